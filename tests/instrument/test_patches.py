from __future__ import annotations

import pickle
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from lightning_flops.instrument.patches import listening, replace


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
    with ExitStack() as undo:
        replace(undo, Base, "run", spying(spied))
        replace(undo, Derived, "run", spying(spied, "derived "))
        assert (Base().run("a"), Derived().run("b")) == ("a", "b")
        assert spied == ["a", "derived b", "b"]
        assert (Base.run.__name__, Base.run.__doc__) == ("run", "Run it.")
    assert (Base().run("a"), Derived().run("b"), len(spied)) == ("a", "b", 3)


def test_somebody_who_wrapped_us_in_turn_is_left_alone_and_we_are_silent() -> None:
    spied: list[str] = []
    with ExitStack() as undo:
        replace(undo, Base, "run", spying(spied))
        ours = Base.run
        theirs: Any = lambda self, what: ours(self, what).upper()  # noqa: E731
        Base.run = theirs  # type: ignore[method-assign]
    assert Base.run is theirs
    assert (Base().run("a"), spied) == ("A", [])
    Base.run = RUN  # type: ignore[method-assign]


@pytest.mark.parametrize("first_undone", [0, 1])
def test_two_of_ours_on_one_method_leave_nothing_in_either_order(first_undone: int) -> None:
    spied: list[str] = []
    both = [ExitStack(), ExitStack()]
    replace(both[0], Base, "run", spying(spied, "inner "))
    replace(both[1], Base, "run", spying(spied, "outer "))
    Base().run("a")
    assert spied == ["outer a", "inner a"]
    both[first_undone].close()
    both[1 - first_undone].close()


def test_a_function_of_a_module_is_left_as_it_was_found_and_pickled_by_its_name() -> None:
    library = types.ModuleType("library")
    vars(library)["size"] = len
    plain = pickle.dumps(spying)
    with ExitStack() as undo:
        replace(undo, library, "size", lambda original: lambda value: original(value) + 1)
        assert vars(library)["size"]("ab") == 3
        replace(undo, sys.modules[__name__], "spying", lambda original: lambda *args: original(*args))
        assert pickle.dumps(spying) == plain and pickle.loads(plain) is spying
    assert vars(library)["size"] is len


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

    double = listening(
        lambda value: 2 * value,
        before=before,
        after=lambda value: hear("after"),
        failed=lambda error: heard.append("told"),
    )
    assert double(4) == 8
    expected = {
        "before": ["before", "told", "after"],
        "ends": ["before", "ends", "told", "after"],
        "after": ["before", "ends", "after", "told"],
    }
    assert heard == expected[broken]


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
