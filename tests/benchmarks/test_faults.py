"""The campaigns see the faults that are planted for them, and none where there is none."""

from __future__ import annotations

import logging
import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook

from benchmarks import faults
from benchmarks.faults import Lines
from lightning_flops.run import run
from lightning_flops.run.run import safe
from lightning_flops.units import percent
from tests.same_training import Kind, Settings, values


class Half(float):
    """Stands for an object with hooks; what it is called with is a function of ours."""

    run = None


def training(failed: Callable[[nn.Module], object]) -> Kind:
    """Training with one hook of ours; *failed* is what the boundary does with an exception."""

    def train(folder: Path, settings: Settings | None) -> dict[str, Any]:
        model = nn.Linear(1, 1)
        nn.init.ones_(model.weight)
        nn.init.ones_(model.bias)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(run, "failed", lambda run, error: failed(model))
            if settings is not None:
                safe(percent)(Half(0.5))
        return {"weights": values(model.parameters())}

    return Kind(train, ())


def disturbs(model: nn.Module) -> None:
    with torch.no_grad():
        next(model.parameters()).add_(1)


def raises(model: nn.Module) -> None:
    raise RuntimeError


def speaks(model: nn.Module) -> None:
    for _ in range(2):
        logging.getLogger("lightning_flops").warning("again")


@pytest.mark.parametrize(
    ("failed", "kinds"),
    [
        (lambda model: None, []),
        (lambda model: register_module_forward_hook(lambda *args: None), ["something stayed behind"]),
        (raises, ["it was raised into the training"]),
        (disturbs, ["the training differs"]),
        (speaks, ["more than one warning"]),
        (lambda model: time.sleep(60), ["the training hung or died"]),
    ],
)
def test_a_planted_fault_is_seen_and_no_other(
    failed: Callable[[nn.Module], object], kinds: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = Lines(training(failed))
    assert lines.lines > 0
    monkeypatch.setattr(faults, "_TRIAL_SEC", 5.0)
    assert [fault.kind for fault in lines.trial(random.Random(1))] == kinds


def interrupted(catches: Callable[[nn.Module], object] | None) -> Kind:
    """Training with one hook of ours, around which *catches* answers a Ctrl-C; None: nothing does."""

    def train(folder: Path, settings: Settings | None) -> dict[str, Any]:
        model = nn.Linear(1, 1)
        try:
            if settings is not None:
                safe(percent)(Half(0.5))
        except (KeyboardInterrupt, TimeoutError):
            if catches is None:
                raise
            catches(model)
        return {"weights": values(nn.Linear(1, 1).parameters())}

    return Kind(train, ())


def ends_with_a_hook(model: nn.Module) -> None:
    register_module_forward_hook(lambda *args: None)
    raise KeyboardInterrupt


@pytest.mark.parametrize("what", [faults.CTRL_C, faults.HANDLERS])
@pytest.mark.parametrize(
    ("catches", "kinds"),
    [
        (None, []),
        (lambda model: None, ["it did not come out of the training"]),
        (lambda model: os.kill(os.getpid(), signal.SIGSEGV), ["the training hung or died"]),
    ],
)
def test_what_a_signal_raises_must_come_out_of_a_training_that_lives(
    what: str, catches: Callable[[nn.Module], object] | None, kinds: list[str]
) -> None:
    lines = Lines(interrupted(catches), what)
    assert [fault.kind for fault in lines.trial(random.Random(1))] == kinds


def test_a_hook_that_ctrl_c_leaves_is_seen() -> None:
    lines = Lines(interrupted(ends_with_a_hook), faults.CTRL_C)
    assert [fault.kind for fault in lines.trial(random.Random(1))] == ["something stayed behind"]
