"""Ctrl-C while everything of ours is removed: whatever line it comes at, nothing is left."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from lightning_flops.measure.counting.flop_counter import FlopCounter, PartCounter
from lightning_flops.measure.memory import memory_reader
from lightning_flops.measure.patches import listen
from lightning_flops.measure.run_facts import _cores
from lightning_flops.measure.timing.processor_wait import read_counters
from lightning_flops.records import OUTSIDE
from lightning_flops.run.window import Window
from lightning_flops.signals import Quiet, Undo
from lightning_flops.sinks.console import say
from tests.left_on_torch import torch_state


class _CtrlC:
    """Raises KeyboardInterrupt at the *at*-th line of ours, of contextlib or of torch's handles from here on."""

    def __init__(self, at: int) -> None:
        self.left = at

    def __enter__(self) -> _CtrlC:
        sys.settrace(self._trace)
        return self

    def __exit__(self, *error: object) -> None:
        sys.settrace(None)

    def _trace(self, frame: FrameType, event: str, arg: Any) -> Any:
        file = frame.f_code.co_filename
        ours = "lightning_flops/" in file or file.endswith(("contextlib.py", "torch/utils/hooks.py"))
        if ours and event == "line":
            self.left -= 1
            if self.left == 0:
                sys.settrace(None)
                raise KeyboardInterrupt
        return self._trace if ours else None


def _closed(undo: Any, at: int) -> bool:
    """Whether Ctrl-C came while *undo* was closed, once and then, as a run does at its end, once more."""
    came = False
    try:
        with _CtrlC(at):
            undo.close()
    except KeyboardInterrupt:
        came = True
    undo.close()
    return came


@pytest.mark.parametrize("several", [False, True])
def test_no_line_of_an_undo_loses_a_wrapper_to_ctrl_c(several: bool) -> None:
    at, came = 0, True
    while came:
        at += 1

        def function() -> int:
            return 3

        owner: Any = SimpleNamespace(first=function, second=function)
        undo = Undo()
        for name in ("first", "second"):
            for _ in range(1 + several):
                listen(undo, owner, name, lambda: None)
        assert owner.first is not function
        came = _closed(undo, at)
        assert owner.first is function
        assert owner.second is function
    assert at > 10


@pytest.mark.parametrize(("held", "end"), [("marks", Window.unmark), ("scope", Window.leave_scope)])
def test_no_line_of_a_windows_end_loses_a_wrapper_to_ctrl_c(held: str, end: Callable[[Window], None]) -> None:
    """What the interrupted call leaves, the run's end undoes."""
    at, came = 0, True
    while came:
        at += 1

        def function() -> int:
            return 3

        owner: Any = SimpleNamespace(first=function, second=function)
        window, undo = object.__new__(Window), Undo()
        for name in ("first", "second"):
            listen(undo, owner, name, lambda: None)
        setattr(window, held, undo)
        came = _closed(SimpleNamespace(close=partial(end, window)), at)
        assert (owner.first, owner.second) == (function, function), at
    assert at > 10


@pytest.mark.parametrize("part", ["forward", "validation"])
@pytest.mark.parametrize("end", [PartCounter.leave, PartCounter.give_up])
def test_no_line_of_a_parts_end_keeps_what_follows_from_being_counted(
    part: str, end: Callable[[PartCounter], None]
) -> None:
    """Where the user catches what was raised, the step goes on."""
    model, at, came = nn.Linear(2, 2), 0, True
    while came:
        at += 1
        with FlopCounter(model) as counter:
            parts = PartCounter(counter)
            parts.enter(part)
            came = _closed(SimpleNamespace(close=partial(end, parts)), at)
            parts.give_up()
            with torch.no_grad():
                torch.ones(1, 2) @ model.weight  # of no module's call: the root's in the part alone
                model(torch.ones(1, 2))
        assert {cell.module: cell.flops for cell in counter.record().cells if cell.flops} == {OUTSIDE: 8, "": 8}, at
    assert at > 10


def _fails_with(number: int, error: Exception) -> None:
    raise error


