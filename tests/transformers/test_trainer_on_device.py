"""Batches that accelerate's loader moves to a device: their tokens are read before, so that no step waits for it.

A tensor of ``Far`` stands in for one on a device: its shape is known, and no value of it can be read.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import data_loader

from lightning_flops import FlopsProfilerTrainerCallback
from tests.results import profile_of, throughput_of
from tests.transformers.tiny import BATCH, LENGTH, Sentences, length_of, new_trainer

READS = {"item", "tolist", "numpy", "cpu", "__int__", "__bool__", "__float__", "__iter__", "__contains__"}


class Far(torch.Tensor):
    """Work on it is done and gives ordinary tensors; reading it is an error."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") in READS:
            raise AssertionError("this waits for the device")
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
        return result.as_subclass(torch.Tensor) if isinstance(result, torch.Tensor) else result


@pytest.fixture
def moved(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Every batch that a loader has moved to the device."""
    batches: list[Any] = []

    def send(batch: Any, *args: Any, **kwargs: Any) -> Any:
        batches.append({name: tensor.as_subclass(Far) for name, tensor in batch.items()})
        return batches[-1]

    monkeypatch.setattr(data_loader, "send_to_device", send)
    return batches


@pytest.mark.parametrize("accumulated", [1, 3])
def test_tokens_of_batches_that_are_moved_are_known(accumulated: int, moved: list[Any], tmp_path: Path) -> None:
    callback = FlopsProfilerTrainerCallback(timing_steps=2, trace=False)
    trainer = new_trainer(
        tmp_path,
        callback,
        data=Sentences(10 * BATCH),
        gradient_accumulation_steps=accumulated,
        num_train_epochs=2,
        eval_dataset=Sentences(2 * BATCH),
        eval_strategy="epoch",
    )
    before = data_loader.send_to_device
    trainer.train()
    assert data_loader.send_to_device is before
    summary, profile = throughput_of(callback), profile_of(callback)
    real = 2 * sum(length_of(index) for index in range(10 * BATCH))
    assert (summary.tokens, summary.real_tokens) == (2 * 10 * BATCH * LENGTH, real)
    assert summary.tokens_per_sec is not None
    assert not any("on the device before" in note for note in profile.notes)
    assert len(moved) == 2 * (10 + 2)
    assert summary.padding_ratio == pytest.approx(1 - real / (2 * 10 * BATCH * LENGTH))
