"""Where no step can be afforded that would show that chance decides what runs, the steps' autograd nodes show it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.checks import LAYERS, PRODUCT, ROWS, STEPS, WHOLE, WIDTH, Dropping
from tests.every_step import DOORS, Data

HERE = [door for door in DOORS if door != "DeepSpeed"]


@pytest.fixture(autouse=True)
def no_step_is_counted_outside_of_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_flops.session.session.SHARE", 1e-6)


@pytest.mark.parametrize("door", HERE)
@pytest.mark.parametrize("keeps", [1.0, 0.5])
def test_steps_of_the_same_shapes(door: str, keeps: float, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(3)
    model = Dropping(keeps).train()
    batches = tuple({"rows": torch.randn(ROWS, WIDTH)} for _ in range(STEPS))
    summary = DOORS[door](model, Data((), batches), tmp_path, True).summary
    assert summary is not None and summary.steps_checked == 0
    if keeps == 1.0:
        assert WHOLE == STEPS * LAYERS * 3 * PRODUCT == summary.model_flops
        assert summary.notes == ()
        return
    assert model.ran < STEPS * LAYERS
    assert summary.model_flops is None
    (sentence,) = summary.notes
    assert "added another number of nodes to autograd's graph than most steps of the same shapes" in sentence
    warnings = [record.getMessage() for record in caplog.records if record.name.startswith("lightning_flops")]
    assert len([one for one in warnings if "another number of nodes" in one]) == 1, "said once"
