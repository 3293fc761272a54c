"""What a session asks its door, which knows the framework that drives the run."""

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
    """The first step to profile, given as the number of steps of the run before it; None: there is none."""
    steps_before: int = 0
    """Steps that the run made before it had a session; they count as steps of the run."""
    settle_steps: int
    """Steps to leave alone after a counted one."""
    device: torch.device
    """Where the model is."""
    dp_size: int
    """Ranks that see different data."""
    output: LoggedOutput
    """Where rank 0 shows its reports."""
    holds_back: Callable[[], bool] = lambda: False
    """Whether something that was reported waits for the run to log its own metrics. If so, the session stays.

    It is asked when there is nothing else to do in the run.
    """


class Door(Protocol):
    """Connects one framework to a session.

    The door tells its session where batches, steps and their parts begin and end. The session asks the door for what
    only the framework knows. An error in a door's method ends the session, and never the training.
    """

    def plan(self) -> RunPlan:
        """What is known of the run when it begins."""

    def meter(self, note: Callable[[str], None]) -> BatchMeter:
        """What finds the samples and tokens in the run's batches; *note* adds a sentence to every report."""

    def tap_run(self, taps: Patches) -> None:
        """Put into *taps* the wrappers that stay as long as the session does."""

    def tap_parts(self, taps: Patches) -> None:
        """Put wrappers around the parts of a step into *taps*; they are taken off when no window needs them."""

    def take_out(self) -> None:
        """Remove what the door put on the framework's objects outside of the session's taps."""

    def window_opens(self) -> None:
        """The step that begins now is counted."""

    def context(self) -> RunContext:
        """Where the run takes place, as it is now; the session knows its micro-batch size."""

    def x_axis(self) -> int:
        """The run's own step, which its loggers use as x-axis."""

    def optimizers(self) -> Iterable[Any] | None:
        """The optimizers that update the model; None if not known."""

    def whole_model(self) -> nn.Module:
        """The model with all its wrappers; some of them may be around the root."""

    def loader_workers(self) -> int | None:
        """Fewest worker processes of the training DataLoaders; None if not known."""

    def feed(self) -> Feed | None:
        """What feeds the training loop with batches; None if not known."""
