"""Compiled networks: counted on their compiled path, where an ordinary network's products are the eager ones.

Each is compiled and run once before it is counted, as a training run would have done. A compiled region is one module:
no inner module is entered while it runs.

A kernel takes seconds to compile. So a network whose point is no kernel is traced, and run operator by operator; those
that are compiled to kernels as well are ``SLOW``, but two.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_flops.records import PhaseFlops

from .case import (
    BATCH,
    FIRST,
    HIDDEN,
    INPUTS,
    OUTPUTS,
    SECOND,
    TWO_LAYERS,
    Example,
    Family,
    Parts,
    forward_and_backward,
    forward_without_grad,
    two_layers,
)

FAMILY = Family("compiled")


def warmed_up(example: Example) -> Example:
    """The example, compiled: run once, its gradients dropped; afterwards the compiler forgets it."""
    example.teardown = torch._dynamo.reset
    example.run()
    example.model.zero_grad(set_to_none=True)
    return example


def compiled(model: nn.Module, *args: Tensor, **options: Any) -> Example:
    """*model*, compiled as a whole."""
    return warmed_up(Example(cast("nn.Module", torch.compile(model, **options)), *args))


def compiled_perceptron(
    name: str, compiled: Callable[[nn.Module], Any], step: Callable[[Example], None] = forward_and_backward
) -> None:
    """Adds a perceptron after *compiled* has been applied to it, or returned something in its place."""

    def build() -> Example:
        model = two_layers(nn.GELU())
        costs = TWO_LAYERS if step is forward_and_backward else (FIRST + SECOND,)
        example = Example(compiled(model) or model, torch.randn(BATCH, INPUTS), step=step)
        return warmed_up(example).costs(*costs, by_module={"": costs})

    FAMILY.put(name, build)


traced: Callable[[nn.Module], Any] = partial(torch.compile, backend="aot_eager")

# The default compiler: products become calls that write into given memory.
compiled_perceptron("compiled_to_kernels", torch.compile)
# Traced forward and backward, run operator by operator.
compiled_perceptron("compiled_by_autograd_alone", traced)
# module.compile() leaves the module what it was.
compiled_perceptron("compiled_in_place", lambda model: model.compile(backend="aot_eager"))
# No backward is traced.
compiled_perceptron("compiled_without_grad", traced, forward_without_grad)


@FAMILY.network
def compiled_while_it_is_counted() -> Example:
    """The first call traces and compiles: what is only traced is not work, what runs then is."""
    model = two_layers(nn.GELU())
    model.compile(backend="aot_eager")
    return Example(model, torch.randn(BATCH, INPUTS), teardown=torch._dynamo.reset).costs(
        *TWO_LAYERS, by_module={"": TWO_LAYERS}
    )


@FAMILY.network
def compiled_block_in_an_eager_model() -> Example:
    """The block is compiled, what is around it is not; every part keeps its own name."""
    classes = 2
    stem = 2 * BATCH * INPUTS * INPUTS
    head = 2 * BATCH * OUTPUTS * classes
    block = PhaseFlops(forward=FIRST + SECOND, backward=2 * (FIRST + SECOND))
    model = nn.Sequential(nn.Linear(INPUTS, INPUTS), traced(two_layers(nn.GELU())), nn.Linear(OUTPUTS, classes))
    return warmed_up(Example(model, torch.randn(BATCH, INPUTS))).costs(
        stem + block.forward + head,
        stem + block.backward + 2 * head,
        by_module={"0": (stem, stem), "1": block, "2": (head, 2 * head)},
    )


@FAMILY.network
def compiled_function_in_a_forward() -> Example:
    """The function belongs to the module that calls it."""

    @torch.compile(backend="aot_eager")
    def function(x: Tensor, weight: Tensor) -> Tensor:
        return torch.relu(x) @ weight

    def forward(self: Any, x: Tensor) -> Tensor:
        return function(self.enter(x), self.weight)

    model = Parts(forward, enter=nn.Linear(INPUTS, HIDDEN), weight=nn.Parameter(torch.randn(HIDDEN, OUTPUTS)))
    return warmed_up(Example(model, torch.randn(BATCH, INPUTS))).costs(*TWO_LAYERS, by_module={"enter": (FIRST, FIRST)})


@FAMILY.network
def compiled_common_subexpression() -> Example:
    """The compiler runs lin(x) once where the program says it twice, and what runs is what counts."""

    def forward(self: Any, x: Tensor) -> Tensor:
        return self.layer(x) + self.layer(x)

    model = Parts(forward, layer=nn.Linear(INPUTS, HIDDEN))
    return compiled(model, torch.randn(BATCH, INPUTS), backend="aot_eager").costs(FIRST, FIRST)


@FAMILY.network
def compiled_around_a_graph_break() -> Example:
    """What the compiler must leave to Python splits the region in two; both are counted."""

    def forward(self: Any, x: Tensor) -> Tensor:
        x = self.first(x)
        torch._dynamo.graph_break()
        return self.second(torch.relu(x))

    return compiled(
        Parts(forward, first=nn.Linear(INPUTS, HIDDEN), second=nn.Linear(HIDDEN, OUTPUTS)),
        torch.randn(BATCH, INPUTS),
        backend="aot_eager",
    ).costs(*TWO_LAYERS)


def compiled_checkpoint_of(
    *, backend: str, widths: tuple[int, int, int] = (5, 7, 11), dynamic: bool = False
) -> Example:
    """A checkpointed block that ends in a sigmoid, and so repeats both products, and a head; compiled as a whole."""
    batch, classes = 3, 2
    inputs, hidden, outputs = widths

    def forward(self: Any, x: Tensor) -> Tensor:
        return self.head(checkpoint(self.block, x, use_reentrant=False))

    first, second = 2 * batch * inputs * hidden, 2 * batch * hidden * outputs
    head = 2 * batch * outputs * classes
    whole = PhaseFlops(forward=first + second + head, backward=first + 2 * second + 2 * head, recompute=first + second)
    return compiled(
        Parts(
            forward,
            block=nn.Sequential(nn.Linear(inputs, hidden), nn.ReLU(), nn.Linear(hidden, outputs), nn.Sigmoid()),
            head=nn.Linear(outputs, classes),
        ),
        torch.randn(batch, inputs),
        backend=backend,
        dynamic=dynamic,
    ).costs(whole.forward, whole.backward, whole.recompute, by_module={"": whole})


# The compiled backward repeats the block as the eager one does: both products, for the sigmoid behind them.
FAMILY.put("compiled_checkpoint", lambda: compiled_checkpoint_of(backend="aot_eager"))
# What the backward repeats is spread among its gradients' kernels.
FAMILY.put("compiled_checkpoint_to_kernels", lambda: compiled_checkpoint_of(backend="inductor"))
# Repeated products and gradients have one size: what separates them is what they depend on.
FAMILY.put("compiled_checkpoint_of_squares", lambda: compiled_checkpoint_of(backend="aot_eager", widths=(6, 6, 6)))
# Compiled for every batch size: the sizes are those of the call.
FAMILY.put("compiled_checkpoint_of_any_batch", lambda: compiled_checkpoint_of(backend="inductor", dynamic=True))
# The same run operator by operator.
FAMILY.put("traced_checkpoint_of_any_batch", lambda: compiled_checkpoint_of(backend="aot_eager", dynamic=True))


@FAMILY.network
def compiled_checkpoint_that_repeats_less() -> Example:
    """The last product's factors are all that the backward needs of it: only the first product runs again.

    Less than half of the compiled backward is repeated, so that no rule of thumb would see it.
    """
    batch, inputs, hidden, outputs = 3, 2, 7, 11

    def forward(self: Any, x: Tensor) -> Tensor:
        return checkpoint(self.block, x, use_reentrant=False)

    first, second = 2 * batch * inputs * hidden, 2 * batch * hidden * outputs
    return compiled(
        Parts(forward, block=nn.Sequential(nn.Linear(inputs, hidden), nn.Tanh(), nn.Linear(hidden, outputs))),
        torch.randn(batch, inputs),
        backend="aot_eager",
    ).costs(first + second, first + 2 * second, first)


@FAMILY.network
def compiled_blocks_each_with_a_checkpoint() -> Example:
    """Two blocks compiled in place, one of them checkpointed inside; and the causal kernel's half is skipped again."""
    batch, heads, sequence, size = 2, 3, 7, 4

    class Attention(nn.Module):
        def __init__(self, *, repeat: bool) -> None:
            super().__init__()
            self.query = nn.Linear(size, size)
            self.repeat = repeat

        def attend(self, x: Tensor) -> Tensor:
            query = self.query(x)
            mixed = nn.functional.scaled_dot_product_attention(query, x, x, is_causal=True)
            return torch.sigmoid(mixed)

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.attend, x, use_reentrant=False) if self.repeat else self.attend(x)

    linear = 2 * batch * heads * sequence * size * size
    scores = 2 * batch * heads * sequence * sequence * size
    skipped = 2 * batch * heads * (6 + 5 + 4 + 3 + 2 + 1) * size
    plain = PhaseFlops(forward=linear + 2 * scores, backward=2 * linear + 4 * scores, recompute=scores)
    again = PhaseFlops(forward=0, recompute=linear + 2 * scores)
    model = nn.Sequential(Attention(repeat=True), Attention(repeat=False))
    for block in model:
        block.compile(backend="aot_eager")
    return warmed_up(Example(model, torch.randn(batch, heads, sequence, size, requires_grad=True))).costs(
        2 * plain.forward,
        2 * plain.backward,
        2 * plain.recompute + again.recompute,
        skipped=(2 * (2 + 4 + 1) + 2) * skipped,
        by_module={"0": plain + again, "1": plain},
    )


