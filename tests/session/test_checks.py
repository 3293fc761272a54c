"""Where shapes never change, a step is counted once more now and then, and shows whether all spend the same.

``tests/deepspeed/test_checks.py`` is the same under DeepSpeed.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_flops import profile_training
from tests.checks import (
    CONFIRMED,
    LAYERS,
    PRODUCT,
    REFUTED,
    ROWS,
    STEPS,
    WHOLE,
    WIDTH,
    Dropping,
    figures,
    generous,
    train,
)
from tests.every_step import DOORS, LOG_EVERY, SETTINGS

HERE = [door for door in DOORS if door != "DeepSpeed"]


@pytest.mark.parametrize("door", HERE)
def test_a_check_confirms_what_was_foretold(door: str, tmp_path: Path) -> None:
    trained, bare = (train(door, tmp_path, keeps=1.0, profiled=profiled) for profiled in (True, False))
    assert figures(trained.summary) == CONFIRMED
    assert (trained.losses, trained.weights) == (bare.losses, bare.weights)


@pytest.mark.parametrize("door", HERE)
def test_a_check_shows_that_chance_decides_what_runs(door: str, tmp_path: Path) -> None:
    trained, bare = (train(door, tmp_path, keeps=0.5, profiled=profiled) for profiled in (True, False))
    assert figures(trained.summary) == REFUTED
    assert (trained.losses, trained.weights) == (bare.losses, bare.weights)


def rows() -> list[torch.Tensor]:
    return [torch.randn(ROWS, WIDTH) for _ in range(2 * STEPS)]


def test_a_step_of_two_batches_is_checked_with_both() -> None:
    model = Dropping(1.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with generous(), profile_training(model, optimizer, log_every_n_steps=LOG_EVERY, **SETTINGS) as profiler:
        for index, batch in enumerate(profiler.batches(rows())):
            model(batch)["loss"].backward()
            if index % 2:
                optimizer.step()
                optimizer.zero_grad()
    assert figures(profiler.throughput) == {**CONFIRMED, "model_flops": 2 * WHOLE, "hardware_flops": 2 * WHOLE}


def test_a_teacher_that_runs_before_the_model_is_in_the_check() -> None:
    """A check begins where the step before it ends, as a window does."""
    model, teacher = Dropping(1.0), Dropping(1.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with generous(), profile_training(model, optimizer, log_every_n_steps=LOG_EVERY, **SETTINGS) as profiler:
        for batch in profiler.batches(rows()[:STEPS]):
            with torch.no_grad():
                teacher(batch)
            model(batch)["loss"].backward()
            optimizer.step()
            optimizer.zero_grad()
    found = figures(profiler.throughput)
    assert (found["counted"], found["predicted"]) == (2, STEPS - 2)
    assert found["model_flops"] == STEPS * LAYERS * 4 * PRODUCT


class Growing(torch.optim.SGD):
    """Multiplies matrices that grow, as an optimizer with a history does."""

    steps = 0

    def step(self, *args: Any, **kwargs: Any) -> Any:
        """Make one update."""
        self.steps += 1
        torch.ones(1, self.steps) @ torch.ones(self.steps, 1)
        return super().step(*args, **kwargs)


def test_of_a_run_whose_optimizer_spends_something_else_at_each_step_model_flops_are_known() -> None:
    model = Dropping(1.0)
    optimizer = Growing(model.parameters(), lr=0.01)
    with generous(), profile_training(model, optimizer, log_every_n_steps=LOG_EVERY, **SETTINGS) as profiler:
        for batch in profiler.batches(rows()[:STEPS]):
            model(batch)["loss"].backward()
            optimizer.step()
            optimizer.zero_grad()
    assert figures(profiler.throughput) == {**CONFIRMED, "hardware_flops": None}


def test_a_check_whose_step_is_left_is_made_later() -> None:
    model = Dropping(1.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    done = 0
    with generous(), profile_training(model, optimizer, log_every_n_steps=LOG_EVERY, **SETTINGS) as profiler:
        for index, batch in enumerate(profiler.batches(rows())):
            if done == 100 and index == 100:  # the check's step: the loop gives it up after its forward
                try:
                    model(batch)
                    raise KeyError
                except KeyError:
                    continue
            model(batch)["loss"].backward()
            optimizer.step()
            optimizer.zero_grad()
            done += 1
    found = figures(profiler.throughput)
    assert found["unknown"] == 0 and found["counted"] in (2, 3)
    assert found["model_flops"] == done * LAYERS * 3 * PRODUCT


def test_there_is_no_check_without_the_monitor() -> None:
    model = Dropping(1.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    begun = []
    with pytest.MonkeyPatch.context() as patches, generous():
        patches.setattr("lightning_flops.session.samples.Samples.begins", lambda samples: begun.append(samples))
        with profile_training(model, optimizer, monitor=False, **SETTINGS) as profiler:
            for batch in profiler.batches(rows()):
                model(batch)["loss"].backward()
                optimizer.step()
    assert begun == [] and profiler.throughput is None


def test_in_a_short_run_half_a_percent_is_less_than_a_check() -> None:
    model = Dropping(1.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with profile_training(model, optimizer, log_every_n_steps=LOG_EVERY, **SETTINGS) as profiler:
        for batch in profiler.batches(rows()[:STEPS]):
            model(batch)["loss"].backward()
            optimizer.step()
    assert figures(profiler.throughput)["counted"] == 1
