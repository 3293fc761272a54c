"""Whole programs: models that are not one forward after the other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, stack_module_state, vmap

from lightning_flops.records import PhaseFlops

from .case import BATCH, FIRST, HIDDEN, INPUTS, OUTPUTS, SECOND, Example, Family, Parts, two_layers

FAMILY = Family("programs")


@FAMILY.part_by_part
def adversarial_step() -> Example:
    """A discriminator's update on real and generated data, then the generator's through the discriminator.

    The root is never called, only its parts. In the generator's backward the discriminator computes its weights'
    gradients too: no setting keeps it from them.
    """
    batch, noise, hidden, data, features, classes = 3, 4, 7, 5, 11, 2

    def step(example: Example) -> None:
        model: Any = example.model
        z, real = example.args
        d_optimizer = torch.optim.SGD(model.discriminator.parameters(), lr=0.1)
        g_optimizer = torch.optim.Adam(model.generator.parameters(), lr=0.1)
        fake = model.generator(z)
        (model.discriminator(real).sum() - model.discriminator(fake.detach()).sum()).backward()
        d_optimizer.step()
        model.discriminator(fake).sum().backward()
        g_optimizer.step()

    g1, g2 = 2 * batch * noise * hidden, 2 * batch * hidden * data
    d1, d2 = 2 * batch * data * features, 2 * batch * features * classes
    generator = PhaseFlops(forward=g1 + g2, backward=g1 + 2 * g2)
    discriminator = PhaseFlops(forward=3 * (d1 + d2), backward=2 * (d1 + 2 * d2) + 2 * (d1 + d2))
    parts = {
        "generator": nn.Sequential(nn.Linear(noise, hidden), nn.ReLU(), nn.Linear(hidden, data)),
        "discriminator": nn.Sequential(nn.Linear(data, features), nn.ReLU(), nn.Linear(features, classes)),
    }
    return Example(nn.ModuleDict(parts), torch.randn(batch, noise), torch.randn(batch, data), step=step).costs(
        generator.forward + discriminator.forward,
        generator.backward + discriminator.backward,
        by_module={"generator": generator, "discriminator": discriminator},
    )


@FAMILY.part_by_part
def truncated_backpropagation() -> Example:
    """Six steps in chunks of two: the gradient of the state stops at each chunk's boundary."""
    batch, chunks, chunk, inputs, hidden = 3, 3, 2, 5, 7
    from_input = 2 * batch * inputs * hidden
    from_state = 2 * batch * hidden * hidden
    steps = chunks * chunk

    def step(example: Example) -> None:
        (sequence,) = example.args
        state = torch.zeros(batch, hidden)
        for part in sequence.split(chunk):
            state = state.detach()
            for values in part:
                state = example.model(values, state)
            state.sum().backward()  # type: ignore[no-untyped-call]

    return Example(nn.RNNCell(inputs, hidden), torch.randn(steps, batch, inputs), step=step).costs(
        steps * (from_input + from_state), steps * (from_input + from_state) + (steps - chunks) * from_state
    )


@FAMILY.network
def module_that_raises() -> Example:
    """A part fails halfway and its parent goes on without it; what ran has run, under the right names."""
    batch, hidden, wide, classes = 3, 5, 11, 7

    def forward(self: Any, x: Tensor) -> Tensor:
        self.first(x)
        raise ValueError("no second layer today")

    def careful_forward(self: Any, x: Tensor) -> Tensor:
        try:
            x = self.fragile(x)
        except ValueError:
            x = self.instead(x)
        return self.head(torch.relu(x))

    wasted, instead = 2 * batch * hidden * wide, 2 * batch * hidden * hidden
    head = 2 * batch * hidden * classes
    model = Parts(
        careful_forward,
        fragile=Parts(forward, first=nn.Linear(hidden, wide), second=nn.Linear(wide, hidden)),
        instead=nn.Linear(hidden, hidden),
        head=nn.Linear(hidden, classes),
    )
    return Example(model, torch.randn(batch, hidden)).costs(
        wasted + instead + head,
        instead + 2 * head,
        by_module={"fragile": (wasted,), "instead": (instead, instead), "head": (head, 2 * head)},
    )


@FAMILY.network
def method_that_is_not_forward() -> Example:
    """The parent calls encoder.encode: the product inside belongs to encoder's layer, the one beside it to the root."""

    class Encoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(INPUTS, HIDDEN)
            self.weight = nn.Parameter(torch.randn(HIDDEN, OUTPUTS))

        def encode(self, x: Tensor) -> Tensor:
            return torch.relu(self.layer(x)) @ self.weight

    def forward(self: Any, x: Tensor) -> Tensor:
        return self.encoder.encode(x)

    whole, of_layer = (FIRST + SECOND, FIRST + 2 * SECOND), (FIRST, FIRST)
    return Example(Parts(forward, encoder=Encoder()), torch.randn(BATCH, INPUTS)).costs(
        *whole, by_module={"": whole, "encoder": of_layer, "encoder.layer": of_layer}
    )


@FAMILY.network
def spectral_norm() -> Example:
    """One power iteration (W v, then its transpose times u) and u W v: three matrix-vector products and a dot product.

    Their gradients are outer products and scaled vectors, which are elementwise.
    """
    norm = 3 * (2 * HIDDEN * INPUTS) + 2 * HIDDEN
    layer = nn.utils.parametrizations.spectral_norm(nn.Linear(INPUTS, HIDDEN))
    return Example(nn.Sequential(layer, nn.ReLU()), torch.randn(BATCH, INPUTS)).costs(
        FIRST + norm, FIRST, by_module={"0": (FIRST + norm, FIRST), "0.parametrizations.weight.0": (norm,)}
    )


