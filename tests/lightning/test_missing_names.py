"""A Lightning that has lost one of the private names that a fit uses: the run is the same, and the report says so."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lightning_flops import FlopsProfilerCallback
from lightning_flops.adapters.lightning_context import LOST
from lightning_flops.run import private_names
from tests.lightning.footprint import footprint
from tests.lightning.nets import ROOTS, loader, new_net, new_trainer


@pytest.mark.parametrize("name", LOST)
def test_a_private_name_that_is_missing_costs_what_the_report_says(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def net_of_a_user_with_hooks() -> Any:
        net = new_net(ROOTS[0])
        kind = type(net)
        zero_grad = {"optimizer_zero_grad": lambda self, epoch, batch_idx, optimizer: optimizer.zero_grad()}
        net.__class__ = type(kind.__name__, (kind,), zero_grad)
        return net

    plain_run, plain = new_trainer(ROOTS[0], tmp_path), net_of_a_user_with_hooks()
    plain_run.fit(plain, loader(12))

    # Lightning itself needs its names: they are hidden from us alone.
    exists = private_names.exists
    monkeypatch.setattr(private_names, "exists", lambda owner, asked: asked != name and exists(owner, asked))
    callback = FlopsProfilerCallback(timing_steps=2)
    run, net = new_trainer(ROOTS[0], tmp_path, callback), net_of_a_user_with_hooks()
    run.fit(net, loader(12))
    assert net.losses == plain.losses
    assert callback.profile is not None
    (note,) = [note for note in callback.profile.notes if note.startswith("This Lightning (")]
    assert note.endswith(f" keeps no {name}: {LOST[name]}.")
    found, expected = footprint(run, net), footprint(plain_run, plain)
    assert found == expected
