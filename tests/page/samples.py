"""What the page shows: a decoder on a GPU, ten thousand modules, many ranks, hostile names, and a trace.

The times of modules, operators and kernels are made here by simple rules, so that the page has something to draw; how
they are measured is tested elsewhere.
"""

from __future__ import annotations

from dataclasses import replace

from lightning_flops.analysis.ranks import with_ranks
from lightning_flops.config import ProfilerConfig
from lightning_flops.measure.counting.recorded_calls import recorded_work
from lightning_flops.schema.profile import Profile
from lightning_flops.schema.step import PartTiming, TimingProfile
from lightning_flops.schema.trace import TracesReport
from tests.analysis.in_memory import analyze_traces
from tests.analysis.trace_events import (
    A100,
    Event,
    data_loader,
    memory,
    module,
    phase,
    product,
    step,
    trace_from_events,
)
from tests.report import jobs, windows
from tests.report.renamed import renamed, with_suffix
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
    return with_ranks(*jobs.job(jobs.slow_loader()))


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
    """The decoder with markup in every name, but for dots, which part those of modules."""
    evil: Profile = renamed(decoder(), with_suffix(*(one.replace(".", "") for one in HOSTILE)))
    return replace(evil, notes=HOSTILE)


def traced() -> TracesReport:
    """Step 3 of 1000 us, step 4 of 2000, each with a product in the module ``first.linear``, after 50 us of data."""
    events: list[Event] = []
    for number, begin, length in ((3, 0, 1000), (4, 1000, 2000)):
        events += [
            step(number, begin, length),
            data_loader(begin, 50),
            phase("forward", begin + 90, 60),
            module("", begin + 92, 50),
            module("first", begin + 94, 40),
            module("first.linear", begin + 96, 30),
            *product(number, begin + 100, rows=1_000_000, kernel_us=500),
            # 4 GB are there before the trace; at the peak a product's 2 GB are added to them.
            memory(begin + 101, 2_000_000_000, device=0, total=6_000_000_000),
            memory(begin + 700, -2_000_000_000, device=0, total=4_000_000_000),
        ]
    loaded = trace_from_events(events, metadata={"deviceProperties": [A100]}, source="/runs/0/step.pt.trace.json")
    return analyze_traces([loaded], formulas=recorded_work)
