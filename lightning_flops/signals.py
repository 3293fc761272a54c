"""Tells an exception of the user's signal handler from our own failures: it is the user's, and passes through."""

from __future__ import annotations

import functools
import signal
from types import CodeType
from typing import Any


def is_of_signal_handler(error: BaseException) -> bool:
    """Whether a signal handler of the user's raised *error*: one of its frames is a handler that is in force."""
    trace = error.__traceback__
    if trace is None:
        return False
    handlers = {_code_of(signal.getsignal(number)) for number in signal.valid_signals()} - {None}
    while trace is not None:
        if trace.tb_frame.f_code in handlers:
            return True
        trace = trace.tb_next
    return False


def _code_of(handler: Any) -> CodeType | None:
    while isinstance(handler, functools.partial):
        handler = handler.func
    if not (hasattr(handler, "__code__") or hasattr(handler, "__func__")):
        handler = getattr(type(handler), "__call__", None)  # noqa: B004
    code = getattr(getattr(handler, "__func__", handler), "__code__", None)
    return code if isinstance(code, CodeType) else None
