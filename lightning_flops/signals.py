"""Separates an exception of the user's signal handler from our own failures: it is the user's, and passes through."""

from __future__ import annotations

import functools
import signal
from types import CodeType, FrameType
from typing import Any


def is_of_signal_handler(error: BaseException) -> bool:
    """Whether a signal handler of the user's raised *error*.

    One of its frames is a handler that is in force, or was given the frame that it interrupted: it may have put another
    handler in its own place.
    """
    trace = error.__traceback__
    if trace is None:
        return False
    handlers = {_code_of(signal.getsignal(number)) for number in signal.valid_signals()} - {None}
    interrupted: FrameType | None = None
    while trace is not None:
        frame = trace.tb_frame
        given = list(frame.f_locals.values())
        if (
            frame.f_code in handlers
            or (
                interrupted is not None
                and any(one is interrupted for one in given[:3])  # with "self", the third
                and any(isinstance(one, int) and one in signal.valid_signals() for one in given[:2])
            )
        ):
            return True
        interrupted, trace = frame, trace.tb_next
    return False


def words_of(error: Exception) -> str:
    """*error* in words, for a failure that stays with us.

    Raises:
        Exception: *error* itself, if a signal handler of the user's raised it.
    """
    if is_of_signal_handler(error):
        raise error
    return f"{type(error).__name__}: {error}"


def _code_of(handler: Any) -> CodeType | None:
    while isinstance(handler, functools.partial):
        handler = handler.func
    if not (hasattr(handler, "__code__") or hasattr(handler, "__func__")):
        handler = getattr(type(handler), "__call__", None)  # noqa: B004
    code = getattr(getattr(handler, "__func__", handler), "__code__", None)
    return code if isinstance(code, CodeType) else None
