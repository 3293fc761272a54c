"""What must hold in a profile before it is compared: a file may have been edited, or may be half of one."""

from __future__ import annotations

from lightning_flops.analysis.module_names import parent_name
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
        if not phases.isdisjoint(part.phases) or not part.phases:
            return f"timing.parts[{place}].phases must be phases that no other part has"
        phases.update(part.phases)
        if len(part.steps_sec) != steps:
            return f"timing.parts[{place}].steps_sec must have as many steps as timing.global_step.steps_sec"
    return None
