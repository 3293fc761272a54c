"""The callback under transformers' own Trainer: exact counts, samples and tokens, and the same training."""

from __future__ import annotations

import copy
import json
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import IterableDataset
from transformers import Trainer, TrainerCallback

from lightning_flops import FlopsProfilerTrainerCallback, Profile
from lightning_flops.records import PhaseFlops
from tests.results import profile_of, throughput_of
from tests.transformers.tiny import (
    BATCH,
    LENGTH,
    Sentences,
    gpt2_flops,
    length_of,
    new_net_trainer,
    new_trainer,
    profiler,
)


def only_profile(callback: FlopsProfilerTrainerCallback) -> Profile:
    assert callback.profiles == (callback.profile,)
    return profile_of(callback)


def flops_of(profile: Profile) -> PhaseFlops:
    """What was counted in a step; the model has no estimate, no recomputation and no product in its optimizer."""
    one = profile.flops
    return PhaseFlops(forward=one.forward, backward=one.backward, recompute=one.recompute, optimizer=one.optimizer)


def in_order(trainer: Trainer) -> Trainer:
    """*trainer*, which takes its rows one after the other."""
    trainer._get_train_sampler = lambda dataset=None: None  # type: ignore[assignment, method-assign]
    return trainer


def tokens_of(rows: range) -> int:
    return sum(map(length_of, rows))


def test_the_flops_of_a_step_are_those_counted_by_hand(tmp_path: Path) -> None:
    callback = profiler()
    new_trainer(tmp_path, callback).train()
    profile = only_profile(callback)
    assert flops_of(profile) == gpt2_flops(BATCH)
    assert (profile.profile_step, profile.micro_steps, profile.samples) == (1, 1, BATCH)
    assert not profile.uncounted
    by_name = {module.name: module.total for module in profile.modules}
    assert by_name["transformer.h.0.attn.c_attn"].forward == 2 * BATCH * LENGTH * 8 * 24
    assert by_name["lm_head"].forward == 2 * BATCH * LENGTH * 8 * 32


@pytest.mark.parametrize(("profile_step", "batches"), [(1, 3), (2, 2), (3, 3)])
def test_accumulated_batches_are_a_step_that_may_be_short(profile_step: int, batches: int, tmp_path: Path) -> None:
    """Eight batches of an epoch are groups of three, three and two."""
    callback = profiler(profile_step=profile_step)
    trainer = in_order(new_trainer(tmp_path, callback, gradient_accumulation_steps=3, num_train_epochs=5))
    trainer.train()
    profile = only_profile(callback)
    assert (profile.micro_steps, profile.samples) == (batches, batches * BATCH)
    one = gpt2_flops(BATCH)
    assert flops_of(profile) == PhaseFlops(forward=batches * one.forward, backward=batches * one.backward)
    first = profile_step % 3 * 3 * BATCH
    assert profile.tokens == tokens_of(range(first, first + batches * BATCH))
    assert len(profile.timed_steps) == 2
    assert trainer.state.global_step == 15


@pytest.mark.parametrize("monitor", [True, False])
@pytest.mark.parametrize(
    ("known_by", "in_step", "in_run"),
    [("mask", 6 + 5 + 4 + 3, 8 * (6 + 5 + 4 + 3)), ("labels of all", 4 * 6, 8 * 4 * 6), ("labels of some", None, None)],
)
def test_tokens_are_those_that_are_no_padding_and_the_same_in_step_and_run(
    known_by: str, in_step: int | None, in_run: int | None, monitor: bool, tmp_path: Path
) -> None:
    """A token without a label may be padding or a prompt, and without a mask it is unknown which."""
    data: Any = Sentences(8 * BATCH, masks=known_by == "mask")
    if known_by == "labels of all":
        data = [{"input_ids": row["input_ids"], "labels": row["input_ids"]} for row in (data[i] for i in range(32))]
    callback = profiler(timing_steps=1, monitor=monitor)
    in_order(new_trainer(tmp_path, callback, data=data)).train()
    profile = only_profile(callback)
    assert profile.tokens == in_step
    assert (profile.job_rates.tokens_per_sec is None) == (in_step is None)
    assert bool([note for note in profile.notes if "may be padding or a prompt" in note]) == (in_step is None)
    if monitor:
        assert throughput_of(callback).real_tokens == in_run


def test_a_checkpoint_is_as_without_the_profiler_but_for_the_logged_figures(tmp_path: Path) -> None:
    def state_of(folder: Path, *callbacks: Any) -> Any:
        new_trainer(folder, *callbacks, save_strategy="steps", save_steps=8).train()
        state = json.loads((folder / "checkpoint-8" / "trainer_state.json").read_text())
        files = sorted(path.name for path in (folder / "checkpoint-8").iterdir())
        for log in state["log_history"]:
            for name in [name for name in log if name.startswith("flops_")]:
                assert isinstance(log.pop(name), float)
        return state, files

    assert state_of(tmp_path / "profiled", profiler()) == state_of(tmp_path / "plain")


def test_a_stream_without_a_length_is_profiled(tmp_path: Path) -> None:
    class Stream(IterableDataset[dict[str, torch.Tensor]]):
        def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
            return (Sentences(40 * BATCH)[i] for i in range(40 * BATCH))

    callback = profiler()
    new_trainer(tmp_path, callback, data=Stream(), max_steps=8, gradient_accumulation_steps=2, bf16=True).train()
    profile = only_profile(callback)
    context = profile.context
    assert (context.framework, context.precision) == ("transformers", "bf16 mixed, float32 parameters")
    assert (context.accumulate, context.micro_batch_size, context.dp_size) == (2, BATCH, 1)
    assert profile.flops.forward == 2 * gpt2_flops(BATCH).forward
    assert profile.tokens == tokens_of(range(2 * BATCH))
    assert profile.timing is not None and profile.timing.data_wait_sec is not None


def test_pickles_and_copies_have_the_settings_and_the_result(tmp_path: Path) -> None:
    inside: list[Any] = []

    class Copies(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            inside.extend((pickle.loads(pickle.dumps(callback)), copy.deepcopy(callback)))
            assert type(pickle.loads(pickle.dumps(kwargs["model"]))) is type(trainer.model)

    callback = profiler()
    trainer = new_net_trainer(tmp_path, callback, Copies())
    trainer.train()
    assert all(one.config == callback.config for one in inside)
    again = copy.copy(callback)
    assert (again.config, again.profile) == (callback.config, only_profile(callback))
    assert pickle.loads(pickle.dumps(callback)).profile == callback.profile
    new_net_trainer(tmp_path, again).train()
    assert only_profile(again) is not callback.profile


def test_each_training_of_a_trainer_is_profiled_and_has_its_own_profile(tmp_path: Path) -> None:
    callback = profiler()
    trainer = new_net_trainer(tmp_path, callback)
    trainer.train()
    first = only_profile(callback)
    trainer.train()
    second = only_profile(callback)
    assert second is not first
    assert second.flops == first.flops
