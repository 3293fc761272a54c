"""Runs whose steps all have other lengths: what is said of a step is what counting it says, or nothing is said."""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lightning_flops import FlopsProfilerCallback, profile_training
from lightning_flops.analysis.step_keys import StepKey
from lightning_flops.records import WITHOUT_PADDING
from lightning_flops.schema.throughput import ThroughputSummary
from tests.lengths import VOCAB, WIDTH, Encoder, Strided, hold_to, sentences, truths, watch_sessions

STEPS = 500
SETTINGS: dict[str, Any] = {"profile_step": 3, "timing_steps": 12, "trace": False, "peak_flops_per_sec": 1e12}

Truth = dict[StepKey, dict[tuple[str, str], int]]


def keys_of(data: list[torch.Tensor]) -> Counter[StepKey]:
    return Counter((((tuple(batch.shape),),), 1) for batch in data)


def model_flops(keys: Counter[StepKey], truth: Truth) -> int:
    return sum(
        steps * (truth[key]["forward", "float32"] + truth[key]["backward", "float32"]) for key, steps in keys.items()
    )


def plain_run(model: nn.Module, data: list[torch.Tensor], **settings: Any) -> ThroughputSummary:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with profile_training(model, optimizer, **{**SETTINGS, **settings}) as profiler:
        for ids in profiler.batches(data):
            optimizer.zero_grad()
            model(ids).square().mean().backward()
            optimizer.step()
    assert profiler.throughput is not None
    return profiler.throughput


def truth_of(model: nn.Module, keys: Counter[StepKey]) -> Truth:
    def step(batches: tuple[Any, ...]) -> None:
        for shapes in batches:
            model(torch.randint(VOCAB, shapes[0])).square().mean().backward()

    return truths(model, keys, step)


@pytest.fixture
def generous(monkeypatch: pytest.MonkeyPatch) -> None:
    """These runs are over in seconds, of which half a percent is no step: let them count as many as they may."""
    monkeypatch.setattr("lightning_flops.session.session.SHARE", 1e6)
    monkeypatch.setattr("lightning_flops.session.samples._GUESS", 0)


def test_every_step_of_a_plain_loop(monkeypatch: pytest.MonkeyPatch, generous: None) -> None:
    sessions, data, model = watch_sessions(monkeypatch), sentences(STEPS), Encoder()
    summary = plain_run(model, data)
    keys = keys_of(data)
    truth = truth_of(model, keys)
    assert hold_to(sessions[0], truth) == len(keys)
    assert summary.steps_unknown == 0
    assert summary.steps_counted + summary.steps_predicted == STEPS
    assert 13 < summary.steps_counted <= 13 + 64
    assert summary.model_flops == model_flops(keys, truth)
    assert summary.mfu is not None


def test_within_half_a_percent_of_a_short_run_what_is_not_known_is_not_said(monkeypatch: pytest.MonkeyPatch) -> None:
    sessions, data, model = watch_sessions(monkeypatch), sentences(STEPS), Encoder()
    summary = plain_run(model, data)
    keys = keys_of(data)
    known = hold_to(sessions[0], truth_of(model, keys))
    assert summary.steps_unknown > 0
    assert 13 < known < len(keys)
    assert (summary.model_flops, summary.hardware_flops, summary.mfu) == (None, None, None)


def test_a_net_with_strides_has_no_law(monkeypatch: pytest.MonkeyPatch, generous: None) -> None:
    sessions, data, model = watch_sessions(monkeypatch), sentences(200, greatest=500), Strided()
    summary = plain_run(model, data)
    keys = keys_of(data)
    known = hold_to(sessions[0], truth_of(model, keys))
    why = sessions[0].flops.law({}, last=next(iter(keys)), peak_sec=lambda _: None)
    assert isinstance(why, str) and why.startswith("the FLOPs of the counted steps follow no polynomial of their sizes")
    assert 0 < known < len(keys)
    assert summary.steps_unknown > 0
    assert summary.model_flops is None


def test_sizes_that_never_come_twice_are_counted_until_a_law_holds(generous: None) -> None:
    """Four sizes vary, whose law has 27 terms: more than a window counts, and no step is foretold before it holds."""
    model, features = nn.Linear(1, WIDTH), 1
    sizes = list(itertools.product((1, 2, 3), *[range(4, 9)] * 3))
    random.Random(0).shuffle(sizes)
    data = [torch.randn(*one, features) for one in sizes[:300]]
    summary = plain_run(model, data)
    assert (summary.steps_unknown, summary.steps_counted + summary.steps_predicted) == (0, 300)
    assert 27 + 2 <= summary.steps_counted <= 12 + 64
    # Forward, and in the backward the weight's gradient alone: nobody asks for that of the data.
    assert summary.model_flops == sum(2 * 2 * math.prod(one) * features * WIDTH for one in sizes[:300])


