from __future__ import annotations

import copy
import pickle
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import cloudpickle
import pytest

from lightning_flops.instrument.patches import Patches, listening


class Base:
    def run(self, what: str) -> str:
        """Run it."""
        return what


RUN = vars(Base)["run"]


class Derived(Base):
    pass


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    yield
    try:
        assert vars(Base)["run"] is RUN
        assert "run" not in vars(Derived)
    finally:
        Base.run = RUN  # type: ignore[method-assign]


def spying(spied: list[str], tag: str = "") -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def run(self: Base, what: str) -> Any:
            spied.append(tag + what)
            return original(self, what)

        return run

    return make


def test_a_replaced_method_runs_around_the_original_and_keeps_its_name() -> None:
    spied: list[str] = []
    patches = Patches()
    patches.replace(Base, "run", spying(spied))
    patches.replace(Derived, "run", spying(spied, "derived "))
    assert (Base().run("a"), Derived().run("b")) == ("a", "b")
    assert spied == ["a", "derived b", "b"]
    assert (Base.run.__name__, Base.run.__doc__) == ("run", "Run it.")
    patches.undo()
    assert (Base().run("a"), Derived().run("b"), len(spied)) == ("a", "b", 3)


def test_somebody_who_wrapped_us_in_turn_is_left_alone_and_we_are_silent() -> None:
    patches = Patches()
    spied: list[str] = []
    patches.replace(Base, "run", spying(spied))
    ours = Base.run
    theirs: Any = lambda self, what: ours(self, what).upper()  # noqa: E731
    Base.run = theirs  # type: ignore[method-assign]
    patches.undo()
    assert Base.run is theirs
    assert (Base().run("a"), spied) == ("A", [])
    Base.run = RUN  # type: ignore[method-assign]


@pytest.mark.parametrize("first_undone", [0, 1])
def test_two_of_ours_on_one_method_leave_nothing_in_either_order(first_undone: int) -> None:
    spied: list[str] = []
    both = [Patches(), Patches()]
    both[0].replace(Base, "run", spying(spied, "inner "))
    both[1].replace(Base, "run", spying(spied, "outer "))
    Base().run("a")
    assert spied == ["outer a", "inner a"]
    both[first_undone].undo()
    both[1 - first_undone].undo()


def test_a_missing_method_is_an_error_of_ours() -> None:
    with pytest.raises(AttributeError, match="walk"):
        Patches().replace(Base, "walk", spying([]))


def test_a_module_is_left_as_it_was_found() -> None:
    library = types.ModuleType("library")
    vars(library)["size"] = len
    patches = Patches()
    patches.replace(library, "size", lambda original: lambda value: original(value) + 1)
    assert vars(library)["size"]("ab") == 3
    patches.undo()
    assert vars(library)["size"] is len


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


@pytest.mark.parametrize("broken", ["before", "ends", "after"])
def test_a_function_that_is_listened_to_does_what_it_does_whatever_fails_in_us(broken: str) -> None:
    heard: list[str] = []

    def hear(what: str) -> None:
        heard.append(what)
        if what == broken:
            raise LookupError(what)

    def before(value: int) -> Any:
        hear("before")
        return lambda: hear("ends")

    def after(value: int) -> None:
        hear("after")

    double = listening(lambda value: 2 * value, before=before, after=after, failed=lambda error: heard.append("told"))
    assert double(4) == 8
    assert (
        heard
        == {
            "before": ["before", "told", "after"],
            "ends": ["before", "ends", "told", "after"],
            "after": ["before", "ends", "after", "told"],
        }[broken]
    )


def test_an_error_of_the_function_that_is_listened_to_is_its_callers() -> None:
    heard: list[str] = []

    def fails() -> None:
        raise ValueError("the user's")

    call = listening(
        fails,
        before=lambda: lambda: heard.append("ends"),
        after=lambda: heard.append("after"),
        failed=lambda error: heard.append("told"),
    )
    with pytest.raises(ValueError, match="the user's"):
        call()
    assert heard == ["ends"]
