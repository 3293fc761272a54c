"""What the counter could not do stands in the record, in sentences."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_flops.analysis.flop_counts import FlopCounts
from lightning_flops.measure.counting.flop_counter import FlopCounter
from lightning_flops.records import PhaseFlops


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


def cast(x: Tensor) -> Tensor:
    return x.double()


def packed(x: Tensor) -> Tensor:
    return nn.utils.rnn.pack_padded_sequence(x, torch.tensor([3, 3]), batch_first=True).data


def multiplied(x: Tensor) -> Tensor:
    return (x @ torch.ones(3, 3)).double()


@pytest.mark.parametrize(("made", "products"), [(cast, 0), (packed, 0), (multiplied, 1)])
def test_a_forward_that_was_not_counted_is_noted_if_its_backward_costs_anything(
    made: Callable[[Tensor], Tensor], products: int
) -> None:
    """A batch that was cast or packed before the counting began has nothing in its backward that counts."""
    x = torch.randn(2, 3, 3, requires_grad=True)
    given = made(x)
    model = nn.Linear(3, 5, dtype=given.dtype)
    with FlopCounter(model) as counter:
        model(given).sum().backward()
    counts = FlopCounts(counter.record())
    layer = 2 * (2 * 3) * 3 * 5
    assert counts.total == PhaseFlops(forward=layer, backward=2 * layer + products * 2 * (2 * 3) * 3 * 3)
    assert len(counts.notes) == products
    assert all("while nothing was counted" in note for note in counts.notes)


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (lambda x: torch.linalg.svdvals(x), "linalg.svdvals"),
        (lambda x: torch.linalg.eigvalsh(x), "linalg.eigvalsh"),
        (lambda x: x.prod(0), "prod"),
        (lambda x: torch.linalg.lstsq(x, x), "linalg.lstsq"),
    ],
)
def test_operators_whose_last_bits_may_differ_are_named(call: Callable[[Tensor], Any], named: str) -> None:
    with FlopCounter(None) as counter:
        call(torch.eye(3))
    (note,) = [note for note in counter.record().notes if "last bits" in note]
    assert note.startswith(f"Torch computes {named}")
