"""Runs one measurement in a process of its own: it may raise, hang or crash, and nothing of it stays behind."""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Literal

OutcomeKind = Literal["counted", "raised", "timed out", "crashed"]

MESSAGE_CHARACTERS = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How one measurement ended."""

    kind: OutcomeKind
    flops: int | None = None
    """What was reported; None unless *kind* is ``counted``."""
    message: str = ""
    """The exception's type and first line, or the signal's number."""


def isolated(measure: Callable[[], int], *, timeout_sec: float) -> Outcome:
    """What *measure* returns, from a forked process that is killed after *timeout_sec*.

    Forking keeps the imports that the caller has made, so each measurement starts in milliseconds from the same clean
    state: a tool that leaves torch patched cannot spoil the next network.
    """
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_measure_and_send, args=(measure, sender))
    process.start()
    sender.close()
    try:
        if not receiver.poll(timeout_sec):
            return Outcome(kind="timed out", message=f"no answer in {timeout_sec:g} s")
        try:
            outcome = receiver.recv()
        except EOFError:
            process.join(timeout_sec)
            return Outcome(kind="crashed", message=f"exit code {process.exitcode}")
        assert isinstance(outcome, Outcome)
        return outcome
    finally:
        receiver.close()
        process.join(1.0)
        if process.is_alive():
            process.kill()
            process.join()


def _measure_and_send(measure: Callable[[], int], sender: Connection) -> None:
    # Tools print tables and warnings; only the number is wanted.
    with open(os.devnull, "w") as silence:
        sys.stdout = sys.stderr = silence
        os.dup2(silence.fileno(), 1)
        os.dup2(silence.fileno(), 2)
        try:
            outcome = Outcome(kind="counted", flops=measure())
        except BaseException as error:
            first_line = (str(error).splitlines() or [""])[0]
            outcome = Outcome(kind="raised", message=f"{type(error).__name__}: {first_line}"[:MESSAGE_CHARACTERS])
        sender.send(outcome)
        sender.close()
    # A tool's threads and exit handlers have nothing to do in this process any more.
    os._exit(0)