def transformer_layer(*, backend: str) -> Example:
    """Causal self-attention and two linear layers behind it, compiled as a whole."""
    batch, sequence, hidden, heads, intermediate = 2, 7, 12, 3, 20
    projection = 2 * batch * sequence * hidden * hidden
    scores = 2 * batch * sequence * sequence * hidden
    skipped = 2 * batch * (6 + 5 + 4 + 3 + 2 + 1) * hidden
    linear = 2 * batch * sequence * hidden * intermediate

    def layer_forward(self: Any, x: Tensor) -> Tensor:
        qkv = self.qkv(x).view(batch, sequence, 3, heads, hidden // heads)
        query, key, value = (part.transpose(1, 2) for part in qkv.unbind(2))
        mixed = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = self.norm(x + self.out(mixed.transpose(1, 2).flatten(2)))
        return x + self.down(torch.relu(self.up(x)))

    forward = 4 * projection + 2 * scores + 2 * linear
    return compiled(
        Parts(
            layer_forward,
            qkv=nn.Linear(hidden, 3 * hidden),
            out=nn.Linear(hidden, hidden),
            norm=nn.LayerNorm(hidden),
            up=nn.Linear(hidden, intermediate),
            down=nn.Linear(intermediate, hidden),
        ),
        torch.randn(batch, sequence, hidden, requires_grad=True),
        backend=backend,
    ).costs(forward, 2 * forward, scores, skipped=(2 + 4 + 1) * skipped, by_module={"": (forward, 2 * forward, scores)})


# Causal self-attention stays one fused kernel.
FAMILY.put("compiled_transformer_layer", lambda: transformer_layer(backend="inductor"))
# The same run operator by operator.
FAMILY.put("traced_transformer_layer", lambda: transformer_layer(backend="aot_eager"))


def compiled_block_under_a_checkpoint(name: str, *, backend: str, reentrant: bool) -> None:
    """Adds a checkpoint outside of the region: what the backward repeats is a compiled forward of its own."""

    def forward(self: Any, x: Tensor) -> Tensor:
        return checkpoint(self.block, self.enter(x), use_reentrant=reentrant)

    def build() -> Example:
        first = nn.Linear(INPUTS, HIDDEN)
        inner = nn.Sequential(nn.Linear(HIDDEN, HIDDEN), nn.Sigmoid(), nn.Linear(HIDDEN, OUTPUTS), nn.Sigmoid())
        model = Parts(forward, enter=first, block=torch.compile(inner, backend=backend))
        block = 2 * BATCH * HIDDEN * HIDDEN + SECOND
        return warmed_up(Example(model, torch.randn(BATCH, INPUTS))).costs(
            FIRST + block,
            FIRST + 2 * block,
            block,
            by_module={"enter": (FIRST, FIRST), "block": (block, 2 * block, block)},
        )

    FAMILY.put(name, build)


# To kernels, as long models are trained, and run operator by operator; repeated by a node of the checkpoint's own, and
# where a saved tensor asks for it.
for _name, _backend in (("compiled", "inductor"), ("traced", "aot_eager")):
    compiled_block_under_a_checkpoint(f"{_name}_block_in_a_reentrant_checkpoint", backend=_backend, reentrant=True)
    compiled_block_under_a_checkpoint(f"{_name}_block_in_a_checkpoint", backend=_backend, reentrant=False)


SLOW = frozenset(
    {
        "compiled_checkpoint_of_any_batch",
        "compiled_transformer_layer",
        "compiled_block_in_a_reentrant_checkpoint",
        "compiled_block_in_a_checkpoint",
    }
)
"""Networks that take seconds to compile to kernels; each is here a second time, traced alone."""
