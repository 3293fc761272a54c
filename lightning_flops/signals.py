"""Separates an exception of the user's signal handler from our own failures: it is the user's, and passes through."""

from __future__ import annotations

import signal


def is_of_signal_handler(error: BaseException) -> bool:
    """Whether a signal handler of the user's raised *error*: one frame was given a signal and the frame below it."""
    trace, interrupted = error.__traceback__, object()
    while trace is not None:
        given = list(trace.tb_frame.f_locals.values())[:3]  # with "self", the frame is the third
        given += [one for value in given if type(value) is tuple for one in value]  # of ``*args``
        numbers = [one for one in given if isinstance(one, int) and one in signal.valid_signals()]
        if numbers and any(one is interrupted for one in given):
            return True
        interrupted, trace = trace.tb_frame, trace.tb_next
    return False


def words_of(error: Exception) -> str:
    """*error* in words, for a failure that stays with us.

    Raises:
        Exception: *error* itself, if a signal handler of the user's raised it.
    """
    if is_of_signal_handler(error):
        raise error
    return f"{type(error).__name__}: {error}"
