"""A network that carries its own FLOP counts, worked out by hand from its layer sizes.

A family file defines networks; nothing in it needs pytest, so a benchmark can run the same ones through other tools:

    for network in all_networks():
        example = network.example()
        example.model(*example.args, **example.kwargs)   # the forward alone
        example.run()                                    # what ``network.expected`` counts

The arithmetic of every truth follows one rule: a multiply-add is two FLOPs, and only matrix-product-like work counts.
A product of an (m, k) with a (k, n) matrix is ``2 * m * k * n``. Its backward is two more products of the same cost,
one for each factor that needs a gradient. Biases, norms, activations, softmax, embeddings and losses are zero.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lightning_flops.records import PhaseFlops

SEED = 20_240_229
BATCH, INPUTS, HIDDEN, OUTPUTS = 3, 5, 7, 11
FIRST, SECOND = 2 * 3 * 5 * 7, 2 * 3 * 7 * 11
"""The layers of ``two_layers``, forward."""
TWO_LAYERS = (FIRST + SECOND, FIRST + 2 * SECOND)
"""Both, forward and backward; their input needs no gradient."""


def two_layers(between: nn.Module) -> nn.Sequential:
    """Two linear layers, "0" and "2"."""
    return nn.Sequential(nn.Linear(INPUTS, HIDDEN), between, nn.Linear(HIDDEN, OUTPUTS))


def by_layer(first: str, second: str, recompute: int = 0) -> dict[str, tuple[int, ...]]:
    """What each of the two layers costs, by their names; *recompute* is the first one's."""
    return {first: (FIRST, FIRST, recompute), second: (SECOND, 2 * SECOND)}


class Expected:
    """What a network's run costs, by hand.

    Args:
        forward: FLOPs in forwards.
        backward: in what autograd ran, less *recompute*.
        recompute: in what the backward repeats of the forward.
        optimizer: in the optimizer's steps.
        skipped: what fused masked attention does not execute: for every head, the scores above the diagonal.
        by_module: the same four of the modules worth naming, what is below them included; zeros may be left out.
    """

    def __init__(
        self,
        forward: int,
        backward: int = 0,
        recompute: int = 0,
        *,
        optimizer: int = 0,
        skipped: int = 0,
        by_module: Mapping[str, tuple[int, ...] | PhaseFlops] | None = None,
    ) -> None:
        self.forward, self.backward = forward, backward
        self.phases = _phases(forward, backward, recompute, optimizer)
        self.skipped = skipped
        self.by_module = {
            name: one if isinstance(one, PhaseFlops) else _phases(*one) for name, one in (by_module or {}).items()
        }


def _phases(forward: int, backward: int = 0, recompute: int = 0, optimizer: int = 0) -> PhaseFlops:
    return PhaseFlops(forward=forward, backward=backward, recompute=recompute, optimizer=optimizer)


class Example:
    """A network, built, with the inputs its truth is for.

    Args:
        model: the network.
        args: what it is called with; *kwargs* by name.
        kwargs: see *args*.
        step: what is counted; by default one forward and a backward from the sum of its outputs.
        teardown: undoes what building set up outside the model, such as a process group.
    """

    def __init__(
        self,
        model: nn.Module,
        *args: Any,
        kwargs: Mapping[str, Any] | None = None,
        step: Callable[[Example], None] | None = None,
        teardown: Callable[[], None] = lambda: None,
    ) -> None:
        self.model, self.args, self.kwargs = model, args, kwargs or {}
        self.step, self.teardown = step, teardown
        self.expected: Expected | None = None

    def costs(self, *expected: int, **more: Any) -> Example:
        """Says what its run costs; *expected* and *more* are those of ``Expected``."""
        self.expected = Expected(*expected, **more)
        return self

    def costs_two_layers(self, first: str, second: str) -> Example:
        """Says that it costs what ``two_layers`` do, whose names here are these."""
        return self.costs(*TWO_LAYERS, by_module=by_layer(first, second))

    def forward(self) -> Any:
        """The model's output on the example's inputs."""
        return self.model(*self.args, **self.kwargs)

    def run(self) -> None:
        """Runs what the truth counts, once."""
        (self.step or forward_and_backward)(self)


