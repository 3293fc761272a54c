"""The border between the user's training and this package: what fails on our side never reaches the training."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar, cast

from lightning_flops.instrument.border import InterruptsWhenDropped

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")


class Border:
    """Every call from a framework, from torch or from a user's loop goes through it.

    The code at the border catches what our side raises and gives it to ``broke``. The first failure closes the border
    for good. Everything of ours is removed first, and only then is the failure logged, because the logging may fail
    too, for example in a handler of the user's.

    Args:
        take_off: removes everything of ours; called once, and once more if it raised.
        tell: says what failed; called at most once, and only for an ``Exception``.
    """

    def __init__(self, *, take_off: Callable[[], None], tell: Callable[[Exception], None]) -> None:
        self.closed = False
        """Nothing of ours runs in this training any more."""
        self._take_off = take_off
        self._tell = tell

    def close(self) -> None:
        """Remove everything of ours, unless that was done before."""
        if not self.closed:
            self.closed = True
            try:
                self._take_off()
            except BaseException as error:
                self._take_off()  # for an error that came before it began; taking off what is off does nothing
                if not isinstance(error, Exception):
                    raise

    def broke(self, error: BaseException) -> None:
        """Our side raised *error*: training goes on without us.

        Raises:
            BaseException: *error* itself if it is not an ``Exception``, such as the user's Ctrl-C; it is raised again
                after everything of ours is removed.
        """
        if not isinstance(error, Exception):
            try:
                self.close()
            finally:
                raise error
        if self.closed:
            return
        try:
            self.close()
        finally:
            self._tell(error)

    def tell_failed(self, fails: Callable[[T, BaseException], object], token: T, error: BaseException) -> None:
        """Tell *fails* that a function of the user's has raised *error*, unless we are out; nothing is raised here."""
        try:
            if not self.closed:
                fails(token, error)
        except BaseException as ours:
            self.broke(ours)


class _HasBorder(Protocol):
    @property
    def border(self) -> Border: ...


S = TypeVar("S", bound=_HasBorder)


def guarded(method: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[S, P], R | None]:
    """Make *method* safe to call from the other side of its object's border: it never raises an ``Exception``.

    It does nothing, and returns None, when the border is closed.
    """

    @functools.wraps(method)
    def run(self: S, /, *args: P.args, **kwargs: P.kwargs) -> R | None:
        try:
            return None if self.border.closed else method(self, *args, **kwargs)
        except BaseException as error:
            self.border.broke(error)
            return None

    return run


Hook = TypeVar("Hook", bound=Callable[..., None])


def event(hook: Hook) -> Hook:
    """*hook* of a callback of ours as a framework calls it: what fails on our side goes to the callback's ``_broke``.

    That ends our part of the run, and never the run.
    """

    @functools.wraps(hook)
    def run(self: Any, /, *args: Any, **kwargs: Any) -> None:
        try:
            hook(self, *args, **kwargs)
        except BaseException as error:
            self._broke(error)

    return cast(Hook, run)


def guarded_on_deletion(method: Callable[Concatenate[S, P], object]) -> Callable[Concatenate[S, P], object]:
    """As ``guarded``, for a method that Python calls because an object is deleted, where it drops what is raised.

    If the user's Ctrl-C arrives there, it arrives again after everything of ours is removed.
    """

    @functools.wraps(method)
    def run(self: S, /, *args: P.args, **kwargs: P.kwargs) -> object:
        try:
            try:
                if not self.border.closed:
                    method(self, *args, **kwargs)
            except BaseException as error:
                self.border.broke(error)
        except KeyboardInterrupt:
            return InterruptsWhenDropped()
        return None

    return run
