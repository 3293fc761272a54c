from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from lightning_flops.measure.patches import listen


class Base:
    def run(self, what: str) -> str:
        """Run it."""
        return what


RUN = vars(Base)["run"]


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    yield
    try:
        assert vars(Base)["run"] is RUN
    finally:
        Base.run = RUN  # type: ignore[method-assign]


def spying(spied: list[str], tag: str = "") -> Callable[..., None]:
    return lambda self, what: spied.append(tag + what)


def unexpected(error: Exception) -> None:
    raise AssertionError(error)


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
