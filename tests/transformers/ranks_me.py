"""One of two ranks of trainings of transformers, by DDP or by DeepSpeed; run by test_trainer_ranks."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch

from lightning_flops import FlopsProfilerTrainerCallback
from tests.left_on_objects import left_on_classes, left_on_object
from tests.transformers.tiny import new_trainer


def train(folder: Path, stage: int | None, *callbacks: Any) -> dict[str, Any]:
    """What one training came to; *stage* is ZeRO's, None is DistributedDataParallel."""
    given: dict[str, Any] = {"gradient_accumulation_steps": 3, "num_train_epochs": 4}
    if stage is not None:
        given = {"gradient_accumulation_steps": 2, "num_train_epochs": 6}
        given["deepspeed"] = {
            "train_micro_batch_size_per_gpu": "auto",
            "gradient_accumulation_steps": "auto",
            "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
            "zero_force_ds_cpu_optimizer": False,
            "zero_allow_untested_optimizer": True,
            "flops_profiler": {"enabled": bool(callbacks), "profile_step": 2},
        }
    trainer = new_trainer(folder, *callbacks, **given)
    trainer.train()
    wrapped: Any = trainer.model_wrapped
    weights: Any = trainer.model.state_dict().values()  # type: ignore[union-attr]
    if stage is not None:  # of ZeRO-3 each rank has a part, in the optimizer's own copy
        name = "fp32_partitioned_groups_flat" if stage == 3 else "single_partition_of_fp32_groups"
        weights = getattr(wrapped.optimizer, name)
    return {
        "losses": [log["loss"] for log in trainer.state.log_history if "loss" in log],
        "logged": sorted({name for log in trainer.state.log_history for name in log if name.startswith("flops_")}),
        "weights": [part.tolist() for part in weights],
        "random_state": torch.get_rng_state().tolist(),
        "left": [*left_on_object(trainer), *left_on_object(wrapped), *left_on_classes(wrapped)],
        "wrapped": type(wrapped).__name__,
        "builtin_ran": hasattr(wrapped, "flops"),
        "profiles": [profile.to_json() for one in callbacks for profile in one.profiles],
    }


def main(folder: Path, stages: list[str]) -> None:
    seen = {}
    for name in stages:
        stage = None if name == "ddp" else int(name)
        seen[f"plain {name}"] = train(folder / f"plain{name}", stage)
        first = 1 if stage is None else None  # None: the block's
        profiler = FlopsProfilerTrainerCallback(profile_step=first, timing_steps=2, trace=False)
        seen[f"profiled {name}"] = train(folder / f"profiled{name}", stage, profiler)
    (folder / f"seen{os.environ['RANK']}.json").write_text(json.dumps(seen))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
