from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from torch import nn
from torch.utils.data import DataLoader

from lightning_flops import FlopsProfilerCallback
from tests.calls import OurCalls


class Net(LightningModule):
    """Tells *calls* of each step."""

    def __init__(self, calls: OurCalls) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)
        self.calls = calls

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        self.calls.step_begins()
        return self.layer(batch[0]).square().mean()  # type: ignore[no-any-return]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


@pytest.mark.parametrize("lengths", [False, True], ids=["equal", "ever new"])
def test_a_step_between_windows_costs_few_calls_of_ours(
    lengths: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # On a busy machine the run takes long enough to afford one more counted step.
    monkeypatch.setattr("lightning_flops.session.session.SHARE", 1e-6)
    calls = OurCalls(first=110, last=210)
    batches = [[torch.ones(4, 3), torch.empty(1 + (index if lengths else 0))] for index in range(220)]
    trainer = Trainer(
        accelerator="cpu",
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=tmp_path,
        log_every_n_steps=1000,
        callbacks=[FlopsProfilerCallback(timing_steps=5, trace=False)],
    )
    loader: DataLoader[Any] = DataLoader(batches, batch_size=None)  # type: ignore[arg-type]
    trainer.fit(Net(calls), loader)
    assert calls.a_step <= 8.1, calls.calls  # an add-up now and then
