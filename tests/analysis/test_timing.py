"""A typical step and stalls, computed by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lightning_flops.analysis.rates import build_throughput
from lightning_flops.analysis.step_flops import StepSums, UnprofiledFlops
from lightning_flops.analysis.timing import build_timing
from lightning_flops.config import ProfilerConfig
from lightning_flops.records import (
    BatchTokens,
    BatchTotals,
    Extremes,
    PhaseSeconds,
    ProcessorLoss,
    StepRecord,
)
from lightning_flops.run.throughput import Monitor
from lightning_flops.schema.profile import Spread, ThroughputSummary
from lightning_flops.schema.step import Stalls, TimingProfile
from tests.analysis.in_memory import known
from tests.fake_clock import FakeNow
from tests.report import windows


def forward_steps(number: int) -> list[StepRecord]:
    return [windows.step(at, seconds=PhaseSeconds(forward=1.0)) for at in range(number)]


def timing(*steps: PhaseSeconds) -> TimingProfile:
    return known(build_timing([windows.step(at, seconds=one) for at, one in enumerate(steps)], mixed_phases=()))


def whole(*seconds: float) -> tuple[StepRecord, ...]:
    """Steps that were timed as a whole."""
    return tuple(windows.step(at, seconds=PhaseSeconds(other=one)) for at, one in enumerate(seconds, 8))


def forwards(*seconds: float) -> TimingProfile:
    return timing(*(PhaseSeconds(forward=one) for one in seconds))


def test_a_typical_step_is_the_mean_of_the_middle_half_by_wall_time() -> None:
    found = forwards(0.25, 0.5, 0.5, 0.75, 0.75, 1.0, 2.0, 64.0)
    # 0.5, 0.75, 0.75 and 1.0 are the middle: two on each side are left out.
    assert found.global_step.typical_sec == 0.75
    assert found.global_step.mean_sec == 69.75 / 8
    assert found.global_step_sec == 69.75 / 8


def test_parts_of_a_typical_step_are_of_the_same_steps_so_they_add_up() -> None:
    # By wall time the first and the last step are left out, though the last one's forward is the shortest.
    found = timing(
        PhaseSeconds(forward=1.0, backward=0.0),
        PhaseSeconds(forward=1.0, backward=1.0),
        PhaseSeconds(forward=2.0, backward=1.0),
        PhaseSeconds(forward=0.5, backward=8.0),
    )
    assert found.seconds_of("forward", typical=True) == 1.5
    assert found.seconds_of("backward", typical=True) == 1.0
    assert found.seconds_of("forward", "backward", typical=True) == found.global_step.typical_sec == 2.5
    assert found.seconds_of("forward") == 1.125


def test_all_that_is_of_steps_timed_by_parts_is_scaled_to_those_timed_as_a_whole() -> None:
    """Marks make a step of 4 s take 5 s: its wait, what the loader ran in it, and its processor time, too."""
    seconds = PhaseSeconds(data_wait=1.25, forward=3.75)
    window = replace(
        windows.mlp_window(),
        timed_steps=tuple(windows.step(at, seconds=seconds, reader_sec=1.25) for at in range(8)),
        plain_steps=whole(*(4.0,) * 6),
        processor=ProcessorLoss(seconds=40.0, batches_sec=(2.5,) * 8, waited_share=None),
    )
    profile = windows.build_profile(window, config=ProfilerConfig())
    found = known(profile.timing)
    assert (found.global_step_sec, found.data_wait_sec, found.reader_sec, found.cpu_time_sec) == (4.0, 1.0, 1.0, 2.0)
    assert (found.whole_steps, found.longer) == (6, 1.25)
    text = " ".join(str(profile).split())
    assert "0-7 timed by parts, 6 more as a whole." in text and "mean of those 6: 4 s" in text
    assert "They took 25.0% longer than the 6 that were timed as a whole" in text
    assert "CPU (process) 50.0% of a processor" in text and "The data loader ran" not in text
    grown = windows.build_profile(replace(window, plain_steps=whole(*(10.0,) * 6)), config=ProfilerConfig())
    assert "They took 50.0% less than" in " ".join(str(grown).split()) and "Rough: steps got longer" not in text
    assert "Rough: steps got longer meanwhile, maybe not all parts alike." in " ".join(str(grown).split())
    few = windows.build_profile(replace(window, plain_steps=whole(*(4.0,) * 3)), config=ProfilerConfig())
    assert "as a whole" not in str(few) and "mean of 8: 5 s" in str(few)


def test_what_lies_between_steps_is_of_all_timed_ones_and_in_the_summary_if_it_takes_a_tenth_of_their_time() -> None:
    """An evaluation of 3 s after every fourth of 16 steps of 1 s, and a checkpoint of half a second: 12 s and 0.5 s."""
    steps = [*forward_steps(8), *whole(*(1.0,) * 8)]
    for at in range(0, 16, 4):
        steps[at] = replace(steps[at], excluded_sec={"validation": 3.0, **({"checkpoint": 0.5} if at == 12 else {})})
    window = replace(windows.mlp_window(), timed_steps=tuple(steps[:8]), plain_steps=tuple(steps[8:]))
    profile = windows.build_profile(window, config=ProfilerConfig())
    found, text = known(profile.timing), " ".join(str(profile).split())
    assert (found.global_step_sec, found.excluded_sec) == (1.0, {"checkpoint": 0.5, "validation": 12.0})
    assert "over the wall clock. Between these 16 steps, and in none of them: validation 12 s." in text
    assert "Between steps: checkpoint 500 ms, validation 12 s." in text
    each = [replace(one, excluded_sec={"validation": 3.0}) for one in steps]
    window = replace(window, timed_steps=tuple(each[:8]), plain_steps=tuple(each[8:]))
    text = " ".join(str(windows.build_profile(window, config=ProfilerConfig())).split())
    assert "over the wall clock. Left out of each step: validation 3 s." in text and "Between these" not in text
    window = replace(window, plain_steps=tuple(steps[8:]))  # not each of those timed as a whole leaves it out
    assert not known(windows.build_profile(window, config=ProfilerConfig()).timing).excludes_in_each


def test_how_long_steps_are_is_of_those_timed_as_a_whole_and_where_they_stalled_of_the_others() -> None:
    """The loop's own clock saw whole steps of 2 s, and one of 12; by parts, marks made 2 s 2.5, and a wait one 5 s."""
    usual, late = PhaseSeconds(data_wait=0.5, forward=2.0), PhaseSeconds(data_wait=3.0, forward=2.0)
    window = replace(
        windows.mlp_window(),
        timed_steps=tuple(windows.step(at, seconds=late if at == 3 else usual) for at in range(8)),
        plain_steps=whole(2.0, 12.0, *(2.0,) * 6),
    )
    found = known(windows.build_profile(window, config=ProfilerConfig()).timing)
    step = found.global_step
    assert (step.mean_sec, step.typical_sec) == pytest.approx((26 / 8, 2))
    assert (min(step.steps_sec), max(step.steps_sec)) == pytest.approx((2, 12))
    assert step.steps_sec[3] == pytest.approx(12.0)
    assert found.data_wait_sec == pytest.approx((7 * 0.4 + 0.6 * 12) / 8)  # of the late one its share there
    assert found.seconds_of("data_wait", "forward") == pytest.approx(step.mean_sec)
    stalls = known(found.stalls)
    assert (stalls.steps, stalls.part) == (1, "data wait") and stalls.seconds == pytest.approx(2.0)
    uneven = replace(window, plain_steps=whole(1.0, 2.0, 2.0, 3.0))
    step = known(windows.build_profile(uneven, config=ProfilerConfig()).timing).global_step
    assert (step.mean_sec, step.typical_sec) == pytest.approx((2, 2))


