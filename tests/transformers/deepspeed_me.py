"""Trainings of transformers by DeepSpeed on one rank; run by test_trainer_deepspeed."""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path
from typing import Any

import torch

from lightning_flops import FlopsProfilerTrainerCallback
from tests.left_on_objects import left_on_classes, left_on_object
from tests.transformers.tiny import new_trainer

MESSAGES: list[str] = []


class Keeps(logging.Handler):
    """Keeps what our package logs."""

    def emit(self, record: logging.LogRecord) -> None:
        MESSAGES.append(f"{record.levelname}: {record.getMessage()}")


def train(folder: Path, *callbacks: Any, block: Any = None) -> dict[str, Any]:
    """What one training came to."""
    MESSAGES.clear()
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "zero_optimization": {"stage": 1},
        "zero_force_ds_cpu_optimizer": False,
        "zero_allow_untested_optimizer": True,
    }
    if block is not None:
        config["flops_profiler"] = block
    trainer = new_trainer(folder, *callbacks, deepspeed=config, gradient_accumulation_steps=2, num_train_epochs=2)
    trainer.train()
    engine: Any = trainer.model_wrapped
    return {
        "losses": [log["loss"] for log in trainer.state.log_history if "loss" in log],
        "weights": [weight.tolist() for weight in trainer.model.state_dict().values()],  # type: ignore[union-attr]
        "random_state": torch.get_rng_state().tolist(),
        "left": [*left_on_object(trainer), *left_on_object(engine), *left_on_classes(engine)],
        "engine": type(engine).__name__,
        "steps_per_print": engine.steps_per_print(),
        "builtin_ran": hasattr(engine, "flops"),
        "builtin_is_on": bool(engine._config.flops_profiler_config.enabled),
        "profiles": [profile.to_json() for one in callbacks for profile in one.profiles],
        "messages": list(MESSAGES),
    }


def main(folder: Path) -> None:
    ours = logging.getLogger("lightning_flops")
    ours.setLevel(logging.INFO)
    ours.addHandler(Keeps())

    def profiler(**settings: Any) -> FlopsProfilerTrainerCallback:
        return FlopsProfilerTrainerCallback(trace=False, monitor=False, **settings)

    block = {"enabled": True, "profile_step": 2, "module_depth": 1, "detailed": False}
    seen = {
        "plain": train(folder / "plain"),
        "no block": train(folder / "none", profiler(timing_steps=2)),
        "block": train(folder / "block", profiler(timing_steps=2), block=block),
        "arguments": train(folder / "arguments", profiler(profile_step=1), block=block),
        "off": train(folder / "off", profiler(), block={**block, "enabled": False}),
        "wrong": train(folder / "wrong", profiler(), block={**block, "top_modules": -3}),
    }
    (folder / "seen.json").write_text(json.dumps(seen))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