class Parts(nn.Module):
    """A module of named parts, and a function of the module and its inputs that is its forward."""

    def __init__(self, forward: Callable[..., Any], **parts: Any) -> None:
        super().__init__()
        for name, part in parts.items():
            setattr(self, name, part)
        self._forward = forward

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._forward(self, *args, **kwargs)


@dataclass
class Network:
    """One member of the corpus."""

    name: str
    family: str
    build: Callable[[], Example]  #: Makes the model and its inputs, and says what they cost.
    one_call: bool  #: Whether ``expected.forward`` is what one call of the model on its inputs costs.

    _expected: Expected | None = None

    @property
    def key(self) -> str:
        """Its name among all."""
        return f"{self.family}.{self.name}"

    def example(self) -> Example:
        """Builds the model and its inputs, the same ones every time."""
        torch.manual_seed(SEED)
        example = self.build()
        self._expected = example.expected
        return example

    @property
    def expected(self) -> Expected:
        """What its run costs, as the first example said."""
        if self._expected is None:
            self.example().teardown()
        assert self._expected is not None
        return self._expected


class Family:
    """The networks of one file, in the order they are written."""

    def __init__(self, name: str) -> None:
        """Starts an empty family called *name*."""
        self.name = name
        self.networks: list[Network] = []

    def put(self, name: str, build: Callable[[], Example], *, one_call: bool = True) -> None:
        """Adds a network that a function makes."""
        self.networks.append(Network(name, self.name, build, one_call))

    def network(self, build: Callable[[], Example]) -> Callable[[], Example]:
        """Decorates a function that makes a network; the function's name becomes the network's."""
        self.put(build.__name__, build)
        return build

    def part_by_part(self, build: Callable[[], Example]) -> Callable[[], Example]:
        """The same where one call of the model is not all that runs."""
        self.put(build.__name__, build, one_call=False)
        return build

    def of_two_layers(
        self,
        *expected: int,
        between: Callable[[], nn.Module] = nn.Tanh,
        of_input: bool = False,
        one_call: bool = True,
        **more: Any,
    ) -> Callable[[Callable[[Example], None]], Callable[[Example], None]]:
        """Decorates what is done with two layers; *of_input*: their input needs its gradient."""

        def define(step: Callable[[Example], None]) -> Callable[[Example], None]:
            def build() -> Example:
                batch = torch.randn(BATCH, INPUTS, requires_grad=of_input)
                return Example(two_layers(between()), batch, step=step).costs(*expected, **more)

            self.put(step.__name__, build, one_call=one_call)
            return step

        return define


def forward_and_backward(example: Example) -> None:
    """One forward, and the backward of the sum of everything it returned."""
    total(example.forward()).backward()  # type: ignore[no-untyped-call]


def forward_only(example: Example) -> None:
    """One forward with gradients on, and no backward."""
    example.forward()


def forward_without_grad(example: Example) -> None:
    """One forward under ``torch.no_grad``."""
    with torch.no_grad():
        example.forward()


def forward_in_inference_mode(example: Example) -> None:
    """One forward under ``torch.inference_mode``."""
    with torch.inference_mode():
        example.forward()


def total(output: Any) -> Tensor:
    """The sum of every tensor in *output* that a gradient can flow back from."""
    tensors = [tensor for tensor in tensors_in(output) if tensor.requires_grad]
    return sum((tensor.sum() for tensor in tensors), start=torch.zeros(()))


def tensors_in(output: Any) -> Iterator[Tensor]:
    """The tensors in nested tuples, lists and mappings, in order."""
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, Mapping):
        for value in output.values():
            yield from tensors_in(value)
    elif isinstance(output, (tuple, list)):
        for value in output:
            yield from tensors_in(value)
