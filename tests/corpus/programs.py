"""Whole programs: models that are not one forward after the other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, stack_module_state, vmap

from lightning_flops.records import PhaseFlops

from .case import BATCH, FIRST, HIDDEN, INPUTS, OUTPUTS, SECOND, Example, Expected, Family, Network, two_layers

FAMILY = Family("programs")


@FAMILY.network
def adversarial_step() -> Network:
    """A discriminator's update on real and generated data, then the generator's through the discriminator.

    The root is never called, only its parts. In the generator's backward the discriminator computes its weights'
    gradients too: nobody told it not to.
    """
    batch, noise, hidden, data, features, classes = 3, 4, 7, 5, 11, 2

    class Adversaries(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.generator = nn.Sequential(nn.Linear(noise, hidden), nn.ReLU(), nn.Linear(hidden, data))
            self.discriminator = nn.Sequential(nn.Linear(data, features), nn.ReLU(), nn.Linear(features, classes))

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
    return Network(
        one_call=False,
        build=lambda: Example(Adversaries(), torch.randn(batch, noise), torch.randn(batch, data), step=step),
        expected=Expected(
            generator.forward + discriminator.forward,
            generator.backward + discriminator.backward,
            by_module={"generator": generator, "discriminator": discriminator},
        ),
    )


@FAMILY.network
def truncated_backpropagation() -> Network:
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

    return Network(
        one_call=False,
        build=lambda: Example(nn.RNNCell(inputs, hidden), torch.randn(steps, batch, inputs), step=step),
        expected=Expected(
            steps * (from_input + from_state), steps * (from_input + from_state) + (steps - chunks) * from_state
        ),
    )


@FAMILY.network
def module_that_raises() -> Network:
    """A part fails halfway and its parent goes on without it; what ran has run, under the right names."""
    batch, hidden, wide, classes = 3, 5, 11, 7

    class Fragile(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(hidden, wide)
            self.second = nn.Linear(wide, hidden)

        def forward(self, x: Tensor) -> Tensor:
            self.first(x)
            raise ValueError("no second layer today")

    class Careful(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fragile = Fragile()
            self.instead = nn.Linear(hidden, hidden)
            self.head = nn.Linear(hidden, classes)

        def forward(self, x: Tensor) -> Tensor:
            try:
                x = self.fragile(x)
            except ValueError:
                x = self.instead(x)
            return self.head(torch.relu(x))

    wasted, instead = 2 * batch * hidden * wide, 2 * batch * hidden * hidden
    head = 2 * batch * hidden * classes
    return Network(
        build=lambda: Example(Careful(), torch.randn(batch, hidden)),
        expected=Expected(
            wasted + instead + head,
            instead + 2 * head,
            by_module={"fragile": (wasted,), "instead": (instead, instead), "head": (head, 2 * head)},
        ),
    )


@FAMILY.network
def method_that_is_not_forward() -> Network:
    """The parent calls encoder.encode: the product inside belongs to encoder's layer, the one beside it to the root."""

    class Encoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(INPUTS, HIDDEN)
            self.weight = nn.Parameter(torch.randn(HIDDEN, OUTPUTS))

        def encode(self, x: Tensor) -> Tensor:
            return torch.relu(self.layer(x)) @ self.weight

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = Encoder()

        def forward(self, x: Tensor) -> Tensor:
            return self.encoder.encode(x)

    layer, product = 2 * BATCH * INPUTS * HIDDEN, 2 * BATCH * HIDDEN * OUTPUTS
    return Network(
        build=lambda: Example(Model(), torch.randn(BATCH, INPUTS)),
        expected=Expected(
            layer + product,
            layer + 2 * product,
            by_module={
                "": (layer + product, layer + 2 * product),
                "encoder": (layer, layer),
                "encoder.layer": (layer, layer),
            },
        ),
    )


@FAMILY.network
def spectral_norm() -> Network:
    """One power iteration (W v, then its transpose times u) and u W v: three matrix-vector products and a dot product.

    Their gradients are outer products and scaled vectors, which are elementwise.
    """
    batch, inputs, outputs = 3, 5, 7
    product = 2 * batch * inputs * outputs
    norm = 3 * (2 * outputs * inputs) + 2 * outputs

    def build() -> Example:
        layer = nn.utils.parametrizations.spectral_norm(nn.Linear(inputs, outputs))
        return Example(nn.Sequential(layer, nn.ReLU()), torch.randn(batch, inputs))

    return Network(
        build=build,
        expected=Expected(
            product + norm, product, by_module={"0": (product + norm, product), "0.parametrizations.weight.0": (norm,)}
        ),
    )


@FAMILY.network
def lazy_layer() -> Network:
    """A layer that learns its input's size, and becomes another class, in the forward that is counted."""
    batch, inputs, outputs, classes = 3, 5, 7, 11
    first, second = 2 * batch * inputs * outputs, 2 * batch * outputs * classes
    return Network(
        build=lambda: Example(
            nn.Sequential(nn.LazyLinear(outputs), nn.ReLU(), nn.LazyLinear(classes)), torch.randn(batch, inputs)
        ),
        expected=Expected(
            first + second, first + 2 * second, by_module={"0": (first, first), "2": (second, 2 * second)}
        ),
    )


