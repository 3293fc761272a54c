"""What training programs do to a network: freezing, adapters, shared weights, opaque calls, teachers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lightning_flops.records import OUTSIDE, PhaseFlops

from .case import BATCH, FIRST, HIDDEN, INPUTS, OUTPUTS, SECOND, Example, Family, Parts

FAMILY = Family("training")


@FAMILY.network
def frozen_body() -> Example:
    """No gradient is needed below the head: the head computes its weight's alone."""
    batch, inputs, hidden, classes = 3, 5, 7, 11
    body = 2 * batch * inputs * hidden + 2 * batch * hidden * hidden
    head = 2 * batch * hidden * classes
    frozen = nn.Sequential(nn.Linear(inputs, hidden), nn.ReLU(), nn.Linear(hidden, hidden)).requires_grad_(False)
    return Example(nn.Sequential(frozen, nn.Linear(hidden, classes)), torch.randn(batch, inputs)).costs(
        body + head, head, by_module={"0": (body,), "1": (head, head)}
    )


@FAMILY.network
def frozen_middle() -> Example:
    """A frozen layer between trained ones passes the gradient on: one product instead of two."""
    batch, inputs, hidden, middle, outputs = 3, 5, 7, 11, 13
    first = 2 * batch * inputs * hidden
    second = 2 * batch * hidden * middle
    third = 2 * batch * middle * outputs
    model = nn.Sequential(
        nn.Linear(inputs, hidden), nn.Linear(hidden, middle).requires_grad_(False), nn.Linear(middle, outputs)
    )
    return Example(model, torch.randn(batch, inputs)).costs(
        first + second + third,
        first + second + 2 * third,
        by_module={"0": (first, first), "1": (second, second), "2": (third, 2 * third)},
    )


