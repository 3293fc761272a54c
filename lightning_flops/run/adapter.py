"""What a run asks of the adapter of its framework."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from lightning_flops.records import Loop, RunContext, TimePhase
from lightning_flops.run.output import LoggedOutput
from lightning_flops.signals import Undo


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What does not change in a run."""

    root: nn.Module  # the model whose modules own the work
    whole: nn.Module  # with all its wrappers
    device: torch.device  # where the model is
    output: LoggedOutput  # where rank 0 shows its reports
    rank: int = 0
    world_size: int = 1
    loop: Loop = "training"
    profile_step: int | None  # the first step to profile, given as the number of steps before it; None: there is none
    settle_steps: int = 2  # steps left alone after a counted one, until batches that were fetched ahead are used up
    unseen: tuple[TimePhase, ...] = ()  # parts the loop never shows apart; if any, its wait for data may be unseen, too
    ends_when_dropped: bool = False  # a run that is dropped is over, and reports: its framework does not always say so


class Adapter(ABC):
    """One framework's hooks on one rank, turned into calls on a ``Run``, which asks these questions of them."""

    facts: Facts

    @abstractmethod
    def context(self) -> RunContext:
        """Where the run takes place, as it is now."""

    @abstractmethod
    def x_axis(self) -> int:
        """The run's own step, which its loggers use as x-axis."""

    def logged_at(self) -> int:
        """The same for what the loggers get now, if it differs, as DeepSpeed's samples do."""
        return self.x_axis()

    @abstractmethod
    def optimizers(self) -> Iterable[Any] | None:
        """The optimizers that update the model; None if they are not known."""

    @abstractmethod
    def loader_workers(self) -> Collection[int]:
        """The workers of each training DataLoader, as far as they are known."""

    def declared_batch_size(self) -> int | None:
        """What the framework's settings or loader say of the samples of the running batch; None: nothing."""
        return None

    def names_phase(self, *, begins: bool) -> None:  # noqa: B027
        """By the loop's own word a phase of the step *begins*, or ends."""

    @abstractmethod
    def is_between_steps(self) -> bool:
        """Whether a step has just ended, and nothing of the next one has begun, not even the fetch of its batch."""

    @abstractmethod
    def take_hooks_off(self) -> None:
        """Take the hooks off the models, until ``put_hooks_on``: whole steps go without hooks."""

    @abstractmethod
    def put_hooks_on(self) -> None:
        """Put them on again; a step has just ended."""

    @abstractmethod
    def call(self) -> tuple[str, Any] | None:
        """What of the root was called for the running step, and with what, by shapes at least; None: not known."""

    @abstractmethod
    def looks(self, model: nn.Module) -> None:
        """*model*, which may be any, is called without gradients while a step is counted."""

    @abstractmethod
    def mark_parts(self, stack: Undo) -> None:
        """Put hooks around the parts of a step, which *stack* removes."""
