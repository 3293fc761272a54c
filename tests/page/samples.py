"""Profiles for the page: of a decoder on a GPU, of ten thousand modules, of many ranks, and with hostile names.

The times of modules, operators and kernels are made here by simple rules, so that the page has something to draw; how
they are measured is tested elsewhere.
"""

from __future__ import annotations

from dataclasses import replace

from lightning_flops.analysis.ranks import with_ranks
from lightning_flops.config import ProfilerConfig
from lightning_flops.schema.profile import Profile
from lightning_flops.schema.step import PartTiming, TimingProfile
from tests.report import jobs, windows
from tests.report.traced_windows import transformer_traced
from tests.report.windows import build_profile

SLOWED = "blocks.11.mlp.up"
"""A module of the decoder whose backward takes half as long again as its sisters'."""


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
    profile = build_profile(window, config=ProfilerConfig(), traced=replace(transformer_traced()[1], index=34))
    assert profile.timing is not None
    return replace(profile, timing=_uneven(profile.timing))


def many_ranks() -> Profile:
    """Four ranks, of which rank 2 waits for its data while the others wait for it."""
    profile, answers = jobs.job(jobs.slow_loader())
    return with_ranks(profile, answers)


def of_modules(number: int) -> Profile:
    """A model of *number* modules: a root, and blocks of ten."""
    profile = decoder()
    root, leaf = profile.modules[0], next(one for one in profile.modules if one.name == "blocks.0.attn.qkv")
    blocks = [replace(leaf, name=f"block{at}") for at in range(number // 10)]
    leaves = [replace(leaf, name=f"block{at % len(blocks)}.linear{at}") for at in range(number - len(blocks) - 1)]
    return replace(profile, modules=(root, *sorted((*blocks, *leaves), key=lambda one: one.name.split("."))))


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
