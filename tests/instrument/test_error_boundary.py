"""What fails on our side of the error boundary stays there, whatever fails in us."""

from __future__ import annotations

from typing import Any

import pytest

from lightning_flops.instrument.error_boundary import error_boundary, listening


class Owner:
    def __init__(self) -> None:
        self.told: list[tuple[str, str]] = []

    def _failed(self, where: str, error: Exception) -> None:
        self.told.append((where, str(error)))

    @error_boundary("a hook")
    def hook(self, error: BaseException | None = None) -> None:
        self.told.append(("the hook", "runs"))
        if error is not None:
            raise error


def test_an_error_of_ours_is_told_and_ends_at_the_border() -> None:
    owner = Owner()
    owner.hook(LookupError("no longer there"))
    owner.hook()
    assert owner.told == [("the hook", "runs"), ("a hook", "no longer there"), ("the hook", "runs")]


def test_a_ctrl_c_goes_on_to_the_user() -> None:
    owner = Owner()
    with pytest.raises(KeyboardInterrupt):
        owner.hook(KeyboardInterrupt())
    assert owner.told == [("the hook", "runs")]


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


# ---- code that runs when an object is deleted