def test_steps_that_accumulate_batches(monkeypatch: pytest.MonkeyPatch, generous: None) -> None:
    sessions, data, model = watch_sessions(monkeypatch), sentences(200, batch=2), Encoder()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with profile_training(model, optimizer, **SETTINGS) as profiler:
        for index, ids in enumerate(profiler.batches(data)):
            model(ids).square().mean().backward()
            if index % 2:
                optimizer.step()
                optimizer.zero_grad()
    keys: Counter[StepKey] = Counter()
    for one, other in zip(data[::2], data[1::2], strict=True):
        keys[((tuple(one.shape),), (tuple(other.shape),)), 1] += 1
    truth = truth_of(model, keys)
    summary = profiler.throughput
    assert summary is not None
    assert hold_to(sessions[0], truth) > 80
    assert summary.steps_counted + summary.steps_predicted + summary.steps_unknown == 100
    assert summary.model_flops in (None, model_flops(keys, truth))


def test_work_that_is_not_in_the_shapes_ends_all_foretelling(generous: None) -> None:
    """Every third step runs the head twice: the same shapes, other FLOPs."""
    model = Encoder()
    data = [torch.randint(VOCAB, (4, 9 + index % 5)) for index in range(100)]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with profile_training(model, optimizer, **SETTINGS) as profiler:
        for index, ids in enumerate(profiler.batches(data)):
            hidden = model.layer(model.embed(ids)) if index % 3 == 0 else None
            loss = model(ids).square().mean()
            if hidden is not None:
                loss = loss + model.head(hidden).square().mean()
            loss.backward()
            optimizer.step()
    summary = profiler.throughput
    assert summary is not None
    assert summary.model_flops is None
    assert summary.steps_unknown > 50
    assert summary.steps_counted < 20  # once shapes tell nothing, no further step is counted


def test_unfreezing_ends_all_foretelling(generous: None) -> None:
    """The same shapes cost more from step 60 on, when the embedding and the first products need gradients, too."""
    model = Encoder()
    model.embed.requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with profile_training(model, optimizer, log_every_n_steps=10, **SETTINGS) as profiler:
        for index, ids in enumerate(profiler.batches(sentences(120))):
            if index == 60:
                model.embed.requires_grad_(True)
            optimizer.zero_grad()
            model(ids).square().mean().backward()
            optimizer.step()
    assert profiler.throughput is not None
    assert profiler.throughput.model_flops is None
    assert profiler.throughput.steps_predicted == 0


def test_work_before_the_models_forward_is_in_no_sample(monkeypatch: pytest.MonkeyPatch, generous: None) -> None:
    """A teacher runs before the model: a step that is counted from the model's forward on lacks it, and is not used.

    Steps are counted from border to border then, so that the run's FLOPs are known all the same.
    """
    sessions, data, model, teacher = watch_sessions(monkeypatch), sentences(200), Encoder(), Encoder()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with profile_training(model, optimizer, **SETTINGS) as profiler:
        for ids in profiler.batches(data):
            with torch.no_grad():
                wanted = teacher(ids)
            (model(ids) - wanted).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    keys = keys_of(data)
    truth = truth_of(model, keys)
    for flops in truth.values():
        flops["forward", "float32"] *= 2  # the teacher is such a model, too
    assert hold_to(sessions[0], truth) > 20
    assert sessions[0].flops.laws.believes_samples is False
    assert profiler.throughput is not None
    assert profiler.throughput.steps_counted > 13
    assert profiler.throughput.model_flops in (None, model_flops(keys, truth))


def test_training_is_bit_identical(generous: None) -> None:
    data = sentences(120)

    def weights(profiled: bool) -> list[torch.Tensor]:
        torch.manual_seed(5)
        model = Encoder()
        if profiled:
            plain_run(model, data)
        else:
            optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
            for ids in data:
                optimizer.zero_grad()
                model(ids).square().mean().backward()
                optimizer.step()
        return [parameter.detach() for parameter in model.parameters()]

    assert all(torch.equal(one, other) for one, other in zip(weights(True), weights(False), strict=True))


