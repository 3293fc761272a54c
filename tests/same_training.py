"""One small run of each framework, and all of it that a profiler could change."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.data import DataLoader
from transformers import Trainer

from lightning_flops import FlopsProfilerCallback, FlopsProfilerTrainerCallback, profile_training
from lightning_flops.adapters.lightning import LightningAdapter
from lightning_flops.adapters.loop import LoopAdapter
from lightning_flops.adapters.transformers import TrainerAdapter
from tests.fake_clock import FakeNow
from tests.left_on_objects import left_on_object
from tests.left_on_torch import torch_state
from tests.lightning import nets
from tests.loops.nets import BATCH, NARROW, WIDE, Rows
from tests.transformers import tiny

Settings = Mapping[str, Any]


def values(tensors: Any) -> list[Any]:
    return [tensor.tolist() for tensor in tensors]


def lightning(
    folder: Path, settings: Settings | None, *, root: str = nets.ROOT, manual: bool = False, batches: int = 9
) -> dict[str, Any]:
    """A fit of two epochs, a short one of one, logged and saved; with validation unless its optimization is manual."""
    net = nets.new_gan(root) if manual else nets.new_net(root, validates=True)
    callbacks = [] if settings is None else [FlopsProfilerCallback(**settings)]
    logger = import_module(f"{root}.loggers").CSVLogger(folder)
    more: dict[str, Any] = {"max_epochs": 1 + (batches > 3), "log_every_n_steps": 3}
    trainer = nets.new_trainer(root, folder, *callbacks, logger=logger, enable_checkpointing=True, **more)
    torch.manual_seed(11)
    trainer.fit(net, nets.loader(batches), None if manual else nets.loader(2))
    return {
        "weights": values(net.parameters()),
        "losses": getattr(net, "losses", None),
        "marks": nets.footprint(trainer, net),
        "profiles": [callback.profile for callback in callbacks],
    }


def evaluation(folder: Path, settings: Settings | None, *, function: str) -> dict[str, Any]:
    """A prediction, a test or a validation."""
    net = nets.new_evaluated_net()
    callbacks = [] if settings is None else [FlopsProfilerCallback(**settings)]
    trainer = nets.new_trainer(nets.ROOT, folder, *callbacks)
    torch.manual_seed(11)
    given = nets.run(trainer, function, net, nets.loader(14))
    return {
        "returned": values(given) if function == "predict" else given,
        "modes": [module.training for module in net.modules()],
        "marks": nets.footprint(trainer, net),
        "profiles": [callback.profile for callback in callbacks],
    }


def loop(folder: Path, settings: Settings | None) -> dict[str, Any]:
    """A loop with shuffled batches, batch norm, dropout, clipping, a schedule, and evaluations."""
    torch.manual_seed(5)
    net = nn.Sequential(nn.Linear(WIDE, 32), nn.BatchNorm1d(32), nn.Dropout(0.2), nn.ReLU(), nn.Linear(32, NARROW))
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    losses = []
    data = DataLoader(Rows(14, FakeNow()), batch_size=BATCH, shuffle=True)
    with nullcontext() if settings is None else profile_training(net, optimizer, **settings) as profiler:
        for place, rows in enumerate(data if profiler is None else profiler.batches(data)):
            loss = net(rows).square().mean()
            loss.backward()
            nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            losses.append(float(loss.detach()))
            if place % 4 == 3:
                net.eval()
                with torch.no_grad():
                    losses.append(float(net(rows).sum()))
                net.train()
    moments = [one.tolist() for state in optimizer.state.values() for one in state.values()]
    return {
        "weights": values(net.state_dict().values()),
        "losses": losses,
        "optimizer": (moments, optimizer.state_dict()["param_groups"]),
        "marks": left_on_object(net) + left_on_object(optimizer),
        "profiles": [] if profiler is None else [profiler.profile],
    }


def transformers(folder: Path, settings: Settings | None) -> dict[str, Any]:
    """A Trainer that accumulates and evaluates."""
    callbacks = [] if settings is None else [FlopsProfilerTrainerCallback(**settings)]
    trainer: Trainer = tiny.new_net_trainer(
        folder, *callbacks, rows=tiny.Rows(7 * tiny.ROWS), num_train_epochs=3, gradient_accumulation_steps=2,
        logging_steps=3, eval_strategy="epoch", eval_dataset=tiny.Rows(tiny.ROWS),
    )  # fmt: skip
    trainer.train()
    net: Any = trainer.model
    logged = ("loss", "grad_norm", "learning_rate", "eval_loss")
    return {
        "weights": values(net.parameters()),
        "losses": net.losses,
        "logs": [{name: log[name] for name in logged if name in log} for log in trainer.state.log_history],
        "marks": tiny.footprint(trainer),
        "profiles": [callback.profile for callback in callbacks],
    }


class Kind(NamedTuple):
    """How a run is made, and whose methods a hook of it calls."""

    run: Callable[[Path, Settings | None], dict[str, Any]]
    adapters: tuple[type, ...]

    def outcome(self, folder: Path, settings: Settings | None) -> dict[str, Any]:
        """All that a profiler could change, and ``profiles``; what is not as before is ``left on torch``."""
        before = torch_state()
        seen = self.run(folder, settings)
        left = [name for name, state in torch_state().items() if state != before[name]]
        return {**seen, "random state": torch.get_rng_state().tolist(), "left on torch": left}


SEAMED = {
    "lightning": Kind(lightning, (LightningAdapter,)),
    "lightning by hand": Kind(partial(lightning, manual=True), (LightningAdapter,)),
    "predict": Kind(partial(evaluation, function="predict"), (LightningAdapter,)),
    "loop": Kind(loop, (LoopAdapter,)),
    "transformers": Kind(transformers, (LoopAdapter, TrainerAdapter)),
}
"""Runs of every adapter."""
KINDS = {
    **SEAMED,
    **{name: Kind(partial(evaluation, function=name), (LightningAdapter,)) for name in ("test", "validate")},
    **{
        f"{root}, {batches} batches{', by hand' * manual}": Kind(
            partial(lightning, root=root, manual=manual, batches=batches), (LightningAdapter,)
        )
        for root in nets.ROOTS
        for manual in (False, True)
        for batches in (1, 3, 12)  # the run ends before its window, in it, and after it
    },
}
"""All runs, those of Lightning by both of its roots."""
