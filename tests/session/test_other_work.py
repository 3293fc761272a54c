"""Where no step can be afforded that would show that chance decides what runs, the steps' autograd nodes show it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader

from lightning_flops import profile_training
from tests.checks import LAYERS, PRODUCT, ROWS, STEPS, WHOLE, WIDTH, Dropping
from tests.every_step import DOORS, SETTINGS, Data

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


class RarelyWhole(Dropping):
    """All of its layers run, but for every twentieth step."""

    steps = 0

    def forward(self, rows: torch.Tensor) -> dict[str, torch.Tensor]:
        """The loss, as that of the other."""
        self.steps += 1
        self.keeps = 0.0 if self.steps % 20 == 7 else 1.0
        return super().forward(rows)


def batches_of_a_loader(batches: list[torch.Tensor]) -> Iterable[torch.Tensor]:
    return DataLoader(batches, batch_size=None)  # type: ignore[arg-type]


@pytest.mark.parametrize("source", [list, iter, batches_of_a_loader])
def test_every_step_of_a_plain_loop_is_looked_at_wherever_its_batches_come_from(
    source: Callable[[list[torch.Tensor]], Iterable[torch.Tensor]],
) -> None:
    model = RarelyWhole(1.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with profile_training(model, optimizer, **SETTINGS) as profiler:
        for rows in profiler.batches(source([torch.randn(ROWS, WIDTH) for _ in range(400)])):
            model(rows)["loss"].backward()
            optimizer.step()
            optimizer.zero_grad()
    summary = profiler.throughput
    assert summary is not None and summary.model_flops is None
    (sentence,) = summary.notes
    found = re.match(r"(\d+) of (\d+) steps that were looked at", sentence)
    assert found is not None
    # Step 7 is timed. Neither the window's steps are looked at, nor those beside readings.
    assert int(found[1]) == 19 and int(found[2]) >= 350
