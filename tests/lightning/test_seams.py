"""Whatever of ours fails in a fit, wherever the session calls it: one warning, nothing left, the same training."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_flops import FlopsProfilerCallback
from tests.lightning.footprint import footprint
from tests.lightning.nets import ROOTS, loader, new_gan, new_net, new_trainer
from tests.session.seams import broken_at, seams

MAKES: dict[str, Callable[[str], Any]] = {"automatic": new_net, "manual": new_gan}
WORDS = "broken on purpose"


class Outcome:
    """Everything of one fit that a failure might change."""

    def __init__(self, kind: str, folder: Path, *callbacks: Any) -> None:
        net = MAKES[kind](ROOTS[0])
        run = new_trainer(ROOTS[0], folder, *callbacks, max_epochs=2)
        torch.manual_seed(11)
        run.fit(net, loader(7))
        self.weights = [weight.tolist() for weight in net.parameters()]
        self.losses = getattr(net, "losses", None)
        self.random_state = torch.get_rng_state().tolist()
        self.run, self.net = run, net

    @property
    def training(self) -> tuple[Any, ...]:
        return self.weights, self.losses, self.random_state

    def footprint(self) -> dict[str, Any]:
        return footprint(self.run, self.net)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Outcome]]:
    yield {kind: Outcome(kind, tmp_path_factory.mktemp(kind)) for kind in MAKES}


@pytest.mark.parametrize("seam", seams("lightning_flops.adapters.lightning_fit"))
def test_a_failure_at_a_seam_is_one_warning_and_the_training_goes_on_untouched(
    seam: str, plain: dict[str, Outcome], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    kind = "manual" if "_raw_" in seam or "_without_" in seam else "automatic"
    with broken_at(seam, RuntimeError(WORDS)) as broken:
        failed = Outcome(kind, tmp_path, FlopsProfilerCallback(timing_steps=2, profile_step=1))
    assert failed.training == plain[kind].training
    assert failed.footprint() == plain[kind].footprint()
    warnings = [
        record.getMessage()
        for record in caplog.records
        if record.levelno >= logging.WARNING and WORDS in record.getMessage()
    ]
    assert len(warnings) == int(broken.called), warnings
