from __future__ import annotations

import pickle
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from lightning_flops.instrument.patches import listen


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


def spying(spied: list[str], tag: str = "") -> Callable[..., None]:
    return lambda self, what: spied.append(tag + what)


def unexpected(error: Exception) -> None:
    raise AssertionError(error)


def test_a_replaced_method_runs_around_the_original_and_keeps_its_name() -> None:
    spied: list[str] = []
    with ExitStack() as undo:
        listen(undo, Base, "run", unexpected, before=spying(spied))
        listen(undo, Derived, "run", unexpected, before=spying(spied, "derived "))
        assert (Base().run("a"), Derived().run("b")) == ("a", "b")
        assert spied == ["a", "derived b", "b"]
        assert (Base.run.__name__, Base.run.__doc__) == ("run", "Run it.")
    assert (Base().run("a"), Derived().run("b"), len(spied)) == ("a", "b", 3)


def test_somebody_who_wrapped_us_in_turn_is_left_alone_and_we_are_silent() -> None:
    spied: list[str] = []
    with ExitStack() as undo:
        listen(undo, Base, "run", unexpected, before=spying(spied))
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
    listen(both[0], Base, "run", unexpected, before=spying(spied, "inner "))
    listen(both[1], Base, "run", unexpected, before=spying(spied, "outer "))
    Base().run("a")
    assert spied == ["outer a", "inner a"]
    both[first_undone].close()
    both[1 - first_undone].close()


def test_a_function_of_a_module_is_left_as_it_was_found_and_pickled_by_its_name() -> None:
    plain, before, heard = pickle.dumps(spying), spying, list[Any]()
    with ExitStack() as undo:
        listen(undo, sys.modules[__name__], "spying", unexpected, after=lambda *args: heard.append(args))
        assert pickle.dumps(spying) == plain and pickle.loads(plain) is spying is not before
        spying([])
    assert spying is before and heard == [([],)]


@pytest.mark.parametrize("broken", ["before", "ends", "after"])
def test_a_function_that_is_listened_to_does_what_it_does_whatever_fails_in_us(broken: str) -> None:
    heard: list[str] = []

    def hear(what: str) -> None:
        heard.append(what)
        if what == broken:
            raise LookupError(what)

    def before(*_: Any) -> Any:
        hear("before")
        return lambda: hear("ends")

    with ExitStack() as undo:
        failed = lambda error: heard.append("told")  # noqa: E731
        listen(undo, Base, "run", failed, before=before, after=lambda *_: hear("after"))
        assert Base().run("a") == "a"
    expected = {
        "before": ["before", "told", "after"],
        "ends": ["before", "ends", "told", "after"],
        "after": ["before", "ends", "after", "told"],
    }
    assert heard == expected[broken]


def test_an_error_of_the_function_that_is_listened_to_is_its_callers() -> None:
    heard: list[str] = []
    with ExitStack() as undo, pytest.raises(TypeError, match="missing 1 required"):
        ends = lambda *_: lambda: heard.append("ends")  # noqa: E731
        listen(undo, Base, "run", unexpected, before=ends, after=lambda *_: heard.append("after"))
        Base().run()  # type: ignore[call-arg]
    assert heard == ["ends"]
