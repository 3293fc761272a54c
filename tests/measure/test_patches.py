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


def test_somebody_who_wrapped_us_in_turn_is_left_alone_and_we_are_silent() -> None:
    spied: list[str] = []
    with ExitStack() as undo:
        listen(undo, Base, "run", spying(spied))
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
    listen(both[0], Base, "run", spying(spied, "inner "))
    listen(both[1], Base, "run", spying(spied, "outer "))
    Base().run("a")
    assert spied == ["outer a", "inner a"]
    both[first_undone].close()
    both[1 - first_undone].close()


@pytest.mark.parametrize("broken", ["begins", "ends"])
def test_a_function_that_is_listened_to_does_what_it_does_whatever_fails_in_us(broken: str) -> None:
    heard: list[object] = []

    def hear(what: str, *values: object) -> None:
        heard.extend((what, *values))
        if what == broken:
            raise LookupError(what)

    def begins(*_: Any) -> Any:
        hear("begins")
        return lambda result, error: hear("ends", result, error)

    with ExitStack() as undo:
        listen(undo, Base, "run", begins, failed=lambda error: heard.append("failed"))
        assert Base().run("a") == "a"
    expected = {"begins": ["begins", "failed"], "ends": ["begins", "ends", "a", None, "failed"]}
    assert heard == expected[broken]


def test_who_listens_gets_what_a_function_has_raised_and_so_does_its_caller() -> None:
    heard: list[object] = []
    with ExitStack() as undo:
        listen(undo, Base, "run", lambda *_: lambda result, error: heard.append((result, error)))
        with pytest.raises(TypeError) as raised:
            Base().run()  # type: ignore[call-arg]
    assert heard == [(None, raised.value)]
