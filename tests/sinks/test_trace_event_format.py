"""A kept trace has our tracks where viewers draw them, by Google's "Trace Event Format"; no viewer is run."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lightning_flops import profile_training
from lightning_flops.sinks.trace_file import COUNTER


@pytest.mark.parametrize("settings", [{}, {"record_shapes": True, "with_stack": True, "profile_memory": True}])
def test_a_kept_trace_keeps_to_the_format(settings: Mapping[str, Any], tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with profile_training(model, optimizer, timing_steps=2, trace_dir=str(tmp_path), output_file=None, **settings):
        for batch in torch.ones(16, 4, 8):
            model(batch).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    (path,) = tmp_path.glob("*.pt.trace.json")
    events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    slices = [event for event in events if event["ph"] == "X"]
    assert {"module: 0", "module: 2", "phase: forward"} <= {
        event["name"] for event in slices if event["cat"] == "user_annotation"
    }
    ours = [event for event in events if event["ph"] == "C" and event["name"].startswith(COUNTER)]
    assert len({event["name"] for event in ours}) == bool(settings)  # memory alone: nothing ran on a device
    # A viewer draws the tracks in a process of torch's, above its slices, and within their time.
    named = {event["pid"] for event in events if event["ph"] == "M" and event["name"] == "process_name"}
    first, last = min(event["ts"] for event in slices), max(event["ts"] + event["dur"] for event in slices)
    times = [event["ts"] for event in ours]
    assert times == sorted(set(times)) and all(first <= time <= last for time in times)
    assert all(event["pid"] in named and all(map(math.isfinite, event["args"].values())) for event in ours)
