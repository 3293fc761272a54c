"""A kept trace keeps to the format that viewers read.

The rules are those of Google's "Trace Event Format" (its sections on complete, counter, instant, flow and metadata
events), and of Perfetto's guide to writing events, "Thread-scoped (sync) slices": on one thread "child slices nest
perfectly inside parent slices and do not partially overlap". No viewer is run: none can be installed with a package.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lightning_flops import profile_training
from lightning_flops.sinks.trace_file import COUNTER

Event = dict[str, Any]

PHASES = frozenset("BEXiIPCbneSTpFstfNODMVvRc")
NAMED = {
    "process_name": "name",
    "process_labels": "labels",
    "process_sort_index": "sort_index",
    "thread_name": "name",
    "thread_sort_index": "sort_index",
}
"""Metadata events, and what each says."""


def broken_rules(document: Any) -> list[str]:
    """What of the format *document* does not keep to, in words."""
    events: list[Event] = document["traceEvents"]
    broken = [f"{rule}: {event}" for event in events if (rule := _broken_alone(event)) is not None]
    # With stacks on, torch writes the Python calls that open and close a scope as slices, which overlap the scope in
    # part; its own scopes, too. Each of the two nests with all else.
    for left_out in ("user_annotation", "python_function"):
        broken += [] if broken else _broken_nesting(event for event in events if event.get("cat") != left_out)
    return broken or _broken_counters(events)


def _broken_alone(event: Event) -> str | None:
    """The rule for a single event that *event* breaks."""
    phase = event.get("ph")
    if not isinstance(phase, str) or phase not in PHASES or not isinstance(event.get("name"), str):
        return "no phase of the format, or no name"
    if phase == "M":
        said = NAMED.get(event["name"])
        return None if said is not None and said in event.get("args", {}) else "metadata that no viewer knows"
    if not _is_number(event.get("ts")) or not isinstance(event.get("pid"), (int, str)):
        return "no time or no process"
    if phase == "X" and not (_is_number(event.get("dur")) and event["dur"] >= 0 and "tid" in event):
        return "no length or no thread"
    if phase == "C" and not (event.get("args") and all(map(_is_number, event["args"].values()))):
        return "a counter without numbers"
    return None


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _broken_nesting(events: Iterable[Event]) -> list[str]:
    """Slices of one thread that begin inside another and end after it."""
    threads: defaultdict[tuple[Any, Any], list[tuple[int, int, str]]] = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            begin = _ns(event["ts"])
            threads[event["pid"], event["tid"]].append((begin, -(begin + _ns(event["dur"])), event["name"]))
    broken = []
    for slices in threads.values():
        around: list[tuple[int, int, str]] = []
        for one in sorted(slices):
            while around and -around[-1][1] <= one[0]:
                around.pop()
            if around and -one[1] > -around[-1][1]:
                broken.append(f"{one[2]} begins inside {around[-1][2]} and ends after it")
            around.append(one)
    return broken


def _ns(microseconds: float) -> int:
    return round(microseconds * 1000)


def _broken_counters(events: Iterable[Event]) -> list[str]:
    """Tracks whose times do not rise."""
    tracks: defaultdict[tuple[Any, str], list[int]] = defaultdict(list)
    for event in events:
        if event["ph"] == "C":
            tracks[event["pid"], event["name"]].append(_ns(event["ts"]))
    return [f"the times of {name} do not rise" for (_, name), times in tracks.items() if times != sorted(set(times))]


@pytest.mark.parametrize("settings", [{}, {"record_shapes": True, "with_stack": True, "profile_memory": True}])
def test_a_kept_trace_keeps_to_the_format(settings: Mapping[str, Any], tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data: Any = torch.utils.data.DataLoader(torch.ones(64, 8), batch_size=4)  # type: ignore[arg-type]
    with profile_training(
        model, optimizer, timing_steps=2, trace_dir=str(tmp_path), output_file=str(tmp_path / "report.txt"), **settings
    ):
        for batch in data:
            model(batch).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    (path,) = tmp_path.glob("*.pt.trace.json")
    document = json.loads(path.read_text(encoding="utf-8"))
    assert broken_rules(document) == []
    events = document["traceEvents"]
    ours = {event["name"] for event in events if event["ph"] == "C" and event["name"].startswith(COUNTER)}
    assert len(ours) == bool(settings)  # memory alone: nothing ran on a device
    # A viewer draws the tracks in a process of torch's, above its slices, and within their time.
    slices = [event for event in events if event["ph"] == "X"]
    named = {event["pid"] for event in events if event["ph"] == "M" and event["name"] == "process_name"}
    first, last = min(event["ts"] for event in slices), max(event["ts"] + event["dur"] for event in slices)
    for event in events:
        if event["ph"] == "C" and event["name"].startswith(COUNTER):
            assert event["pid"] in named
            assert first <= event["ts"] <= last