@FAMILY.network
def lazy_layer() -> Example:
    """A layer that learns its input's size, and becomes another class, in the forward that is counted."""
    model = nn.Sequential(nn.LazyLinear(HIDDEN), nn.ReLU(), nn.LazyLinear(OUTPUTS))
    return Example(model, torch.randn(BATCH, INPUTS)).costs_two_layers("0", "2")


@FAMILY.network
def ensemble_under_vmap() -> Example:
    """Four models at once, their weights stacked: batched products, that the module that calls vmap owns."""
    members = 4

    class Ensemble(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            models = [two_layers(nn.Tanh()) for _ in range(members)]
            weights, _ = stack_module_state(models)
            self.names = list(weights)
            self.weights = nn.ParameterList(nn.Parameter(weights[name].detach()) for name in self.names)
            self.like = [models[0]]  # in a list, so that it is no part of this module

        def forward(self, x: Tensor) -> Tensor:
            def one(weights: dict[str, Tensor], x: Tensor) -> Tensor:
                output: Tensor = functional_call(self.like[0], weights, (x,))
                return output

            stacked = dict(zip(self.names, self.weights, strict=True))
            return vmap(one, in_dims=(0, None))(stacked, x)

    whole = members * (FIRST + SECOND), members * (FIRST + 2 * SECOND)
    return Example(Ensemble(), torch.randn(BATCH, INPUTS)).costs(*whole, by_module={"": whole})


@FAMILY.network
def data_dependent_routing() -> Example:
    """Half of the rows go through one expert, the rest through another: each pays for the rows that it gets."""
    batch, inputs, wide, narrow = 6, 5, 11, 2
    rows_left = 2

    def forward(self: Any, x: Tensor, goes_left: Tensor) -> Tensor:
        output = torch.zeros_like(x)
        output = output.index_put((goes_left,), self.left(x[goes_left]))
        return output.index_put((~goes_left,), self.right(x[~goes_left]))

    left, right = 2 * rows_left * inputs * wide, 2 * (batch - rows_left) * inputs * narrow
    model = Parts(
        forward,
        left=nn.Sequential(nn.Linear(inputs, wide), nn.ReLU(), nn.Linear(wide, inputs)),
        right=nn.Sequential(nn.Linear(inputs, narrow), nn.ReLU(), nn.Linear(narrow, inputs)),
    )
    return Example(model, torch.randn(batch, inputs), torch.arange(batch) < rows_left).costs(
        2 * left + 2 * right,
        3 * left + 3 * right,
        by_module={"left": (2 * left, 3 * left), "right": (2 * right, 3 * right)},
    )


@FAMILY.network
def layer_made_in_the_forward() -> Example:
    """A layer that did not exist when counting began has its name nevertheless."""

    def forward(self: Any, x: Tensor) -> Tensor:
        self.grown.append(nn.Linear(HIDDEN, OUTPUTS))
        return self.grown[0](self.first(x))

    model = Parts(forward, first=nn.Linear(INPUTS, HIDDEN), grown=nn.ModuleList())
    return Example(model, torch.randn(BATCH, INPUTS)).costs_two_layers("first", "grown.0")


@FAMILY.network
def hooks_of_the_users_own() -> Example:
    """Forward hooks and full backward hooks, which put nodes of their own into the graph, move no count."""

    model = two_layers(nn.ReLU())
    for layer in model:
        layer.register_forward_hook(lambda module, args, output: output * 2)
        layer.register_full_backward_hook(lambda module, inputs, outputs: None)
    return Example(model, torch.randn(BATCH, INPUTS, requires_grad=True)).costs(
        FIRST + SECOND, 2 * FIRST + 2 * SECOND, by_module={"0": (FIRST, 2 * FIRST), "2": (SECOND, 2 * SECOND)}
    )


@FAMILY.part_by_part
def product_in_a_gradient_hook() -> Example:
    """A hook that rotates a gradient on its way is part of the backward."""
    batch, inputs, hidden = 3, 5, 7

    def forward(self: Any, x: Tensor) -> Tensor:
        output: Tensor = self.layer(x)
        output.register_hook(lambda gradient: gradient @ self.rotation)  # type: ignore[no-untyped-call]
        return torch.tanh(output)

    layer, rotation = 2 * batch * inputs * hidden, 2 * batch * hidden * hidden
    model = Parts(forward, layer=nn.Linear(inputs, hidden), rotation=nn.Buffer(torch.randn(hidden, hidden)))
    return Example(model, torch.randn(batch, inputs)).costs(layer, layer + rotation)


def as_scripted_block(script: Callable[[nn.Module, Tensor], Any]) -> Example:
    """A block that TorchScript runs, in front of a layer that Python runs."""

    x = torch.randn(BATCH, INPUTS)
    block = nn.Sequential(nn.Linear(INPUTS, HIDDEN), nn.ReLU())
    return Example(nn.Sequential(script(block, x), nn.Linear(HIDDEN, OUTPUTS)), x).costs_two_layers("0", "1")


# Compiled from its source.
FAMILY.put("scripted_block", lambda: as_scripted_block(lambda block, x: torch.jit.script(block)))
# Recorded from one run.
FAMILY.put("traced_block", lambda: as_scripted_block(lambda block, x: torch.jit.trace(block, x)))  # type: ignore[no-untyped-call]
