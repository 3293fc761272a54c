"""A run whose session is out, and that may go on later with another one: a loop that trains in turn with others."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from lightning_flops.instrument.random_state import random_state_kept
from lightning_flops.text.printable import package_logger

if TYPE_CHECKING:
    from lightning_flops.analysis.step_keys import StepKey
    from lightning_flops.instrument.notes import Notes
    from lightning_flops.instrument.timing.monitor import Monitor
    from lightning_flops.records import BatchTokens
    from lightning_flops.schema.profile import Profile
    from lightning_flops.schema.throughput import ThroughputSummary
    from lightning_flops.session.output import RunOutput
    from lightning_flops.session.step_flops import StepFlops

logger = package_logger(__name__)


@dataclass(slots=True, kw_only=True)
class RunSoFar:
    """What is known of the run. It holds neither the model nor an optimizer, which may be gone when it goes on."""

    steps_done: int
    last: StepKey | None
    """What the step that ended last is known by."""
    notes: Notes
    monitor: Monitor | None
    flops: StepFlops
    profile: Profile | None
    """Of its latest window."""
    slowed_tokens: BatchTokens
    throughput: ThroughputSummary | None
    x_axis: int
    output: RunOutput
    is_written: bool
    """The throughput is in the reports."""

    def write(self) -> None:
        """Write the throughput, if that is not done."""
        if self.is_written or self.throughput is None:
            return
        self.is_written = True
        try:
            with random_state_kept():
                self.output.write_throughput(self.throughput, step=self.x_axis)
        except Exception as error:
            logger.warning("the throughput of a loop was not written: %s: %s", type(error).__name__, error)
