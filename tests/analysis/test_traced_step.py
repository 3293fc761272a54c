"""Times and rates of modules in a traced step; the windows' docstrings say how the numbers come about."""

from __future__ import annotations

import json
from array import array
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lightning_flops.analysis.profile import module_times
from lightning_flops.analysis.trace_report import build_traced_step
from lightning_flops.config import ProfilerConfig
from lightning_flops.records import PhaseSeconds, TracedStepRecord
from lightning_flops.schema.profile import Profile
from lightning_flops.schema.step import ModuleTimes
from tests.analysis.in_memory import known
from tests.analysis.trace_events import Event, kernel, launch, made, module, node, operator, phase, scope, step
from tests.report.traced_windows import mlp_traced, transformer_traced
from tests.report.windows import A100, build_profile

PEAK = ProfilerConfig(peak_flops_per_sec=800e9)


def times_of(profile: Profile, name: str) -> ModuleTimes:
    (found,) = [one for one in profile.modules if one.name == name]
    return known(found.times)


def test_a_modules_rates_are_the_counted_flops_over_the_traced_seconds() -> None:
    window, traced = mlp_traced()
    profile = build_profile(window, config=PEAK, traced=traced)
    fc1, fc2, root = (times_of(profile, name) for name in ("fc1", "fc2", ""))
    assert (fc1.forward_sec, fc1.backward_sec) == (0.002, 0.003)
    assert (fc1.forward_flops_per_sec, fc1.forward_utilization) == (200e9, 0.25)
    assert fc1.backward_flops_per_sec == pytest.approx(400e6 / 0.003)
    assert (fc2.forward_flops_per_sec, fc2.backward_flops_per_sec) == (200e9, 100e9)
    assert fc2.backward_utilization == 0.125
    # The root: 600 M in 5 ms, 800 M in the 8 ms that are some module's.
    assert (root.forward_sec, root.own_forward_sec, root.backward_sec) == (0.005, 0.0015, 0.008)
    assert (root.forward_flops_per_sec, root.backward_flops_per_sec) == (120e9, 100e9)


def test_seconds_of_a_device_are_scaled_to_the_elements_of_the_counted_steps_batches(tmp_path: Path) -> None:
    # fc's kernels take 40 us of two steps with 8 x 3 and 4 x 3 elements, 18 on average; the counted one has 9 x 3.
    events: list[Event] = []
    for place, length_us in enumerate((50, 30)):
        at = 200 * place
        events += [step(place, at, 100), phase("forward", at, 60), module("fc", at + 1, 50)]
        events += [launch(place, at + 5, 2), kernel(place, at + 10, length_us)]
    window = mlp_traced()[0]
    like = window.counted_steps[0].signature
    counted = replace(window.counted_steps[0], signature=replace(like, batches=("[9, 3]",)))
    traces = replace(
        record(8, written(tmp_path / "trace.json", *events)),
        signatures=tuple(replace(like, batches=(f"loader 0: [{samples}, 3]",)) for samples in (8, 4)),
    )
    window = replace(window, context=A100, counted_steps=(counted,), traces=(traces,), variable=True)
    traced = build_traced_step(window)
    assert not traced.like_counted and not traced.is_apart
    assert (traced.forward_scale, traced.backward_scale) == (1.5, 1.5)
    times = module_times(traced)
    assert times["fc"].forward_sec == pytest.approx(60e-6)


