from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import TrainerCallback

from lightning_flops import FlopsProfilerTrainerCallback
from tests.calls import OurCalls
from tests.transformers.tiny import ROWS, Rows, new_net_trainer


class Steps(TrainerCallback):
    """Tells *calls* of each step."""

    def __init__(self, calls: OurCalls) -> None:
        self.calls = calls

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        self.calls.step_begins()


@pytest.mark.parametrize(("monitor", "most"), [(True, 9), (False, 3)])
def test_a_step_between_windows_costs_few_calls_of_ours(
    monitor: bool, most: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # On a busy machine the run takes long enough to afford one more counted step.
    monkeypatch.setattr("lightning_flops.run.run.SHARE", 1e-6)
    calls = OurCalls(first=110, last=210)
    profiler = FlopsProfilerTrainerCallback(timing_steps=5, trace=False, monitor=monitor)
    trainer = new_net_trainer(tmp_path, profiler, Steps(calls), rows=Rows(220 * ROWS), logging_steps=1000)
    trainer.train()
    assert len(profiler.profiles) == 1
    assert calls.a_step <= most, calls.calls
