"""Trains by DeepSpeedStrategy on this rank, in every way that test_deepspeed_strategy asks about; writes what it saw.

DeepSpeedStrategy refuses to run without a GPU; the double here differs from it in the device alone.
"""

from __future__ import annotations

import contextlib
import copy
import importlib
import json
import logging
import os
import sys
from pathlib import Path
from typing import Any

import deepspeed
import torch
from torch import nn

from lightning_flops import FlopsProfilerCallback
from tests.left_on_objects import left_on_object
from tests.lightning.nets import loader, new_trainer, trunk

BLOCK = {"enabled": True, "profile_step": 2, "module_depth": 1, "timing_steps": 2, "trace": False}
BATCHES = 18
"""On each rank and in each epoch: four and a half steps of four batches."""

Facts = dict[str, Any]


class _Messages(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(f"{record.levelname}: {record.getMessage()}")


def strategy(root: str, config: dict[str, Any]) -> Any:
    """DeepSpeedStrategy of *root*, on the CPU."""
    base: Any = importlib.import_module(f"{root}.strategies").DeepSpeedStrategy

    class DeepSpeedOnCpu(base):  # type: ignore[misc]
        @property
        def root_device(self) -> torch.device:
            return torch.device("cpu", self.local_rank)

        def setup_environment(self) -> None:
            self.parallel_devices = [torch.device("cpu", rank) for rank in range(int(os.environ["WORLD_SIZE"]))]
            super(base, self).setup_environment()

    return DeepSpeedOnCpu(config=config, process_group_backend="gloo")


def net(root: str, *, fails_at: int | None = None, manual: bool = False) -> Any:
    """A module whose training_step calls ``self(x)``: its forward runs inside the engine's."""
    base: Any = importlib.import_module(root).LightningModule

    class Net(base):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.net = trunk()
            self.losses: list[float] = []
            self.automatic_optimization = not manual

        def forward(self, x: torch.Tensor) -> Any:
            return self.net(x)

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor | None:
            x, y = batch
            loss = nn.functional.mse_loss(self(x), y)
            self.losses.append(loss.item())
            if len(self.losses) == fails_at:
                raise RuntimeError("the user's own")
            if not manual:
                return loss
            self.manual_backward(loss)
            self.optimizers().step()
            return None

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self(batch[0])

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.01)

    torch.manual_seed(3)
    return Net()


def ds_config(stage: int, block: object | None) -> dict[str, Any]:
    """A DeepSpeed config as a user writes it."""
    config: dict[str, Any] = {"zero_allow_untested_optimizer": True, "zero_optimization": {"stage": stage}}
    return config if block is None else {**config, "flops_profiler": block}


def fit(
    root: str,
    stage: int,
    folder: str,
    *callbacks: Any,
    block: object | None,
    fails_at: int | None = None,
    **kwargs: Any,
) -> Facts:
    """Train, and say what came of it."""
    messages = _Messages()
    package = logging.getLogger("lightning_flops")
    package.addHandler(messages)
    package.setLevel(logging.INFO)
    written = copy.deepcopy(block)
    config = ds_config(stage, block)
    manual = kwargs.pop("manual", False)
    module = net(root, fails_at=fails_at, manual=manual)
    settings = {"accumulate_grad_batches": 1 if manual else 4, "max_epochs": 3, "limit_val_batches": 1, **kwargs}
    seen: Facts = {}
    try:
        trainer = new_trainer(
            root,
            folder,
            *callbacks,
            strategy=strategy(root, config),
            devices=int(os.environ["WORLD_SIZE"]),
            num_sanity_val_steps=0,
            **settings,
        )
        try:
            trainer.fit(module, loader(BATCHES * int(os.environ["WORLD_SIZE"])), loader(2))
        except (AttributeError, RuntimeError, TypeError) as error:
            seen["raised"] = f"{type(error).__name__}: {error}"
    finally:
        package.removeHandler(messages)
    ours = [callback for callback in trainer.callbacks if isinstance(callback, FlopsProfilerCallback)]
    profiles = [callback.profile for callback in ours if callback.profile is not None]
    engine = trainer.strategy.model
    if not isinstance(engine, deepspeed.DeepSpeedEngine):  # the fit ended before there was one
        engine = None
    with deepspeed.zero.GatheredParameters(list(module.parameters())) if stage == 3 else contextlib.nullcontext():
        weights = {name: weight.detach().tolist() for name, weight in module.named_parameters()}
    return {
        **seen,
        "losses": module.losses,
        "weights": weights,
        "random_state": torch.get_rng_state().tolist(),
        "messages": messages.texts,
        "callbacks": len(ours),
        "profiles": [profile.to_json() for profile in profiles],
        "block_is_the_users": block is None or config["flops_profiler"] is block,
        "block_is_as_written": block == written,
        "config": {name: value for name, value in config.items() if name != "flops_profiler"},
        "global_steps": None if engine is None else engine.global_steps,
        "lightnings_steps": trainer.global_step,
        "builtin_was_on": None if engine is None else engine.flops_profiler_enabled(),
        "left_behind": leftovers(trainer, module, engine),
    }


def leftovers(trainer: Any, module: Any, engine: Any) -> list[str]:
    """Attributes of ours on what belongs to others."""
    owners = [trainer, trainer.strategy, trainer.fit_loop, trainer.fit_loop.epoch_loop, *module.modules()]
    owners += [] if engine is None else [engine, *engine.modules()]
    return [f"{type(owner).__name__}.{name}" for owner in owners for name in left_on_object(owner)]


def scenarios(root: str, stage: int, folder: str) -> dict[str, Facts]:
    """Every way, by its name."""
    off = {**BLOCK, "enabled": False}
    found = {
        "plain": fit(root, stage, folder, block=off),
        "profiled": fit(root, stage, folder, FlopsProfilerCallback(), block=dict(BLOCK)),
    }
    if (root, stage) != ("lightning.pytorch", 2):
        return found
    callback = FlopsProfilerCallback
    short = {"max_epochs": 1, "limit_train_batches": 2}
    own = callback(profile_step=1, timing_steps=3, trace=True)
    found["arguments"] = fit(root, stage, folder, own, block=dict(BLOCK))
    found["fails"] = fit(root, stage, folder, callback(), block=dict(BLOCK), fails_at=14)
    found["manual"] = fit(root, stage, folder, callback(), block=dict(BLOCK), manual=True, max_epochs=1)
    found["wrong"] = fit(root, stage, folder, callback(), block={**BLOCK, "profile_step": "2"}, **short)
    whole = {**BLOCK, "profile_step": 1, "detailed": True, "step": 1}
    found["unknown"] = fit(root, stage, folder, callback(), block=whole, max_epochs=1)
    found["no object"] = fit(root, stage, folder, callback(), block=["profile_step"], **short)
    found["block off"] = fit(root, stage, folder, callback(), block=off, **short)
    os.environ["LIGHTNING_FLOPS"] = "1"
    found["switch"] = fit(root, stage, folder, block=dict(BLOCK))
    found["switch, no block"] = fit(root, stage, folder, block=None)
    found["switch, own callback"] = fit(root, stage, folder, callback(profile_step=1), block=dict(BLOCK))
    del os.environ["LIGHTNING_FLOPS"]
    return found


if __name__ == "__main__":
    # Not needed for what is tested here, and a minute to compile.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    found = {
        f"{root} {stage}": scenarios(root, int(stage), sys.argv[1]) for root, stage in map(str.split, sys.argv[2:])
    }
    Path(sys.argv[1], f"seen{os.environ['RANK']}.json").write_text(json.dumps(found))
