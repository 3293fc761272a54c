"""What a checkpoint repeats without grad, and what else runs with grad enabled inside a backward.

A block of three linear layers: the middle one runs under ``torch.no_grad``, as an indexer, a router or a codebook's
look-up does. No gradient comes of it, but a checkpoint repeats it like the other two. The sigmoid at the end of the
block saves its result, so that no checkpoint stops before it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from lightning_flops.records import PhaseFlops

from .case import Example, Family, Parts, forward_and_backward
from .checkpointed import keeping_products

FAMILY = Family("repeated")

ROWS, WIDTH = 5, 8
LAYER = 2 * ROWS * WIDTH * WIDTH

REENTRANT, OTHER = (partial(checkpoint, use_reentrant=reentrant) for reentrant in (True, False))
Checkpoint = Callable[[Callable[[Tensor], Tensor], Tensor], Any]
"""Calls a function of a tensor, and keeps nothing for its backward but the tensor."""


class Block(nn.Module):
    """Two layers with gradients, and one between them that has none."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.index, self.last = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        with torch.no_grad():
            kept = self.index(x) > 0
        return torch.sigmoid(self.last(x * kept))


class WithBlock(nn.Module):
    """A block that is checkpointed; no module but the block itself is inside, or its layers alone."""

    def __init__(self, how: Checkpoint, *, as_module: bool = True) -> None:
        super().__init__()
        self.block = Block()
        self.how = how
        self.as_module = as_module

    def forward(self, x: Tensor) -> Tensor:
        return self.how(self.block if self.as_module else self.block.forward, x)


def repeated_block(
    how: Checkpoint, *, as_module: bool = True, step: Callable[[Example], None] = forward_and_backward
) -> Example:
    """Forward and backward as without a checkpoint; recompute is the forward."""
    model = WithBlock(how, as_module=as_module)
    return Example(model, torch.randn(ROWS, WIDTH, requires_grad=True), step=step).costs(
        3 * LAYER,
        2 * LAYER + 2 * LAYER,
        3 * LAYER,
        by_module={
            "block.first": (LAYER, 2 * LAYER, LAYER),
            "block.index": (LAYER, 0, LAYER),
            "block.last": (LAYER, 2 * LAYER, LAYER),
        },
    )


def network(how: Checkpoint) -> Checkpoint:
    """Decorates what checkpoints the block; the function's name becomes the network's."""
    FAMILY.put(how.__name__, lambda: repeated_block(how))
    return how


# The node that runs the block again is the checkpoint's own.
FAMILY.put("index_in_a_reentrant_checkpoint", lambda: repeated_block(REENTRANT))
# A saved tensor that is asked for runs the block again, inside some node of the block's.
FAMILY.put("index_in_a_checkpoint", lambda: repeated_block(OTHER))
# What is checkpointed is no module.
FAMILY.put("index_in_a_reentrant_checkpoint_of_a_function", lambda: repeated_block(REENTRANT, as_module=False))
FAMILY.put("index_in_a_checkpoint_of_a_function", lambda: repeated_block(OTHER, as_module=False))
# Nothing compares what was repeated with what was saved.
FAMILY.put(
    "index_in_a_checkpoint_without_determinism_check",
    lambda: repeated_block(partial(OTHER, determinism_check="none", preserve_rng_state=False)),
)
# The forward and its repetition each run in a context that the user gives; grad is off in neither.
FAMILY.put(
    "index_in_a_checkpoint_in_contexts_of_its_own",
    lambda: repeated_block(partial(OTHER, context_fn=lambda: (nullcontext(), nullcontext()))),
)


@network
def index_in_a_checkpoint_that_goes_on_to_the_end(function: Callable[[Tensor], Tensor], x: Tensor) -> Any:
    """As in every other kind: all three layers."""
    with set_checkpoint_early_stop(False):
        return OTHER(function, x)


@network
def index_in_a_checkpoint_whose_input_is_offloaded(function: Callable[[Tensor], Tensor], x: Tensor) -> Any:
    """What the checkpoint keeps is packed and unpacked by hooks on saved tensors."""
    with torch.autograd.graph.save_on_cpu():
        return REENTRANT(function, x)


@FAMILY.network
def index_in_a_checkpoint_under_offloading() -> Example:
    """Inside the checkpoint the tensors are offloaded, and hooks of two kinds are called."""

    def offloading(function: Callable[[Tensor], Tensor], x: Tensor) -> Any:
        def inside(x: Tensor) -> Tensor:
            with torch.autograd.graph.save_on_cpu():
                return function(x)

        return OTHER(inside, x)

    # The inner hooks keep every tensor: the checkpoint is never asked to repeat anything.
    return repeated_block(offloading).costs(3 * LAYER, 4 * LAYER)


@FAMILY.network
def index_in_a_selective_checkpoint() -> Example:
    """Products are kept: the repetition finds all three, the one without a gradient too, and runs none."""
    return repeated_block(partial(OTHER, context_fn=keeping_products)).costs(3 * LAYER, 4 * LAYER)


