"""The one place that makes wrappers around functions of a framework or of the user.

A wrapper calls our code before and after a function, inside the session's border. Whatever our code does or raises, the
function is called once, with the caller's arguments, and the caller gets what it returns or raises.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from lightning_flops.instrument.patches import Make, Patches
from lightning_flops.instrument.timing.phase_timer import Mark, PhaseTimer
from lightning_flops.instrument.torch_private.compiler import hide, hide_around
from lightning_flops.session.noted_taps import NotedTaps

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
        hide(border.broke)
        self.for_run = Patches(border.close)
        """Wrappers that stay as long as the session does."""
        self.for_window = Patches(border.close)
        """Wrappers around the parts of a step, as long as a window needs them."""
        self.noted = NotedTaps(self.around, session, border)
        """Makes the wrappers of what every step of a loop runs."""

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
        ends: Callable[[T], object] | None,
        *,
        fails: Callable[[T, BaseException], object] | None = None,
        returns: Callable[[T, Any], object] | None = None,
    ) -> Make:
        """A wrapper that tells when a call begins and ends.

        Args:
            begins: gets the call's arguments. What it returns is given to the other functions; if that is None, they
                are not called.
            ends: is called when the function has returned; None: nothing is.
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
                        border.tell_failed(fails, token, error)
                        token = None
                    raise
                finally:
                    try:
                        if token is not None and border.closed:
                            self._session.leave_again()
                        elif token is not None:
                            if ends is not None:
                                ends(token)
                            if returns is not None and not failed:
                                returns(token, result)
                    except BaseException as error:
                        border.broke(error)

            return hide_around(run, begins, ends, fails, returns, self._session.leave_again, border.tell_failed)

        return make

    def spared(
        self,
        begins: Callable[..., T | None],
        *,
        fails: Callable[[T, BaseException], object],
        returns: Callable[[T, Any], object],
        passes: Callable[[Any], object],
    ) -> Make:
        """As ``around``, for what fetches the batches of a step. If only the monitor needs to know, *passes* is told.

        Args:
            begins: as for ``around``.
            fails: as for ``around``.
            returns: as for ``around``.
            passes: is called with what the function returned; with None if it raised.
        """
        border, log, told = self._border, self._session.log, self.around(begins, None, fails=fails, returns=returns)

        def make(original: Function) -> Function:
            tell = told(original)

            def run(*args: Any, **kwargs: Any) -> Any:
                try:  # as in noted_taps.py
                    result = None
                    noted = log.spare and not border.closed
                    if noted:
                        log.fetch_since = log.now()
                except BaseException as error:
                    noted = False
                    border.broke(error)
                if not noted:
                    return tell(*args, **kwargs)
                try:
                    result = original(*args, **kwargs)
                    return result
                finally:
                    try:
                        if not border.closed:
                            passes(result)
                    except BaseException as error:
                        border.broke(error)

            return hide_around(run, passes)

        return make

    def fetch_begins(self) -> Make:
        """A wrapper: its call is where the loop begins to wait for its data loader."""
        session, border, log = self._session, self._border, self._session.log

        def make(original: Function) -> Function:
            def run(*args: Any, **kwargs: Any) -> Any:
                try:  # as in noted_taps.py: no call of ours
                    if log.spare:
                        log.fetch_since = log.now()
                    elif not border.closed:
                        session.fetch_begins()
                except BaseException as error:
                    border.broke(error)
                return original(*args, **kwargs)

            return hide_around(run, session.fetch_begins)

        return make

    def fetch_ends(self) -> Make:
        """A wrapper: its call is where the loop has what it waited for."""
        session, border, log = self._session, self._border, self._session.log

        def make(original: Function) -> Function:
            def run(*args: Any, **kwargs: Any) -> Any:
                try:  # as in noted_taps.py, so this is written out: ``log.fetch_ends()``
                    if log.spare:
                        since, log.fetch_since = log.fetch_since, None
                        if since is not None:
                            log.fetches += 1
                            if not log.reasons:
                                log.wait_sec += log.now() - since
                    elif not border.closed:
                        session.fetch_ends()
                except BaseException as error:
                    border.broke(error)
                return original(*args, **kwargs)

            return hide_around(run, session.fetch_ends)

        return make

    def before(self, action: Callable[[], object]) -> Make:
        """A wrapper that calls *action* before each call."""

        def begins(*args: Any, **kwargs: Any) -> None:
            action()

        return self.around(begins, None)

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

            return hide_around(run, choose)

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

            return hide_around(run, session.enter, session.leave, PhaseTimer.enter, PhaseTimer.leave)

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


def _ignore_failure(token: object, error: BaseException) -> None:
    pass
