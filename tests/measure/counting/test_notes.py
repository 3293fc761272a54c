"""What the counter could not do stands in the record, in sentences."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_flops.analysis.flop_counts import FlopCounts
from lightning_flops.measure.counting.flop_counter import FlopCounter


def test_a_replayed_cuda_graph_is_listed_as_heavy_under_the_module_that_replays_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    replayed = []

    def replay(graph: Any) -> None:
        replayed.append(graph)

    class Replaying(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            replay_method: Any = torch.cuda.CUDAGraph.replay
            replay_method(self)
            return x

    monkeypatch.setattr(torch.cuda.CUDAGraph, "replay", replay)
    model = nn.Sequential(nn.Linear(3, 5), Replaying())
    outer, inner = FlopCounter(model), FlopCounter(model)
    with outer:
        with inner:
            model(torch.randn(2, 3))
        model(torch.randn(2, 3))
    model(torch.randn(2, 3))
    for counter, calls in ((outer, 2), (inner, 1)):
        counts = FlopCounts(counter.record())
        (listed,) = counts.uncounted.values()
        assert counts.uncounted.keys() == {"cuda.graph_replay"}
        assert (listed.calls, listed.modules, listed.heavy) == (calls, ("1",), True)
        assert counts.is_lower_bound
    assert len(replayed) == 3
    assert torch.cuda.CUDAGraph.replay is replay


def test_what_control_flow_runs_is_not_counted_and_its_operator_is_listed() -> None:
    layers = nn.ModuleDict({"before": nn.Linear(3, 5), "inside": nn.Linear(5, 7)})
    with torch.no_grad(), FlopCounter(layers) as counter:
        x = layers["before"](torch.ones(2, 3))
        torch.cond(torch.tensor(True), lambda x: layers["inside"](x), lambda x: layers["inside"](-x), (x,))
    counts = FlopCounts(counter.record())
    assert counts.forward == 2 * 2 * 3 * 5
    assert [name for name, listed in counts.uncounted.items() if listed.heavy] == ["higher_order.cond"]
