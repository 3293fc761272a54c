"""Steps of training: accumulation, lower precision, and optimizers whose updates are products themselves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from .case import BATCH, FIRST, HIDDEN, INPUTS, OUTPUTS, SECOND, Example, Family, forward_and_backward, total

FAMILY = Family("optimizers")


@FAMILY.of_two_layers(
    4 * (FIRST + SECOND),
    4 * (FIRST + 2 * SECOND),
    by_module={"0": (4 * FIRST, 4 * FIRST)},
    between=nn.ReLU,
    one_call=False,
)
def gradient_accumulation(example: Example) -> None:
    """Four micro-batches, one update that is elementwise."""
    optimizer = torch.optim.AdamW(example.model.parameters(), lr=1e-3)
    for _ in range(4):
        forward_and_backward(example)
    optimizer.step()


@FAMILY.of_two_layers(FIRST + SECOND, FIRST + 2 * SECOND, between=nn.ReLU)
def autocast(example: Example) -> None:
    """Lower precision changes no count."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = total(example.forward())
    loss.backward()  # type: ignore[no-untyped-call]


def newton_schulz(rows: int, columns: int, steps: int) -> int:
    """Orthogonalizing a matrix: X X^T, its square, and that times X, in every step, over the shorter side."""
    short, long = sorted((rows, columns))
    return steps * (2 * short * long * short + 2 * short * short * short + 2 * short * short * long)


@FAMILY.network
def muon_optimizer() -> Example:
    """Torch's Muon: five Newton-Schulz steps for each weight matrix; biases do not exist here."""
    batch, inputs, hidden, outputs = 3, 5, 11, 7

    def step(example: Example) -> None:
        optimizer = torch.optim.Muon(example.model.parameters(), lr=1e-3, ns_steps=5)
        forward_and_backward(example)
        optimizer.step()  # type: ignore[no-untyped-call]

    first, second = 2 * batch * inputs * hidden, 2 * batch * hidden * outputs
    update = newton_schulz(hidden, inputs, 5) + newton_schulz(outputs, hidden, 5)
    model = nn.Sequential(nn.Linear(inputs, hidden, bias=False), nn.ReLU(), nn.Linear(hidden, outputs, bias=False))
    return Example(model, torch.randn(batch, inputs), step=step).costs(
        first + second, first + 2 * second, optimizer=update, by_module={"": (first + second, first + 2 * second)}
    )


class Whitening(torch.optim.Optimizer):
    """A user's own optimizer: the gradient times its own second moment."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One update; the closure, if there is one, computes the gradients first."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.sub_(parameter.grad @ (parameter.grad.T @ parameter.grad), alpha=1e-3)
        return loss


@FAMILY.network
def own_optimizer_with_a_closure() -> Example:
    """The closure's forward and backward stay what they are, though they run inside the optimizer's step."""
    batch, inputs, outputs = 3, 5, 7

    def step(example: Example) -> None:
        optimizer = Whitening(example.model.parameters())

        def closure() -> float:
            optimizer.zero_grad()
            loss = example.forward().square().sum()
            loss.backward()
            return float(loss.detach())

        optimizer.step(closure)

    product = 2 * batch * inputs * outputs
    second_moment = 2 * inputs * outputs * inputs
    update = 2 * outputs * inputs * inputs
    model = nn.Linear(inputs, outputs, bias=False)
    return Example(model, torch.randn(batch, inputs), step=step).costs(
        product, product, optimizer=second_moment + update, by_module={"": (product, product)}
    )


@FAMILY.network
def update_under_a_gradient_hook() -> Example:
    """An update that runs as soon as a gradient is complete, in the middle of the backward, is optimizer work."""

    updates = 2 * (2 * INPUTS * HIDDEN * INPUTS) + 2 * (2 * HIDDEN * OUTPUTS * HIDDEN)
    model = nn.Sequential(nn.Linear(INPUTS, HIDDEN, bias=False), nn.ReLU(), nn.Linear(HIDDEN, OUTPUTS, bias=False))

    @torch.no_grad()
    def update(parameter: Tensor) -> None:
        assert parameter.grad is not None
        parameter.sub_(parameter.grad @ (parameter.grad.T @ parameter.grad), alpha=1e-3)
        parameter.grad = None

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(update)  # type: ignore[no-untyped-call]
    return Example(model, torch.randn(BATCH, INPUTS)).costs(FIRST + SECOND, FIRST + 2 * SECOND, optimizer=updates)