def test_what_other_steps_took_beyond_a_typical_one_is_a_stall_by_the_part_with_most_of_it() -> None:
    usual = PhaseSeconds(data_wait=0.25, backward=0.75)
    late = PhaseSeconds(data_wait=0.5, backward=1.25)
    found = timing(usual, usual, usual, late, usual, usual, usual, PhaseSeconds(data_wait=0.375, backward=0.875))
    assert found.global_step.typical_sec == 1.0
    # 0.75 and 0.25 s longer; the waits have 0.25 + 0.125 of it.
    assert found.stalls == Stalls(steps=2, seconds=1.0, part="backward")


@pytest.mark.parametrize(("longest", "stalls"), [(1.1, None), (1.125, 1)])
def test_a_step_stalls_from_a_tenth_beyond_a_typical_one(longest: float, stalls: int | None) -> None:
    found = forwards(*[1.0] * 7, longest)
    assert (None if found.stalls is None else found.stalls.steps) == stalls


def test_how_busy_processors_were_while_steps_were_timed() -> None:
    steps = [windows.step(at, seconds=PhaseSeconds(forward=0.5)) for at in range(2)]
    used = ProcessorLoss(seconds=1.0, batches_sec=(0.5, 1.0), waited_share=None, busy_share=0.875)
    found = build_timing(steps, mixed_phases=(), processor=used)
    assert found is not None and found.cpu_system_ratio == 0.875
    profile = replace(windows.build_profile(windows.mlp_window(), config=ProfilerConfig()), timing=found)
    text = str(profile)
    assert "CPU (process) 150%" in text and "CPU (system) 87.5%" in text


