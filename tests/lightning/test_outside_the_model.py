"""FLOPs of what runs in no module of the model: a loss is the model's forward, a callback's work is not. By hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_flops import FlopsProfilerCallback, profile_training
from tests.results import profile_of

ROWS, WIDTH = 4, 8
LAYER = 2 * ROWS * WIDTH * WIDTH  # a product of the rows with a square matrix
ALIKE = 2 * ROWS * ROWS * WIDTH  # of the rows with themselves
SQUARE = 2 * WIDTH**3  # of two square matrices


def rows() -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.randn(20 * ROWS, WIDTH)), ROWS)


def norm_of(weight: Tensor) -> None:
    """What people log: a product and a decomposition, of a parameter that wants gradients."""
    torch.linalg.svdvals(weight @ weight.T)


@pytest.mark.parametrize("logs", [True, False])
def test_in_a_loop_the_loss_is_forward_and_what_precedes_and_follows_it_is_not(logs: bool, tmp_path: Path) -> None:
    net, mixing = nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False)), torch.randn(WIDTH, WIDTH)
    optimizer = torch.optim.SGD(net.parameters(), 0.01)
    with profile_training(net, optimizer, profile_step=3, log_dir=tmp_path, peak_flops_per_sec=1e9) as profiler:
        for (batch,) in rows():
            one = net(batch @ mixing if logs else batch)
            penalty = (one @ one.T).sum()
            loss = penalty + (one @ net(batch).T).sum()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if logs:
                norm_of(next(net.parameters()))
    profile = profile_of(profiler)
    assert profile.flops.forward == 2 * LAYER + 2 * ALIKE
    svd = sum(one.flops.outside for one in profile.operators if "svd" in one.operator)
    assert profile.flops.outside == (LAYER + SQUARE + svd if logs else 0)
    assert bool(svd) is logs
    assert profile.flops.hardware == profile.flops.model == profile.flops.forward + profile.flops.backward
    assert profile.flops.executed == profile.flops.model + profile.flops.outside
    assert ("in addition outside the model" in " ".join(str(profile).split())) is logs
    assert ("all other FLOPs at the peak" in str(profile)) is not logs
    assert profiler.throughput is not None
    assert profiler.throughput.model_flops == 20 * profile.flops.model == profiler.throughput.hardware_flops


def test_the_loss_in_a_closure_is_forward(tmp_path: Path) -> None:
    net = nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False))
    optimizer = torch.optim.LBFGS(net.parameters(), max_iter=3, tolerance_grad=0, tolerance_change=0)
    with profile_training(net, optimizer, profile_step=1, log_dir=tmp_path) as profiler:
        for (batch,) in rows():

            def closure(batch: Tensor = batch) -> Tensor:
                optimizer.zero_grad()
                out = net(batch)
                loss: Tensor = (out @ out.T).square().sum() / 1e4
                loss.backward()  # type: ignore[no-untyped-call]
                return loss

            optimizer.step(closure)  # type: ignore[no-untyped-call]  # three times
    profile = profile_of(profiler)
    assert (profile.flops.forward, profile.flops.backward) == (3 * (LAYER + ALIKE), 3 * (LAYER + 2 * ALIKE))
    assert {one.operator for one in profile.operators if one.flops.optimizer} == {"aten.dot"}


class Net(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH, bias=False)

    def training_step(self, batch: list[Tensor], _: int) -> Tensor:
        out: Tensor = self.layer(batch[0])
        return (out @ out.T).sum()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.01)


class LogsNorms(lightning.Callback):
    def on_train_batch_start(self, trainer: Any, net: Any, *_: Any) -> None:
        norm_of(net.layer.weight)

    def on_train_batch_end(self, trainer: Any, net: Any, *_: Any) -> None:
        norm_of(net.layer.weight)


def test_what_a_callback_multiplies_is_not_the_models_and_its_time_is_not_the_forwards(trainer: Any) -> None:
    profiles = []
    for others in ([], [LogsNorms()]):
        callback = FlopsProfilerCallback(profile_step=3, peak_flops_per_sec=1e9)
        trainer(*others, callback, max_epochs=1).fit(Net(), rows())
        profiles.append(profile_of(callback))
    alone, logged = profiles
    assert logged.flops.forward == alone.flops.forward == LAYER + ALIKE
    assert logged.flops.model == alone.flops.model
    assert alone.flops.outside == 0
    assert logged.flops.outside > 2 * SQUARE
    assert logged.timing is not None
    assert [part.name for part in logged.timing.parts][-1] == "other"
