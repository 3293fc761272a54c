"""What the campaigns of ``benchmarks.faults`` have in common: trials, their faults, and a process for each trial."""

from __future__ import annotations

import contextlib
import json
import os
import random
import select
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

REPOSITORY = Path(__file__).resolve().parent.parent


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """Something that a promise of this project rules out."""

    kind: str
    """In few words; faults of one kind and place are one line of the report."""
    where: str
    """The place in our code, or what was asked."""
    again: str
    """Arguments of ``python -m benchmarks.faults`` that show it again."""
    words: str = ""


@dataclass(slots=True, kw_only=True)
class Tally:
    """What came out of one campaign."""

    campaign: str
    promise: str
    """What a trial without fault shows."""
    seed: int
    tried: int = 0
    seconds: float = 0.0
    faults: list[Fault] = field(default_factory=list)
    faulty: int = 0
    """Trials with one fault or more."""

    def kinds(self) -> list[tuple[str, str, int, Fault]]:
        """Each kind of fault at each place: how often, and one of them; the most frequent kind first."""
        kinds = Counter(fault.kind for fault in self.faults)
        places = Counter((fault.kind, fault.where) for fault in self.faults)
        first = {(fault.kind, fault.where): fault for fault in reversed(self.faults)}
        order = sorted(places, key=lambda place: (-kinds[place[0]], place[0], -places[place], place[1]))
        return [(*place, places[place], first[place]) for place in order]


Trial = Callable[[random.Random, str], list[Fault]]
"""One trial: draws from the generator; its second argument is what shows it again."""


def run_campaign(tally: Tally, trial: Trial, *, seconds: float, again: str, only: int | None = None) -> Tally:
    """Try, each trial with a generator of its own, until *seconds* are over.

    Args:
        tally: is filled in.
        trial: what is tried.
        seconds: no trial begins later than this.
        again: arguments that show one trial again, with ``{number}`` in place of the trial's.
        only: the one trial to try.
    """
    started = time.monotonic()
    for number in _numbers(started + seconds) if only is None else [only]:
        found = trial(random.Random(f"{tally.seed}/{number}"), again.format(number=number, seed=tally.seed))
        tally.tried += 1
        tally.faulty += bool(found)
        tally.faults += found
    tally.seconds = time.monotonic() - started
    return tally


def _numbers(end: float) -> Iterator[int]:
    number = 0
    while time.monotonic() < end:
        yield number
        number += 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What a process said before its end."""

    value: Any = None
    failed: str = ""
    """Why there is no value: it hung, or died of what."""


def answer_of(function: Callable[[], Any], *, timeout_sec: float) -> Answer:
    """What *function* returns, which JSON can hold, from a forked process that is killed after *timeout_sec*.

    What it prints goes nowhere. Forking keeps the imports that the caller has made, so that a trial starts soon and
    from the same state as all the others.
    """
    forked = fork(timeout_sec=timeout_sec)
    if isinstance(forked, Answer):
        return forked
    forked.end_with(function)


class Forked:
    """The new process, in which ``fork`` has returned."""

    def __init__(self, writer: int) -> None:
        self._writer = writer

    def end_with(self, function: Callable[[], Any]) -> NoReturn:
        """Answer what *function* returns, which JSON can hold, or that it raises; this process ends."""
        try:
            text = json.dumps({"value": function()})
        except BaseException as error:
            text = json.dumps({"failed": f"{type(error).__name__}: {error}"})
        with os.fdopen(self._writer, "w") as pipe:
            pipe.write(text)
        os._exit(0)


def fork(*, timeout_sec: float) -> Answer | Forked:
    """Go on in a second process as well, which is killed after *timeout_sec*; what it prints goes nowhere.

    Returns:
        In the new process a ``Forked``; in this one, when the new one has ended, its answer.
    """
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        _leave_terminal()
        return Forked(writer)
    os.close(writer)
    received, end = b"", time.monotonic() + timeout_sec
    try:
        while part := _read(reader, end):
            received += part
    finally:
        os.close(reader)
        status = _end(child)
    if part is None:
        return Answer(failed=f"no answer in {timeout_sec:g} s")
    return Answer(**json.loads(received)) if received else Answer(failed=f"its process ended with status {status}")


def stream_of(function: Callable[[Callable[[Any], None]], None], *, timeout_sec: float) -> Iterator[Any]:
    """What *function* says, which JSON can hold, from a forked process, until it ends or says nothing for so long.

    What it raises goes nowhere, as what it prints does.
    """
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        _leave_terminal()
        try:
            with os.fdopen(writer, "w") as pipe:
                function(lambda value: print(json.dumps(value), file=pipe, flush=True))
        finally:
            os._exit(0)
    os.close(writer)
    try:
        received = b""
        while part := _read(reader, time.monotonic() + timeout_sec):
            *lines, received = (received + part).split(b"\n")
            yield from map(json.loads, lines)
    finally:
        os.close(reader)
        _end(child)


def _leave_terminal() -> None:
    """This process leads a session of its own, and what it prints goes nowhere."""
    os.setsid()
    nowhere = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(nowhere, stream)
    os.close(nowhere)


def _read(reader: int, end: float) -> bytes | None:
    """The next bytes; none at the end, None where they have not come until *end*."""
    ready, _, _ = select.select([reader], [], [], max(0.0, end - time.monotonic()))
    return os.read(reader, 1 << 20) if ready else None


def _end(child: int) -> int:
    """Kill a process that leads a session, and all of that session; its exit status."""
    for kill in (os.killpg, os.kill):
        with contextlib.suppress(OSError):
            kill(child, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
