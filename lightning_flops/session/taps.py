"""The one place that makes wrappers around functions of a framework or of the user.

A wrapper calls our code before and after a function, inside the session's border. Whatever our code does or raises, the
function is called once, with the caller's arguments, and the caller gets what it returns or raises.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from threading import get_ident
from typing import TYPE_CHECKING, Any, TypeVar

from torch import is_grad_enabled

from lightning_flops.instrument.batches import known_by, tensor_shapes
from lightning_flops.instrument.patches import Make, Patches
from lightning_flops.instrument.timing.phase_timer import Mark, PhaseTimer
from lightning_flops.instrument.torch_private.compiler import hide
from lightning_flops.session.noted_calls import FACTS, FETCH, MOST_KINDS, NO_BATCH, UPDATE

if TYPE_CHECKING:
    from torch import nn

    from lightning_flops.session.border import Border
    from lightning_flops.session.noted_calls import NotedCalls
    from lightning_flops.session.session import Session

T = TypeVar("T")
S = TypeVar("S")

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
                        self._failed(fails, token, error)
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

            return _not_compiled(run, begins, ends, fails, returns, self._session.leave_again, self._failed)

        return make

    def noted(
        self,
        calls: NotedCalls,
        kind: int,
        begins: Callable[..., T | None],
        ends: Callable[[T], object],
        *,
        fails: Callable[[T, BaseException], object],
        root: nn.Module,
        fact: Any = None,
        sees: Callable[[tuple[Any, ...], dict[str, Any]], Any] | None = None,
        aside: Callable[[], object] | None = None,
    ) -> Make:
        """As ``around``, where calls can be noted: then the door is told of a call later.

        Args:
            calls: holds what is noted.
            kind: of a call's begin; that of its end is the next.
            begins: as for ``around``.
            ends: as for ``around``.
            fails: as for ``around``.
            root: the model; a call is noted only while it is in training mode, and a forward only with gradients on.
            fact: noted with an update.
            sees: noted with a forward: what this returns of its arguments.
            aside: nobody is told of a call if this returns something true.
        """
        border, told, end, ends_step = self._border, self.around(begins, ends, fails=fails), kind + 1, kind == UPDATE
        kinds, facts, timed = calls.kinds, calls.facts, bool(FACTS[end])

        def make(original: Function) -> Function:
            tell = told(original)

            def run(*args: Any, **kwargs: Any) -> Any:
                # This runs in every step, where each further function that is called costs half a microsecond.
                try:
                    is_aside = aside is not None and aside()
                    noted = calls.on and get_ident() == calls.thread and not is_aside
                    if noted and (not root.training or len(kinds) > MOST_KINDS or (sees and not is_grad_enabled())):
                        noted = False
                        calls.stop()
                    if noted:
                        kinds.append(kind)
                        if sees is not None:
                            facts.append(calls.now())
                            facts.append(None if calls.has_batch else sees(args, kwargs))
                            calls.has_batch = False
                        elif fact is not None:
                            facts.append(fact)
                except BaseException as error:
                    noted = is_aside = False
                    border.broke(error)
                if not noted:
                    return original(*args, **kwargs) if is_aside else tell(*args, **kwargs)
                try:
                    failed = False
                    return original(*args, **kwargs)
                except BaseException as error:
                    failed = True
                    self._failed(calls.fails_now, fails, error)
                    raise
                finally:
                    try:
                        if border.closed:
                            self._session.leave_again()
                        elif not failed:
                            if timed:
                                at = calls.now()
                            if ends_step:
                                calls.steps_left -= 1
                            if calls.on and not (ends_step and (not calls.steps_left or at >= calls.until)):
                                kinds.append(end)
                                if timed:
                                    facts.append(at)
                                if ends_step:
                                    facts.append(calls.nodes())
                            else:
                                calls.ends_now(ends)
                    except BaseException as error:
                        border.broke(error)

            return _not_compiled(
                run, sees, calls.stop, calls.ends_now, calls.fails_now, self._failed, self._session.leave_again
            )

        return make

    def noted_fetch(
        self,
        owner: S,
        begins: Callable[..., bool],
        ends: Callable[[S, tuple[Any, ...], Any, bool], object],
        no_more: Callable[[S], object],
        *,
        calls: NotedCalls,
    ) -> Make:
        """As ``noted``, for the fetches of a class that outlives us: the wrapper holds *owner* and the border weakly.

        Args:
            owner: the methods' object.
            begins: a function of *owner* and the call's arguments; returns whether *ends* is called.
            ends: a function of *owner*, the call's positional arguments, what was returned, and whether it has raised.
            no_more: a function of *owner*, called after *ends* if there was no batch left.
            calls: holds what is noted.
        """
        weak_border, weak_owner = weakref.ref(self._border), weakref.ref(owner)
        weak_calls = weakref.ref(calls)

        def make(original: Function) -> Function:
            def run(*args: Any, **kwargs: Any) -> Any:
                try:
                    result, failed, since, used_up, ours, noted = None, True, None, False, None, weak_calls()
                    if noted is None or noted.fetching:
                        pass
                    elif noted.on and args[0] is noted.feeds() and get_ident() == noted.thread:
                        noted.fetching = True
                        since = noted.now()
                    elif (ours := weak_owner()) is not None and not begins(ours, *args, **kwargs):
                        ours = None
                except BaseException as error:
                    ours = None
                    _broke(weak_border(), error)
                try:
                    result = original(*args, **kwargs)
                    failed = False
                    return result
                except StopIteration:
                    used_up = True
                    raise
                finally:
                    try:
                        if since is not None and noted is not None:
                            noted.fetching = False
                            ended = noted.now()
                            reader = noted.tokens
                            found = (
                                None if failed else (tensor_shapes(result), reader.of(result) if reader.reads else None)
                            )
                            if noted.hands_over is not None:
                                found = noted.hands_over(found)
                            known = noted.replayed
                            looks = False
                            if found is not None and known.looks_left > 0:
                                shapes = found[0] if found[1] is None else known_by(*found)
                                looks = shapes not in known.known
                            noted.has_batch = found is not None and not looks
                            known.looks_left -= looks
                            noted.kinds.append(NO_BATCH if found is None else FETCH)
                            noted.facts.append((since, ended, *(found or (None, None))))
                            if used_up:
                                noted.stop()
                                ours = weak_owner()
                            if not noted.on:
                                noted.tell_all()
                        elif ours is not None:
                            ends(ours, args, result, failed)
                        if used_up and ours is not None:
                            no_more(ours)
                    except BaseException as error:
                        _broke(weak_border(), error)

            return _not_compiled(
                run, begins, ends, no_more, calls.stop, calls.tell_all, calls.tokens.of, tensor_shapes, known_by, _broke
            )

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
                try:  # as in ``noted``
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

            return _not_compiled(run, passes)

        return make

    def fetch_begins(self) -> Make:
        """A wrapper: its call is where the loop begins to wait for its data loader."""
        session, border, log = self._session, self._border, self._session.log

        def make(original: Function) -> Function:
            def run(*args: Any, **kwargs: Any) -> Any:
                try:  # as in ``noted``: no call of ours
                    if log.spare:
                        log.fetch_since = log.now()
                    elif not border.closed:
                        session.fetch_begins()
                except BaseException as error:
                    border.broke(error)
                return original(*args, **kwargs)

            return _not_compiled(run, session.fetch_begins)

        return make

    def fetch_ends(self) -> Make:
        """A wrapper: its call is where the loop has what it waited for."""
        session, border, log = self._session, self._border, self._session.log

        def make(original: Function) -> Function:
            def run(*args: Any, **kwargs: Any) -> Any:
                try:  # as in ``noted``, so this is written out: ``log.fetch_ends()``
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

            return _not_compiled(run, session.fetch_ends)

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

            return _not_compiled(run, choose)

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

            return _not_compiled(run, session.enter, session.leave, PhaseTimer.enter, PhaseTimer.leave)

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
        """Tell of what a function has raised, unless we are out."""
        try:
            if not self._border.closed:
                fails(token, error)
        except BaseException as ours:
            self._border.broke(ours)


def _not_compiled(run: Function, *ours: Any) -> Function:
    """*run*, a wrapper that may be called by compiled code: neither it nor *ours*, which it calls, is compiled.

    What it is around is compiled as it would be without us.
    """
    hide(run, alone=True)
    for function in ours:
        if function is not None:
            hide(function)
    return run


def _broke(border: Border | None, error: BaseException) -> None:
    if border is not None:
        border.broke(error)
    elif not isinstance(error, Exception):
        raise error


def _ignore(token: object) -> None:
    pass


def _ignore_failure(token: object, error: BaseException) -> None:
    pass
