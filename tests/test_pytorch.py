"""``count_flops`` around plain PyTorch loops."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException
from torch.utils.flop_counter import FlopCounterMode

import lightning_flops
from lightning_flops.errors import LightningFlopsError
from lightning_flops.pytorch import count_flops, count_offline
from lightning_flops.records import PhaseFlops

FIRST = 2 * 2 * 3 * 5  # a batch of 2 through Linear(3, 5)
SECOND = 2 * 2 * 5 * 7  # and through Linear(5, 7)


def model_of_two() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 7))


def test_a_training_step_is_counted_forward_and_backward_by_module() -> None:
    model = model_of_two()
    optimizer = torch.optim.AdamW(model.parameters())
    with count_flops(model) as counts:
        model(torch.randn(2, 3)).sum().backward()
        optimizer.step()
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


def test_counts_are_live_inside_the_block_and_final_after_it() -> None:
    model = model_of_two()
    with count_flops(model) as counts:
        assert counts.forward == 0
        output = model(torch.randn(2, 3))
        assert (counts.forward, counts.backward) == (FIRST + SECOND, 0)
        output.sum().backward()
    model(torch.randn(2, 3))
    assert (counts.forward, counts.backward) == (FIRST + SECOND, FIRST + 2 * SECOND)


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


def test_an_unknown_way_to_count_causal_attention_is_refused() -> None:
    with pytest.raises(ValueError, match="causal_attention must be"), count_flops(None, causal_attention="some"):  # type: ignore[arg-type]
        pass


def test_the_public_names_are_these() -> None:
    assert lightning_flops.count_flops is count_flops


def test_an_offline_count_is_that_of_the_eager_step_and_touches_nothing() -> None:
    model = model_of_two()
    model.append(nn.Dropout(0.5))
    weights = [parameter.detach().clone() for parameter in model.parameters()]
    random = torch.get_rng_state()
    counts = count_offline(model, torch.empty(2, 3))
    assert counts.by_module()["0"] == PhaseFlops(forward=FIRST, backward=FIRST)
    assert counts.by_module()["2"] == PhaseFlops(forward=SECOND, backward=2 * SECOND)
    assert torch.equal(torch.get_rng_state(), random)
    assert all(torch.equal(old, new) for old, new in zip(weights, model.parameters(), strict=True))
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("batch", [(torch.empty(2, 3),), {"input": torch.empty(2, 3)}])
def test_an_offline_count_takes_positional_and_keyword_arguments(batch: object) -> None:
    assert count_offline(model_of_two(), batch).forward == FIRST + SECOND


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:The .grad attribute of a Tensor:UserWarning")
def test_an_offline_count_of_a_compiled_model_is_the_eager_one() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 5)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = self.layer(x) + self.layer(x)
            return result

    compiled = torch.compile(Twice(), backend="eager")
    assert isinstance(compiled, nn.Module)
    assert count_offline(compiled, torch.empty(2, 3)).by_module()["layer"].forward == 2 * FIRST


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


def test_an_offline_count_that_raises_leaves_the_model_as_it_was() -> None:
    class Needy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 5)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.last = self.layer(x)
            return x if self.last.sum() > 0 else -x

    model = Needy()
    with pytest.raises(DataDependentOutputException):
        count_offline(model, torch.empty(2, 3))
    assert not hasattr(model, "last")


def test_an_offline_count_leaves_a_weight_that_a_hook_computes() -> None:
    model = nn.utils.spectral_norm(nn.Linear(3, 5))
    weight = model.weight
    assert count_offline(model, torch.empty(2, 3)).backward == FIRST
    assert model.weight is weight


def test_counts_do_not_keep_the_model_alive() -> None:
    model = model_of_two()
    with count_flops(model) as counts:
        model(torch.randn(2, 3)).sum().backward()
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None
    assert counts.forward == FIRST + SECOND


def rows_of(text: str) -> dict[str, list[str]]:
    """The table's cells by module."""
    lines = [line.split() for line in text.split("\n") if line.strip() and not line.startswith("-")]
    return {cells[0] if cells[0] != "Sequential" else "": cells[1:] for cells in lines}


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
    assert "module       params  weight shapes  FLOPs forward  FLOPs backward" in text
    rows = rows_of(text)
    # 3 * 5 + 5 and 5 * 7 + 7 parameters; FLOPs as above.
    assert rows[""] == ["62", str(FIRST + SECOND), str(FIRST + 2 * SECOND)]
    assert rows["0:"] == ["Linear", "20", "5x3,", "5", str(FIRST), str(FIRST)]
    assert rows["1:"] == ["ReLU", "0", "0", "0"]
    assert rows["2:"] == ["Linear", "42", "7x5,", "7", str(SECOND), str(2 * SECOND)]
    assert "<td" in counts._repr_html_()


