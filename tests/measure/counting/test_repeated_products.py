"""What a custom function's backward repeats of its forward, forwards that no backward used, and bytes of lists."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from lightning_flops.measure.counting.flop_counter import FlopCounter
from lightning_flops.measure.torch_private.needed import sequence_number

ROWS, WIDTH, WORDS, CHUNK = 12, 5, 7, 4


class ChunkedLoss(torch.autograd.Function):
    """As TRL's and Liger's losses: logits of a chunk of rows at a time, made again in the backward."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(hidden, weight)
        total = hidden.new_zeros(())
        for at in range(0, ROWS, CHUNK):
            total += (hidden[at : at + CHUNK] @ weight.t()).logsumexp(-1).sum()
        return total

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        hidden, weight = ctx.saved_tensors
        of_hidden, of_weight = torch.empty_like(hidden), torch.zeros_like(weight)
        for at in range(0, ROWS, CHUNK):
            rows = hidden[at : at + CHUNK]
            chances = (rows @ weight.t()).softmax(-1) * gradient  # the forward's product once more
            of_hidden[at : at + CHUNK] = chances @ weight
            of_weight += chances.t() @ rows
        return of_hidden, of_weight


def test_a_product_that_a_custom_backward_repeats_with_the_forwards_operands_is_recompute() -> None:
    hidden, weight = torch.randn(ROWS, WIDTH, requires_grad=True), torch.randn(WORDS, WIDTH, requires_grad=True)
    counter = FlopCounter(None)
    with counter:
        ChunkedLoss.apply(hidden, weight).backward()  # type: ignore[no-untyped-call]
    one = 2 * ROWS * WIDTH * WORDS
    total = counter.total()
    assert (total.forward, total.recompute, total.backward) == (one, one, 2 * one)


class Square(torch.autograd.Function):
    """x @ x, whose backward has products of the same sizes as the forward, and none of its operands."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(rows)
        return rows @ rows

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        (rows,) = ctx.saved_tensors
        return gradient @ rows.t() + rows.t() @ gradient


def test_a_product_of_other_operands_is_the_backwards_whatever_its_size() -> None:
    counter = FlopCounter(None)
    with counter:
        Square.apply(torch.randn(6, 6, requires_grad=True)).sum().backward()  # type: ignore[no-untyped-call]
    one = 2 * 6**3
    assert (counter.total().recompute, counter.total().backward) == (0, 2 * one)


def test_a_forward_with_gradients_that_no_backward_used_is_known() -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    rows = torch.randn(3, 4)
    counter = FlopCounter(net)
    with counter:
        loss = net(rows).sum()
        net(rows).argmax(-1)  # for a metric
        with torch.no_grad():
            net(rows)
        loss.backward()
    assert counter.record().unused_calls == {"": 1, "0": 1, "1": 1, "2": 1}


def test_a_reentrant_checkpoint_in_a_forward_without_gradients_is_no_unused_forward() -> None:
    class Stack(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.part, self.head = nn.Linear(4, 4), nn.Linear(4, 2)

        def forward(self, rows: torch.Tensor) -> Any:
            return self.head(checkpoint(self.part, rows, use_reentrant=True))

    model, rows = Stack(), torch.randn(3, 4, requires_grad=True)
    counter = FlopCounter(model)
    with counter:
        model(rows).sum().backward()
        with torch.no_grad():
            model(rows)  # for a metric
    assert counter.record().unused_calls == {}


def test_a_backward_on_another_thread_makes_no_forward_of_a_metric_whose_node_has_a_number_of_its_nodes() -> None:
    model, rows = nn.Linear(4, 4), torch.randn(3, 4)
    counter = FlopCounter(model)
    counter.decide(is_forward=True)
    start = sequence_number()

    def train() -> None:
        while sequence_number() < start:
            model.weight.view(-1)
        (model(rows) * 2).sum().backward()

    with counter:
        thread = threading.Thread(target=train)
        thread.start()
        thread.join()
        for _ in range(4):
            model.weight @ rows.t()  # for a metric, with gradients
        counter.decide(is_forward=False)
    counter.settle()
    assert counter.total().outside == 4 * 2 * 4 * 4 * 3


@pytest.mark.parametrize("how", ["fused", "foreach"])
def test_bytes_of_optimizers_that_take_lists_are_at_least_those_of_the_parameters_and_states(how: str) -> None:
    net = nn.Sequential(*(nn.Linear(50, 50) for _ in range(3)))
    optimizer = torch.optim.AdamW(net.parameters(), fused=how == "fused", foreach=how == "foreach")
    of_parameters = 3 * (50 * 50 + 50) * 4

    def step() -> None:
        net(torch.randn(2, 50)).sum().backward()
        optimizer.step()

    step()
    counter = FlopCounter(net)
    with counter:
        step()
    cells = [one for one in counter.record().cells if one.phase == "optimizer" and one.operator != "aten._foreach_add_"]
    read, written = (sum(getattr(one, f"bytes_{how_}") for one in cells) for how_ in ("read", "written"))
    # Parameters, gradients and two states are read; parameters and two states are written.
    if how == "fused":
        steps = 6 * 4  # the number of updates so far, a float of each parameter
        assert (read, written) == (4 * of_parameters + steps, 3 * of_parameters)
    else:
        assert read >= 4 * of_parameters and written >= 3 * of_parameters


def test_what_is_known_of_autograd_nodes_does_not_grow_with_the_steps_and_unused_forwards_stay_known() -> None:
    model, kept = nn.Sequential(*(nn.Linear(4, 4) for _ in range(20))), []
    counter = FlopCounter(model)
    for step in range(40):
        with counter:
            if step < 3:
                model(torch.randn(2, 4))  # no backward follows
            model(torch.randn(2, 4)).sum().backward()
        nodes = counter._threads.state.shared.tables
        kept.append(sum(len(known) for one in nodes for known in (one._starts, one.graphs, one.ran)))
    assert kept[-1] == kept[20] <= kept[10]
    assert counter.record().unused_calls[""] == 3