class LoraLinear(nn.Module):
    """A frozen linear layer and a trained low-rank update beside it."""

    def __init__(self, inputs: int, outputs: int, rank: int) -> None:
        super().__init__()
        self.base = nn.Linear(inputs, outputs).requires_grad_(False)
        self.down = nn.Linear(inputs, rank, bias=False)
        self.up = nn.Linear(rank, outputs, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


@FAMILY.network
def lora() -> Example:
    """The base never computes a weight gradient, and no input gradient in the first layer."""
    batch, inputs, hidden, outputs, rank = 3, 11, 7, 5, 2
    base1, down1, up1 = 2 * batch * inputs * hidden, 2 * batch * inputs * rank, 2 * batch * rank * hidden
    base2, down2, up2 = 2 * batch * hidden * outputs, 2 * batch * hidden * rank, 2 * batch * rank * outputs
    model = nn.Sequential(LoraLinear(inputs, hidden, rank), nn.ReLU(), LoraLinear(hidden, outputs, rank))
    return Example(model, torch.randn(batch, inputs)).costs(
        base1 + down1 + up1 + base2 + down2 + up2,
        (down1 + 2 * up1) + (base2 + 2 * down2 + 2 * up2),
        by_module={
            "0.base": (base1,),
            "0.down": (down1, down1),
            "0.up": (up1, 2 * up1),
            "2.base": (base2, base2),
            "2.down": (down2, 2 * down2),
            "2.up": (up2, 2 * up2),
        },
    )


@FAMILY.network
def tied_embedding_and_head() -> Example:
    """One weight looks words up for nothing and scores them with a product."""
    batch, sequence, vocabulary, hidden = 2, 5, 29, 7

    def forward(self: Any, tokens: Tensor) -> Tensor:
        return self.head(torch.tanh(self.mix(self.embedding(tokens))))

    embedding, mixing = nn.Embedding(vocabulary, hidden), nn.Linear(hidden, hidden)
    scoring = nn.Linear(hidden, vocabulary, bias=False)
    scoring.weight = embedding.weight
    model = Parts(forward, embedding=embedding, mix=mixing, head=scoring)
    mix = 2 * batch * sequence * hidden * hidden
    head = 2 * batch * sequence * hidden * vocabulary
    return Example(model, torch.randint(vocabulary, (batch, sequence))).costs(
        mix + head, 2 * mix + 2 * head, by_module={"mix": (mix, 2 * mix), "head": (head, 2 * head)}
    )


@FAMILY.network
def tied_autoencoder() -> Example:
    """The decoder multiplies with the encoder's weight, transposed, from the root's own forward."""
    batch, inputs, hidden = 3, 7, 5

    def forward(self: Any, x: Tensor) -> Tensor:
        return torch.relu(self.encoder(x)) @ self.encoder.weight

    product = 2 * batch * inputs * hidden
    model = Parts(forward, encoder=nn.Linear(inputs, hidden))
    return Example(model, torch.randn(batch, inputs)).costs(
        2 * product, product + 2 * product, by_module={"": (2 * product, 3 * product), "encoder": (product, product)}
    )


@FAMILY.network
def repeated_module() -> Example:
    """One layer called three times costs three times; its first input needs no gradient."""
    batch, hidden, calls = 3, 7, 3

    def forward(self: Any, x: Tensor) -> Tensor:
        for _ in range(calls):
            x = torch.tanh(self.layer(x))
        return x

    product = 2 * batch * hidden * hidden
    layer = PhaseFlops(forward=calls * product, backward=product + (calls - 1) * 2 * product)
    model = Parts(forward, layer=nn.Linear(hidden, hidden))
    return Example(model, torch.randn(batch, hidden)).costs(layer.forward, layer.backward, by_module={"layer": layer})


@FAMILY.network
def module_under_two_names() -> Example:
    """A layer that two towers share is counted once a call, under the name of the tower that called it."""

    def tower(self: Any, x: Tensor) -> Tensor:
        return self.shared(torch.relu(self.own(x)))

    def forward(self: Any, x: Tensor, y: Tensor) -> Tensor:
        return self.left(x) + self.right(y)

    layer = nn.Linear(HIDDEN, OUTPUTS)
    towers = (Parts(tower, own=nn.Linear(size, HIDDEN), shared=layer) for size in (INPUTS, 2 * INPUTS))
    model = Parts(forward, **dict(zip(("left", "right"), towers, strict=True)))
    return Example(model, torch.randn(BATCH, INPUTS), torch.randn(BATCH, 2 * INPUTS)).costs(
        (1 + 2) * FIRST + 2 * SECOND,
        (1 + 2) * FIRST + 2 * (2 * SECOND),
        by_module={
            "left": (FIRST + SECOND, FIRST + 2 * SECOND),
            "left.shared": (SECOND, 2 * SECOND),
            "right": (2 * FIRST + SECOND, 2 * FIRST + 2 * SECOND),
            "right.shared": (SECOND, 2 * SECOND),
        },
    )


@FAMILY.network
def same_module_twice_in_a_sequence() -> Example:
    """Two names in one parent: both calls are listed under the first."""
    batch, hidden = 3, 7
    product = 2 * batch * hidden * hidden
    layer = nn.Linear(hidden, hidden)
    return Example(nn.Sequential(layer, nn.ReLU(), layer), torch.randn(batch, hidden)).costs(
        2 * product, product + 2 * product, by_module={"0": (2 * product, 3 * product)}
    )


@FAMILY.network
def keyword_only_calls() -> Example:
    """Blocks that take their input by keyword only are found in the backward like any others."""
    batch, hidden, wide = 3, 7, 11

    def forward(self: Any, *, states: Tensor) -> dict[str, Tensor]:
        return {"states": states + self.down(torch.relu(self.up(states)))}

    def stack_forward(self: Any, *, states: Tensor) -> dict[str, Tensor]:
        for block in self.blocks:
            states = block(states=states)["states"]
        return {"states": states}

    product = 2 * batch * hidden * wide
    later = PhaseFlops(forward=2 * product, backward=4 * product)
    model = Parts(
        stack_forward,
        blocks=nn.ModuleList(
            Parts(forward, up=nn.Linear(hidden, wide), down=nn.Linear(wide, hidden)) for _ in range(3)
        ),
    )
    return Example(model, kwargs={"states": torch.randn(batch, hidden)}).costs(
        3 * 2 * product,
        3 * 4 * product - product,
        by_module={"blocks.0": (2 * product, 3 * product), "blocks.1": later, "blocks.2": later},
    )


@dataclass
class OpaqueOutput:
    """An output that no tree of containers leads into."""

    scores: Tensor
    loss: Callable[[], Tensor]


@FAMILY.network
def opaque_output() -> Example:
    """The tensors are hidden in an object; the backward still belongs to the layers."""

    def forward(self: Any, x: Tensor) -> OpaqueOutput:
        scores = self.head(torch.relu(self.body(x)))
        return OpaqueOutput(scores=scores, loss=scores.sum)

    def step(example: Example) -> None:
        example.forward().loss().backward()

    model = Parts(forward, body=nn.Linear(INPUTS, HIDDEN), head=nn.Linear(HIDDEN, OUTPUTS))
    return Example(model, torch.randn(BATCH, INPUTS), step=step).costs_two_layers("body", "head")


@FAMILY.network
def branch_that_the_loss_leaves_out() -> Example:
    """Its forward runs, its backward does not."""
    batch, inputs, outputs, unused = 3, 5, 7, 11

    def forward(self: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.used(x), self.unused(x)

    def step(example: Example) -> None:
        example.forward()[0].sum().backward()

    used, left_out = 2 * batch * inputs * outputs, 2 * batch * inputs * unused
    model = Parts(forward, used=nn.Linear(inputs, outputs), unused=nn.Linear(inputs, unused))
    return Example(model, torch.randn(batch, inputs), step=step).costs(
        used + left_out, used, by_module={"unused": (left_out,), "used": (used, used)}
    )


@FAMILY.network
def teacher_inside_the_model() -> Example:
    """A teacher without gradients counts in the forward, under its own name."""
    batch, inputs, hidden, outputs = 3, 5, 11, 7

    def forward(self: Any, x: Tensor) -> Tensor:
        with torch.no_grad():
            target = self.teacher(x)
        return nn.functional.mse_loss(self.student(x), target)

    student = 2 * batch * inputs * outputs
    teacher = 2 * batch * inputs * hidden + 2 * batch * hidden * outputs
    model = Parts(
        forward,
        student=nn.Linear(inputs, outputs),
        teacher=nn.Sequential(nn.Linear(inputs, hidden), nn.ReLU(), nn.Linear(hidden, outputs)),
    )
    return Example(model, torch.randn(batch, inputs)).costs(
        student + teacher, student, by_module={"teacher": (teacher,), "student": (student, student)}
    )


@FAMILY.part_by_part
def teacher_outside_the_model() -> Example:
    """A teacher that is no part of the model still runs in the step: it is listed outside."""
    teacher = nn.Linear(INPUTS, HIDDEN)

    def step(example: Example) -> None:
        with torch.no_grad():
            target = teacher(example.args[0])
        nn.functional.mse_loss(example.forward(), target).backward()  # type: ignore[no-untyped-call]

    return Example(nn.Linear(INPUTS, HIDDEN), torch.randn(BATCH, INPUTS), step=step).costs(
        2 * FIRST, FIRST, by_module={"": (FIRST, FIRST), OUTSIDE: (FIRST,)}
    )


@FAMILY.part_by_part
def contrastive_loss_outside_the_model() -> Example:
    """A product in the loss, forward and backward, belongs to no module."""

    def step(example: Example) -> None:
        features = nn.functional.normalize(example.forward())
        (features @ features.T).exp().sum().backward()  # type: ignore[no-untyped-call]

    similarity = 2 * BATCH * HIDDEN * BATCH
    return Example(nn.Linear(INPUTS, HIDDEN), torch.randn(BATCH, INPUTS), step=step).costs(
        FIRST + similarity,
        FIRST + 2 * similarity,
        by_module={"": (FIRST, FIRST), OUTSIDE: (similarity, 2 * similarity)},
    )