@FAMILY.network
def ensemble_under_vmap() -> Network:
    """Four models at once, their weights stacked: batched products, that the module that calls vmap owns."""
    batch, members, inputs, hidden, outputs = 3, 4, 5, 7, 11

    class Ensemble(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            models = [
                nn.Sequential(nn.Linear(inputs, hidden), nn.Tanh(), nn.Linear(hidden, outputs)) for _ in range(members)
            ]
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

    first, second = 2 * members * batch * inputs * hidden, 2 * members * batch * hidden * outputs
    whole = PhaseFlops(forward=first + second, backward=first + 2 * second)
    return Network(
        build=lambda: Example(Ensemble(), torch.randn(batch, inputs)),
        expected=Expected(whole.forward, whole.backward, by_module={"": whole}),
    )


@FAMILY.network
def data_dependent_routing() -> Network:
    """Half of the rows go through one expert, the rest through another: each pays for the rows that it gets."""
    batch, inputs, wide, narrow = 6, 5, 11, 2
    rows_left = 2

    class Routed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.left = nn.Sequential(nn.Linear(inputs, wide), nn.ReLU(), nn.Linear(wide, inputs))
            self.right = nn.Sequential(nn.Linear(inputs, narrow), nn.ReLU(), nn.Linear(narrow, inputs))

        def forward(self, x: Tensor, goes_left: Tensor) -> Tensor:
            output = torch.zeros_like(x)
            output = output.index_put((goes_left,), self.left(x[goes_left]))
            return output.index_put((~goes_left,), self.right(x[~goes_left]))

    left, right = 2 * rows_left * inputs * wide, 2 * (batch - rows_left) * inputs * narrow
    return Network(
        build=lambda: Example(Routed(), torch.randn(batch, inputs), torch.arange(batch) < rows_left),
        expected=Expected(
            2 * left + 2 * right,
            3 * left + 3 * right,
            by_module={"left": (2 * left, 3 * left), "right": (2 * right, 3 * right)},
        ),
    )


@FAMILY.network
def layer_made_in_the_forward() -> Network:
    """A layer that did not exist when counting began has its name nevertheless."""

    class Growing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(INPUTS, HIDDEN)
            self.grown = nn.ModuleList()

        def forward(self, x: Tensor) -> Tensor:
            self.grown.append(nn.Linear(HIDDEN, OUTPUTS))
            return self.grown[0](self.first(x))

    first, grown = 2 * BATCH * INPUTS * HIDDEN, 2 * BATCH * HIDDEN * OUTPUTS
    return Network(
        build=lambda: Example(Growing(), torch.randn(BATCH, INPUTS)),
        expected=Expected(
            first + grown, first + 2 * grown, by_module={"first": (first, first), "grown.0": (grown, 2 * grown)}
        ),
    )


@FAMILY.network
def hooks_of_the_users_own() -> Network:
    """Forward hooks and full backward hooks, which put nodes of their own into the graph, move no count."""

    def build() -> Example:
        model = two_layers(nn.ReLU())
        for layer in model:
            layer.register_forward_hook(lambda module, args, output: output * 2)
            layer.register_full_backward_hook(lambda module, inputs, outputs: None)
        return Example(model, torch.randn(BATCH, INPUTS, requires_grad=True))

    return Network(
        build=build,
        expected=Expected(
            FIRST + SECOND, 2 * FIRST + 2 * SECOND, by_module={"0": (FIRST, 2 * FIRST), "2": (SECOND, 2 * SECOND)}
        ),
    )


@FAMILY.network
def product_in_a_gradient_hook() -> Network:
    """A hook that rotates a gradient on its way is part of the backward."""
    batch, inputs, hidden = 3, 5, 7

    class Rotated(nn.Module):
        rotation: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(inputs, hidden)
            self.register_buffer("rotation", torch.randn(hidden, hidden))

        def forward(self, x: Tensor) -> Tensor:
            output: Tensor = self.layer(x)
            output.register_hook(lambda gradient: gradient @ self.rotation)  # type: ignore[no-untyped-call]
            return torch.tanh(output)

    layer, rotation = 2 * batch * inputs * hidden, 2 * batch * hidden * hidden
    return Network(
        one_call=False,
        build=lambda: Example(Rotated(), torch.randn(batch, inputs)),
        expected=Expected(layer, layer + rotation),
    )


def as_scripted_block(script: Callable[[nn.Module, Tensor], Any]) -> Network:
    """A block that TorchScript runs, in front of a layer that Python runs."""

    def build() -> Example:
        x = torch.randn(BATCH, INPUTS)
        block = nn.Sequential(nn.Linear(INPUTS, HIDDEN), nn.ReLU())
        return Example(nn.Sequential(script(block, x), nn.Linear(HIDDEN, OUTPUTS)), x)

    return Network(
        build=build,
        expected=Expected(
            FIRST + SECOND, FIRST + 2 * SECOND, by_module={"0": (FIRST, FIRST), "1": (SECOND, 2 * SECOND)}
        ),
    )


# Compiled from its source.
FAMILY.put("scripted_block", as_scripted_block(lambda block, x: torch.jit.script(block)))
# Recorded from one run.
FAMILY.put("traced_block", as_scripted_block(lambda block, x: torch.jit.trace(block, x)))  # type: ignore[no-untyped-call]
