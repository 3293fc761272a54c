"""Wrappers of what every step of a loop runs: its calls can be noted, and then the door is told of them later.

They run when their code is no longer in the processor's cache. There each function that is called and each line that
runs costs a part of a microsecond. So each wrapper is written out, with nothing in it that is for the others alone.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from threading import get_ident
from typing import TYPE_CHECKING, Any, TypeVar

from torch import is_grad_enabled

from lightning_flops.instrument.batches import known_by, tensor_shapes
from lightning_flops.instrument.patches import Make
from lightning_flops.instrument.torch_private.compiler import hide_around
from lightning_flops.session.noted_calls import (
    BACKWARD,
    BACKWARD_ENDS,
    FETCH,
    FORWARD,
    FORWARD_ENDS,
    MOST_KINDS,
    UPDATE,
    UPDATE_ENDS,
    NotedCalls,
)

if TYPE_CHECKING:
    from torch import nn

    from lightning_flops.session.border import Border
    from lightning_flops.session.session import Session

T = TypeVar("T")
S = TypeVar("S")

Function = Callable[..., Any]


class NotedTaps:
    """Makes these wrappers, for one session.

    Args:
        around: makes a wrapper that tells at once; as ``Taps.around``.
        session: is told where a step was left after everything of ours was removed.
        border: catches what our code raises.
    """

    def __init__(self, around: Callable[..., Make], session: Session, border: Border) -> None:
        self._around = around
        self._session = session
        self._border = border

    def forward(
        self,
        calls: NotedCalls,
        begins: Callable[..., T | None],
        ends: Callable[[T], object],
        *,
        fails: Callable[[T, BaseException], object],
        root: nn.Module,
        sees: Callable[[tuple[Any, ...], dict[str, Any]], Any],
    ) -> Make:
        """As ``Taps.around``, for the model's forward.

        Args:
            calls: holds what is noted.
            begins: as for ``Taps.around``.
            ends: as for ``Taps.around``.
            fails: as for ``Taps.around``.
            root: the model; a call is noted only while it is in training mode, and a forward only with gradients on.
            sees: what this returns of a forward's arguments is noted with it.
        """
        border, told = self._border, self._around(begins, ends, fails=fails)
        kinds, facts = calls.kinds, calls.facts

        def make(original: Function) -> Function:
            tell = told(original)

            def run(*args: Any, **kwargs: Any) -> Any:
                try:
                    failed, noted = False, calls.on and get_ident() == calls.thread
                    if noted:
                        if root.training and len(kinds) <= MOST_KINDS and is_grad_enabled():
                            kinds.append(FORWARD)
                            facts.append(calls.now())
                            facts.append(None if calls.has_batch else sees(args, kwargs))
                            calls.has_batch = False
                        else:
                            noted = False
                            calls.stop()
                except BaseException as error:
                    noted = False
                    border.broke(error)
                if not noted:
                    return tell(*args, **kwargs)
                try:
                    return original(*args, **kwargs)
                except BaseException as error:
                    failed = True
                    border.tell_failed(calls.fails_now, fails, error)
                    raise
                finally:
                    try:
                        if failed:
                            self._leaves_if_closed()
                        elif calls.on:
                            kinds.append(FORWARD_ENDS)
                        else:
                            self._noted_ended(calls, ends)
                    except BaseException as error:
                        border.broke(error)

            return hide_around(run, sees, *self._of_noted(calls))

        return make

    def backward(
        self,
        calls: NotedCalls,
        begins: Callable[..., T | None],
        ends: Callable[[T], object],
        *,
        fails: Callable[[T, BaseException], object],
        root: nn.Module,
        aside: Callable[[], object],
    ) -> Make:
        """As ``forward``, for a function that runs a backward.

        Args:
            calls: as for ``forward``.
            begins: as for ``Taps.around``.
            ends: as for ``Taps.around``.
            fails: as for ``Taps.around``.
            root: as for ``forward``.
            aside: nobody is told of a call if this returns something true.
        """
        border, told = self._border, self._around(begins, ends, fails=fails)
        kinds, facts = calls.kinds, calls.facts

        def make(original: Function) -> Function:
            tell = told(original)

            def run(*args: Any, **kwargs: Any) -> Any:
                try:
                    failed, is_aside = False, aside()
                    noted = calls.on and not is_aside and get_ident() == calls.thread
                    if noted:
                        if root.training and len(kinds) <= MOST_KINDS:
                            kinds.append(BACKWARD)
                        else:
                            noted = False
                            calls.stop()
                except BaseException as error:
                    noted = is_aside = False
                    border.broke(error)
                if not noted:
                    return original(*args, **kwargs) if is_aside else tell(*args, **kwargs)
                try:
                    return original(*args, **kwargs)
                except BaseException as error:
                    failed = True
                    border.tell_failed(calls.fails_now, fails, error)
                    raise
                finally:
                    try:
                        if failed:
                            self._leaves_if_closed()
                        elif calls.on:
                            kinds.append(BACKWARD_ENDS)
                            facts.append(calls.now())
                        else:
                            self._noted_ended(calls, ends)
                    except BaseException as error:
                        border.broke(error)

            return hide_around(run, *self._of_noted(calls))

        return make

    def update(
        self,
        calls: NotedCalls,
        begins: Callable[..., T | None],
        ends: Callable[[T], object],
        *,
        fails: Callable[[T, BaseException], object],
        root: nn.Module,
        optimizer: Any,
    ) -> Make:
        """As ``forward``, for an optimizer's step.

        Args:
            calls: as for ``forward``.
            begins: as for ``Taps.around``.
            ends: as for ``Taps.around``.
            fails: as for ``Taps.around``.
            root: as for ``forward``.
            optimizer: is noted with each of its updates.
        """
        border, told = self._border, self._around(begins, ends, fails=fails)
        kinds, facts = calls.kinds, calls.facts

        def make(original: Function) -> Function:
            tell = told(original)

            def run(*args: Any, **kwargs: Any) -> Any:
                try:
                    failed, noted = False, calls.on and get_ident() == calls.thread
                    if noted:
                        if root.training:
                            kinds.append(UPDATE)
                            facts.append(optimizer)
                        else:
                            noted = False
                            calls.stop()
                except BaseException as error:
                    noted = False
                    border.broke(error)
                if not noted:
                    return tell(*args, **kwargs)
                try:
                    return original(*args, **kwargs)
                except BaseException as error:
                    failed = True
                    border.tell_failed(calls.fails_now, fails, error)
                    raise
                finally:
                    try:
                        if failed:
                            self._leaves_if_closed()
                        else:
                            at = calls.now()
                            calls.steps_left -= 1
                            if calls.on and calls.steps_left and at < calls.until:
                                kinds.append(UPDATE_ENDS)
                                facts.append(at)
                                facts.append(calls.nodes())
                            else:
                                self._noted_ended(calls, ends)
                    except BaseException as error:
                        border.broke(error)

            return hide_around(run, *self._of_noted(calls))

        return make

    def _noted_ended(self, calls: NotedCalls, ends: Callable[[T], object]) -> None:
        """A call whose begin was noted has ended, and the door is told at once."""
        if self._border.closed:
            self._session.leave_again()
        else:
            calls.ends_now(ends)

    def _of_noted(self, calls: NotedCalls) -> tuple[Function, ...]:
        """What the wrappers above call."""
        return calls.stop, calls.fails_now, self._border.tell_failed, self._noted_ended, self._leaves_if_closed

    def _leaves_if_closed(self) -> None:
        """A call whose begin was noted has raised, and all is told."""
        if self._border.closed:
            self._session.leave_again()

    def fetch(
        self,
        owner: S,
        begins: Callable[..., bool],
        ends: Callable[[S, tuple[Any, ...], Any, bool], object],
        no_more: Callable[[S], object],
        *,
        calls: NotedCalls,
    ) -> Make:
        """As ``forward``, for the fetches of a class that outlives us: the wrapper holds *owner* and us weakly.

        Args:
            owner: the methods' object.
            begins: a function of *owner* and the call's arguments; returns whether *ends* is called. When everything of
                ours is removed it returns False.
            ends: a function of *owner*, the call's positional arguments, what was returned, and whether it has raised.
            no_more: a function of *owner*, called after *ends* if there was no batch left.
            calls: holds what is noted.
        """
        weak_border, weak_owner = weakref.ref(self._border), weakref.ref(owner)
        weak_calls = weakref.ref(calls)

        def make_told(original: Function) -> Function:
            def run(*args: Any, **kwargs: Any) -> Any:
                try:
                    result, failed, used_up = None, True, False
                    if (ours := weak_owner()) is not None and not begins(ours, *args, **kwargs):
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
                        if ours is not None:
                            ends(ours, args, result, failed)
                            if used_up:
                                no_more(ours)
                    except BaseException as error:
                        _broke(weak_border(), error)

            return hide_around(run, begins, ends, no_more, _broke)

        def make(original: Function) -> Function:
            tell = make_told(original)

            def run(*args: Any, **kwargs: Any) -> Any:
                try:
                    failed, used_up, is_aside, since, noted = True, False, False, None, weak_calls()
                    if noted is None or noted.fetching:
                        is_aside = True
                    elif noted.on and args[0] is noted.feeds() and get_ident() == noted.thread:
                        noted.fetching = True
                        since = noted.now()
                except BaseException as error:
                    since, is_aside = None, True
                    _broke(weak_border(), error)
                if since is None or noted is None:
                    return original(*args, **kwargs) if is_aside else tell(*args, **kwargs)
                try:
                    result = original(*args, **kwargs)
                    failed = False
                    return result
                except StopIteration:
                    used_up = True
                    raise
                finally:
                    try:
                        noted.fetching = False
                        ended, reader, replayed = noted.now(), noted.tokens, noted.replayed
                        if failed:
                            noted.fetched(since, ended, None)
                            if used_up:
                                noted.stop()
                                if (ours := weak_owner()) is not None:
                                    no_more(ours)
                        else:
                            shapes, tokens = tensor_shapes(result), reader.of(result) if reader.reads else None
                            known = shapes if tokens is None else known_by(shapes, tokens)
                            usual = known in replayed.known or replayed.looks_left <= 0
                            usual = usual and noted.on and noted.hands_over is None and not noted.has_batch
                            if usual:  # as in ``fetched``, without the call
                                noted.has_batch = True
                                noted.kinds.append(FETCH)
                                noted.facts.append((since, ended, shapes, tokens))
                            else:
                                noted.fetched(since, ended, (shapes, tokens))
                    except BaseException as error:
                        _broke(weak_border(), error)

            return hide_around(
                run, no_more, calls.stop, calls.fetched, calls.tokens.of, tensor_shapes, known_by, _broke
            )

        return make


def _broke(border: Border | None, error: BaseException) -> None:
    if border is not None:
        border.broke(error)
    elif not isinstance(error, Exception):
        raise error
