"""Phases of a training step of Lightning's, by itself and inside a strategy's wrapper: FLOPs by hand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.forks import LIGHTNING, run_fork

PROGRAM = """
import json, sys
import torch
from lightning.pytorch import LightningModule, Trainer
from torch import nn
from lightning_flops import FlopsProfilerCallback

WIDTH, ROWS, TOKENS = 8, 4, 5
FORWARD = 2 * ROWS * WIDTH * WIDTH


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, rows):
        return self.layer(rows)

    def generate(self, rows):
        for _ in range(TOKENS):
            rows = self(rows)
        return rows.new_zeros(len(rows), WIDTH + TOKENS)


class Net(LightningModule):
    def __init__(self, manual):
        super().__init__()
        self.policy, self.reference = Policy(), Policy().requires_grad_(False)
        self.automatic_optimization = not manual

    def training_step(self, batch, batch_idx):
        rows = batch[0]
        with torch.no_grad():
            self.policy.generate(rows)
            self.reference(rows)
        if self.automatic_optimization:
            return self.policy(rows).sum()
        optimizer = self.optimizers()
        for _ in range(2):
            optimizer.zero_grad()
            self.manual_backward(self.policy(rows).sum())
            optimizer.step()

    def configure_optimizers(self):
        return torch.optim.SGD(self.policy.parameters(), lr=0.1)


strategy, manual = sys.argv[1], sys.argv[2] == "manual"
profiler = FlopsProfilerCallback(profile_step=2, timing_steps=2, trace=False, lines=False, monitor=False)
quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
trainer = Trainer(max_epochs=1, callbacks=[profiler], accelerator="cpu", devices=1, strategy=strategy, **quiet)
data = torch.utils.data.TensorDataset(torch.ones(12 * ROWS, WIDTH))
trainer.fit(Net(manual), torch.utils.data.DataLoader(data, batch_size=ROWS))
profile = profiler.profile
assert sum(one.flops for one in profile.phases.values()) == profile.flops.model
assert abs(sum(one.seconds for one in profile.phases.values()) - profile.timing.global_step_sec) < 1e-9
print(json.dumps({name: one.flops / FORWARD for name, one in profile.phases.items()}))
"""


@pytest.mark.parametrize("strategy", ["auto", "ddp"])  # DistributedDataParallel runs the step as its module's forward
@pytest.mark.parametrize(("optimization", "training"), [("automatic", 2), ("manual", 4)])
def test_a_training_step_has_its_rollout_and_its_scoring(
    strategy: str, optimization: str, training: int, tmp_path: Path
) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    run = run_fork(["-W", "ignore", "program.py", strategy, optimization], folder=tmp_path, imports=LIGHTNING)
    assert run.returncode == 0, run.stderr[-4000:]
    found = json.loads(run.stdout.splitlines()[-1])
    # Of the training: a forward and a backward of as much, as rows need no gradient, once or twice.
    assert found == {"rollout": 5, "scoring": 1, "training": training, "rest": 0}
