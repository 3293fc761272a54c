"""One rank of a training of transformers on two; run by test_trainer_ranks."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch

from lightning_flops import FlopsProfilerTrainerCallback
from tests.transformers.footprint import footprint
from tests.transformers.tiny import new_trainer


def train(folder: Path, *callbacks: Any, **given: Any) -> dict[str, Any]:
    """What one training came to."""
    trainer = new_trainer(folder, *callbacks, gradient_accumulation_steps=3, num_train_epochs=4, **given)
    trainer.train()
    return {
        "losses": [log["loss"] for log in trainer.state.log_history if "loss" in log],
        "logged": sorted({name for log in trainer.state.log_history for name in log if name.startswith("flops_")}),
        "weights": [weight.tolist() for weight in trainer.model.state_dict().values()],  # type: ignore[union-attr]
        "random_state": torch.get_rng_state().tolist(),
        "left": footprint(trainer)["ours"],
        "wrapped": type(trainer.model_wrapped).__name__,
        "profiles": [profile.to_json() for one in callbacks for profile in one.profiles],
    }


def main(folder: Path) -> None:
    rank = int(os.environ["RANK"])
    seen = {
        "plain": train(folder / "plain"),
        "profiled": train(
            folder / "profiled", FlopsProfilerTrainerCallback(profile_step=1, timing_steps=2, trace=False)
        ),
    }
    (folder / f"seen{rank}.json").write_text(json.dumps(seen))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