def test_modules_and_operators_have_medians_over_the_traced_steps_scaled_to_a_typical_one(tmp_path: Path) -> None:
    """Three steps of 100 us: fc takes 10, 20 and 60 us of a forward of 40, 40 and 90, its product 5, 15 and 55.

    The backward takes 40 us each, of which fc's node has 20.
    """
    events = []
    for place, fc_us in enumerate((10, 20, 60)):
        at = 200 * place
        events += [
            step(place, at, 180),
            phase("forward", at, fc_us + 30 - 10 * (place == 1)),
            module("fc", at + 5, fc_us),
            made(place, at + 5, fc_us - 5, name="aten::mm"),
            phase("backward", at + 110, 40),
            node(place, at + 120, 20),
        ]
    path = written(tmp_path / "trace.json", *events)
    window = mlp_traced()[0]
    seconds = PhaseSeconds(forward=80e-6, backward=10e-6)
    timed = tuple(replace(one, seconds=seconds) for one in window.timed_steps)
    window = replace(window, timed_steps=timed, traces=(record(8, path),))
    traced = build_traced_step(window)
    assert traced.tables is not None and traced.tables.modules is not None
    # The forward's median is 40 us. In it fc has 20 us and the root, of 30, 20 and 30, 30: a typical one takes 80.
    assert (traced.steps, traced.tables.modules.steps, traced.tables.modules.forward_us) == (3, 1, 40.0)
    assert (round(traced.forward_scale, 9), round(traced.backward_scale, 9)) == (1.6, 0.25)
    assert traced.is_apart  # the backward took four times as long as it does
    times = module_times(traced)
    fc, root = times["fc"], times[""]
    found_us = [fc.forward_sec, known(fc.backward_sec), root.forward_sec, root.own_forward_sec]
    assert [round(1e6 * seconds, 6) for seconds in found_us] == [32, 5, 80, 48]


def test_recomputed_flops_are_the_backwards() -> None:
    window, traced = transformer_traced()
    profile = build_profile(window, config=ProfilerConfig(), traced=traced)
    attention = times_of(profile, "blocks.0.attn")
    # Forward 24 + 8 + 8 G in 0.7 ms, backward twice that and the 4 G that flash attention repeats in 1.4 ms.
    assert attention.forward_flops_per_sec == pytest.approx(40e9 / 0.0007)
    assert attention.backward_flops_per_sec == pytest.approx((80e9 + 4e9) / 0.0014)
    assert attention.own_forward_sec == pytest.approx(0.0002)


def record(index: int, path: str = "no such file") -> TracedStepRecord:
    signatures = (mlp_traced()[0].counted_steps[0].signature,)
    return TracedStepRecord(index=index, signatures=signatures, path=path)


def written(path: Path, *events: Event, **beside: Any) -> str:
    """A trace file of these *events*, with what stands beside them."""
    path.write_text(json.dumps({"traceEvents": events, **beside}))
    return str(path)


def test_what_the_host_spent_on_launching_is_no_modules_time(tmp_path: Path) -> None:
    path = written(tmp_path / "trace.json", module("fc1", 0, 0.1), operator("aten::addmm", 0.01, 0.02))
    window = replace(mlp_traced()[0], traces=(record(8, path),))
    on_host = build_traced_step(window)
    assert on_host.tables is not None and on_host.tables.modules is not None
    window = replace(window, context=replace(window.context, device_type="cuda"))
    on_device = build_traced_step(window)
    assert known(on_device.tables).modules is None


def test_a_traced_step_carries_each_call_of_each_collective_and_what_it_exposed(tmp_path: Path) -> None:
    place = {"rank": 1, "world_size": 2, "pg_config": [{"ranks": [0, 1]}]}
    events = scope("gloo:all_reduce", 0.01, 0.03, thread=2), operator("aten::mm", 0, 0.02)
    path = written(tmp_path / "trace.json", *events, distributedInfo=place)
    window = mlp_traced()[0]
    window = replace(window, context=replace(window.context, rank=1, world_size=2), traces=(record(8, path),))
    traced = build_traced_step(window)
    (calls,) = traced.collectives
    assert (calls.name, calls.group, calls.calls, calls.bytes) == ("all_reduce", "[0, 1]", 1, None)
    assert (calls.latency_ns, calls.total_ns) == (array("q", [30]), 30)
    # From 0 to 40: the product hides the first 10 of the 30.
    assert [(part.name, part.wall_sec, part.exposed_sec) for part in traced.parts] == [("other", 40e-9, 20e-9)]
