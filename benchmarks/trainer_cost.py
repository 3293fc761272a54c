"""What the callback costs a step of a transformers Trainer outside of a window: host CPU time over a bare Trainer.

``make bench-time`` runs this with the other benchmarks of time; ``python -m benchmarks.trainer_cost`` runs it alone.

As in ``monitor_cost``, one training holds all arms. Inside a forward the Trainer's callbacks, and those of its methods
that are wrapped, are switched to the next arm's for a block of steps; the order of the arms is new in every round. A
block's figures are those of ``monitor_cost``, and the Trainer logs with its last step.
"""

from __future__ import annotations

import argparse
import gc
import logging
import tempfile
import types
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset
from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments

from lightning_flops import FlopsProfilerTrainerCallback

from .arms import BLOCK_STEPS, Arms, steps_of
from .machine import restart_in_one_thread_environment
from .monitor_cost import BARE, BARE_AGAIN, EMPTY, OVER_BARE, table
from .time_report import RESULT, write_section

logger = logging.getLogger("benchmarks.trainer_cost")

MODULE = "benchmarks.trainer_cost"
OURS = "FlopsProfilerTrainerCallback"
ARMS = BARE, BARE_AGAIN, EMPTY, OURS
TAPPED = ("get_batch_samples", "_get_num_items_in_batch")
"""Methods of a Trainer that are wrapped for the whole run and called in every step."""


class Rows(Dataset[dict[str, torch.Tensor]]):
    """Rows of 64 numbers, always the same one."""

    def __init__(self, number: int) -> None:
        """Makes the row."""
        self.number = number
        self.row = torch.randn(64)

    def __len__(self) -> int:
        """As many as the training asks for."""
        return self.number

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        """The row."""
        return {"x": self.row}


class SmallNet(nn.Module):
    """A forward and a loss; it tells *on_step* where each step's forward begins."""

    def __init__(self, on_step: Callable[[], None]) -> None:
        """Keeps *on_step*."""
        super().__init__()
        self.layer = nn.Linear(64, 64)
        self.on_step = on_step

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        """The loss, as the Trainer wants it."""
        self.on_step()
        return {"loss": self.layer(x).square().mean()}


class EmptyCallback(TrainerCallback):
    """No event of its own; the Trainer calls the inherited ones, which do nothing."""


class Switch:
    """Switches one training's callbacks and wrapped methods to those of an arm.

    Args:
        profiler: the callback under test.
    """

    def __init__(self, profiler: FlopsProfilerTrainerCallback) -> None:
        """Makes the empty callback."""
        self.trainer: Any = None
        self._own: Mapping[str, list[TrainerCallback]] = {
            BARE: [], BARE_AGAIN: [], EMPTY: [EmptyCallback()], OURS: [profiler],
        }  # fmt: skip
        self._plain = {name: vars(Trainer)[name] for name in TAPPED}

    def turn_to(self, arm: str) -> None:
        """What follows is a step of *arm*."""
        callbacks = self.trainer.callback_handler.callbacks
        own = [one for of_arm in self._own.values() for one in of_arm]
        callbacks[:] = [one for one in callbacks if one not in own] + self._own[arm]
        for name, plain in self._plain.items():
            if arm == OURS:
                vars(self.trainer).pop(name, None)
            else:  # what an instance has itself goes before what its class has, which is wrapped
                vars(self.trainer)[name] = types.MethodType(plain, self.trainer)

    def end(self) -> None:
        """The training ends as it began."""
        self.trainer.control.should_training_stop = True
        self.turn_to(OURS)


def measure(profiler: FlopsProfilerTrainerCallback, *, rounds: int, folder: Path) -> Arms:
    """CPU microseconds of a step under each arm: of each block the mean and the median."""
    switch = Switch(profiler)
    arms = Arms(ARMS, rounds=rounds, turn_to=switch.turn_to, end=switch.end)
    steps = steps_of(ARMS, rounds=rounds)
    arguments = TrainingArguments(
        output_dir=str(folder), per_device_train_batch_size=2, max_steps=steps, report_to="none", save_strategy="no",
        logging_steps=BLOCK_STEPS, use_cpu=True, disable_tqdm=True, dataloader_pin_memory=False,
    )  # fmt: skip
    switch.trainer = Trainer(
        model=SmallNet(arms.step_begins), args=arguments, train_dataset=Rows(2 * steps), callbacks=[profiler]
    )
    switch.trainer.remove_callback(PrinterCallback)
    gc.collect()
    switch.trainer.train()
    return arms


def report(by_setting: Mapping[str, Arms], *, rounds: int) -> list[str]:
    """The section of the results."""
    return [
        "## What the callback costs a step of a transformers Trainer",
        "",
        f"Host CPU µs a step of a small network, outside of a window; arms switched inside one training in blocks of "
        f"{BLOCK_STEPS} steps, in a new order in each of {rounds} rounds; medians of the rounds' differences with 95% "
        "bootstrap intervals. The Trainer logs once in a block. The mean of a block's steps has that in it, and so all "
        "that is put off.",
        "",
        *table(
            {name: (arms.medians, arms.means) for name, arms in by_setting.items()},
            targets={OURS: {BARE: OVER_BARE}},
        ),
        "",
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures, writes its section of the results, and returns 0."""
    parser = argparse.ArgumentParser(prog=f"python -m {MODULE}", description=__doc__)
    parser.add_argument("--rounds", type=int, default=120)
    parser.add_argument("--output", type=Path, default=RESULT)
    options = parser.parse_args(arguments)
    restart_in_one_thread_environment(MODULE)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    logging.getLogger("lightning_flops").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    settings: dict[str, dict[str, Any]] = {
        "monitor=True, the window closed": {"profile_step": 0, "timing_steps": 1, "trace": False},
        "monitor=False, the window closed": {"profile_step": 0, "timing_steps": 1, "trace": False, "monitor": False},
        "timer_only=True": {"timer_only": True},
    }
    with tempfile.TemporaryDirectory() as folder:
        by_setting = {
            name: measure(FlopsProfilerTrainerCallback(**given), rounds=options.rounds, folder=Path(folder))
            for name, given in settings.items()
        }
    write_section(options.output, "trainer_cost", report(by_setting, rounds=options.rounds))
    logger.info("wrote %s", options.output)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
