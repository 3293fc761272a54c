"""Part 8: ``lightning-flops trace`` on the trace that a run has written says what the live report said."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

from ..machine import ROOT
from .checks import Check, Here, Row, exactly, holds, reported
from .nets import MEDIUM, size_for
from .trace import gpt_traced

_OF_THE_FILE = ("flops", "source", "rank", "overlap", "events", "notes")
"""What is the file's own, or what a live run of one rank leaves out."""
_SHARE = 1e-3
"""On a CPU the live report has nanoseconds, a file microseconds with three digits."""
_SHOWN = 5
_LEAST_FIGURES = 50


def _command(here: Here) -> Iterator[Row]:
    traced = gpt_traced(here, size_for(here, MEDIUM), trace_dir=str(here.folder / "traces"), record_shapes=True)
    profile = json.loads(traced.profile.to_json())
    (path,) = profile["traced"]["files"]
    command = [sys.executable, "-m", "lightning_flops", "trace", path, "--json"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    yield exactly("status of the command", run.returncode, 0)
    if run.returncode:
        yield reported("what it wrote", run.stderr[-500:])
        return
    (read,) = json.loads(run.stdout)["traces"]
    # A table that a live run on a CPU has nothing for, because it keeps no shapes, may stand in the file.
    live = profile["traced"]["tables"].items()
    tables = dict(_leaves({name: rows for name, rows in live if rows is not None and name not in _OF_THE_FILE}))
    others = dict(_leaves(read))
    apart = [
        f"{path}: {one} live, {others.get(path)} read"
        for path, one in tables.items()
        if not _same(one, others.get(path))
    ]
    yield holds(
        f"figures of the live report that the command has, too, of {len(tables)}",
        not apart and len(tables) > _LEAST_FIGURES,
        "; ".join([str(len(tables) - len(apart)), *apart[:_SHOWN]]),
    )
    # Counted from the shapes in the trace, beside what the counter saw in its own step.
    (step,) = read["flops"]["steps"]
    for phase in ("forward", "backward", "recompute"):
        claim = f"{phase} FLOPs from the trace's shapes, beside the counted step's"
        seen, truth = step[phase], profile["flops"][phase]
        if step["lower_bound"]:
            yield holds(f"{claim}: a lower bound", seen <= truth, f"{seen:,} of {truth:,}")
        else:
            yield exactly(claim, seen, truth)


def _leaves(tree: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """The values in a tree of JSON, and how long its lists are, each with where it stands."""
    if isinstance(tree, dict):
        for name, value in tree.items():
            yield from _leaves(value, f"{path}.{name}")
    elif isinstance(tree, list):
        yield f"{path} has", len(tree)
        for index, value in enumerate(tree):
            yield from _leaves(value, f"{path}[{index}]")
    else:
        yield path, tree


def _same(live: Any, read: Any) -> bool:
    """Whether two values differ by no more than a rounding."""
    if isinstance(live, float) and isinstance(read, (int, float)):
        return abs(live - read) <= _SHARE * max(abs(live), abs(read), 1.0)
    return bool(live == read)


CHECKS = (Check("the command beside the live report", _command),)
