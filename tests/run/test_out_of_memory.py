from __future__ import annotations

import logging
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lightning_flops import FlopsProfilerCallback, profile_training
from lightning_flops.adapters.place import Frame
from lightning_flops.measure.fake_steps import in_shapes, kept_call

ROWS: Any = torch.randn(64, 4)
HUGE = 1 << 60
"""Bytes that no machine has."""


class Full(nn.Module):
    """Wants more than there is at the third batch."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.calls > 2:
            torch.empty(HUGE, dtype=torch.uint8)
        found: torch.Tensor = self.last(self.first(x).relu())
        return found


class _Grows(torch.autograd.Function):
    """Wants more in a backward than there is, if told so."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, is_full: bool) -> torch.Tensor:
        ctx.is_full = is_full
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        if ctx.is_full:
            torch.empty(HUGE, dtype=torch.uint8)
        return gradient, None


class FullBackward(nn.Module):
    """Its backward wants more than there is from a call on; it has an argument by position and one by name."""

    def __init__(self, call: int) -> None:
        super().__init__()
        self.left = call
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 2)

    def forward(self, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        self.left -= 1
        grown: torch.Tensor = _Grows.apply(self.first(x).relu(), self.left < 0)  # type: ignore[no-untyped-call]
        found: torch.Tensor = self.last(grown) * scale
        return found


@pytest.fixture
def warnings(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    with caplog.at_level(logging.WARNING, logger="lightning_flops"):
        yield caplog


def test_a_loop_that_runs_out_of_memory_gets_the_account_of_its_step(
    tmp_path: Path, warnings: pytest.LogCaptureFixture
) -> None:
    model = Full()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before, attributes = {}, dict[str, Any]()
    with (
        pytest.raises(RuntimeError, match="DefaultCPUAllocator"),
        profile_training(model, optimizer, log_dir=str(tmp_path), profile_step=10),
    ):
        for batch in torch.utils.data.DataLoader(ROWS, batch_size=16):
            before, attributes = {key: one.clone() for key, one in model.state_dict().items()}, dict(vars(model))
            model(batch).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert all(torch.equal(one, before[key]) for key, one in model.state_dict().items())
    assert vars(model) == {**attributes, "calls": 3}
    (said,) = [one for one in warnings.messages if one.startswith("out of memory")]
    assert "a step would take this. Peak 1.15 EB with a batch of 16, in the forward of the root (aten.empty" in said
    text = (tmp_path / "lightning_flops" / "out_of_memory.txt").read_text()
    assert "Predicted memory" in text and "temporary" in text


@pytest.mark.parametrize("call", [0, 2])
def test_a_backward_that_runs_out_of_memory_is_accounted_for_in_the_shapes_of_its_batch(
    call: int, tmp_path: Path, warnings: pytest.LogCaptureFixture
) -> None:
    """The first, and a larger one later; of no batch more than its shapes is kept."""
    model, batches = FullBackward(call), list[weakref.ref[torch.Tensor]]()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with (
        pytest.raises(RuntimeError, match="DefaultCPUAllocator"),
        profile_training(model, optimizer, log_dir=str(tmp_path), profile_step=10),
    ):
        for rows in (16, 16, 48):
            x = torch.randn(rows, 4)
            batches.append(weakref.ref(x))
            assert [one() is None for one in batches[:-1]] == [True] * (len(batches) - 1)
            model(x, scale=torch.ones(rows, 1)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    (said,) = [one for one in warnings.messages if one.startswith("out of memory")]
    assert f"Peak 1.15 EB with a batch of {len(x)}, in the backward of the root (aten.empty" in said
    assert len(x) == (48 if call else 16)


def test_arguments_that_may_hold_tensors_unseen_are_not_kept() -> None:
    tensor = torch.ones(2, 3, dtype=torch.int64)
    given = {"ids": tensor, "labels": tensor, "scale": 2.0}
    call = kept_call(nn.Identity(), (), given, given)
    assert call[1]["ids"] is call[1]["labels"] and call[1]["ids"].is_meta
    name, other = in_shapes(call, ((5, 7), (5, 7))) or ("", {})
    assert other["ids"] is other["labels"] and (other["ids"].shape, other["ids"].dtype) == ((5, 7), torch.int64)
    assert (name, other["scale"]) == ("__call__", 2.0)
    assert in_shapes(call, ((5, 7),)) is in_shapes(call, ((5,), (5,))) is in_shapes((), ()) is None
    hides = kept_call(nn.Identity(), (tensor, nn.Linear(2, 2)), {}, (tensor, nn.Linear(2, 2)))
    assert in_shapes(hides, (tuple(tensor.shape),)) is None


def test_out_of_memory_outside_of_every_step_is_said_and_another_error_is_not(
    tmp_path: Path, warnings: pytest.LogCaptureFixture
) -> None:
    model = nn.Linear(4, 2)
    fails: Any = lambda: torch.ones(2, 3).mm(torch.ones(2, 3))  # noqa: E731
    for raised in (lambda: torch.empty(HUGE, dtype=torch.uint8), lambda: 1 / 0, fails):
        with pytest.raises((RuntimeError, ZeroDivisionError)), profile_training(model, log_dir=str(tmp_path)):
            raised()
    said = [one for one in warnings.messages if one.startswith("out of memory")]
    by_hand = "predict_memory(model, batch, optimizer) says what a step takes"
    assert said == [f"out of memory: what the model was called with is not known; {by_hand}"]
    assert not list(tmp_path.rglob("out_of_memory*"))


@pytest.mark.parametrize("rank", [0, 1])
def test_of_several_ranks_the_first_alone_says_it(
    rank: int, monkeypatch: pytest.MonkeyPatch, warnings: pytest.LogCaptureFixture
) -> None:
    frame = Frame(framework="torch", rank=rank, world_size=2, strategy="", precision=lambda _: "fp32")
    monkeypatch.setattr("lightning_flops.pytorch.frame_of", lambda model, **_: frame)
    with pytest.raises(RuntimeError, match="DefaultCPUAllocator"), profile_training(nn.Linear(4, 2)):
        torch.empty(HUGE, dtype=torch.uint8)
    said = [one for one in warnings.messages if one.startswith("out of memory: of several ranks no step is predicted")]
    assert len(said) == 1 - rank


@pytest.mark.parametrize(
    ("net", "where"), [(Full(), "forward of net"), (FullBackward(2), "backward of net")], ids=["forward", "backward"]
)
def test_a_trainer_that_runs_out_of_memory_gets_the_account_of_its_training_step(
    net: Any, where: str, tmp_path: Path, warnings: pytest.LogCaptureFixture
) -> None:
    lightning: Any = pytest.importorskip("lightning.pytorch")

    class Module(lightning.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.net = net

        def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
            given = (batch, torch.ones(len(batch), 1))[: 1 + isinstance(net, FullBackward)]
            loss = self.net(*given).sum()
            self.log("loss", loss)
            return loss  # type: ignore[no-any-return]

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters())

    model = Module()
    trainer = lightning.Trainer(
        max_epochs=1,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=tmp_path,
        callbacks=[FlopsProfilerCallback(profile_step=10)],
    )
    with pytest.raises(RuntimeError, match="DefaultCPUAllocator"):
        trainer.fit(model, torch.utils.data.DataLoader(ROWS, batch_size=16))
    (said,) = [one for one in warnings.messages if one.startswith("out of memory")]
    assert f"Peak 1.15 EB with a batch of 16, in the {where} (aten.empty" in said
    assert "log" not in vars(model)
    assert list(tmp_path.rglob("out_of_memory.txt"))
    assert all(parameter.grad is None or type(parameter.grad) is torch.Tensor for parameter in model.parameters())
