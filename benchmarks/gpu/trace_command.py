"""Part 8: ``lightning-flops trace`` on the trace that a run has written says what the live report said."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

from ..machine import ROOT
from .gpt import Size, size_for
from .here import Check, Here
from .judge import exactly, holds, told
from .results import Row
from .trace import gpt_traced

_OF_THE_FILE = ("flops", "source", "rank", "overlap", "events", "notes")
"""What is the file's own, or what a live run of one rank leaves out."""
_SHARE = 1e-3
"""On a CPU the live report has nanoseconds, a file microseconds with three digits."""
_SHOWN = 5
_LEAST_FIGURES = 50
_SIZE = Size(layers=4, width=512, heads=8, vocabulary=4096, batch=4, length=512)


def _command(here: Here) -> Iterator[Row]:
    folder = here.folder / "traces"
    size = size_for(here) if here.small else _SIZE
    profile = json.loads(gpt_traced(here, size, trace_dir=str(folder), record_shapes=True).profile.to_json())
    live = profile["traced"]
    (path,) = live["files"]
    run = subprocess.run(
        [sys.executable, "-m", "lightning_flops", "trace", path, "--json"],
        cwd=ROOT, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    yield exactly("status of the command", run.returncode, 0)
    if run.returncode:
        yield told("what it wrote", run.stderr[-500:])
        return
    (read,) = json.loads(run.stdout)["traces"]
    # A table that a live run on a CPU has nothing for, because it keeps no shapes, may stand in the file.
    tables = {name: rows for name, rows in live["tables"].items() if rows is not None and name not in _OF_THE_FILE}
    apart = list(_apart(tables, read, ""))
    figures = sum(1 for _ in _leaves(tables))
    yield holds(
        f"figures of the live report that the command has, too, of {figures}",
        not apart and figures > _LEAST_FIGURES,
        f"{figures - len(apart)}"
        + "".join(f"; {path}: {one} live, {other} read" for path, one, other in apart[:_SHOWN]),
    )
    yield from _flops(profile, read["flops"])


def _executed(flops: Any) -> int:
    found: int = sum(flops[part] for part in ("forward", "backward", "recompute", "optimizer"))
    return found - int(flops["skipped"])


def _flops(profile: Any, read: Any) -> Iterator[Row]:
    """Counted from the shapes in the trace, beside what the counter saw in its own step."""
    (step,) = read["steps"]
    for phase in ("forward", "backward", "recompute"):
        claim = f"{phase} FLOPs from the trace's shapes, beside the counted step's"
        seen, truth = step[phase], profile["flops"][phase]
        if step["lower_bound"]:
            yield holds(f"{claim}: a lower bound", seen <= truth, f"{seen:,} of {truth:,}")
        else:
            yield exactly(claim, seen, truth)


def _apart(live: Any, read: Any, path: str) -> Iterator[tuple[str, Any, Any]]:
    """Where two trees of JSON differ by more than a rounding."""
    if isinstance(live, dict) and isinstance(read, dict):
        for name in live:
            yield from _apart(live[name], read.get(name), f"{path}.{name}")
    elif isinstance(live, list) and isinstance(read, list) and len(live) == len(read):
        for index, (one, other) in enumerate(zip(live, read, strict=True)):
            yield from _apart(one, other, f"{path}[{index}]")
    elif isinstance(live, float) and isinstance(read, (int, float)):
        if abs(live - read) > _SHARE * max(abs(live), abs(read), 1.0):
            yield path, live, read
    elif live != read:
        yield path, live, read


def _leaves(tree: Any) -> Iterator[Any]:
    children = tree.values() if isinstance(tree, dict) else tree if isinstance(tree, list) else None
    if children is None:
        yield tree
    else:
        for child in children:
            yield from _leaves(child)


CHECKS = (Check(claim="the command beside the live report", look=_command),)
