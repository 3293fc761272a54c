"""Counting leaves no trace: not on torch, not on the model, not in the numbers a training step computes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch._dynamo  # adds to the warning filters when it is first imported, which is not ours to undo
from torch import Tensor, nn

from lightning_flops.measure.counting.flop_counter import FlopCounter
from lightning_flops.pytorch import count_flops
from tests.left_on_torch import torch_state_and_warnings


def small_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.Dropout(0.5), nn.Tanh(), nn.Linear(5, 7))


def model_state(model: nn.Module) -> list[tuple[int, dict[str, Any]]]:
    return [(id(module), {**vars(module), "hooks": dict(module._forward_hooks)}) for module in model.modules()]


def run_step(model: nn.Module, *, seed: int = 1) -> None:
    torch.manual_seed(seed)
    model(torch.randn(2, 3)).square().sum().backward()


def test_nothing_is_left_on_torch_or_on_the_model() -> None:
    model = small_model()
    before, model_before = torch_state_and_warnings(), model_state(model)
    with count_flops(model) as counts:
        run_step(model)
    assert counts.forward > 0
    assert torch_state_and_warnings() == before
    assert [(key, sorted(values)) for key, values in model_state(model)] == [
        (key, sorted(values)) for key, values in model_before
    ]


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_a_forward_that_raises_leaves_later_modules_their_own_work(error: type[BaseException]) -> None:
    class Raising(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(3, 5)
            self.fails = True

        def forward(self, x: Tensor) -> Tensor:
            x = self.inner(x)
            if self.fails:
                raise error("on purpose")
            return x

    model = nn.ModuleDict({"raising": Raising(), "after": nn.Linear(3, 7)})
    before = torch_state_and_warnings()
    with count_flops(model) as counts:
        with pytest.raises(error):
            model["raising"](torch.randn(2, 3))
        model["after"](torch.randn(2, 3))
    assert torch_state_and_warnings() == before
    assert counts.own_by_module()["raising.inner"].forward == 2 * 2 * 3 * 5
    assert counts.own_by_module()["after"].forward == 2 * 2 * 3 * 7


@pytest.mark.parametrize("optimizer_class", [torch.optim.SGD, torch.optim.AdamW])
def test_losses_weights_and_random_state_are_bit_identical(optimizer_class: Any) -> None:
    def train(*, counted: bool) -> tuple[list[float], list[Tensor], Tensor]:
        model = small_model()
        optimizer = optimizer_class(model.parameters(), lr=0.1)
        counter = FlopCounter(model)
        losses = []
        torch.manual_seed(3)
        for step in range(4):
            optimizer.zero_grad()
            if counted and step == 1:
                with counter:
                    loss = model(torch.randn(2, 3)).square().sum()
                    loss.backward()
                    optimizer.step()
            else:
                loss = model(torch.randn(2, 3)).square().sum()
                loss.backward()
                optimizer.step()
            losses.append(loss.item())
        return losses, [parameter.detach().clone() for parameter in model.parameters()], torch.get_rng_state()

    plain_losses, plain_weights, plain_random = train(counted=False)
    losses, weights, random = train(counted=True)
    assert losses == plain_losses
    assert all(torch.equal(mine, plain) for mine, plain in zip(weights, plain_weights, strict=True))
    assert torch.equal(random, plain_random)


def test_a_formula_that_raises_lists_its_operator_and_training_goes_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from lightning_flops.measure.counting.formulas import registry

    def broken(args: Any, kwargs: Any, out: Any) -> int:
        raise ZeroDivisionError("no such shape")

    monkeypatch.setitem(registry.user_formulas, "aten::addmm", broken)
    registry.forget_entries()
    try:
        model = small_model()
        with count_flops(model) as counts:
            run_step(model)
            run_step(model)
    finally:
        monkeypatch.undo()
        registry.forget_entries()
    assert counts.uncounted["aten.addmm"].calls == 4
    assert counts.uncounted["aten.addmm"].modules == ("0", "3")
    assert counts.is_lower_bound
    warned = [record.getMessage() for record in caplog.records if "aten.addmm" in record.getMessage()]
    assert len(warned) == 1


def test_a_failure_of_the_counter_itself_is_noted_once_and_breaks_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from lightning_flops.measure.counting import attribution

    model = small_model()
    run_step(model)
    plain = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()

    def fail(*args: Any) -> Any:
        raise ZeroDivisionError("a defect of ours")

    monkeypatch.setattr(attribution, "graph_task_id", fail)
    with count_flops(model) as counts:
        run_step(model)
    for parameter, gradient in zip(model.parameters(), plain, strict=True):
        assert parameter.grad is not None and gradient is not None
        assert torch.equal(parameter.grad, gradient)
    assert any("a defect of ours" in note for note in counts.notes)
    assert len([record for record in caplog.records if "a defect of ours" in record.getMessage()]) == 1


def test_lazy_conjugates_are_resolved_as_without_a_counter() -> None:
    matrix = torch.randn(3, 3, dtype=torch.complex64)
    plain = torch.linalg.pinv(matrix)
    with count_flops(None):
        counted = torch.linalg.pinv(matrix)
    assert torch.equal(counted, plain)
