"""``count_flops`` around plain PyTorch loops."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import lightning_flops
from lightning_flops.pytorch import count_flops, count_offline
from lightning_flops.records import PhaseFlops
from tests.left_on_torch import torch_state
from tests.standalone.nets import FIRST, SECOND, model_of_two


def test_a_training_step_is_counted_forward_and_backward_by_module() -> None:
    model = model_of_two()
    optimizer = torch.optim.AdamW(model.parameters())
    with count_flops(model) as counts:
        output = model(torch.randn(2, 3))
        assert (counts.forward, counts.backward) == (FIRST + SECOND, 0)
        output.sum().backward()
        optimizer.step()
    model(torch.randn(2, 3))
    # The first layer's input needs no gradient: one product there, two in the second.
    assert counts.by_module() == {
        "": PhaseFlops(forward=FIRST + SECOND, backward=FIRST + 2 * SECOND),
        "0": PhaseFlops(forward=FIRST, backward=FIRST),
        "1": PhaseFlops(),
        "2": PhaseFlops(forward=SECOND, backward=2 * SECOND),
    }
    assert counts.model_flops == counts.hardware_flops == 2 * FIRST + 3 * SECOND
    assert not counts.uncounted
    assert not counts.notes


def test_without_a_model_all_work_is_counted_outside_as_torchs_own_mode_counts_it() -> None:
    model, loss = model_of_two(), nn.Linear(7, 1)
    parameters = (*model.parameters(), *loss.parameters())

    def step() -> None:
        loss(model(torch.randn(2, 3))).sum().backward()
        torch.optim.SGD(parameters, 0.1).step()

    with count_flops() as counts:
        step()
    with FlopCounterMode(display=False) as of_torch:
        step()
    forward, backward = FIRST + SECOND + 2 * 2 * 7, FIRST + 2 * SECOND + 2 * 2 * 2 * 7
    assert counts.by_module()["(outside)"] == PhaseFlops(forward=forward, backward=backward)
    assert of_torch.get_total_flops() == forward + backward


def test_half_of_the_score_matrix_is_counted_on_request_where_attention_is_causal() -> None:
    batch, heads, sequence, size = 2, 3, 8, 4
    query, key, value = (torch.randn(batch, heads, sequence, size) for _ in range(3))

    def forward(causal_attention: str, *, causal: bool) -> int:
        with count_flops(None, causal_attention=causal_attention) as counts:  # type: ignore[arg-type]
            nn.functional.scaled_dot_product_attention(query, key, value, is_causal=causal)
        return counts.forward

    full = 2 * (2 * batch * heads * sequence * sequence * size)
    assert forward("full", causal=True) == full
    assert forward("half", causal=True) == full // 2
    assert forward("half", causal=False) == full


def test_an_offline_count_is_that_of_the_eager_step_and_touches_nothing() -> None:
    model = model_of_two()
    model.append(nn.Dropout(0.5))
    weights = [parameter.detach().clone() for parameter in model.parameters()]
    random, before = torch.get_rng_state(), torch_state()
    counts = count_offline(model, torch.empty(2, 3))
    assert torch_state() == before
    assert counts.by_module()["0"] == PhaseFlops(forward=FIRST, backward=FIRST)
    assert counts.by_module()["2"] == PhaseFlops(forward=SECOND, backward=2 * SECOND)
    assert torch.equal(torch.get_rng_state(), random)
    assert all(torch.equal(old, new) for old, new in zip(weights, model.parameters(), strict=True))
    assert all(parameter.grad is None for parameter in model.parameters())


class Rotary(nn.Module):
    """Keeps a table as long as the longest sequence seen, a count of its calls, and a layer made when first needed."""

    table: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.length = 0
        self.layer: nn.Linear | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.layer is None:
            self.layer = nn.Linear(3, 5)
        if len(x) > self.length:
            self.length = len(x)
            self.register_buffer("table", torch.ones(self.length, 5), persistent=False)
        result: torch.Tensor = self.layer(x) * self.table[: len(x)]
        self.last = result
        return result


def test_an_offline_count_leaves_in_the_model_nothing_that_its_forward_stored() -> None:
    rotary = Rotary()
    model = nn.Sequential(rotary)
    assert count_offline(model, torch.empty(2, 3)).forward == FIRST
    assert (rotary.calls, rotary.length, rotary.layer) == (0, 0, None)
    assert not hasattr(rotary, "table")
    assert not hasattr(rotary, "last")
    assert not list(model.parameters())
    out = model(torch.randn(2, 3))
    assert type(out) is torch.Tensor
    assert list(model.state_dict()) == ["0.layer.weight", "0.layer.bias"]


def test_counts_print_a_table_by_module_also_when_the_model_is_gone() -> None:
    model = model_of_two()
    with count_flops(model) as counts:
        model(torch.randn(2, 3)).sum().backward()
        inside = str(counts)
        assert (counts.forward, counts.uncounted) == (FIRST + SECOND, {})  # printing is not counted
    del model
    gc.collect()
    text = str(counts)
    assert text == inside == lightning_flops.render_text(counts)
    assert "module       params  weight shapes  forward, FLOPs  backward, FLOPs" in text
    lines = [line.split() for line in text.split("\n") if line.strip() and not line.startswith("-")]
    rows = {name: cells for name, *cells in lines}
    # 3 * 5 + 5 and 5 * 7 + 7 parameters; FLOPs as above.
    assert rows["Sequential"] == ["62", str(FIRST + SECOND), str(FIRST + 2 * SECOND)]
    assert rows["0:"] == ["Linear", "20", "5x3,", "5", str(FIRST), str(FIRST)]
    assert rows["1:"] == ["ReLU", "0", "0", "0"]
    assert rows["2:"] == ["Linear", "42", "7x5,", "7", str(SECOND), str(2 * SECOND)]
    assert "<table>" in (shown := counts._repr_html_()) and ">7x5, 7</td>" in shown


def test_counts_show_their_phases_and_what_they_lack() -> None:
    with count_flops(None) as counts:
        torch.zeros(100, 20) @ torch.zeros(20, 3)
        assert repr(counts) == "<FlopCounts forward=12,000, backward=0, recompute=0, optimizer=0>"
        torch.ops.lightning_flops_tests.gemm_without_a_formula(torch.zeros(3))
    assert repr(counts) == ("<FlopCounts forward=12,000, backward=0, recompute=0, optimizer=0, a lower bound>")


@torch.library.custom_op("lightning_flops_tests::gemm_without_a_formula", mutates_args=())
def gemm_without_a_formula(x: torch.Tensor) -> torch.Tensor:
    """An operator that no formula is registered for, and that calls nothing of torch's."""
    return torch.from_numpy(x.numpy() + 1)


def test_what_is_no_module_is_named() -> None:
    function: Any = torch.relu
    with pytest.raises(TypeError, match=r"model must be a torch.nn.Module, got builtin_function_or_method"):
        count_offline(function, torch.ones(2))
    with pytest.raises(TypeError, match=r"model must be a torch.nn.Module, got builtin_function_or_method"):
        count_flops(function).__enter__()
