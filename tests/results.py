"""What a profiler of any framework has when its run is over."""

from __future__ import annotations

from typing import Any

from lightning_flops.schema.profile import Profile, ThroughputSummary


def profile_of(profiler: Any) -> Profile:
    """The profile of a callback, a handle or a loop's profiler, which must have one."""
    profile = profiler.profile
    assert isinstance(profile, Profile)
    return profile


def throughput_of(profiler: Any) -> ThroughputSummary:
    """The summary of the run, which must have one."""
    throughput = profiler.throughput
    assert isinstance(throughput, ThroughputSummary)
    return throughput
