"""Keeps the trace file of one step, so written that viewers show modules and phases, and figures over time above."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from lightning_flops.records import MARKS
from lightning_flops.sinks.file import numbered, write_new_file

if TYPE_CHECKING:
    from lightning_flops.trace.tables import CounterTrack

# torch records the fast marks as operators. In its trace files the category stands before the name.
_NAME = re.compile(
    rb'"name": "(?P<name>(?:' + b"|".join(json.dumps(mark)[1:-1].encode() for mark in MARKS) + rb')(?:[^"\\]|\\.)*)"'
)
_CATEGORY = re.compile(rb'"cat": "cpu_op"(?=,\s*' + _NAME.pattern + b")")
_ANNOTATION = b'"cat": "user_annotation"'
_EVENTS = re.compile(rb'"traceEvents": \[\s*$')

COUNTER = "lightning_flops: "
"""How the name of every track that we add begins. No event of torch's is called so, and none of ours has a length: what
adds up events finds nothing new in a kept file."""


def keep_trace(
    path: str, folder: str, *, rank: int, step: int, counters: Sequence[CounterTrack] = (), process: int = 0
) -> str:
    """Copy a trace file that torch wrote, marks turned into annotations, and say where it lies now.

    The local file at *path* goes to *folder*, a path or URL, under a name that is free there. *counters* are figures
    over time, on the file's clock, which viewers show under the number of the *process*.

    Raises:
        OSError: it cannot be read or written; the message names the file.
    """
    target = f"{folder.rstrip('/')}/rank{rank}_step{step}.pt.trace.json"
    with open(path, "rb") as file:
        return numbered(target, write_new_file(target, _with_counters(_annotated(file), counters, process)))


def _annotated(lines: Iterable[bytes]) -> Iterator[bytes]:
    before = b""
    for line in lines:
        if _NAME.search(line) is None:
            yield before
            before = line
        else:
            yield _CATEGORY.sub(_ANNOTATION, before + line)
            before = b""
    yield before


def _with_counters(lines: Iterable[bytes], counters: Sequence[CounterTrack], process: int) -> Iterator[bytes]:
    """*lines* with the counters' events behind torch's own, of which there is always one: no other event moves."""
    if not counters:
        yield from lines
        return
    inside, before = False, b""
    for line in lines:
        text = line.strip()
        # No event holds a list of objects: this one ends the list of events.
        if inside and text.startswith(b"]") and before == b"}":
            inside = False
            yield from (b",\n" + event for track in counters for event in _counter_events(track, process))
            yield b"\n"
        inside = inside or _EVENTS.search(line) is not None
        before = text.rpartition(b"\n")[2].strip() or before
        yield line


def _counter_events(track: CounterTrack, process: int) -> Iterator[bytes]:
    name, unit = json.dumps(COUNTER + track.name), json.dumps(track.unit)
    for time_ns, value in zip(track.times_ns, track.values, strict=True):
        moment = f"{time_ns // 1000}.{time_ns % 1000:03d}"
        # Six digits of a rate are more than a picture shows; bytes are exact.
        text = str(value) if isinstance(value, int) else f"{value:.6g}"
        yield f'{{"ph": "C", "name": {name}, "pid": {process}, "ts": {moment}, "args": {{{unit}: {text}}}}}'.encode()
