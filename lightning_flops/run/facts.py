"""What a run asks of the adapter of its framework."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from lightning_flops.records import Loop, RunContext, TimePhase
from lightning_flops.run.output import LoggedOutput


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """One run as its framework knows it: what a run asks of its adapter."""

    root: nn.Module  # the model whose modules own the work
    device: torch.device  # where the model is
    output: LoggedOutput  # where rank 0 shows its reports
    context: Callable[[], RunContext]  # returns where the run takes place, as it is now
    x_axis: Callable[[], int]  # returns the run's own step, which its loggers use as x-axis
    optimizers: Callable[[], Iterable[Any] | None]  # returns the optimizers that update the model; None if not known
    whole_model: Callable[[], nn.Module]  # returns the model with all its wrappers
    rank: int = 0
    world_size: int = 1
    loop: Loop = "training"
    profile_step: int | None  # the first step to profile, given as the number of steps before it; None: there is none
    settle_steps: int = 2  # steps left alone after a counted one, until batches that were fetched ahead are used up
    loader_workers: Callable[[], int | None] = lambda: None  # returns the fewest workers of the training DataLoaders
    logged_at: Callable[[], int] | None = None  # returns the loggers' x-axis, as DeepSpeed's samples; None: the step
    declared_batch_size: Callable[[], int] | None = None  # returns what the framework's settings name; None: nothing
    unseen: tuple[TimePhase, ...] = ()  # parts the loop never shows apart; if any, its wait for data may be unseen, too
    ends_when_dropped: bool = False  # a run that is dropped is over, and reports: its framework does not always say so
    mark_parts: Callable[[ExitStack], None] = lambda stack: None  # puts hooks around a step's parts; the stack undoes
