"""Activation checkpointing: what the backward repeats of the forward.

Reentrant checkpointing repeats the whole block. The other kind stops as soon as every tensor that the backward needs
has been saved again. A product saves its factors before it is computed, so a block that ends in a product does not
repeat it; a block that ends in an activation, which saves its result, repeats everything.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    checkpoint_sequential,
    create_selective_checkpoint_contexts,
    set_checkpoint_early_stop,
)

from lightning_flops import register_flop_formula
from lightning_flops.records import PhaseFlops

from .autograd_forms import Own, OwnProduct
from .case import BATCH, FIRST, HIDDEN, INPUTS, OUTPUTS, SECOND, TWO_LAYERS, Example, Family, Parts

FAMILY = Family("checkpointed")


class Checkpointed(nn.Module):
    """A stem, then blocks that are checkpointed, then a head."""

    def __init__(self, stem: nn.Module, blocks: list[nn.Module], head: nn.Module, *, reentrant: bool) -> None:
        super().__init__()
        self.stem = stem
        self.blocks = nn.ModuleList(blocks)
        self.head = head
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return self.head(x)


def block_of(inputs: int, hidden: int, outputs: int, *last: nn.Module) -> nn.Module:
    """Two linear layers, a tanh between them."""
    return nn.Sequential(nn.Linear(inputs, hidden), nn.Tanh(), nn.Linear(hidden, outputs), *last)


def checkpointed_blocks(*, reentrant: bool, last: tuple[Callable[[], nn.Module], ...] = ()) -> Example:
    """Two blocks between a stem and a head; *last* makes the modules at the end of each block."""
    batch, inputs, width, hidden, classes = 3, 5, 7, 11, 2
    stem = 2 * batch * inputs * width
    first = 2 * batch * width * hidden
    second = 2 * batch * hidden * width
    head = 2 * batch * width * classes
    repeated = first + second if reentrant or last else first
    block = PhaseFlops(forward=first + second, backward=2 * (first + second), recompute=repeated)
    blocks = [block_of(width, hidden, width, *(make() for make in last)) for _ in range(2)]
    model = Checkpointed(nn.Linear(inputs, width), blocks, nn.Linear(width, classes), reentrant=reentrant)
    return Example(model, torch.randn(batch, inputs)).costs(
        stem + 2 * (first + second) + head,
        stem + 2 * 2 * (first + second) + 2 * head,
        2 * repeated,
        by_module={
            "stem": (stem, stem),
            "blocks.0": block,
            "blocks.1": block,
            "blocks.1.0": (first, 2 * first, first),
            "blocks.1.2": (second, 2 * second, repeated - first),
            "head": (head, 2 * head),
        },
    )


# The first forward runs without gradients and counts like any other; the backward repeats both products.
FAMILY.put("reentrant_blocks", lambda: checkpointed_blocks(reentrant=True))
# Not reentrant: the last product of each block is not repeated.
FAMILY.put("blocks_that_end_in_a_product", lambda: checkpointed_blocks(reentrant=False))
# Not reentrant: the sigmoid at the end saves its result, so both products are repeated.
FAMILY.put("blocks_that_end_in_an_activation", lambda: checkpointed_blocks(reentrant=False, last=(nn.Sigmoid,)))


@FAMILY.network
def checkpointed_sequence() -> Example:
    """Six modules in two segments: (linear, tanh, linear) is checkpointed, (tanh, linear, tanh) never is."""
    batch, inputs, hidden, middle, outputs = 3, 5, 7, 11, 13
    first = 2 * batch * inputs * hidden
    second = 2 * batch * hidden * middle
    third = 2 * batch * middle * outputs

    def forward(self: Any, x: Tensor) -> Tensor:
        return checkpoint_sequential(  # type: ignore[no-untyped-call]
            self.layers, 2, x, use_reentrant=False
        )

    model = Parts(
        forward,
        layers=nn.Sequential(
            nn.Linear(inputs, hidden),
            nn.Tanh(),
            nn.Linear(hidden, middle),
            nn.Tanh(),
            nn.Linear(middle, outputs),
            nn.Tanh(),
        ),
    )
    return Example(model, torch.randn(batch, inputs)).costs(
        first + second + third,
        first + 2 * second + 2 * third,
        first,
        by_module={"layers.0": (first, first, first), "layers.2": (second, 2 * second), "layers.4": (third, 2 * third)},
    )


@FAMILY.network
def checkpointed_function() -> Example:
    """No module is inside: a plain function of the module's parameters is repeated, but for its last product."""

    def forward(self: Any, x: Tensor) -> Tensor:
        return checkpoint(lambda x: torch.tanh(x @ self.first) @ self.second, x, use_reentrant=False)

    first, second = (nn.Parameter(torch.randn(shape)) for shape in ((INPUTS, HIDDEN), (HIDDEN, OUTPUTS)))
    return Example(Parts(forward, first=first, second=second), torch.randn(BATCH, INPUTS)).costs(
        *TWO_LAYERS, FIRST, by_module={"": (*TWO_LAYERS, FIRST)}
    )


