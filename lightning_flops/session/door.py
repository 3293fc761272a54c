"""What a session asks of the framework that drives its run, and what it hands to its door."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch
    from torch import nn

    from lightning_flops.instrument.batches import BatchMeter
    from lightning_flops.instrument.patches import Patches
    from lightning_flops.instrument.timing.loader_queue import Feed
    from lightning_flops.records import RunContext
    from lightning_flops.session.output import LoggedOutput


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPlan:
    """What is known of a run when it begins."""

    profile_step: int | None
    """The first step to profile, by the number of steps of the run before it; None: there is none."""
    settle_steps: int
    """Steps to leave alone after a counted one."""
    device: torch.device
    """Where the model is."""
    dp_size: int
    """Ranks that see different data."""
    output: LoggedOutput
    """Where rank 0 shows its reports."""


class Door(Protocol):
    """One framework's way into a session.

    The door tells its session where batches, steps and their parts begin and end; the session asks the door for what
    only the framework knows. What a door's method raises ends the session, and never the training.
    """

    def plan(self) -> RunPlan:
        """How the run begins."""

    def meter(self, note: Callable[[str], None]) -> BatchMeter:
        """What tells the samples and tokens of the run's batches; *note* takes a sentence for every report."""

    def tap_run(self, taps: Patches) -> None:
        """Put into *taps* what stays as long as the session does."""

    def tap_parts(self, taps: Patches) -> None:
        """Put wrappers around the parts of a step into *taps*; they are taken off when no window needs them."""

    def take_out(self) -> None:
        """Take off what the session's taps do not hold."""

    def window_opens(self) -> None:
        """The step that begins now is counted."""

    def context(self) -> RunContext:
        """Where the run takes place, as it is now; the session knows its micro-batch size."""

    def x_axis(self) -> int:
        """The run's own step, by which its loggers order what they get."""

    def reading_is_due(self) -> bool:
        """Whether the run logs its own metrics at its present step."""

    def optimizers(self) -> Iterable[Any] | None:
        """The optimizers that update the model; None if not known."""

    def whole_model(self) -> nn.Module:
        """The model in all its wrappers, some of which may be around the root."""

    def loader_workers(self) -> int | None:
        """Fewest worker processes of the training DataLoaders; None if not known."""

    def feed(self) -> Feed | None:
        """What feeds the training loop; None if nobody can tell."""
