from __future__ import annotations

import copy
import pickle
import sys
import types
from collections.abc import Callable
from typing import Any

import cloudpickle
import pytest

from lightning_flops.instrument.patches import Patches


class Loop:
    def __init__(self) -> None:
        self.ran: list[str] = []

    def run(self, what: str) -> str:
        """Run it."""
        self.ran.append(what)
        return what


RUN = vars(Loop)["run"]


def spying(spied: list[str], tag: str = "") -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def run(what: str) -> Any:
            spied.append(tag + what)
            return original(what)

        return run

    return make


def test_a_replaced_method_runs_around_the_original_and_keeps_its_name() -> None:
    loop, patches = Loop(), Patches()
    spied: list[str] = []
    patches.replace(loop, "run", spying(spied))
    assert loop.run("a") == "a"
    assert (spied, loop.ran) == (["a"], ["a"])
    assert (loop.run.__name__, loop.run.__doc__) == ("run", "Run it.")


def test_undo_leaves_the_instance_as_it_was() -> None:
    loop, patches = Loop(), Patches()
    before = dict(vars(loop))
    patches.replace(loop, "run", spying([]))
    assert patches
    patches.undo()
    assert vars(loop) == before
    assert not patches


def test_an_instance_attribute_that_was_there_comes_back() -> None:
    loop, patches = Loop(), Patches()
    mine: Any = str.upper
    loop.run = mine  # type: ignore[method-assign]
    patches.replace(loop, "run", spying([]))
    patches.undo()
    assert vars(loop)["run"] is mine


def test_somebody_who_wrapped_us_in_turn_is_left_alone_and_we_are_silent() -> None:
    loop, patches = Loop(), Patches()
    spied: list[str] = []
    theirs: list[str] = []
    patches.replace(loop, "run", spying(spied))
    ours = loop.run

    def wrapper(what: str) -> str:
        theirs.append(what)
        return str(ours(what))

    loop.run = wrapper  # type: ignore[method-assign]
    patches.undo()
    assert loop.run("a") == "a"
    assert (spied, theirs, loop.ran) == ([], ["a"], ["a"])


@pytest.mark.parametrize("first_undone", [0, 1])
def test_two_of_ours_on_one_method_leave_nothing_in_either_order(first_undone: int) -> None:
    loop = Loop()
    spied: list[str] = []
    both = [Patches(), Patches()]
    both[0].replace(loop, "run", spying(spied, "inner "))
    both[1].replace(loop, "run", spying(spied, "outer "))
    loop.run("a")
    assert spied == ["outer a", "inner a"]
    both[first_undone].undo()
    both[1 - first_undone].undo()
    assert "run" not in vars(loop)


def test_a_missing_method_is_an_error_of_ours() -> None:
    with pytest.raises(AttributeError, match="walk"):
        Patches().replace(Loop(), "walk", spying([]))


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda loop: pickle.loads(pickle.dumps(loop))])
def test_a_copy_or_a_pickle_of_an_instance_runs_nothing_of_ours(duplicate: Callable[[Any], Any]) -> None:
    loop, patches = Loop(), Patches()
    spied: list[str] = []
    patches.replace(loop, "run", spying(spied))
    assert "lightning_flops.instrument" not in str(pickle.dumps(loop))
    duplicate(loop).run("a")
    assert spied == []
    patches.undo()


def test_a_class_and_a_module_are_left_as_they_were_found() -> None:
    class Base:
        def greet(self) -> str:
            return "hello"

    class Derived(Base):
        pass

    library = types.ModuleType("library")
    vars(library)["size"] = len
    patches = Patches()
    patches.replace(Base, "greet", lambda original: lambda self: original(self) + "!")
    patches.replace(Derived, "greet", lambda original: lambda self: original(self) + "?")
    patches.replace(library, "size", lambda original: lambda value: original(value) + 1)
    assert (Base().greet(), Derived().greet(), vars(library)["size"]("ab")) == ("hello!", "hello!?", 3)
    patches.undo()
    assert (Base().greet(), Derived().greet()) == ("hello", "hello")
    assert "greet" not in vars(Derived) and vars(library)["size"] is len


def test_a_replaced_function_is_pickled_by_its_name_and_one_that_was_taken_before_when_it_is_back() -> None:
    taken, plain = spying, pickle.dumps(spying)
    patches = Patches()
    patches.replace(sys.modules[__name__], "spying", lambda original: lambda *args: original(*args))
    try:
        assert spying is not taken
        assert pickle.dumps(spying) == plain
        assert pickle.loads(plain) is pickle.loads(cloudpickle.dumps(spying)) is spying
        assert copy.deepcopy(taken) is taken
        with pytest.raises(pickle.PicklingError, match="not the same object"):
            pickle.dumps(taken)
    finally:
        patches.undo()
    assert spying is taken and pickle.dumps(taken) == plain and pickle.loads(plain) is taken
