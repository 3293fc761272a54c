"""The profiler itself fails, somewhere: training does not notice."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import torch
from torch.utils.data import DataLoader, TensorDataset

from lightning_flops.adapters.deepspeed import EngineAdapter
from lightning_flops.run.run import Run
from tests.deepspeed.engines import BLOCK, SAMPLES, config, engine_of, installed, left_on, logged
from tests.deepspeed.scenario import scenario

STEPS = 10
PLACES: dict[type, str] = {
    EngineAdapter: "_hear mark_parts context _logs _work_begins",
    Run: "begin fetch_begins fetch_ends batch_begins enter leave outside inside claim batch_done log context finish",
}
"""Methods that the profiler is made to fail in: each is a hook, or what a hook calls."""


def _trained(block: Any) -> tuple[list[str], Any]:
    rows = torch.randn(STEPS * SAMPLES, 8, generator=torch.Generator().manual_seed(7))
    losses = []
    engine = engine_of({**config(block=block), "steps_per_print": 4})
    for (batch,) in DataLoader(TensorDataset(rows), batch_size=SAMPLES):
        loss = engine(batch).square().sum()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item().hex())
    engine.destroy()
    return losses, engine


@scenario()
def a_failure_of_ours_at_any_hook_is_one_warning_and_the_training_goes_on_untouched() -> None:
    plain, _ = _trained(None)
    for owner, names in PLACES.items():
        for name in names.split():
            broken = patch.object(owner, name, side_effect=RuntimeError("broken on purpose"))
            with installed(), logged() as lines, broken as raises:
                losses, engine = _trained({**BLOCK, "profile_step": 1, "monitor": True})
            assert (losses, raises.called, left_on(engine)) == (plain, True, []), name
            assert sum("broken on purpose" in line for line in lines) == 1, (name, lines)
