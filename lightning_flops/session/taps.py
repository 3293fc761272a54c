"""The one place that makes wrappers around functions of a framework or of the user.

A wrapper calls our code before and after a function, inside the session's border. Whatever our code does or raises, the
function is called once, with the caller's arguments, and the caller gets what it returns or raises.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from lightning_flops.instrument.patches import Make, Patches
from lightning_flops.instrument.timing.phase_timer import Mark

if TYPE_CHECKING:
    from lightning_flops.session.border import Border
    from lightning_flops.session.session import Session

T = TypeVar("T")

Function = Callable[..., Any]


def _nothing() -> None:
    pass


class Taps:
    """Makes the wrappers of one session, and holds those that are in place.

    Args:
        session: is told of the parts of a step.
        border: catches what our code raises.
    """

    def __init__(self, session: Session, border: Border) -> None:
        self._session = session
        self._border = border
        self.for_run = Patches()
        """Wrappers that stay as long as the session does."""
        self.for_window = Patches()
        """Wrappers around the parts of a step, as long as a window needs them."""

    def undo(self) -> None:
        """Remove every wrapper."""
        try:
            self.for_window.undo()
        finally:
            self.for_run.undo()

    # ---- the wrappers; each method returns a function that makes one

    def around(
        self,
        begins: Callable[..., T | None],
        ends: Callable[[T], object],
        *,
        fails: Callable[[T, BaseException], object] | None = None,
        returns: Callable[[T, Any], object] | None = None,
    ) -> Make:
        """A wrapper that tells when a call begins and ends.

        Args:
            begins: gets the call's arguments. What it returns is given to the other functions; if that is None, they
                are not called.
            ends: is called when the function has returned.
            fails: is called with what the function raised; None: *ends* is called instead.
            returns: is called, after *ends*, with what the function returned.
        """
        border = self._border

        def make(original: Function) -> Function:
            def run(*args: Any, **kwargs: Any) -> Any:
                try:
                    failed = False
                    token = None if border.closed else begins(*args, **kwargs)
                except BaseException as error:
                    token = None
                    border.broke(error)
                try:
                    return (result := original(*args, **kwargs))
                except BaseException as error:
                    failed = True
                    if fails is not None and token is not None:
                        self._failed(fails, token, error)
                        token = None
                    raise
                finally:
                    try:
                        if token is not None and border.closed:
                            self._session.leave_again()
                        elif token is not None:
                            ends(token)
                            if returns is not None and not failed:
                                returns(token, result)
                    except BaseException as error:
                        border.broke(error)

            return run

        return make

    def around_weakly(
        self,
        begins: Callable[..., T | None],
        ends: Callable[[T], object],
        *,
        returns: Callable[[T, Any], object] | None = None,
    ) -> Make:
        """As ``around``, for a function that outlives us: the wrapper holds the methods and the border weakly."""
        weak_border = weakref.ref(self._border)
        weak_begins, weak_ends = weakref.WeakMethod(begins), weakref.WeakMethod(ends)
        weak_returns = None if returns is None else weakref.WeakMethod(returns)

        def make(original: Function) -> Function:
            def run(*args: Any, **kwargs: Any) -> Any:
                try:
                    failed = True
                    begin = weak_begins()
                    token = None if begin is None else begin(*args, **kwargs)
                except BaseException as error:
                    token = None
                    _broke(weak_border(), error)
                try:
                    result = original(*args, **kwargs)
                    failed = False
                    return result
                finally:
                    try:
                        if token is not None and (end := weak_ends()) is not None:
                            end(token)
                            if weak_returns is not None and not failed and (take := weak_returns()) is not None:
                                take(token, result)
                    except BaseException as error:
                        _broke(weak_border(), error)

            return run

        return make

    def before(self, action: Callable[[], object]) -> Make:
        """A wrapper that calls *action* before each call."""

        def begins(*args: Any, **kwargs: Any) -> None:
            action()

        return self.around(begins, _ignore)

    def after(self, action: Callable[[], object], *, also_failed: bool = False) -> Make:
        """A wrapper that calls *action* after each call that returned; with *also_failed*, after any call."""

        def begins(*args: Any, **kwargs: Any) -> bool:
            return True

        return self.around(begins, lambda _: action(), fails=None if also_failed else _ignore_failure)

    def instead(self, choose: Callable[..., tuple[Function, tuple[Any, ...], dict[str, Any]]]) -> Make:
        """A wrapper that calls what *choose* returns, given the function and the call's arguments."""
        border = self._border

        def make(original: Function) -> Function:
            def run(*args: Any, **kwargs: Any) -> Any:
                try:
                    call = original
                    if not border.closed:
                        call, args, kwargs = choose(original, *args, **kwargs)
                except BaseException as error:
                    call = original
                    border.broke(error)
                return call(*args, **kwargs)

            return run

        return make

    def part(self, part: str, *, counts: bool = True) -> Make:
        """A wrapper that books every call as *part* of a step; *counts* as in ``Recorder.enter``."""
        session, border, mark = self._session, self._border, Mark(part, counts)

        def make(original: Function) -> Function:
            def run(*args: Any, **kwargs: Any) -> Any:
                # As in ``around``, but no code of ours runs between the timer's stamps and the function.
                try:
                    leave: Callable[[], object] = _nothing
                    if not border.closed:
                        timer = session.window.recorder.timer
                        if timer is None:
                            leave = session.leave
                            session.enter(part, counts=counts)
                        else:
                            leave = timer.leave
                            timer.enter(mark)
                except BaseException as error:
                    leave = _nothing
                    border.broke(error)
                try:
                    return original(*args, **kwargs)
                finally:
                    try:
                        leave()
                    except BaseException as error:
                        border.broke(error)

            return run

        return make

    def outside_of_steps(self, name: str) -> Make:
        """A wrapper that books every call under *name*, outside of all steps."""
        session, marked = self._session, self.part(name)

        def begins(*args: Any, **kwargs: Any) -> bool:
            session.training_stops(name)
            return True

        outside = self.around(begins, lambda _: session.training_goes_on(name))
        return lambda original: outside(marked(original))

    def optimizer_work(self) -> Make:
        """A wrapper: what is counted inside its calls is the optimizer's, whatever part of the step runs."""
        session = self._session
        return self.around(lambda *args, **kwargs: session.optimizer_work_begins(), session.optimizer_work_ends)

    def _failed(self, fails: Callable[[T, BaseException], object], token: T, error: BaseException) -> None:
        try:
            if not self._border.closed:
                fails(token, error)
        except BaseException as ours:
            self._border.broke(ours)


def _broke(border: Border | None, error: BaseException) -> None:
    if border is not None:
        border.broke(error)
    elif not isinstance(error, Exception):
        raise error


def _ignore(token: object) -> None:
    pass


def _ignore_failure(token: object, error: BaseException) -> None:
    pass