def test_an_offline_count_prints_the_same_table_as_the_run() -> None:
    model = model_of_two()
    with count_flops(model) as counts:
        model(torch.randn(2, 3)).sum().backward()
    assert str(count_offline(model, torch.empty(2, 3))) == str(counts)


def test_equal_layers_are_one_row_and_layers_of_other_shapes_are_not() -> None:
    # Both have 12 weights, and so have the same FLOPs: 2 FLOPs of each weight and sample.
    model = nn.ModuleList([nn.Linear(3, 4, bias=False), nn.Linear(3, 4, bias=False), nn.Linear(4, 3, bias=False)])
    with count_flops(model) as counts:
        for layer, inputs in zip(model, (3, 3, 4), strict=True):
            layer(torch.zeros(2, inputs))
    lines = [" ".join(line.split()) for line in str(counts).split("\n")]
    assert "0-1: 2 x Linear 12 4x3 48 0" in lines
    assert "2: Linear 12 3x4 48 0" in lines


def test_a_model_that_cannot_be_described_is_counted_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*args: object, **kwargs: object) -> object:
        raise RuntimeError("no")

    monkeypatch.setattr("lightning_flops.pytorch.describe_modules", failing)
    model = model_of_two()
    with count_flops(model) as counts:
        model(torch.randn(2, 3))
        inside = str(counts)
    for text in (inside, str(counts)):
        assert rows_of(text)["2:"] == ["(not", "described)", "n/a", "n/a", str(SECOND), "0"]
    assert (counts.forward, count_offline(model, torch.empty(2, 3)).forward) == (FIRST + SECOND, FIRST + SECOND)


def test_no_code_of_the_users_is_asked_for_the_table() -> None:
    class Watched(nn.Linear):
        asked = 0

        def extra_repr(self) -> str:
            Watched.asked += 1
            return ""

    with count_flops(Watched(3, 5)) as counts:
        pass
    str(counts)
    assert Watched.asked == 0


def test_counts_show_their_phases_and_what_they_lack() -> None:
    with count_flops(None) as counts:
        torch.zeros(100, 20) @ torch.zeros(20, 3)
        assert repr(counts) == "<FlopCounts forward=12,000, backward=0, recompute=0, optimizer=0>"
        torch.ops.lightning_flops_tests.gemm_nobody_knows(torch.zeros(3))
    assert repr(counts) == (
        "<FlopCounts forward=12,000, backward=0, recompute=0, optimizer=0, uncounted=1 operator, a lower bound>"
    )


@torch.library.custom_op("lightning_flops_tests::gemm_nobody_knows", mutates_args=())
def gemm_nobody_knows(x: torch.Tensor) -> torch.Tensor:
    """An operator that no formula is registered for, and that calls nothing of torch's."""
    return torch.from_numpy(x.numpy() + 1)


def test_an_offline_count_of_a_lazy_model_says_what_it_lacks() -> None:
    with pytest.raises(LightningFlopsError, match=r"shapes of all parameters, and 0\.bias, 0\.weight of lazy modules"):
        count_offline(nn.Sequential(nn.LazyLinear(5)), torch.empty(2, 3))


def test_what_is_no_module_is_named() -> None:
    function: Any = torch.relu
    with pytest.raises(TypeError, match=r"model must be a torch.nn.Module, got builtin_function_or_method"):
        count_offline(function, torch.ones(2))
    with pytest.raises(TypeError, match=r"model must be a torch.nn.Module, got builtin_function_or_method"):
        count_flops(function).__enter__()
