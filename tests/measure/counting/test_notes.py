"""What the counter could not do, or where it failed itself, stands in the record; the user's step goes on."""

from __future__ import annotations

import linecache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_flops import FlopsProfiler, count_flops
from lightning_flops.measure.counting.attribution import ThreadState
from lightning_flops.measure.counting.flop_counter import FlopCounter
from lightning_flops.measure.counting.formulas import contract
from tests.corpus.case import BATCH, FIRST, HIDDEN, INPUTS, OUTPUTS, SECOND
from tests.left_on_torch import torch_state


def test_a_replayed_cuda_graph_is_heavy_in_the_module_that_replays_it(monkeypatch: pytest.MonkeyPatch) -> None:
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
    with count_flops(model) as counts:
        model(torch.randn(2, 3))
    model(torch.randn(2, 3))
    listed = counts.uncounted["cuda.graph_replay"]
    assert (listed.calls, listed.modules, listed.may_have_flops) == (1, ("1",), True)
    assert counts.is_lower_bound
    assert len(replayed) == 2
    assert torch.cuda.CUDAGraph.replay is replay


def test_what_control_flow_runs_is_not_counted_and_its_operator_is_listed() -> None:
    layers = nn.ModuleDict({"before": nn.Linear(3, 5), "inside": nn.Linear(5, 7)})
    with torch.no_grad(), count_flops(layers) as counts:
        x = layers["before"](torch.ones(2, 3))
        torch.cond(torch.tensor(True), lambda x: layers["inside"](x), lambda x: layers["inside"](-x), (x,))
    assert counts.forward == 2 * 2 * 3 * 5
    assert [name for name, listed in counts.uncounted.items() if listed.may_have_flops] == ["higher_order.cond"]


def test_what_an_associative_scan_runs_in_eager_code_is_counted() -> None:
    """Its default is for CUDA, and takes functions without products alone."""
    scan = pytest.importorskip("torch._higher_order_ops.associative_scan").associative_scan
    weight = torch.randn(3, 3)
    with count_flops() as counts:
        scan(lambda first, second: first @ weight + second, torch.randn(4, 3), 0, combine_mode="generic")
    # Of 4 rows: two pairs, their two results as one pair, and the third row.
    assert counts.forward == (2 + 1 + 1) * 2 * 3 * 3
    assert not counts.is_lower_bound


class Checkpointed(nn.Module):
    """Two products under a checkpoint, which repeats both of them for the sigmoid behind them."""

    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.Linear(INPUTS, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, OUTPUTS), nn.Sigmoid())

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = checkpoint(self.block, x, use_reentrant=False)
        return out


def fails(*args: Any, **kwargs: Any) -> Any:
    raise LookupError("no longer there")


@pytest.mark.parametrize(
    ("owner", "name", "where"),
    [
        (ThreadState, "push", "a module's hook"),
        (ThreadState, "leave", "a module's hook"),
        (contract, "bytes_of", "an operator"),
    ],
)
def test_what_fails_while_a_model_runs(owner: Any, name: str, where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = Checkpointed(), torch.randn(BATCH, INPUTS)

    def gradients() -> list[Tensor | None]:
        model.zero_grad()
        model(x).sum().backward()
        return [parameter.grad for parameter in model.parameters()]

    expected = gradients()
    monkeypatch.setattr(owner, name, fails)
    with FlopCounter(model) as counter:
        found = gradients()
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True) if a is not None and b is not None)
    (note, *_) = counter.record().notes
    assert note == f"Counting failed in {where} (LookupError: no longer there); FLOPs may be missing."


@pytest.mark.parametrize("name", ["__enter__", "_install"])
def test_the_profiler_by_deepspeeds_name_raises_nothing_into_the_loop(
    name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model, before = Checkpointed(), torch_state()
    monkeypatch.setattr(FlopCounter, name, fails)
    profiler = FlopsProfiler(model)
    profiler.start_profile()
    model(torch.ones(2, 5))
    profiler.stop_profile()
    assert torch_state() == before
    profiler.end_profile()
    profiler.print_model_profile()
    assert [record.getMessage() for record in caplog.records] == [
        "the FLOPs profiler failed and is off; the program goes on: LookupError: no longer there",
        "nothing was profiled: start_profile() comes first",
    ]


def test_a_backward_that_cannot_be_read_counts_as_backward_and_a_note_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    torch._dynamo.reset()
    model: Any = torch.compile(Checkpointed(), backend="aot_eager")
    model(torch.randn(BATCH, INPUTS)).sum().backward()
    monkeypatch.setattr(linecache, "getlines", lambda *_: [])
    with count_flops(model) as counts:
        model(torch.randn(BATCH, INPUTS)).sum().backward()
    assert (counts.forward, counts.recompute) == (FIRST + SECOND, 0)
    assert counts.backward == FIRST + 2 * SECOND + FIRST + SECOND
    (note,) = counts.notes
    assert note.startswith("What the compiled backward of the root repeats of its forward could not be read apart")