def run(batches: list[tuple[float, float, int | None]], *, ranks: int = 1) -> ThroughputSummary | None:
    """A run of batches, each of so many seconds of waiting and working, and so many samples."""
    now = FakeNow()
    monitor = Monitor(now)
    for wait, work, samples in batches:
        monitor.go_on()
        monitor.fetch_begins()
        now.sleep(wait)
        monitor.fetch_ends()
        now.sleep(work)
        monitor.batch(samples=samples, tokens=None, profiled=False, ends_step=True)
    return build_throughput(monitor.totals(), dp_size=ranks)


def test_averages_are_totals_over_totals() -> None:
    summary = known(run([(0.5, 0.5, 8), (0.5, 1.5, 8), (2.0, 3.0, 4)]))
    assert summary.batches == 3
    assert summary.reader_ratio == 3.0 / 8.0
    assert summary.reader_cost_sec == Spread(average=1.0, maximum=2.0, minimum=0.5)
    assert summary.batch_cost_sec == Spread(average=8.0 / 3.0, maximum=5.0, minimum=1.0)
    # 20 samples in 8 s; the batches by themselves: 8, 4 and 0.8.
    assert summary.ips == Spread(average=2.5, maximum=8.0, minimum=0.8)
    assert summary.ips_unit == "samples/s"


def test_batches_in_a_row_are_added_up_in_stretches_of_equally_many() -> None:
    few = known(run([(0.25 * at, 0.75 * at, 8) for at in range(1, 64)]))
    assert few.batch_stretches_sec == tuple(range(1, 64))
    assert few.reader_stretches_sec == tuple(0.25 * at for at in range(1, 64))
    # 64 stretches of one batch are 32 of two, and, of twice as many batches, of four; the last two fill none.
    many = known(run([(0.25 * at, 0.75 * at, 8) for at in range(1, 131)]))
    assert many.batch_stretches_sec == tuple(4.0 * at + 2.5 for at in range(32))
    assert many.reader_stretches_sec == tuple(at + 0.625 for at in range(32))
    assert few.batch_cost_sec.average == 32.0 and many.batch_cost_sec.average == 65.5
    assert known(run([(0.0, 1.0, 8)] * 100_000)).batch_stretches_sec == (1.0,) * 48


def test_without_known_samples_the_rate_is_of_batches() -> None:
    summary = known(run([(0.0, 1.0, 8), (0.0, 4.0, None)]))
    assert summary.ips_unit == "batches/s"
    assert summary.ips == Spread(average=0.4, maximum=1.0, minimum=0.25)


