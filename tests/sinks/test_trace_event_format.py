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
    if not isinstance(document, dict) or not isinstance(document.get("traceEvents"), list):
        return ["it is no object with a list of events"]
    events: list[Event] = document["traceEvents"]
    broken = [f"{rule}: {event}" for event in events if (rule := _broken_alone(event)) is not None]
    # With stacks on, torch writes the Python calls that open and close a scope as slices, which overlap the scope in
    # part; its own scopes, too. Each of the two nests with all else.
    for left_out in ("user_annotation", "python_function"):
        broken += [] if broken else _broken_nesting(event for event in events if event.get("cat") != left_out)
    return broken or [*_broken_counters(events), *_broken_flows(events)]


def _broken_alone(event: Event) -> str | None:
    """The rule for a single event that *event* breaks."""
    phase = event.get("ph")
    if not isinstance(phase, str) or phase not in PHASES:
        return "no phase of the format"
    if not isinstance(event.get("name"), str):
        return "no name"
    if phase == "M":
        said = NAMED.get(event["name"])
        return None if said is not None and said in event.get("args", {}) else "metadata that no viewer knows"
    if not _is_number(event.get("ts")):
        return "no time"
    if not isinstance(event.get("pid"), (int, str)) or (phase != "C" and not isinstance(event.get("tid"), (int, str))):
        return "no process or thread"
    if phase == "X" and not (_is_number(event.get("dur")) and event["dur"] >= 0):
        return "no length"
    if phase in "iI" and event.get("s", "t") not in ("g", "p", "t"):
        return "an instant of no known scope"
    if phase in "stf" and "id" not in event:
        return "a flow without an id"
    if phase == "C" and not (event.get("args") and all(map(_is_number, event["args"].values()))):
        return "a counter without numbers"
    return None


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _broken_nesting(events: Iterable[Event]) -> list[str]:
    """Slices of one thread that begin inside another and end after it."""
    threads: defaultdict[tuple[Any, Any], list[Event]] = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            threads[event["pid"], event["tid"]].append(event)
    broken = []
    for slices in threads.values():
        around: list[Event] = []
        for one in sorted(slices, key=lambda event: (_ns(event["ts"]), -_ns(event["dur"]))):
            while around and _end(around[-1]) <= _ns(one["ts"]):
                around.pop()
            if around and _end(one) > _end(around[-1]):
                broken.append(f"{one['name']} begins inside {around[-1]['name']} and ends after it")
            around.append(one)
    return broken


def _ns(microseconds: float) -> int:
    return round(microseconds * 1000)


def _end(event: Event) -> int:
    return _ns(event["ts"]) + _ns(event["dur"])


def _broken_counters(events: Iterable[Event]) -> list[str]:
    """Tracks whose times do not rise, or whose series change."""
    tracks: defaultdict[tuple[Any, str], list[Event]] = defaultdict(list)
    for event in events:
        if event["ph"] == "C":
            tracks[event["pid"], event["name"]].append(event)
    broken = []
    for (_, name), points in tracks.items():
        times = [_ns(event["ts"]) for event in points]
        if times != sorted(set(times)):
            broken.append(f"the times of {name} do not rise")
        if len({tuple(event["args"]) for event in points}) > 1:
            broken.append(f"the series of {name} change")
    return broken


def _broken_flows(events: Iterable[Event]) -> list[str]:
    """Flows that end and never began."""
    began = {(event.get("cat"), event["name"], event["id"]) for event in events if event["ph"] == "s"}
    ended = {(event.get("cat"), event["name"], event["id"]) for event in events if event["ph"] in "tf"}
    return [f"the flow {one} never began" for one in sorted(ended - began, key=str)]


def span(start: float, length: float, **more: Any) -> Event:
    return {"ph": "X", "name": "one", "pid": 1, "tid": 1, "ts": start, "dur": length, **more}


def counter(start: float, **series: Any) -> Event:
    return {"ph": "C", "name": "track", "pid": 1, "ts": start, "args": series}


@pytest.mark.parametrize(
    ("events", "said"),
    [
        ([span(0, 10), span(2, 8), span(10, 5), span(3, 2, tid=2)], None),
        ([span(0, 10), span(5, 6)], "begins inside"),
        ([span(0, 10), span(2, 3), span(4, 2)], "begins inside"),
        ([span(0, -1)], "no length"),
        ([{**span(0, 1), "ph": "Q"}], "no phase"),
        ([{"ph": "X", "name": "one", "pid": 1, "ts": 0, "dur": 1}], "no process or thread"),
        ([counter(0, bytes=1), counter(5, bytes=2)], None),
        ([counter(5, bytes=1), counter(0, bytes=2)], "do not rise"),
        ([counter(0, bytes=1), counter(5, rate=2)], "series"),
        ([counter(0, bytes="many")], "without numbers"),
        ([counter(0)], "without numbers"),
        ([{"ph": "M", "name": "process_name", "pid": 1, "args": {"name": "python"}}], None),
        ([{"ph": "M", "name": "process_title", "pid": 1, "args": {"name": "python"}}], "no viewer knows"),
        ([{"ph": "f", "name": "flow", "id": 1, "pid": 1, "tid": 1, "ts": 1}], "never began"),
    ],
)
def test_the_rules_hold_what_is_right_and_refuse_what_is_not(events: list[Event], said: str | None) -> None:
    broken = broken_rules({"traceEvents": events})
    assert broken == [] if said is None else any(said in one for one in broken)


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
