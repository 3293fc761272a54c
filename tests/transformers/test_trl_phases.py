"""Phases under TRL's trainers, with nothing but the callback: FLOPs by hand, and they add up to the step."""

from __future__ import annotations

import importlib.util
import warnings
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_flops import Profile
from tests.transformers.test_trl import tokenizer
from tests.transformers.tiny import profiler

pytestmark = pytest.mark.skipif(importlib.util.find_spec("trl") is None, reason="needs trl")

LAYERS, WIDTH, VOCAB = 2, 16, 22
ROWS, PROMPT, COMPLETION = 4, 5, 6
LENGTH = PROMPT + COMPLETION
OPTIONS: dict[str, Any] = {
    "per_device_train_batch_size": ROWS, "max_steps": 7, "logging_steps": 3, "report_to": "none", "bf16": False,
    "save_strategy": "no", "use_cpu": True, "disable_tqdm": True, "dataloader_pin_memory": False,
    "gradient_checkpointing": False,
}  # fmt: skip


def by_hand(*, tokens: int, keys: int, logits: int) -> int:
    """FLOPs of a forward: 12 width² weights a layer and token, two products a key of each query, and the head."""
    return 2 * LAYERS * 12 * WIDTH**2 * tokens + 4 * LAYERS * WIDTH * keys + 2 * WIDTH * VOCAB * logits


def whole(rows: int) -> int:
    """Those of *rows* whole sequences, of which TRL makes logits for all tokens but the last."""
    return by_hand(tokens=rows * LENGTH, keys=rows * LENGTH**2, logits=rows * (LENGTH - 1))


ROLLOUT = by_hand(
    tokens=ROWS * (LENGTH - 1),  # nothing is computed on the last one
    keys=ROWS * (PROMPT**2 + sum(range(PROMPT + 1, LENGTH))),
    logits=ROWS * COMPLETION,
)


def model_in(folder: Path) -> str:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(
        n_layer=LAYERS, n_head=2, n_embd=WIDTH, vocab_size=VOCAB, n_positions=64, resid_pdrop=0.0, embd_pdrop=0.0,
        attn_pdrop=0.0, bos_token_id=1, eos_token_id=1, pad_token_id=0, tie_word_embeddings=False,
    )  # fmt: skip
    GPT2LMHeadModel(config).save_pretrained(folder / "model")
    tokenizer().save_pretrained(folder / "model")
    return str(folder / "model")


def words(number: int) -> str:
    return " ".join(f"w{2 + place}" for place in range(number))


def profile_of(make: Any, folder: Path) -> Profile:
    callback = profiler(profile_step=1, timing_steps=2, trace=False, lines=False, peak_flops_per_sec={"float32": 1e10})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # TRL's own advice about experimental features
        trainer = make(model_in(folder), callback)
        trainer.train()
    profile = callback.profile
    assert profile is not None
    assert profile.timing is not None
    if profile.phases:
        phases, step_sec = profile.phases.values(), profile.timing.global_step_sec
        assert sum(one.flops or 0 for one in phases) == profile.flops.model
        assert sum(one.seconds or 0.0 for one in phases) == pytest.approx(step_sec)
    return profile


@pytest.fixture
def rows(monkeypatch: pytest.MonkeyPatch) -> Any:
    from datasets import Dataset, fingerprint

    numbers = count()  # it would pickle whole trainers for a name
    monkeypatch.setattr(fingerprint.Hasher, "hash", classmethod(lambda kind, value: f"{next(numbers):016x}"))
    return lambda **columns: Dataset.from_dict({name: [text] * 64 for name, text in columns.items()})


@pytest.mark.parametrize(("name", "scorers"), [("GRPO", 1), ("RLOO", 2)])  # the reference, and the old policy
def test_a_rollout_a_reference_and_the_training_have_the_flops_that_they_have_by_hand(
    name: str, scorers: int, rows: Any, tmp_path: Path
) -> None:
    def make(model: str, callback: Any) -> Any:
        import trl

        config = getattr(trl, f"{name}Config")(
            output_dir=str(tmp_path), num_generations=2, max_completion_length=COMPLETION, beta=0.1,
            generation_kwargs={"min_new_tokens": COMPLETION}, **OPTIONS,
        )  # fmt: skip
        return getattr(trl, f"{name}Trainer")(
            model=model, args=config, train_dataset=rows(prompt=words(PROMPT)), processing_class=tokenizer(),
            reward_funcs=lambda completions, **_: [float(len(one)) for one in completions], callbacks=[callback],
        )  # fmt: skip

    profile = profile_of(make, tmp_path)
    found = {name: one.flops for name, one in profile.phases.items()}
    expected = {"rollout": ROLLOUT, "scoring": scorers * whole(ROWS), "training": 3 * whole(ROWS), "rest": 0}
    assert found == expected
    assert profile.phases["rollout"].tokens == ROWS * LENGTH
    assert profile.phases["rollout"].completion_tokens == ROWS * COMPLETION


def test_dpo_scores_by_its_reference(rows: Any, tmp_path: Path) -> None:
    def make(model: str, callback: Any) -> Any:
        import trl

        config = trl.DPOConfig(output_dir=str(tmp_path), **OPTIONS)  # type: ignore[attr-defined]
        data = rows(prompt=words(PROMPT), chosen=" " + words(COMPLETION - 1), rejected=" " + words(COMPLETION - 1))
        return trl.DPOTrainer(  # type: ignore[attr-defined]
            model=model, args=config, train_dataset=data, processing_class=tokenizer(), callbacks=[callback]
        )

    profile = profile_of(make, tmp_path)
    found = {name: one.flops for name, one in profile.phases.items()}
    assert found == {"scoring": whole(2 * ROWS), "training": 3 * whole(2 * ROWS), "rest": 0}


def test_a_teacher_scores_and_without_one_there_are_no_phases(rows: Any, tmp_path: Path) -> None:
    def make(model: str, callback: Any, *, teaches: bool = True) -> Any:
        import trl
        from transformers import AutoModelForCausalLM

        teacher = AutoModelForCausalLM.from_pretrained(model)

        class Student(trl.SFTTrainer):  # type: ignore[name-defined, misc]
            def compute_loss(self, student: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
                loss = super().compute_loss(student, dict(inputs), *args, **kwargs)
                if teaches:
                    with torch.no_grad():
                        distance = teacher(input_ids=inputs["input_ids"]).logits.mean()
                    loss = loss + distance
                return loss

        config = trl.SFTConfig(output_dir=str(tmp_path), **OPTIONS)  # type: ignore[attr-defined]
        data = rows(text=words(LENGTH - 1))  # and the end of the sentence
        return Student(model=model, args=config, train_dataset=data, processing_class=tokenizer(), callbacks=[callback])

    phases = profile_of(make, tmp_path).phases
    of_teacher = whole(ROWS) + ROWS * 2 * WIDTH * VOCAB  # its last logits, too
    assert phases["scoring"].flops == of_teacher
    assert (phases["training"].flops, phases["rest"].flops) == (3 * whole(ROWS), 0)
    plain = profile_of(partial(make, teaches=False), tmp_path)
    assert plain.phases == {}
    assert "Phases" not in str(plain)