def test_every_step_under_lightning(monkeypatch: pytest.MonkeyPatch, generous: None, tmp_path: Path) -> None:
    from lightning.pytorch import LightningModule, Trainer
    from torch.utils.data import DataLoader

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = Encoder()

        def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
            loss: torch.Tensor = self.net(batch).square().mean()
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.01)

    sessions, data, module = watch_sessions(monkeypatch), sentences(STEPS), Module()
    callback = FlopsProfilerCallback(**SETTINGS)
    trainer = Trainer(
        accelerator="cpu", devices=1, max_epochs=1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, default_root_dir=tmp_path, callbacks=[callback],
    )  # fmt: skip
    trainer.fit(module, DataLoader(data, batch_size=None))  # type: ignore[arg-type]
    keys = keys_of(data)
    truth = truth_of(module.net, keys)
    assert hold_to(sessions[0], truth) == len(keys)
    assert callback.throughput is not None
    assert callback.throughput.model_flops == model_flops(keys, truth)
    assert callback.throughput.steps_unknown == 0
    assert callback.throughput.steps_counted > 13


def test_every_step_under_the_trainer_of_transformers(
    monkeypatch: pytest.MonkeyPatch, generous: None, tmp_path: Path
) -> None:
    from torch.utils.data import Dataset
    from transformers import BertConfig, BertForMaskedLM, Trainer, TrainingArguments

    from lightning_flops import FlopsProfilerTrainerCallback

    data = sentences(STEPS)

    class Sentences(Dataset[torch.Tensor]):
        def __len__(self) -> int:
            return STEPS

        def __getitem__(self, index: int) -> torch.Tensor:
            return data[index]

    def collate(batches: list[torch.Tensor]) -> dict[str, torch.Tensor]:
        (ids,) = batches
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}

    config = BertConfig(
        vocab_size=VOCAB, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32,
        max_position_embeddings=64,
    )  # fmt: skip
    model = BertForMaskedLM(config)
    sessions = watch_sessions(monkeypatch)
    callback = FlopsProfilerTrainerCallback(**SETTINGS)
    arguments = TrainingArguments(
        output_dir=str(tmp_path), per_device_train_batch_size=1, num_train_epochs=1, use_cpu=True, report_to=[],
        save_strategy="no", disable_tqdm=True, logging_steps=50,
    )  # fmt: skip
    Trainer(model=model, args=arguments, train_dataset=Sentences(), data_collator=collate, callbacks=[callback]).train()
    keys: Counter[StepKey] = Counter((((*(tuple(batch.shape),) * 3, WITHOUT_PADDING),), 1) for batch in data)

    def step(batches: tuple[Any, ...]) -> None:
        for shapes in batches:
            ids = torch.randint(VOCAB, shapes[0])
            model(input_ids=ids, attention_mask=torch.ones_like(ids), labels=ids).loss.backward()

    model.train()
    truth = truths(model, keys, step)
    assert hold_to(sessions[0], truth) == len(keys)
    assert callback.throughput is not None
    assert callback.throughput.steps_unknown == 0
    assert callback.throughput.model_flops == model_flops(keys, truth)


def test_the_short_last_batch_of_an_epoch_is_counted_in_a_later_one(generous: None, tmp_path: Path) -> None:
    """Between its readings nobody looks at shapes, and no sample would ever fall on the last step of an epoch."""
    from lightning.pytorch import LightningModule, Trainer
    from torch.utils.data import DataLoader

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = Encoder()

        def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
            loss: torch.Tensor = self.net(batch).square().mean()
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.01)

    rows = [torch.randint(VOCAB, (12,)) for _ in range(39 * 4 + 2)]
    callback, module = FlopsProfilerCallback(**SETTINGS), Module()
    trainer = Trainer(
        accelerator="cpu", devices=1, max_epochs=4, logger=False, enable_checkpointing=False, log_every_n_steps=5,
        enable_progress_bar=False, enable_model_summary=False, default_root_dir=tmp_path, callbacks=[callback],
    )  # fmt: skip
    trainer.fit(module, DataLoader(rows, batch_size=4))  # type: ignore[arg-type]
    keys: Counter[StepKey] = Counter({((((4, 12),),), 1): 39 * 4, ((((2, 12),),), 1): 4})
    summary = callback.throughput
    assert summary is not None
    assert summary.steps_unknown == 0
    assert summary.model_flops == model_flops(keys, truth_of(module.net, keys))
