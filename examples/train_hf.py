"""Train a tiny GPT-2 with transformers' Trainer on sums of one digit, and see the FLOPs profiler's report.

The model has random weights, the data are made up, and nothing is downloaded. Sentences have different lengths, so they
are padded, and three batches make one step. Try::

    python examples/train_hf.py
    python examples/train_hf.py --max-steps 200 --profile-step 20
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from lightning_flops import FlopsProfilerTrainerCallback, render_text

SYMBOLS = "_0123456789+=."
"""What a sentence is made of; the first is padding, the last ends a sentence."""


class Sums(Dataset[dict[str, list[int]]]):
    """Sentences such as ``7+8=15.``, each as the places of its symbols."""

    def __len__(self) -> int:
        return 4800

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        """The sentence with this number."""
        one, other = index % 10, index // 10 % 10
        return {"input_ids": [SYMBOLS.index(symbol) for symbol in f"{one}+{other}={one + other}."]}


def padded(sentences: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    """A batch: every sentence is padded to the longest; padding is masked and has no label."""
    ids = [torch.tensor(sentence["input_ids"]) for sentence in sentences]
    batch = torch.nn.utils.rnn.pad_sequence(ids, batch_first=True)
    mask = (batch > 0).long()
    return {"input_ids": batch, "attention_mask": mask, "labels": batch.masked_fill(mask == 0, -100)}


def main() -> None:
    """Trains, and prints the report without the module tree."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--profile-step", type=int, default=10, help="profile the step that begins after this many")
    parser.add_argument("--max-steps", type=int, default=60)
    parser.add_argument("--output-dir", default="out")
    options = parser.parse_args()

    config = GPT2Config(
        vocab_size=len(SYMBOLS), n_positions=8, n_embd=32, n_layer=2, n_head=4,
        bos_token_id=0, eos_token_id=len(SYMBOLS) - 1,
    )  # fmt: skip
    profiler = FlopsProfilerTrainerCallback(profile_step=options.profile_step, detailed=False)
    arguments: dict[str, Any] = {
        "output_dir": options.output_dir,
        "per_device_train_batch_size": 16,
        "gradient_accumulation_steps": 3,
        "max_steps": options.max_steps,
        "learning_rate": 1e-2,
        "logging_steps": 20,
        "report_to": "none",
        "save_strategy": "no",
        "use_cpu": not torch.cuda.is_available(),
        "disable_tqdm": True,
    }
    Trainer(
        model=GPT2LMHeadModel(config),
        args=TrainingArguments(**arguments, dataloader_pin_memory=torch.cuda.is_available()),
        train_dataset=Sums(),
        data_collator=padded,
        callbacks=[profiler],
    ).train()
    if profiler.profile is not None:
        print(render_text(profiler.profile))


if __name__ == "__main__":
    main()
