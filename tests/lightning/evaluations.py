"""A net with a step for each loop that does not train, and how such a loop is run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from tests.fake_clock import FakeNow
from tests.lightning.nets import new_net

LOOPS = ("predict", "test", "validate")


def new_evaluated_net(*, now: FakeNow | None = None, hook: Callable[[str], None] = lambda part: None) -> Any:
    """``nets.new_net`` with a predict, a test and a validation step of 2 s each; *hook* hears where a step is."""
    base: Any = type(new_net())
    sleep = now.sleep if now is not None else lambda seconds: None

    class Evaluated(base):  # type: ignore[misc]
        def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            hook("transfer")
            return batch

        def _evaluate(self, batch: Any) -> torch.Tensor:
            hook("step")
            sleep(2.0)
            hidden = self.net[0](batch[0])
            hook("layer")
            result: torch.Tensor = self.net[1](hidden)
            return result

        def predict_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            return self._evaluate(batch)

        def test_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            loss = nn.functional.mse_loss(self._evaluate(batch), batch[1])
            self.log("loss", loss)
            return loss

        validation_step = test_step

        def on_predict_batch_end(self, *args: Any) -> None:
            hook("batch end")

        on_test_batch_end = on_validation_batch_end = on_predict_batch_end

    torch.manual_seed(3)
    return Evaluated()


def run(trainer: Any, function: str, net: Any, loaders: Any) -> Any:
    """Call *function* of *trainer*, quietly."""
    quiet = {} if function == "predict" else {"verbose": False}
    return getattr(trainer, function)(net, loaders, **quiet)
