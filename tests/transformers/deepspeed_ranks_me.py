"""One rank of trainings of transformers by DeepSpeed on two; run by test_trainer_deepspeed_ranks."""

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

STAGES = (1, 3)


def train(folder: Path, stage: int, *callbacks: Any) -> dict[str, Any]:
    """What one training came to."""
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "zero_force_ds_cpu_optimizer": False,
        "zero_allow_untested_optimizer": True,
        "flops_profiler": {"enabled": bool(callbacks), "profile_step": 2},
    }
    trainer = new_trainer(folder, *callbacks, deepspeed=config, gradient_accumulation_steps=2, num_train_epochs=6)
    trainer.train()
    engine: Any = trainer.model_wrapped
    throughputs = [one.throughput for one in callbacks]
    return {
        "losses": [log["loss"] for log in trainer.state.log_history if "loss" in log],
        "logged": sorted({name for log in trainer.state.log_history for name in log if name.startswith("flops_")}),
        # Of ZeRO-3 each rank has a part, in the optimizer's own copy.
        "weights": [
            part.tolist()
            for part in (
                engine.optimizer.fp32_partitioned_groups_flat
                if stage == 3
                else engine.optimizer.single_partition_of_fp32_groups
            )
        ],
        "random_state": torch.get_rng_state().tolist(),
        "left": [*left_on_object(trainer), *left_on_object(engine), *left_on_classes(engine)],
        "engine": type(engine).__name__,
        "builtin_ran": hasattr(engine, "flops"),
        "profiles": [profile.to_json() for one in callbacks for profile in one.profiles],
        "throughputs": [None if one is None else one.to_json() for one in throughputs],
    }


def main(folder: Path) -> None:
    seen = {}
    for stage in STAGES:
        seen[f"plain {stage}"] = train(folder / f"plain{stage}", stage)
        profiler = FlopsProfilerTrainerCallback(timing_steps=2, trace=False)
        seen[f"profiled {stage}"] = train(folder / f"profiled{stage}", stage, profiler)
    (folder / f"seen{os.environ['RANK']}.json").write_text(json.dumps(seen))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