def test_flops_of_the_run_and_rates_of_its_unprofiled_steps() -> None:
    """Ten steps of 100 FLOPs in 4 s, and one that was counted; a peak of 500 FLOP/s."""
    second = Extremes(number=10, total=4.0, least=0.1, greatest=1.0)
    totals = BatchTotals(batches=10, seconds=second, reader_sec=None, samples=None, samples_per_sec=None)
    flops = StepSums(
        model_flops=1_100,
        hardware_flops=1_320,
        unprofiled=UnprofiledFlops({"float32": 1_000}, None, 0.9),
        flops_error=0.02,
        steps_counted=1,
        steps_by_formula=0,
        steps_estimated=10,
        checks=3,
        lower_bound=True,
    )
    tokens = BatchTokens(100, 80, 2_000)
    found = known(build_throughput(totals, dp_size=1, flops=flops, model_flops_peak_sec=2.0, tokens=tokens))
    assert (found.model_flops, found.hardware_flops) == (1_100, 1_320)
    assert (found.mfu, found.flops_error, found.lower_bound) == (0.5, 0.02, True)
    assert (found.steps_counted, found.steps_estimated, found.checks) == (1, 10, 3)
    assert list(found.unavailable) == ["useful_mfu"]
    wide = known(build_throughput(totals, dp_size=1, flops=replace(flops, flops_error=1.2), model_flops_peak_sec=2.0))
    assert (wide.mfu, wide.model_flops, wide.hardware_flops, wide.flops_error) == (None, None, None, 1.2)
    assert "3 steps that were counted at random differ so much" in wide.unavailable["mfu"]
    no_peak = known(build_throughput(totals, dp_size=1, flops=flops))
    assert "no dense peak" in no_peak.unavailable["mfu"]


def test_processor_time_is_of_steps_only_where_its_batches_are_theirs() -> None:
    steps = [windows.step(at, seconds=PhaseSeconds(forward=1.0)) for at in range(2)]
    for batches, of_steps in (((0.5, 0.25, 1.0, 2.0), (0.75, 3.0)), ((0.5, 0.25, 1.0), ()), ((), ())):
        loss = ProcessorLoss(seconds=2.0, batches_sec=batches, waited_share=None)
        assert known(build_timing(steps, mixed_phases=(), processor=loss)).processor_steps_sec == of_steps


def test_processor_time_of_an_evaluation_between_steps_is_in_none_of_them() -> None:
    """A training of one thread, which an evaluation of eight interrupts: nobody knows which batch had how much."""
    steps = [windows.step(at, seconds=PhaseSeconds(forward=1.0)) for at in range(2)]
    steps[1] = replace(steps[1], excluded_sec={"validation": 3.0})
    loss = ProcessorLoss(seconds=5.0, batches_sec=(1.0, 25.0), waited_share=None, busy_share=0.5)
    assert known(build_timing(steps, mixed_phases=(), processor=loss)).cpu_time_sec is None


def test_the_middle_half_leaves_out_a_quarter_on_either_side() -> None:
    # Of twelve steps the three shortest and the three longest: 4 to 9 are left, whose mean is 6.5.
    assert forwards(*map(float, (12, 1, 11, 2, 10, 3, 9, 4, 8, 5, 7, 6))).global_step.typical_sec == 6.5


@pytest.mark.parametrize(
    ("unhooked_sec", "step_sec", "longer"), [((3.0,) * 6, 3.0, 5 / 3), ((4.5,) * 6, 4.0, 1.25), ((3.0,) * 3, 4.0, 1.25)]
)
def test_steps_timed_as_a_whole_are_scaled_to_those_without_hooks_if_these_took_less_and_are_enough(
    unhooked_sec: tuple[float, ...], step_sec: float, longer: float
) -> None:
    """By parts they take 5 s, as a whole 4."""
    window = replace(
        windows.mlp_window(),
        timed_steps=tuple(windows.step(at, seconds=PhaseSeconds(forward=5.0)) for at in range(8)),
        plain_steps=whole(*(4.0,) * 6),
        unhooked_sec=unhooked_sec,
    )
    found = known(windows.build_profile(window, config=ProfilerConfig()).timing)
    assert (found.global_step_sec, found.longer) == (step_sec, longer)