class NestedCheckpoints(nn.Module):
    """stem, then checkpoint(a, tanh, checkpoint(b, tanh, c), tanh, d)."""

    def __init__(self, sizes: tuple[int, int, int, int, int, int], *, outer: bool, inner: bool) -> None:
        super().__init__()
        widths = list(itertools.pairwise(sizes))
        self.stem, self.a, self.b, self.c, self.d = (nn.Linear(inputs, outputs) for inputs, outputs in widths)
        self.outer = outer
        self.inner = inner

    def inside(self, x: Tensor) -> Tensor:
        """The inner checkpoint's content."""
        return self.c(torch.tanh(self.b(x)))

    def around(self, x: Tensor) -> Tensor:
        """The outer checkpoint's content."""
        x = checkpoint(self.inside, torch.tanh(self.a(x)), use_reentrant=self.inner)
        return self.d(torch.tanh(x))

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.around, self.stem(x), use_reentrant=self.outer)


def nested(*, outer: bool, inner: bool) -> Example:
    """The outer checkpoint repeats a, b, c and d once (d only if reentrant), the inner b and c again (c as well)."""
    batch = 2
    sizes = (3, 4, 5, 6, 7, 8)
    stem, a, b, c, d = (2 * batch * inputs * outputs for inputs, outputs in itertools.pairwise(sizes))
    again = {"a": a, "b": b + b, "c": c + (c if inner else 0), "d": d if outer else 0}
    products = {"a": a, "b": b, "c": c, "d": d}
    model = NestedCheckpoints(sizes, outer=outer, inner=inner)
    return Example(model, torch.randn(batch, sizes[0])).costs(
        stem + a + b + c + d,
        stem + 2 * (a + b + c + d),
        sum(again.values()),
        by_module={
            "stem": (stem, stem),
            **{name: (product, 2 * product, again[name]) for name, product in products.items()},
        },
    )


# Everything in the inner checkpoint runs three times.
FAMILY.put("reentrant_in_reentrant", lambda: nested(outer=True, inner=True))
# The outer stops before d; the inner, reached with its inputs alone, repeats b and c whole.
FAMILY.put("reentrant_in_other", lambda: nested(outer=False, inner=True))
# The outer repeats all of it; the inner stops before c.
FAMILY.put("other_in_reentrant", lambda: nested(outer=True, inner=False))
# Both stop early.
FAMILY.put("other_in_other", lambda: nested(outer=False, inner=False))


def keeping_products() -> Any:
    """The contexts of a selective checkpoint that repeats no product of two matrices."""
    kept = [torch.ops.aten.mm.default, torch.ops.aten.addmm.default]

    def policy(context: object, operator: object, *args: object, **kwargs: object) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if operator in kept else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)  # type: ignore[no-untyped-call]


@FAMILY.network
def selective_checkpoint() -> Example:
    """The linear layers' products are kept and only the attention's two are repeated, as far as they are needed."""
    batch, sequence, hidden = 2, 7, 5
    projection = 2 * batch * sequence * hidden * hidden
    scores = 2 * batch * sequence * sequence * hidden

    def forward(self: Any, x: Tensor) -> Tensor:
        weights = torch.softmax(torch.bmm(self.query(x), x.transpose(1, 2)), dim=-1)
        return torch.tanh(self.out(torch.bmm(weights, x)))

    def selective_forward(self: Any, x: Tensor) -> Tensor:
        return checkpoint(self.block, self.stem(x), use_reentrant=False, context_fn=keeping_products)

    model = Parts(
        selective_forward,
        stem=nn.Linear(hidden, hidden),
        block=Parts(forward, query=nn.Linear(hidden, hidden), out=nn.Linear(hidden, hidden)),
    )
    return Example(model, torch.randn(batch, sequence, hidden)).costs(
        3 * projection + 2 * scores,
        projection + 4 * projection + 4 * scores,
        2 * scores,
        by_module={
            "block": (2 * projection + 2 * scores, 4 * projection + 4 * scores, 2 * scores),
            "block.out": (projection, 2 * projection),
        },
    )


