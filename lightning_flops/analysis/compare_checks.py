"""What must hold in a profile before it is compared: a file may have been edited, or may be half of one."""

from __future__ import annotations

from typing import get_args

from lightning_flops.analysis.module_names import parent_name
from lightning_flops.records import TimePhase
from lightning_flops.schema.profile import Profile
from lightning_flops.schema.step import TimingProfile


def contradiction_in(profile: Profile, timing: TimingProfile) -> str | None:
    """What in *profile* contradicts the rest of it, in words; None if nothing does.

    Args:
        profile: as it was read.
        timing: its times.
    """
    known = {""}  # the root
    for place, module in enumerate(profile.modules):
        if parent_name(module.name) not in known or bool(place) != bool(module.name):
            return f"modules[{place}] is below no module before it"
        known.add(module.name)
    steps, phases = len(timing.global_step.steps_sec), set[str]()
    for place, part in enumerate(timing.parts):
        names = [name.replace(" ", "_") for name in part.name.split(" + ")]
        if not phases.isdisjoint(names) or not set(names) <= set(get_args(TimePhase)):
            return f"timing.parts[{place}].name must be phases that no other part has"
        phases.update(names)
        if len(part.steps_sec) != steps:
            return f"timing.parts[{place}].steps_sec must have as many steps as timing.global_step.steps_sec"
    return None
