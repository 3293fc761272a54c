"""What the campaigns of ``benchmarks.faults`` have in common: trials, their faults, and a process for each trial."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

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
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        os.setsid()
        try:
            nowhere = os.open(os.devnull, os.O_RDWR)
            for stream in (0, 1, 2):
                os.dup2(nowhere, stream)
            text = json.dumps({"value": function()})
        except BaseException as error:
            text = json.dumps({"failed": f"{type(error).__name__}: {error}"})
        with os.fdopen(writer, "w") as pipe:
            pipe.write(text)
        os._exit(0)
    os.close(writer)
    os.set_blocking(reader, False)
    received, end = b"", time.monotonic() + timeout_sec
    try:
        while True:
            try:
                part = os.read(reader, 1 << 20)
            except BlockingIOError:
                if time.monotonic() > end:
                    return Answer(failed=f"no answer in {timeout_sec:g} s")
                time.sleep(0.005)
                continue
            if not part:
                break
            received += part
    finally:
        os.close(reader)
        for kill in (os.killpg, os.kill):
            try:
                kill(child, signal.SIGKILL)
            except OSError:
                continue
        _, status = os.waitpid(child, 0)
    if not received:
        return Answer(failed=f"its process ended with status {os.waitstatus_to_exitcode(status)}")
    return Answer(**json.loads(received))
