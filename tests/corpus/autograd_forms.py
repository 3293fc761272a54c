"""Autograd beyond one backward: custom functions, gradients of gradients, functional transforms."""

from __future__ import annotations

from threading import Thread
from typing import Any

import torch
from torch import Tensor, nn

from .case import BATCH, FIRST, HIDDEN, INPUTS, OUTPUTS, SECOND, TWO_LAYERS, Example, Family, Parts, two_layers

FAMILY = Family("autograd_forms")


class OwnProduct(torch.autograd.Function):
    """x W with a backward of its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return gradient @ weight.T, x.T @ gradient


class Own(nn.Module):
    """A module whose forward is a custom function of its weight."""

    def __init__(self, function: type[torch.autograd.Function], inputs: int, outputs: int) -> None:
        super().__init__()
        self.function = function
        self.weight = nn.Parameter(torch.randn(inputs, outputs))

    def forward(self, x: Tensor) -> Tensor:
        return self.function.apply(x, self.weight)  # type: ignore[no-untyped-call]


@FAMILY.network
def custom_function() -> Example:
    """Its backward computes both gradients although the first input needs none: what runs is what counts."""
    model = nn.Sequential(Own(OwnProduct, INPUTS, HIDDEN), nn.Tanh(), Own(OwnProduct, HIDDEN, OUTPUTS))
    return Example(model, torch.randn(BATCH, INPUTS)).costs(
        FIRST + SECOND, 2 * FIRST + 2 * SECOND, by_module={"0": (FIRST, 2 * FIRST), "2": (SECOND, 2 * SECOND)}
    )


class RepeatedProduct(torch.autograd.Function):
    """tanh(x W), of which nothing but the inputs is kept: the backward runs the forward again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return torch.tanh(x @ weight)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        with torch.enable_grad():
            x, weight = (tensor.detach().requires_grad_() for tensor in ctx.saved_tensors)
            output = torch.tanh(x @ weight)
        gradients = torch.autograd.grad(output, (x, weight), gradient)
        return gradients[0], gradients[1]


@FAMILY.network
def custom_function_that_recomputes() -> Example:
    """The product in the backward that repeats the forward is recompute, the two gradients are backward."""
    costs = (FIRST, 2 * FIRST, FIRST)
    model = nn.Sequential(nn.Tanh(), Own(RepeatedProduct, INPUTS, HIDDEN))
    return Example(model, torch.randn(BATCH, INPUTS)).costs(*costs, by_module={"1": costs})


@FAMILY.of_two_layers(
    FIRST + SECOND, 2 * (FIRST + 2 * SECOND), by_module={"0": (FIRST, 2 * FIRST), "2": (SECOND, 4 * SECOND)}
)
def backward_twice(example: Example) -> None:
    """A graph that is kept runs its backward twice."""
    loss = example.forward().sum()
    loss.backward(retain_graph=True)
    loss.backward()


@FAMILY.of_two_layers(FIRST + SECOND, FIRST + SECOND, of_input=True)
def gradient_of_the_input_alone(example: Example) -> None:
    """autograd.grad for the input computes no weight gradient: one product a layer."""
    (x,) = example.args
    torch.autograd.grad(example.forward().sum(), x)


@FAMILY.of_two_layers(
    FIRST + SECOND,
    (FIRST + SECOND) + (2 * FIRST + 2 * FIRST) + SECOND,
    by_module={"0": (FIRST, (1 + 2 + 2) * FIRST), "2": (SECOND, (1 + 1) * SECOND)},
    of_input=True,
)
def gradient_penalty(example: Example) -> None:
    """The squared norm of d(sum y)/dx, differentiated again, for y = W2 tanh(W1 x).

    The first gradient is two products: g1 = g0 W2 and g2 = (g1 * tanh') W1. Its own backward runs, for W1: the
    gradients of both factors of g2, and, through tanh', those of W1 x, of which x needs one too. For W2: the gradient
    of the factor W2 of g1; g0 is constant. The product W2 tanh(W1 x) itself is not on the way.
    """
    (x,) = example.args
    (gradient,) = torch.autograd.grad(example.forward().sum(), x, create_graph=True)
    gradient.square().sum().backward()


