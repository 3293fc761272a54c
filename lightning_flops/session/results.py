"""What a user asks of a profiled run, by whatever front door: its settings, its profiles, its throughput."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lightning_flops.config import ProfilerConfig
    from lightning_flops.schema.profile import Profile
    from lightning_flops.schema.throughput import ThroughputSummary


class ProfiledRun:
    """The answers; a front door's class inherits them, calls ``_start_anew`` and fills in what comes out."""

    _config: ProfilerConfig
    _profiles: list[Profile]
    _throughput: ThroughputSummary | None

    def _start_anew(self) -> None:
        """Forget what an earlier run measured."""
        self._profiles = []
        self._throughput = None

    @property
    def config(self) -> ProfilerConfig:
        """The settings in force."""
        return self._config

    @property
    def profile(self) -> Profile | None:
        """What the latest window measured; None until one has closed."""
        return self._profiles[-1] if self._profiles else None

    @property
    def profiles(self) -> tuple[Profile, ...]:
        """What every window of the latest run measured, the first one first."""
        return tuple(self._profiles)

    @property
    def throughput(self) -> ThroughputSummary | None:
        """What the batches of the latest run came to; None until it has ended, or if nothing was monitored."""
        return self._throughput
