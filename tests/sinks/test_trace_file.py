"""A kept trace: the lines that torch wrote, with the marks as annotations."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lightning_flops import profile_training
from lightning_flops.sinks.file import keep_trace


def event(name: str, args: str, category: str = "cpu_op") -> str:
    """One event as torch writes it; *args* is what follows the brace that opens them."""
    return f"""  {{
    "ph": "X", "cat": "{category}", "name": "{name}", "pid": 1, "tid": 2,
    "ts": 10.5, "dur": 4,
    "args": {{{args}
  }},
"""


def kept(tmp_path: Path, events: str) -> tuple[str, list[Any]]:
    """The text of the kept file, and its events."""
    whole = f'{{\n  "schemaVersion": 1,\n  "traceEvents": [\n{events.rstrip().rstrip(",")}\n  ]\n}}\n'
    (tmp_path / "from.json").write_text(whole, encoding="utf-8")
    path = keep_trace(str(tmp_path / "from.json"), str(tmp_path / "to"), rank=0, step=7)
    assert path == f"{tmp_path}/to/rank0_step7.pt.trace.json"
    text = Path(path).read_text(encoding="utf-8")
    return text, json.loads(text)["traceEvents"]


@pytest.mark.parametrize("name", ["(root)", "a.\N{GREEK SMALL LETTER ALPHA}", 'a\\"b', "a\\\\b"])
def test_marks_are_annotations_and_other_lines_stay_as_they_are(name: str, tmp_path: Path) -> None:
    others = event("aten::mm", "\n    }") + event("my module: fc1", "\n    }", "user_annotation")
    text, found = kept(tmp_path, event(f"module: {name}", '\n      "External id": 3\n    }') + others)
    assert [one["cat"] for one in found] == ["user_annotation", "cpu_op", "user_annotation"]
    original = (tmp_path / "from.json").read_text(encoding="utf-8")
    assert text == original.replace("cpu_op", "user_annotation", 1)


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
    assert {"module: 0", "module: 2", "phase: forward"} <= {
        event["name"] for event in slices if event["cat"] == "user_annotation"
    }