class OwnCheckpoint(torch.autograd.Function):
    """A checkpoint as Megatron has it: a function of its own, that torch knows nothing of."""

    @staticmethod
    def forward(ctx: Any, function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        ctx.function = function
        ctx.save_for_backward(x)
        with torch.no_grad():
            return function(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor | None]:
        (x,) = ctx.saved_tensors
        x = x.detach().requires_grad_()
        with torch.enable_grad():
            output = ctx.function(x)
        torch.autograd.backward(output, gradient)
        return None, x.grad


class OwnCheckpointByMode(OwnCheckpoint):
    """The same with the other manager that can enable grad, and the gradients taken inside of its block."""

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor | None]:
        (x,) = ctx.saved_tensors
        x = x.detach().requires_grad_()
        with torch.set_grad_enabled(True):
            torch.autograd.backward(ctx.function(x), gradient)
        return None, x.grad


# Nothing but the grad mode tells what is repeated.
FAMILY.put("index_in_a_checkpoint_of_the_users", lambda: repeated_block(OwnCheckpoint.apply))
# Nor is a module called.
FAMILY.put(
    "index_in_a_checkpoint_of_the_users_of_a_function", lambda: repeated_block(OwnCheckpoint.apply, as_module=False)
)
# Gradients taken inside the block in which grad is enabled are not repeated ones: they are taken here alone.
FAMILY.put("index_in_a_checkpoint_that_differentiates_on_the_spot", lambda: repeated_block(OwnCheckpointByMode.apply))


def nested_block(*, outer: bool, inner: bool) -> Example:
    """A checkpoint in a checkpoint around the same block: it runs once more for each."""
    network = repeated_block(
        lambda function, x: checkpoint(
            lambda x: torch.sigmoid(checkpoint(function, x, use_reentrant=inner)), x, use_reentrant=outer
        )
    )
    layer = PhaseFlops(forward=LAYER, backward=2 * LAYER, recompute=2 * LAYER)
    return network.costs(
        3 * LAYER,
        4 * LAYER,
        2 * 3 * LAYER,
        by_module={"block.first": layer, "block.index": (LAYER, 0, 2 * LAYER), "block.last": layer},
    )


# Each of the two nodes runs it.
FAMILY.put("index_in_reentrant_in_reentrant", lambda: nested_block(outer=True, inner=True))
# The outer repetition goes as far as the sigmoid behind the inner checkpoint.
FAMILY.put("index_in_reentrant_in_other", lambda: nested_block(outer=False, inner=True))
# The inner one runs in the outer one's own backward.
FAMILY.put("index_in_other_in_reentrant", lambda: nested_block(outer=True, inner=False))
# Both are asked for by saved tensors.
FAMILY.put("index_in_other_in_other", lambda: nested_block(outer=False, inner=False))


@FAMILY.network
def index_in_a_checkpoint_that_is_differentiated_twice() -> Example:
    """The backward makes a graph, so that grad is enabled in all of it; what the checkpoint repeats is known still.

    For y = sigmoid(W3 (m W1 x)) the gradient of x is two products: g1 = sigmoid' W3 and g2 = m g1 W1. Its backward runs
    both gradients of each, and, through sigmoid', both gradients of W3 (m W1 x) and of W1 x.
    """

    def step(example: Example) -> None:
        (x,) = example.args
        (gradient,) = torch.autograd.grad(example.forward().sum(), x, create_graph=True)
        gradient.square().sum().backward()

    network = repeated_block(OTHER, as_module=False, step=step)
    return network.costs(3 * LAYER, 2 * LAYER + 2 * (2 * LAYER) + 2 * (2 * LAYER), 2 * 3 * LAYER)


class Equilibrium(torch.autograd.Function):
    """A fixed point's backward, as implicit layers have it: the layer again, then gradients as often as it takes."""

    @staticmethod
    def forward(ctx: Any, layer: nn.Module, z: Tensor) -> Tensor:
        ctx.layer = layer
        z = layer(z)
        ctx.save_for_backward(z)
        return z

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor]:
        (z,) = ctx.saved_tensors
        with torch.enable_grad():
            z = z.detach().requires_grad_()
            again = torch.tanh(ctx.layer(z))
            solution = gradient
            for _ in range(3):
                (step,) = torch.autograd.grad(again, z, solution, retain_graph=True)
                solution = (step + gradient).detach()
        torch.autograd.backward(again, solution)
        return None, solution


@FAMILY.network
def implicit_layer() -> Example:
    """The gradients that the solver takes while grad is enabled are backward; the forward that they are of is not."""

    def forward(self: Any, x: Tensor) -> Tensor:
        return Equilibrium.apply(self.layer, x)  # type: ignore[no-untyped-call]

    model = Parts(forward, layer=nn.Linear(WIDTH, WIDTH))
    return Example(model, torch.randn(ROWS, WIDTH, requires_grad=True)).costs(
        LAYER, 3 * LAYER + 2 * LAYER, LAYER, by_module={"layer": (LAYER, 5 * LAYER, LAYER)}
    )


@contextmanager
def _with_grad() -> Iterator[None]:
    with torch.enable_grad():
        yield


@FAMILY.network
def block_with_grad_in_a_no_grad_forward() -> Example:
    """Grad that is enabled in a forward, by a generator's block too, repeats nothing."""

    def forward(self: Any, x: Tensor) -> Tensor:
        with torch.no_grad():
            x = self.first(x)
            with _with_grad():
                result: Tensor = self.last(x)
        return result

    model = Parts(forward, first=nn.Linear(WIDTH, WIDTH), last=nn.Linear(WIDTH, WIDTH))
    return Example(model, torch.randn(ROWS, WIDTH)).costs(2 * LAYER, LAYER)
