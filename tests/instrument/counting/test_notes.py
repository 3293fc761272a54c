"""What the counter could not do stands in the record, in sentences."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, distributed, nn
from torch._C._distributed_c10d import HashStore
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook, fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from lightning_flops.analysis.flop_counts import FlopCounts
from lightning_flops.instrument.counting.flop_counter import FlopCounter
from lightning_flops.records import OUTSIDE, PhaseFlops


@pytest.fixture
def one_rank() -> Iterator[None]:
    """A process group of this process alone."""
    distributed.init_process_group("gloo", rank=0, world_size=1, store=HashStore())
    yield
    distributed.destroy_process_group()


def low_rank_hook(state: Any, bucket: Any) -> Any:
    """Sends gradients as they are, after a product: of the bucket, as a column, with one number."""
    bucket.buffer().unsqueeze(1) @ torch.ones(1, 1)
    return allreduce_hook(distributed.group.WORLD, bucket)  # type: ignore[arg-type]  # there is one by now


low_rank_hook.__annotations__.clear()  # torch compares them with its classes, and these are strings


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("wrapper_is_root", [True, False])
@pytest.mark.parametrize(("hook", "named"), [(low_rank_hook, True), (fp16_compress_hook, False)])
def test_a_communication_hook_that_computes_is_named(
    hook: Callable[..., Any], named: bool, wrapper_is_root: bool
) -> None:
    model = nn.Linear(3, 5)
    wrapped = DistributedDataParallel(model)
    wrapped.register_comm_hook(None, hook)
    with FlopCounter(wrapped if wrapper_is_root else model) as counter:
        wrapped(torch.randn(2, 3)).sum().backward()
    counts = FlopCounts(counter.record())
    product = 2 * 2 * 3 * 5
    assert counts.by_module()[""] == PhaseFlops(forward=product, backward=product)
    assert [note for note in counts.notes if "low_rank_hook" in note] == list(counts.notes)
    assert len(counts.notes) == int(named)
    assert counts.by_module().get(OUTSIDE, PhaseFlops()) == PhaseFlops(optimizer=2 * (3 * 5 + 5) if named else 0)


def test_a_graph_that_was_traced_from_the_model_runs_outside_of_it() -> None:
    model = nn.Linear(3, 5)
    x = torch.randn(2, 3)
    run: Callable[[Tensor], Tensor] = torch.fx.symbolic_trace(model)
    with FlopCounter(model) as counter:
        model(x)
        run(x)
    counts = FlopCounts(counter.record())
    product = 2 * 2 * 3 * 5
    assert counts.own_by_module() == {"": PhaseFlops(forward=product), OUTSIDE: PhaseFlops(forward=product)}
    (note,) = counts.notes
    assert note.startswith("Traced or compiled code ran outside of the model's modules")


def test_a_loss_outside_the_model_is_nothing_to_note() -> None:
    model, head = nn.Linear(3, 5), nn.Linear(5, 2)
    with FlopCounter(model) as counter:
        head(model(torch.randn(2, 3)))
    counts = FlopCounts(counter.record())
    assert counts.by_module()[OUTSIDE] == PhaseFlops(forward=2 * 2 * 5 * 2)
    assert not counts.notes


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


def test_work_beside_a_model_that_was_not_called_is_not_said_to_be_traced() -> None:
    with FlopCounter(nn.Linear(3, 5)) as counter:
        _ = torch.randn(2, 3) @ torch.randn(3, 4)
    counts = FlopCounts(counter.record())
    assert counts.by_module()[OUTSIDE] == PhaseFlops(forward=2 * 2 * 3 * 4)
    (note,) = counts.notes
    assert note.startswith("No module of the model was called while code outside of it was counted.")


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


def test_a_checkpointed_forward_that_was_not_counted_is_noted_too() -> None:
    """What its backward repeats has no module either."""
    weight = torch.randn(3, 3)
    x = torch.randn(2, 3, requires_grad=True)
    made = checkpoint(lambda x: torch.sigmoid(x @ weight), x, use_reentrant=False)
    with FlopCounter(nn.Linear(3, 5)) as counter:
        made.sum().backward()
    counts = FlopCounts(counter.record())
    product = 2 * 2 * 3 * 3
    assert counts.total == PhaseFlops(backward=product, recompute=product)
    (note,) = counts.notes
    assert "while nothing was counted" in note
