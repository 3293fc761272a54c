"""Weights that are tensor subclasses, as quantization libraries have them: what runs inside them is what counts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from .case import Example, Family

FAMILY = Family("subclasses")

aten = torch.ops.aten


class Int8Weight(torch.Tensor):
    """A matrix kept as 8-bit integers and one scale for each row; *product* runs its products."""

    integers: Tensor
    scales: Tensor
    product: Callable[[Tensor, Int8Weight], Tensor]
    turned: bool

    @staticmethod
    def __new__(
        cls, integers: Tensor, scales: Tensor, product: Callable[[Tensor, Int8Weight], Tensor], *, turned: bool = False
    ) -> Int8Weight:
        """A tensor without memory of its own; *turned*: the transpose."""
        shape = integers.shape[::-1] if turned else integers.shape
        made: Int8Weight = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=scales.dtype)
        made.integers, made.scales, made.product, made.turned = integers, scales, product, turned
        return made

    def floats(self) -> Tensor:
        """The matrix that the integers stand for."""
        return self.integers.to(self.scales.dtype) * self.scales.unsqueeze(1)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """What a linear layer asks of its weight."""
        if func in (aten.detach.default, aten.alias.default, aten.clone.default):
            weight = args[0]
            return cls(weight.integers, weight.scales, weight.product, turned=weight.turned)
        if func is aten.t.default:
            weight = args[0]
            return cls(weight.integers, weight.scales, weight.product, turned=not weight.turned)
        if func is aten.mm.default and isinstance(args[1], cls) and args[1].turned:
            return args[1].product(args[0], args[1])
        if func is aten.linear.default:  # in inference mode
            return args[1].product(args[0], args[1])
        if func is aten.equal.default:
            return torch.equal(args[0].floats(), args[1].floats())
        raise NotImplementedError(func)


def in_floats(x: Tensor, weight: Int8Weight) -> Tensor:
    """Weight-only quantization: the product runs in the activations' dtype."""
    return x @ weight.floats().t()


def in_integers(x: Tensor, weight: Int8Weight) -> Tensor:
    """Dynamic quantization: activations become integers too."""
    scale = x.abs().amax() / 127
    product = torch._int_mm((x / scale).round().to(torch.int8), weight.integers.t())
    return product * scale * weight.scales


class Quantized(nn.Module):
    """Two linear layers without bias, the first one's weight quantized and frozen."""

    def __init__(self, sizes: tuple[int, int, int], multiply: Callable[[Tensor, Int8Weight], Tensor]) -> None:
        super().__init__()
        inputs, hidden, outputs = sizes
        integers = torch.randint(-127, 127, (hidden, inputs), dtype=torch.int8)
        weight = Int8Weight(integers, torch.rand(hidden), multiply)
        self.first = nn.Linear(inputs, hidden, bias=False)
        self.first.weight = nn.Parameter(weight, requires_grad=False)
        self.second = nn.Linear(hidden, outputs, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.relu(self.first(x)))


def quantized(multiply: Callable[[Tensor, Int8Weight], Tensor]) -> Example:
    """The frozen weight has no gradient, the input needs none: only the second layer has a backward."""
    batch, inputs, hidden, outputs = 24, 16, 32, 8
    first, second = 2 * batch * inputs * hidden, 2 * batch * hidden * outputs
    model = Quantized((inputs, hidden, outputs), multiply)
    return Example(model, torch.randn(batch, inputs)).costs(
        first + second, second, by_module={"first": (first,), "second": (second, second)}
    )


# The integers are turned into floats, and those multiply.
FAMILY.put("weight_of_integers", lambda: quantized(in_floats))
# The product itself runs on integers.
FAMILY.put("product_of_integers", lambda: quantized(in_integers))
