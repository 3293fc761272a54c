"""What a viewer of traces shows of a module when its slice is chosen: its FLOPs, their rate, the share of the peak."""

from __future__ import annotations

from collections.abc import Mapping

from lightning_flops.analysis.rates import mean
from lightning_flops.schema.modules import ModuleProfile
from lightning_flops.schema.profile import Profile

ModuleArgs = Mapping[str, Mapping[str, int | float]]
"""Values by their words, by the module's qualified name."""


def module_args(profile: Profile) -> ModuleArgs:
    """The values of each module of *profile* with FLOPs, of one step with all calls and the modules inside it.

    Units: FLOPs, FLOP/s, fractions of the peak. What is n/a is left out; nothing is known where the traced step was not
    like the counted one.
    """
    if profile.traced is None or not profile.traced.like_counted:
        return {}
    steps = max(1, len(profile.counted_steps))
    found = {module.name: _args(module, steps=steps) for module in profile.modules}
    return {name: args for name, args in found.items() if args}


def _args(module: ModuleProfile, *, steps: int) -> Mapping[str, int | float]:
    total, times = module.total, module.times
    forward, backward = total.forward, total.backward + total.recompute
    if not forward and not backward:
        return {}
    values = {
        "calls of a step": mean(total=module.calls, steps=steps),
        "forward FLOPs of a step": mean(total=forward, steps=steps),
        "forward FLOP/s": None if times is None else times.forward_flops_per_sec,
        "forward share of peak": None if times is None else times.forward_utilization,
        "backward FLOPs of a step": mean(total=backward, steps=steps),
        "backward FLOP/s": None if times is None else times.backward_flops_per_sec,
        "backward share of peak": None if times is None else times.backward_utilization,
    }
    return {words: value for words, value in values.items() if value is not None}
