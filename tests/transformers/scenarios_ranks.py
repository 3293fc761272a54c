"""Trainings of transformers on two ranks, by DDP or by DeepSpeed, without the profiler and with it."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch

from tests.left_on_objects import left_on_classes, left_on_object
from tests.transformers.tiny import new_trainer, profiler


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
    }


def twice(stage: int | None) -> dict[str, Any]:
    """Both trainings, the profile, and the files of ours."""
    first = 1 if stage is None else None  # None: the block's
    callback = profiler(profile_step=first)
    plain, profiled = train(Path("plain"), stage), train(Path("profiled"), stage, callback)
    return {
        "plain": plain,
        "profiled": profiled,
        "profile": callback.profile and callback.profile.to_json(),
        "files": sorted(path.name for path in Path().rglob("lightning_flops/*")),
    }


SCENARIOS = {"ddp": partial(twice, None), "1": partial(twice, 1), "3": partial(twice, 3)}
