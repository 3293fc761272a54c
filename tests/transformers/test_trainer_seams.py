"""Whatever of ours fails in a training of transformers: one warning, nothing left, the same training."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_flops import FlopsProfilerTrainerCallback
from tests.session.seams import broken_at, each_seam
from tests.transformers.footprint import footprint
from tests.transformers.tiny import ROWS, Rows, new_net_trainer

WORDS = "broken on purpose"


class Outcome:
    """Everything of one training that a failure might change."""

    def __init__(self, folder: Path, *callbacks: Any) -> None:
        trainer = new_net_trainer(
            folder, *callbacks, rows=Rows(7 * ROWS), num_train_epochs=2, gradient_accumulation_steps=2, logging_steps=3
        )
        trainer.train()
        net: Any = trainer.model
        self.training = net.losses, [weight.tolist() for weight in net.parameters()], torch.get_rng_state().tolist()
        self.footprint = footprint(trainer)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    return Outcome(tmp_path_factory.mktemp("plain"))


@pytest.mark.parametrize(
    "seam", each_seam("transformers", "lightning_flops.adapters.hf_trainer", "lightning_flops.adapters.hf_context")
)
def test_a_failure_at_a_seam_is_one_warning_and_the_training_goes_on_untouched(
    seam: str, plain: Outcome, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with broken_at(seam, RuntimeError(WORDS)) as broken:
        failed = Outcome(tmp_path, FlopsProfilerTrainerCallback(timing_steps=2, profile_step=1, trace=False))
    assert failed.training == plain.training
    assert failed.footprint == plain.footprint
    warnings = [
        record.getMessage()
        for record in caplog.records
        if record.levelno >= logging.WARNING and WORDS in record.getMessage()
    ]
    assert len(warnings) == int(broken.called), warnings
