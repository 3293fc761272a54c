"""A module whose matrix is multiplied where torch's dispatcher does not see it is listed, and nothing else is."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_flops import count_flops


class OfPython(torch.autograd.Function):
    """A product that torch does not see: numpy's."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        return torch.from_numpy(x.detach().numpy() @ weight.detach().numpy().T)


class Bound(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return OfPython.apply(x, self.weight)  # type: ignore[no-any-return, no-untyped-call]


class Packed(nn.Module):
    """Its matrix is no parameter, and the kernel takes a copy of it."""

    weight: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("weight", torch.ones(8, 16, dtype=torch.int8))

    def forward(self, x: Tensor) -> Tensor:
        return OfPython.apply(x, self.weight.t().contiguous().float())  # type: ignore[no-any-return, no-untyped-call]


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, 8))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight.to(torch.float64)


class Queries(Scale):
    def forward(self, x: Tensor) -> Tensor:
        return x + 0 if self.training and x.dim() > 2 else self.weight.unsqueeze(0).expand(1, -1, -1)


class Turned(Scale):
    def forward(self, x: Tensor) -> Any:
        return x, self.weight.to(torch.float64)


class Itself(Scale):
    def forward(self, x: Tensor) -> Tensor:
        return self.weight


def test_a_product_of_pythons_is_listed_by_its_modules_class_and_figures_are_lower_bounds() -> None:
    model = nn.Sequential(nn.Linear(8, 8, bias=False), Bound(8, 16), Bound(16, 8))
    with count_flops(model) as counts, torch.no_grad():
        model(torch.ones(4, 8))
        model(torch.ones(4, 8))
    assert counts.forward == 2 * 2 * 4 * 8 * 8  # the first layer's alone
    assert counts.is_lower_bound
    listed = counts.uncounted["Bound.forward"]
    assert (listed.calls, listed.modules) == (4, ("1", "2"))


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.inference_mode])
def test_to_copy_a_matrix_is_not_to_multiply_it(mode: Any) -> None:
    """In inference mode ``contiguous`` and ``float`` arrive undecomposed."""
    with count_flops(model := Packed()) as counts, mode():
        model(torch.ones(4, 8))
    assert list(counts.uncounted) == ["Packed.forward"]


def test_a_layer_that_is_first_called_in_inference_mode_is_listed_too() -> None:
    model = Bound(8, 16)
    with count_flops(model) as counts:
        with torch.inference_mode():
            model(torch.ones(4, 8))
        model(torch.ones(4, 8))
    assert counts.uncounted["Bound.forward"].calls == 2


@pytest.mark.parametrize(
    "layer",
    [
        *(
            nn.Linear(8, 8),
            Scale(),
            Queries(),
            Turned(),
            Itself(),
            nn.Embedding(5, 8),
            nn.LayerNorm((4, 8)),
            nn.LSTM(8, 8),
        ),
        *(nn.Conv1d(4, 4, 1), nn.utils.parametrizations.weight_norm(nn.Linear(8, 8)), nn.GRUCell(8, 8)),
        *(nn.MultiheadAttention(8, 2), nn.Linear(8, 8).double(), torch.compile(nn.Linear(8, 8), backend="eager")),
    ],
    ids=lambda layer: type(layer).__name__,
)
@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_what_reads_its_matrix_in_any_way_is_not(layer: Any, mode: Any) -> None:
    x = torch.ones(4, 8, dtype=next(layer.parameters()).dtype)
    given: tuple[Tensor, ...] = (torch.tensor([[1, 2]]),) if isinstance(layer, nn.Embedding) else (x,)
    model = nn.ModuleDict({"layer": layer})
    with count_flops(model) as counts, mode():
        layer(*given * (3 if isinstance(layer, nn.MultiheadAttention) else 1))
    assert not counts.uncounted


def test_an_experts_layer_without_rows_and_a_layer_that_is_not_called_are_not() -> None:
    model = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])
    with count_flops(model) as counts:
        model[0](torch.ones(0, 8))
    assert not counts.uncounted
    assert not counts.is_lower_bound
