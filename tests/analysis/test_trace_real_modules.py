"""Modules in traces that the installed torch writes when it is asked for them."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from lightning_flops.instrument.counting.recorded_calls import recorded_work
from lightning_flops.schema.trace import TraceReport
from lightning_flops.trace import load_trace
from lightning_flops.trace.report import analyze_one


class Net(nn.Module):
    """A batch of 32 through 8 x 16, and 16 x 4 inside a container."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 16)
        self.body = nn.Sequential(nn.ReLU(), nn.Linear(16, 4))

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.body(self.first(batch))
        return out


def traced(folder: Path, *, with_stack: bool) -> TraceReport:
    """What a trace of three steps says."""
    net, batch = Net(), torch.ones(32, 8)
    with profile(
        activities=[ProfilerActivity.CPU], record_shapes=True, with_modules=True, with_stack=with_stack
    ) as profiler:
        for _ in range(3):
            net(batch).sum().backward()
            profiler.step()
    path = folder / "trace.json"
    profiler.export_chrome_trace(str(path))
    return analyze_one(load_trace(path), formulas=recorded_work).report


FIRST, SECOND = 2 * 32 * 8 * 16, 2 * 32 * 16 * 4
"""FLOPs of a forward. The backward of the first has no gradient of its input."""


def test_modules_with_stacks_have_their_time_and_their_flops(tmp_path: Path) -> None:
    alone = traced(tmp_path, with_stack=False)
    assert alone.modules is None and alone.flops is not None
    assert any(note.startswith("Modules are n/a: with_modules=True alone") for note in alone.notes)
    report = traced(tmp_path, with_stack=True)
    assert report.modules is not None and report.flops is not None and report.flops.modules is not None
    assert not any(note.startswith("Modules") for note in report.notes)
    for flops in (alone.flops, report.flops):
        assert {row.name: (row.calls, row.forward, row.backward) for row in flops.operators} == {
            "aten.addmm": (6, 3 * (FIRST + SECOND), 0),
            "aten.mm": (9, 0, 3 * (FIRST + 2 * SECOND)),
        }
    rows = {row.name: row for row in report.modules.rows}
    linears = ["Net_0.Linear_0", "Net_0.Sequential_0.Linear_1"]
    for name in linears:
        assert rows[name].calls == 3
        assert 0 < rows[name].own_forward_us <= rows["Net_0"].forward_us
        assert rows[name].backward_us > 0
    of_modules = {row.name: (row.forward, row.backward, row.own) for row in report.flops.modules}
    assert of_modules[linears[0]] == (3 * FIRST, 3 * FIRST, 6 * FIRST)
    assert of_modules[linears[1]] == (3 * SECOND, 6 * SECOND, 9 * SECOND)
    assert of_modules["Net_0"] == (3 * (FIRST + SECOND), 3 * (FIRST + 2 * SECOND), 0)