class _Handlers:
    """Signal handlers as people write them."""

    def __init__(self, error: OSError) -> None:
        self.error = error

    def method(self, number: int, frame: FrameType | None) -> None:
        raise self.error

    def of_any_arguments(self, *args: Any) -> None:
        raise self.error

    @property
    def function(self) -> Callable[[int, FrameType | None], None]:
        def handler(number: int, frame: FrameType | None) -> None:
            raise self.error

        return handler


@pytest.mark.parametrize("how", ["function", "method", "of_any_arguments"])
@pytest.mark.parametrize("kind", [TimeoutError, OSError])
def test_what_a_signal_handler_raises_is_not_taken_for_a_failure_that_stays(kind: type[OSError], how: str) -> None:
    before = signal.signal(signal.SIGALRM, getattr(_Handlers(kind("too late")), how))
    try:
        with pytest.raises(kind, match="too late"), Quiet(Exception):
            signal.raise_signal(signal.SIGALRM)
    finally:
        signal.signal(signal.SIGALRM, before)
    with Quiet(OSError):
        raise kind("of ours")
    with Quiet(OSError):
        _fails_with(int(signal.SIGALRM), kind("of ours, where a number is that of a signal"))
    with pytest.raises(ValueError, match="other"), Quiet(OSError):
        raise ValueError("other")


@pytest.mark.parametrize("reads", [memory_reader(torch.device("cpu")), read_counters, _cores])
def test_what_is_read_of_the_system_lets_a_signal_handlers_exception_out(
    monkeypatch: pytest.MonkeyPatch, reads: Callable[[], object]
) -> None:
    def handler(number: int, frame: FrameType | None) -> None:
        raise TimeoutError("too late")

    before = signal.signal(signal.SIGALRM, handler)
    for name in ("read_text", "iterdir"):
        monkeypatch.setattr(Path, name, lambda *_, **__: signal.raise_signal(signal.SIGALRM))
    try:
        with pytest.raises(TimeoutError):
            reads()
    finally:
        signal.signal(signal.SIGALRM, before)


def test_a_sentence_on_standard_error_lets_a_signal_handlers_exception_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def handler(number: int, frame: FrameType | None) -> None:
        raise TimeoutError("too late")

    def write(text: str) -> None:
        signal.raise_signal(signal.SIGALRM)

    before = signal.signal(signal.SIGALRM, handler)
    monkeypatch.setattr(sys, "stderr", SimpleNamespace(write=write))
    try:
        with pytest.raises(TimeoutError):
            say("a sentence")
    finally:
        signal.signal(signal.SIGALRM, before)


def _counts(model: nn.Module) -> None:
    with FlopCounter(model):
        model(torch.ones(1, 2))


def test_no_line_of_the_end_of_counting_leaves_anything_on_torch() -> None:
    model = nn.Linear(2, 2)
    before, at, came = torch_state(), 0, True
    while came:
        at += 1
        undo = Undo()
        counter = undo.enter_context(FlopCounter(model))
        model(torch.ones(1, 2))
        came = _closed(undo, at)
        assert torch_state() == before, at
        assert counter.total().forward == 8
    assert at > 50
    elsewhere = threading.Thread(target=_counts, args=(model,), daemon=True)
    elsewhere.start()
    elsewhere.join(60)
    assert not elsewhere.is_alive(), "what was interrupted holds a lock that every counter of this process needs"


def test_a_signal_handler_may_close_what_is_being_closed() -> None:
    called = list[str]()

    def first() -> None:
        called.append("first")
        if len(called) == 1:
            signal.raise_signal(signal.SIGALRM)

    undo = Undo()
    undo.callback(called.append, "last")
    undo.callback(first)
    before = signal.signal(signal.SIGALRM, lambda number, frame: undo.close())
    try:
        undo.close()
    finally:
        signal.signal(signal.SIGALRM, before)
    assert called == ["first", "first", "last"]
    assert not undo


def test_an_undo_that_fails_keeps_no_other_from_running() -> None:
    called = []

    def fails() -> None:
        called.append("fails")
        raise RuntimeError("broken on purpose")

    undo = Undo()
    undo.callback(called.append, "last")
    undo.callback(fails)
    with pytest.raises(RuntimeError, match="on purpose"):
        undo.close()
    assert called == ["fails", "fails", "last"]
    undo.close()
    assert called[-1] == "last"
    assert len(called) == 3
