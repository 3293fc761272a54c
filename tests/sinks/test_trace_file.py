"""A kept trace: what torch wrote, in a format that viewers read."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lightning_flops import profile_training

# ---- by Google's Trace Event Format; no viewer is run


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
    assert {"module: 0", "module: 2", "phase: forward"} <= {event["name"] for event in slices}
