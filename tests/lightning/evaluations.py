"""A net with a step for each loop that does not train, and how such a loop is run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from tests.fake_clock import FakeNow
from tests.lightning.nets import ROOT, net_class, nothing

LOOPS = ("predict", "test", "validate")


def new_evaluated_net(*, now: FakeNow | None = None, at: Callable[[str], None] = nothing) -> Any:
    """``nets.new_net`` with a predict, a test and a validation step of 2 s each."""

    class Evaluated(net_class(ROOT)):  # type: ignore[misc]
        def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            self.at("transfer")
            return batch

        def predict_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            self.at("step")
            self.sleep(2.0)
            result: torch.Tensor = self.net(batch[0])
            return result

        def test_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            loss = nn.functional.mse_loss(self.predict_step(batch, batch_idx), batch[1])
            self.log("loss", loss)
            return loss

        validation_step = test_step

        def on_predict_batch_end(self, *args: Any) -> None:
            self.at("batch end")

        on_test_batch_end = on_validation_batch_end = on_predict_batch_end

    torch.manual_seed(3)
    return Evaluated(now=now, at=at, manual=False)


def run(trainer: Any, function: str, net: Any, loaders: Any) -> Any:
    """Call *function* of *trainer*, quietly."""
    quiet = {} if function == "predict" else {"verbose": False}
    return getattr(trainer, function)(net, loaders, **quiet)
