"""Runs one part in a process of its own: it may raise, hang or crash, and what it had seen until then is kept."""

from __future__ import annotations

import contextlib
import importlib
import multiprocessing
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from .here import Here, rows_of
from .results import Part, Row

_LAST_LINES = 15
_GRACE_SEC = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A part that is to run."""

    number: int
    name: str
    module: str
    """Has the ``CHECKS``; it is imported where the part runs."""
    limit_sec: float
    """It is ended after these."""


def run_part(
    plan: Plan,
    here: Here,
    *,
    tell: Callable[[Row], None] = lambda row: None,
    clock: Callable[[], float] = time.monotonic,
) -> Part:
    """Run *plan* in a new process, and return what it saw.

    On a CPU the process is forked, which saves the imports. CUDA cannot be used in a fork of a process that has used
    it, so on a GPU each part begins anew.

    Args:
        plan: the part.
        here: where.
        tell: is told of each row as it comes.
        clock: the seconds of its limit are of this.
    """
    context: Any = multiprocessing.get_context("spawn" if here.on_gpu else "fork")
    receiver, sender = context.Pipe(duplex=False)
    log = here.folder / f"part{plan.number}.log"
    began = clock()
    process = context.Process(target=_work, args=(plan.module, here, sender, str(log)))
    process.start()
    sender.close()
    rows: list[Row] = []
    broken = ""
    grace_sec = _GRACE_SEC
    try:
        while True:
            left = plan.limit_sec - (clock() - began)
            if left <= 0 or not receiver.poll(left):
                grace_sec = 0.0
                broken = f"it took longer than its {plan.limit_sec:g} s and was ended\n{_end_of(log)}"
                break
            message = receiver.recv()
            if not isinstance(message, Row):
                broken = message
                break
            rows.append(message)
            tell(message)
    except EOFError:
        process.join(_GRACE_SEC)
        broken = f"its process ended with exit code {process.exitcode}\n{_end_of(log)}"
    finally:
        receiver.close()
        _end(process, grace_sec)
    return Part(number=plan.number, name=plan.name, rows=tuple(rows), seconds=clock() - began, broken=broken)


def _work(module: str, here: Here, sender: Connection, log: str) -> None:
    """In the part's process: send every row, and at the end an empty text, or why it broke off."""
    os.setsid()  # so that what it starts can be ended with it
    _write_to(log)
    broken = ""
    try:
        for check in importlib.import_module(module).CHECKS:
            for row in rows_of(check, here):
                sender.send(row)
    except BaseException:
        broken = traceback.format_exc()
    sender.send(broken)
    sender.close()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # what torch, Lightning and NCCL do at an exit is no part of this, and may hang


def _write_to(log: str) -> None:
    """Have all output of this process, and of what it starts, in the file *log*."""
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(file, 1)
    os.dup2(file, 2)


def _end_of(log: Path) -> str:
    with contextlib.suppress(OSError):
        lines = log.read_text(errors="replace").splitlines()
        return "\n".join(["the last that it wrote:", *lines[-_LAST_LINES:]]) if lines else ""
    return ""


def _end(process: Any, grace_sec: float) -> None:
    process.join(grace_sec)
    if process.pid is not None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)  # its own session: itself, and what it has started
    process.kill()  # if it had none yet
    process.join(_GRACE_SEC)
