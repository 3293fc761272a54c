"""Profiles for the page: of a decoder on a GPU, of ten thousand modules, of many ranks, and with hostile names.

The times of modules, operators and kernels are made here by simple rules, so that the page has something to draw; how
they are measured is tested elsewhere.
"""

from __future__ import annotations

from dataclasses import replace

from lightning_flops.analysis.ranks import with_ranks
from lightning_flops.config import ProfilerConfig
from lightning_flops.records import PhaseBytes, PhaseFlops
from lightning_flops.schema.profile import Profile
from lightning_flops.schema.step import ModuleProfile, ModuleTimes, PartTiming, TimingProfile
from tests.report import jobs, windows
from tests.report.traced_windows import transformer_traced
from tests.report.windows import build_profile

PEAK = 312e12
"""Dense FLOP/s of the device in bfloat16."""

BANDWIDTH = 2.039e12
"""Bytes a second of its memory."""

SLOWED = "blocks.5.mlp.up"
"""The module of the decoder that reaches a tenth of what its sisters reach."""


def timed(modules: tuple[ModuleProfile, ...]) -> tuple[ModuleProfile, ...]:
    """*modules*, which stand in tree order, with times that add up along it, and bytes and rooflines by their FLOPs."""
    inside: dict[str, list[tuple[float, float]]] = {}
    made: list[ModuleProfile] = []
    for place, module in reversed(list(enumerate(modules))):
        rate = PEAK * (0.05 if module.name == SLOWED else 0.35 + 0.04 * (place % 7))
        own, total = module.own, module.total
        forward, backward = 2e-5 + own.forward / rate, 4e-5 + (own.backward + own.recompute) / rate
        below = inside.pop(module.name, [])
        forward_sec, backward_sec = forward + sum(one for one, _ in below), backward + sum(one for _, one in below)
        inside.setdefault(module.name.rpartition(".")[0], []).append((forward_sec, backward_sec))
        known = bool(total.total)
        times = ModuleTimes(
            clock="device",
            forward_sec=forward_sec,
            own_forward_sec=forward,
            backward_sec=backward_sec,
            own_backward_sec=backward,
            forward_flops_per_sec=total.forward / forward_sec if known else None,
            backward_flops_per_sec=total.backward / backward_sec if known else None,
            forward_utilization=total.forward / forward_sec / PEAK if known else None,
            backward_utilization=total.backward / backward_sec / PEAK if known else None,
        )
        moved = PhaseBytes(forward=10**7 + total.forward // 180, backward=2 * 10**7 + total.backward // 160)
        made.append(replace(module, times=times, total_bytes=moved))
    return tuple(reversed(made))


def _uneven(timing: TimingProfile) -> TimingProfile:
    """*timing* with steps that differ: they swing by 2%, and the eighth takes half as long again in its data wait."""

    def part(one: PartTiming, *, late: bool) -> PartTiming:
        steps = [one.mean_sec * (1 + 0.02 * ((place * 7) % 5 - 2) / 2) for place in range(timing.timed_steps)]
        if late:
            steps[7] += 0.5 * timing.global_step_sec
        return replace(one, steps_sec=tuple(steps))

    parts = tuple(part(one, late=one.name == "data wait") for one in timing.parts)
    return replace(timing, parts=parts, global_step=part(timing.global_step, late=True))


def decoder(profile_step: int = 10) -> Profile:
    """The transformer of ``tests.report.windows``, twelve blocks on an A100, with a traced step."""
    window = replace(windows.transformer_window(), profile_step=profile_step)
    profile = build_profile(window, config=ProfilerConfig())
    assert profile.timing is not None
    modules = timed(profile.modules)
    traced = replace(transformer_traced()[1], index=34)
    return replace(profile, modules=modules, timing=_uneven(profile.timing), traced=traced)


def many_ranks() -> Profile:
    """Four ranks, of which rank 2 waits for its data while the others wait for it."""
    profile, answers = jobs.job(jobs.slow_loader())
    return with_ranks(profile, answers)


def of_modules(number: int) -> Profile:
    """A model of *number* modules: blocks of ten, in tree order."""
    profile = decoder()
    leaf = PhaseFlops(forward=2_000_000_000, backward=4_000_000_000)
    blocks = (number - 2) // 10
    used = profile.modules[0]

    def module(name: str, type_name: str, leaves: int, own: PhaseFlops) -> ModuleProfile:
        total = PhaseFlops(forward=leaves * leaf.forward, backward=leaves * leaf.backward)
        return replace(
            used,
            name=name,
            type_name=type_name,
            extra_repr="",
            params=leaves * 1_000_000,
            calls=1,
            own=own,
            total=total,
            total_bytes=PhaseBytes(forward=leaves * 10_000_000, backward=leaves * 20_000_000),
        )

    none = PhaseFlops()
    made = [module("", "Wide", blocks * 6, none), module("blocks", "ModuleList", blocks * 6, none)]
    for block in range(blocks):
        name = f"blocks.{block}"
        made.append(module(name, "Block", 6, none))
        for half in ("attention", "feed_forward"):
            made.append(module(f"{name}.{half}", half.title(), 3, none))
            made += [module(f"{name}.{half}.linear{place}", "Linear", 1, leaf) for place in range(3)]
        made.append(module(f"{name}.dropout", "Dropout", 0, none))
    made += [module(f"extra{place}", "Identity", 0, none) for place in range(number - len(made))]
    return replace(profile, modules=timed(tuple(made)))


HOSTILE = (
    "</script><script>document.title='owned'</script>",
    "<img src=x onerror=\"document.title='owned'\">",
    "\"'><svg onload=document.title='owned'>",
    "javascript:document.title='owned'",
    "{{constructor.constructor('document.title=1')()}}",
    "<!--",
    "]]>",
    "a\u2028b\u202ec",
)
"""What a module, a class or an operator may be called."""


def hostile() -> Profile:
    """The decoder with markup in every name."""
    profile = decoder()
    renamed = []
    for place, module in enumerate(profile.modules):
        name = HOSTILE[place % len(HOSTILE)]
        renamed.append(replace(module, type_name=name, extra_repr=name))
    top = profile.modules[0]
    name = HOSTILE[1].replace(".", "")  # torch takes any name for a module that has no dot
    child = replace(profile.modules[1], name=name, type_name=HOSTILE[1], alias_of=HOSTILE[2])
    operators = tuple(replace(one, operator=HOSTILE[at % 8] + str(at)) for at, one in enumerate(profile.operators))
    context = replace(profile.context, device_name=HOSTILE[0], host=HOSTILE[1], strategy=HOSTILE[2])
    advice = tuple(replace(one, fact=HOSTILE[0], remedy=HOSTILE[1]) for one in profile.advice)
    return replace(
        profile,
        modules=(replace(top, type_name=HOSTILE[0]), *renamed[1:], child),
        operators=operators,
        context=context,
        advice=advice,
        notes=HOSTILE,
    )
