"""What every part of the program shares: where it runs, checks and their rows, and how what was seen is judged."""

from __future__ import annotations

import math
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

import torch

from ..runner import Send, run_apart

Verdict = Literal["met", "missed", "failed", "reported", "n/a"]
"""``reported``: a figure that is held to nothing. ``failed``: it was not seen, because something raised."""

NOT_JUDGED = "not judged: a small run, on a machine that others use"
_LAST_LINES = 15


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One claim, and what was seen."""

    claim: str
    seen: str
    verdict: Verdict
    limit: str = ""  # What it was held to
    note: str = ""  # Why there is nothing to see, or the traceback of what raised


@dataclass(frozen=True, slots=True, kw_only=True)
class Here:
    """Where the program runs."""

    device_type: str  # `cuda` or `cpu`
    small: bool  # Sizes are those of a test
    folder: Path  # For what a part writes; it is deleted afterwards
    output: Path | None = None  # Where the page is kept, and what else people read; None: nothing is

    @property
    def on_gpu(self) -> bool:
        """Whether this is a GPU."""
        return self.device_type == "cuda"

    @property
    def device(self) -> torch.device:
        """The device."""
        return torch.device("cuda", torch.cuda.current_device()) if self.on_gpu else torch.device("cpu")

    def pick(self, whole: int, small: int) -> int:
        """A size: of the whole program, or of a test."""
        return small if self.small else whole

    def settle(self) -> None:
        """Wait until the device has done all its work."""
        if self.on_gpu:
            torch.cuda.synchronize()


@dataclass(frozen=True, slots=True)
class Check:
    """Something to look at."""

    claim: str
    look: Callable[[Here], Iterable[Row]]
    needs_gpu: str = ""  # Why a CPU cannot show it; empty if it can


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One part of the program, run to its end or as far as it came."""

    number: int
    name: str
    rows: tuple[Row, ...]
    seconds: float
    broken: str = ""  # Why it did not come to its end; empty if it did

    @property
    def holds(self) -> bool:
        """Whether it came to its end and nothing in it is missed or failed."""
        return not self.broken and not any(row.verdict in ("missed", "failed") for row in self.rows)


# ---- judgement


def holds(claim: str, met: bool, seen: str, limit: str = "") -> Row:
    """A claim that holds or not, and what it was held to."""
    return Row(claim=claim, seen=seen, verdict="met" if met else "missed", limit=limit)


def exactly(claim: str, seen: Any, truth: Any) -> Row:
    """*seen* is to be *truth*, to the last digit."""
    text = _text(seen) if seen == truth else f"{_text(seen)}, where {_text(truth)} is right"
    return holds(claim, seen == truth, text, "exact")


def within(
    claim: str, seen: float | None, truth: float, *, share: float, least: float = 0, unit: str = "", scale: float = 1
) -> Row:
    """*seen* is to be *truth*, but for a *share* of it, or *least* where that is more; shown × *scale* in *unit*."""
    limit, found = max(share * abs(truth), least), math.nan if seen is None else seen
    relative = f" ({(found - truth) / truth:+.2%})" if truth else ""
    text = f"{_number(found, '', scale)} beside {_number(truth, unit, scale)}{relative}"
    return holds(claim, abs(found - truth) <= limit, text, f"± {_number(limit, unit, scale)}")


def at_most(
    claim: str, seen: float | None, limit: float, *, unit: str = "", scale: float = 1, least: bool = False
) -> Row:
    """*seen* is to be no more than *limit*, or with *least* no less; None misses."""
    found = math.nan if seen is None else seen
    met = found >= limit if least else found <= limit
    return holds(claim, met, _number(found, unit, scale), f"{'≥' if least else '≤'} {_number(limit, unit, scale)}")


at_least = partial(at_most, least=True)


def reported(claim: str, seen: Any) -> Row:
    """A figure that is held to nothing."""
    return Row(claim=claim, seen=_text(seen), verdict="reported")


def not_here(claim: str, because: str) -> Row:
    """What cannot be looked at here, and why."""
    return Row(claim=claim, seen="n/a", verdict="n/a", note=because)


def unjudged(here: Here, *rows: Row) -> Iterator[Row]:
    """*rows*; in a small run, on a machine that is not still, what they miss or meet is only reported."""
    for row in rows:
        judged = row.verdict in ("met", "missed")
        yield replace(row, verdict="reported", note=NOT_JUDGED) if here.small and judged else row


def _text(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def _number(value: float, unit: str, scale: float) -> str:
    scaled = value * scale
    text = "n/a" if math.isnan(value) else f"{scaled:,.0f}" if abs(scaled) >= 1000 else f"{scaled:.4g}"
    return f"{text} {unit}".rstrip()


# ---- running


def rows_of(check: Check, here: Here) -> Iterator[Row]:
    """What *check* sees; one that raises says so in a row of its own, after the rows that it has given."""
    if check.needs_gpu and not here.on_gpu:
        yield not_here(check.claim, f"on a CPU: {check.needs_gpu}")
        return
    try:
        yield from check.look(here)
    except Exception:
        yield Row(claim=check.claim, seen="raised", verdict="failed", note=traceback.format_exc())


def run_part(number: int, name: str, module: str, limit_sec: float, here: Here) -> Part:
    """What the ``CHECKS`` of *module* see, in a process of its own that is ended after *limit_sec*.

    ``module:NAME`` has others. It may raise, hang or crash: what it had seen until then is kept. On a CPU the process
    is forked, which saves the imports. CUDA cannot be used in a fork of a process that has used it, so on a GPU each
    part begins anew.
    """
    rows: list[Row] = []

    def receive(row: Row) -> None:
        rows.append(row)
        print(f"  {row.verdict:<8} {row.claim}: {row.seen}", file=sys.stderr, flush=True)

    began, log = time.monotonic(), here.folder / f"part{number}.log"
    method: Literal["fork", "spawn"] = "spawn" if here.on_gpu else "fork"
    answer = run_apart(partial(_look, module, here), timeout_sec=limit_sec, receive=receive, method=method, log=log)
    broken = answer.traceback or answer.words
    if answer.kind in ("timed out", "crashed"):
        lines = log.read_text(errors="replace").splitlines() if log.exists() else []
        broken = "\n".join([broken, "the last that it wrote:", *lines[-_LAST_LINES:]])
    return Part(number=number, name=name, rows=tuple(rows), seconds=time.monotonic() - began, broken=broken)


def _look(module: str, here: Here, send: Send) -> None:
    name, _, checks = module.partition(":")
    for check in getattr(import_module(name), checks or "CHECKS"):
        for row in rows_of(check, here):
            send(row)
