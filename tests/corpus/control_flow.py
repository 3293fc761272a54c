"""Control flow as operators: branches, loops and scans that run eagerly, and attention with functions on its scores.

Their backwards are functions of the forward's inputs: a branch, and each step of a loop or a map, is run again for its
gradients, to the end, and what runs again is recompute. A scan keeps what its backward needs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch._higher_order_ops import scan, while_loop
from torch._higher_order_ops.map import map as map_over
from torch.nn.attention.flex_attention import flex_attention

from .case import Example, Family, Parts, forward_only

FAMILY = Family("control_flow")

ROWS, WIDTH, HIDDEN, STEPS = 3, 5, 7, 4


def branching(*, taken: bool) -> Example:
    """Two layers if the first number is positive, else one."""
    first, second = 2 * ROWS * WIDTH * HIDDEN, 2 * ROWS * HIDDEN * WIDTH
    short = 2 * ROWS * WIDTH * WIDTH

    def either_way(self: Any, x: Tensor) -> Tensor:
        return torch.cond(x.sum() > 0, lambda x: self.narrow(torch.tanh(self.widen(x))), lambda x: self.short(x), (x,))

    layers = {"widen": nn.Linear(WIDTH, HIDDEN), "narrow": nn.Linear(HIDDEN, WIDTH), "short": nn.Linear(WIDTH, WIDTH)}
    model = Parts(either_way, **layers)
    forward = first + second if taken else short
    return Example(model, torch.full((ROWS, WIDTH), 1.0 if taken else -1.0, requires_grad=True)).costs(
        forward, 2 * forward, forward, without_backward=0
    )


# Both layers, and both again for their gradients.
FAMILY.put("branch_that_is_taken", lambda: branching(taken=True))
# One layer: the other branch does not run.
FAMILY.put("branch_that_is_not_taken", lambda: branching(taken=False))


def looping(loop: Callable[[Tensor, Tensor], Tensor]) -> nn.Module:
    """One weight that a function of the module's uses."""
    return Parts(lambda self, x: loop(x, self.weight), weight=nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH))


STEP = 2 * ROWS * WIDTH * WIDTH


@FAMILY.network
def loop_while_there_is_something_to_do() -> Example:
    """As many products as the loop takes steps; the backward takes them again."""

    def loop(x: Tensor, weight: Tensor) -> Tensor:
        def body(step: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
            return step + 1, torch.tanh(x @ weight)

        start = torch.tensor(0)
        return while_loop(lambda step, x: step < STEPS, body, (start, x))[1]  # type: ignore[no-untyped-call]

    return Example(looping(loop), torch.randn(ROWS, WIDTH, requires_grad=True)).costs(
        STEPS * STEP, STEPS * 2 * STEP, STEPS * STEP, without_backward=0
    )


@FAMILY.network
def scan_over_a_sequence() -> Example:
    """A recurrent cell: each step's input is added to the product of what went before."""

    def loop(x: Tensor, weight: Tensor) -> Tensor:
        def step(carried: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
            carried = torch.tanh(carried @ weight + x)
            return carried, carried * 1

        carried, _ = scan(step, torch.zeros(ROWS, WIDTH, requires_grad=True), x)
        return carried

    return Example(looping(loop), torch.randn(STEPS, ROWS, WIDTH, requires_grad=True)).costs(
        STEPS * STEP, STEPS * 2 * STEP, without_backward=0
    )


@FAMILY.network
def map_over_a_batch() -> Example:
    """One product for each sample, and again for its gradients."""

    def loop(x: Tensor, weight: Tensor) -> Tensor:
        mapped: Any = map_over
        return mapped(lambda x, weight: torch.tanh(x @ weight), x, weight)

    return Example(looping(loop), torch.randn(STEPS, ROWS, WIDTH, requires_grad=True)).costs(
        STEPS * STEP, STEPS * 2 * STEP, STEPS * STEP, without_backward=0
    )


@FAMILY.network
def layers_around_a_branch() -> Example:
    """The branch is its module's; the layers around it keep their own."""
    enter, inside, leave = 2 * ROWS * HIDDEN * WIDTH, STEP, 2 * ROWS * WIDTH * HIDDEN

    def forward(self: Any, x: Tensor) -> Tensor:
        return torch.cond(x.sum() == x.sum(), lambda x: torch.tanh(x @ self.weight), lambda x: torch.tanh(x), (x,))

    model = nn.Sequential(
        nn.Linear(HIDDEN, WIDTH),
        Parts(forward, weight=nn.Parameter(torch.randn(WIDTH, WIDTH))),
        nn.Linear(WIDTH, HIDDEN),
    )
    return Example(model, torch.randn(ROWS, HIDDEN)).costs(
        enter + inside + leave,
        enter + 2 * inside + 2 * leave,
        inside,
        by_module={"0": (enter, enter), "1": (inside, 2 * inside, inside), "2": (leave, 2 * leave)},
    )


@FAMILY.network
def attention_with_a_product_in_its_scores() -> Example:
    """Each score has the inner product of two positions' codes added: one product of all codes with all codes."""
    batch, heads, sequence, size, code = 2, 3, 16, 8, 4
    attention = 2 * 2 * batch * heads * sequence * sequence * size
    positions = 2 * sequence * code * sequence

    def forward(self: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        codes: Any = self.codes

        def with_positions(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return score + codes[i] @ codes[j]

        result = flex_attention(query, key, value, score_mod=with_positions)
        assert isinstance(result, Tensor)
        return result

    # Torch differentiates it on other devices only.
    model = Parts(forward, codes=nn.Buffer(torch.randn(sequence, code)))
    return Example(model, *(torch.randn(batch, heads, sequence, size) for _ in range(3)), step=forward_only).costs(
        attention + positions
    )