@FAMILY.part_by_part
def forces_from_an_energy() -> Example:
    """A gradient taken inside the forward, as interatomic potentials do, and a loss on energy and forces.

    To the gradient penalty's products the energy adds its own path: both gradients of W2 tanh(W1 x). What reaches tanh
    is one sum of two gradients, so W1's own are not computed twice.
    """

    def forward(self: Any, positions: Tensor) -> tuple[Tensor, Tensor]:
        energy = self.leave(torch.tanh(self.enter(positions))).sum()
        (forces,) = torch.autograd.grad(energy, positions, create_graph=True)
        return energy, forces

    def step(example: Example) -> None:
        energy, forces = example.forward()
        (energy.square() + forces.square().sum()).backward()

    model = Parts(forward, enter=nn.Linear(INPUTS, HIDDEN), leave=nn.Linear(HIDDEN, OUTPUTS))
    return Example(model, torch.randn(BATCH, INPUTS, requires_grad=True), step=step).costs(
        FIRST + SECOND,
        (FIRST + SECOND) + (2 * FIRST + SECOND) + (2 * FIRST + 2 * SECOND),
        by_module={"enter": (FIRST, 5 * FIRST), "leave": (SECOND, 4 * SECOND)},
    )


@FAMILY.of_two_layers(*TWO_LAYERS)
def functional_gradient(example: Example) -> None:
    """torch.func.grad of a functional call: weights' gradients, and the inner layer's input."""
    parameters = {name: parameter.detach() for name, parameter in example.model.named_parameters()}

    def loss(values: dict[str, Tensor]) -> Tensor:
        output: Tensor = torch.func.functional_call(example.model, values, example.args)
        return output.sum()

    torch.func.grad(loss)(parameters)


@FAMILY.of_two_layers(*TWO_LAYERS)
def per_sample_gradients(example: Example) -> None:
    """vmap over grad: every sample has its own weight gradient, a product of a column with a row."""
    parameters = {name: parameter.detach() for name, parameter in example.model.named_parameters()}

    def loss(values: dict[str, Tensor], sample: Tensor) -> Tensor:
        output: Tensor = torch.func.functional_call(example.model, values, (sample.unsqueeze(0),))
        return output.sum()

    torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(parameters, *example.args)


@FAMILY.of_two_layers(3 * (FIRST + SECOND), by_module={"0": (3 * FIRST,), "2": (3 * SECOND,)}, one_call=False)
def forward_mode_tangent(example: Example) -> None:
    """A Jacobian-vector product: the tangent of x W is dx W + x dW, so three products a layer, all of them forward."""
    (x,) = example.args
    parameters = {name: parameter.detach() for name, parameter in example.model.named_parameters()}

    def output(values: dict[str, Tensor], x: Tensor) -> Tensor:
        return torch.func.functional_call(example.model, values, (x,))

    tangents = {name: torch.ones_like(parameter) for name, parameter in parameters.items()}
    torch.func.jvp(output, (parameters, x), (tangents, torch.ones_like(x)))


@FAMILY.network
def jacobian() -> Example:
    """torch.func.jacrev: one backward for each of the outputs at once, down to the input, no weight gradients."""

    def step(example: Example) -> None:
        torch.func.jacrev(example.model)(*example.args)

    return Example(two_layers(nn.Tanh()), torch.randn(INPUTS), step=step).costs(
        2 * INPUTS * HIDDEN + 2 * HIDDEN * OUTPUTS, 2 * OUTPUTS * OUTPUTS * HIDDEN + 2 * OUTPUTS * HIDDEN * INPUTS
    )


@FAMILY.of_two_layers(*TWO_LAYERS, by_module={"0": (FIRST, FIRST), "2": (SECOND, 2 * SECOND)})
def backward_on_another_thread(example: Example) -> None:
    """The thread that calls backward runs the graph that another one built."""
    loss = example.forward().sum()
    thread = Thread(target=loss.backward)
    thread.start()
    thread.join()


@FAMILY.network
def towers_in_their_own_threads() -> Example:
    """A forward that runs its parts in threads, as replicas on several devices do."""

    def forward(self: Any, x: Tensor, y: Tensor) -> Tensor:
        results: dict[str, Tensor] = {}

        def run(name: str, tower: nn.Module, value: Tensor) -> None:
            results[name] = tower(value)

        threads = [Thread(target=run, args=("left", self.left, x)), Thread(target=run, args=("right", self.right, y))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return results["left"] + results["right"]

    model = Parts(forward, left=nn.Linear(INPUTS, HIDDEN), right=nn.Linear(2 * INPUTS, HIDDEN))
    # Each thread numbers its nodes from the same start: whose a node is, a backward elsewhere cannot know.
    return Example(model, torch.randn(BATCH, INPUTS), torch.randn(BATCH, 2 * INPUTS)).costs(3 * FIRST, 3 * FIRST)
