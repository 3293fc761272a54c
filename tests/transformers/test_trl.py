"""TRL's SFTTrainer, which is a Trainer: its own metrics and its log stay its own."""

from __future__ import annotations

import importlib.util
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.transformers.tiny import BATCH, LENGTH, VOCAB, WIDTH, footprint, gpt2_flops, length_of, new_gpt2, profiler

pytestmark = pytest.mark.skipif(importlib.util.find_spec("trl") is None, reason="needs trl")

NUMBER = 8 * BATCH


def tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {"<pad>": 0, "<eos>": 1, **{f"w{i}": i for i in range(2, VOCAB)}}
    made = Tokenizer(models.WordLevel(words, unk_token="<eos>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    kind: Any = PreTrainedTokenizerFast
    return kind(tokenizer_object=made, pad_token="<pad>", eos_token="<eos>")


def sft(folder: Path, *callbacks: Any) -> Any:
    from datasets import Dataset

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # TRL's own advice about experimental features
        import trl

        rows = [{"input_ids": [2 + (i + k) % 20 for k in range(length_of(i))]} for i in range(NUMBER)]
        config = trl.SFTConfig(  # type: ignore[attr-defined]
            output_dir=str(folder), per_device_train_batch_size=BATCH, num_train_epochs=2, logging_steps=3,
            report_to="none", save_strategy="no", use_cpu=True, disable_tqdm=True, dataloader_pin_memory=False,
            gradient_accumulation_steps=2, bf16=False, gradient_checkpointing=False, max_length=None,
            pad_to_multiple_of=LENGTH,
        )  # fmt: skip
        trainer: Any = trl.SFTTrainer(  # type: ignore[attr-defined]
            model=new_gpt2(), args=config, train_dataset=Dataset.from_list(rows), processing_class=tokenizer(),
            callbacks=list(callbacks),
        )  # fmt: skip
    trainer._get_train_sampler = lambda dataset=None: None  # one row after the other
    return trainer


def test_an_sft_trainer_is_profiled_and_keeps_its_own_metrics(tmp_path: Path) -> None:
    def train(*callbacks: Any) -> tuple[Any, ...]:
        trainer = sft(tmp_path, *callbacks)
        trainer.train()
        timed = ("train_runtime", "train_samples_per_second", "train_steps_per_second")
        history = [
            {name: value for name, value in log.items() if not name.startswith("flops_") and name not in timed}
            for log in trainer.state.log_history
        ]
        weights = [weight.tolist() for weight in trainer.model.state_dict().values()]
        return history, weights, torch.get_rng_state().tolist(), footprint(trainer), trainer.state.log_history

    *plain, _ = train()
    callback = profiler(monitor=False)
    *profiled, whole_history = train(callback)
    assert profiled == plain
    assert any("mean_token_accuracy" in log for log in whole_history)
    profile = callback.profile
    assert profile is not None
    assert not any("flops_profiler/fwd_flops" in log for log in whole_history)
    # TRL's loss leaves out the last position of each sentence, which predicts nothing.
    last_positions = 2 * BATCH * WIDTH * VOCAB
    assert profile.flops.forward == 2 * (gpt2_flops(BATCH).forward - last_positions)
    assert profile.tokens == 2 * sum(map(length_of, range(BATCH)))
