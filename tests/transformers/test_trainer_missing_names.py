"""A transformers without one of the private names that a training uses: the same run, and the report says so."""

from __future__ import annotations

from pathlib import Path

import pytest

from lightning_flops import FlopsProfilerTrainerCallback
from lightning_flops.adapters.transformers_context import LOST
from lightning_flops.run import private_names
from tests.transformers.footprint import footprint
from tests.transformers.tiny import new_net_trainer


@pytest.mark.parametrize("name", [name for name in LOST if name != "_config"])
def test_a_private_name_that_is_missing_costs_what_the_report_says(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = new_net_trainer(tmp_path)
    plain.train()
    # transformers itself needs its names: they are hidden from us alone.
    exists = private_names.exists
    monkeypatch.setattr(private_names, "exists", lambda owner, asked: asked != name and exists(owner, asked))
    callback = FlopsProfilerTrainerCallback(timing_steps=2, trace=False)
    trainer = new_net_trainer(tmp_path, callback)
    trainer.train()
    assert trainer.model.losses == plain.model.losses  # type: ignore[union-attr]
    assert callback.profile is not None
    (note,) = [note for note in callback.profile.notes if note.startswith("This transformers (")]
    assert note.endswith(f" keeps no {name}: {LOST[name]}.")
    assert footprint(trainer) == footprint(plain)
