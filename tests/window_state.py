"""What a window is doing, in a word."""

from __future__ import annotations

from lightning_flops.instrument.recorder import Recorder


def window_state(recorder: Recorder) -> str:
    """One of the states that a ``Recorder`` can be in, as its picture names them."""
    if recorder.closed:
        return "closed"
    if recorder.waiting:
        return "waiting"
    if recorder.counting:
        return "counting more" if recorder.has_counted else "counting"
    if recorder.timer is not None:
        return "timing"
    return "tracing" if recorder.tracing else "settling"