@FAMILY.network
def gradient_penalty_through_a_checkpoint() -> Example:
    """A gradient of the input is taken through checkpoint(linear, tanh), kept as a graph, and differentiated again.

    Both backwards need the block's activations and repeat its product. The products themselves are those of the
    gradient penalty without a checkpoint: for y = W2 tanh(W1 x) five of W1's size and two of W2's.
    """

    def forward(self: Any, x: Tensor) -> Tensor:
        return self.head(checkpoint(self.block, x, use_reentrant=False))

    def step(example: Example) -> None:
        (x,) = example.args
        (gradient,) = torch.autograd.grad(example.forward().sum(), x, create_graph=True)
        gradient.square().sum().backward()

    model = Parts(forward, block=nn.Sequential(nn.Linear(INPUTS, HIDDEN), nn.Tanh()), head=nn.Linear(HIDDEN, OUTPUTS))
    return Example(model, torch.randn(BATCH, INPUTS, requires_grad=True), step=step).costs(
        FIRST + SECOND,
        5 * FIRST + 2 * SECOND,
        2 * FIRST,
        by_module={"block": (FIRST, 5 * FIRST, 2 * FIRST), "head": (SECOND, 2 * SECOND)},
    )


@FAMILY.network
def checkpoint_that_does_not_stop_early() -> Example:
    """Where it may not stop early, it repeats the last product too."""

    def forward(self: Any, x: Tensor) -> Tensor:
        with set_checkpoint_early_stop(False):
            result: Tensor = checkpoint(self.block, x, use_reentrant=False)
        return result

    model = Parts(forward, block=block_of(INPUTS, HIDDEN, OUTPUTS))
    return Example(model, torch.randn(BATCH, INPUTS)).costs(
        *TWO_LAYERS, FIRST + SECOND, by_module={"block.2": (SECOND, 2 * SECOND, SECOND)}
    )


@FAMILY.network
def checkpoint_with_a_frozen_body() -> Example:
    """Nothing in the block needs a gradient and neither does its input: the backward never reaches it."""
    classes = 2
    head = 2 * BATCH * INPUTS * classes
    block = block_of(INPUTS, HIDDEN, INPUTS).requires_grad_(False)
    model = Checkpointed(nn.Identity(), [block], nn.Linear(INPUTS, classes), reentrant=False)
    return Example(model, torch.randn(BATCH, INPUTS)).costs(
        2 * FIRST + head, head, by_module={"blocks.0": (2 * FIRST,), "head": (head, head)}
    )


def custom_function_in_a_block(*, reentrant: bool) -> Example:
    """A block whose first product is a custom function's; the sigmoid at its end has both repeated."""
    batch, inputs, width, hidden, classes = 3, 5, 7, 11, 2
    stem, head = 2 * batch * inputs * width, 2 * batch * width * classes
    first, second = 2 * batch * width * hidden, 2 * batch * hidden * width
    block = nn.Sequential(Own(OwnProduct, width, hidden), nn.Linear(hidden, width), nn.Sigmoid())
    model = Checkpointed(nn.Linear(inputs, width), [block], nn.Linear(width, classes), reentrant=reentrant)
    return Example(model, torch.randn(batch, inputs)).costs(
        stem + first + second + head,
        stem + 2 * (first + second + head),
        first + second,
        by_module={"blocks.0.0": (first, 2 * first, first), "blocks.0.1": (second, 2 * second, second)},
    )


# The custom function's product is repeated by a module that the backward calls.
FAMILY.put("custom_function_in_a_reentrant_block", lambda: custom_function_in_a_block(reentrant=True))
# The same where a saved tensor asks for the repetition.
FAMILY.put("custom_function_in_a_block_that_is_not_reentrant", lambda: custom_function_in_a_block(reentrant=False))


class CountedProduct(OwnProduct):
    """A product whose own formulas say what its forward and its backward cost."""


register_flop_formula(
    CountedProduct,
    lambda args, kwargs, out: 2 * out.numel() * args[0].shape[1],
    backward=lambda args, kwargs, out: 2 * 2 * args[0].numel() * out[0].shape[1],
)


@FAMILY.network
def block_that_ends_in_a_function_with_formulas() -> Example:
    """The function saves its factors once it has run, so the repetition, inside its backward, runs all of the block."""

    def forward(self: Any, x: Tensor) -> Tensor:
        def block(x: Tensor) -> Tensor:
            return CountedProduct.apply(torch.tanh(self.first(x)), self.weight)  # type: ignore[no-untyped-call]

        return checkpoint(block, x, use_reentrant=False)

    model = Parts(forward, first=nn.Linear(INPUTS, HIDDEN), weight=nn.Parameter(torch.randn(HIDDEN, OUTPUTS)))
    return Example(model, torch.randn(BATCH, INPUTS)).costs(
        *TWO_LAYERS, FIRST + SECOND, by_module={"first": (FIRST, FIRST, FIRST)}
    )
