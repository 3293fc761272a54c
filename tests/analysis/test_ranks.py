from __future__ import annotations

import math
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import fmean

import pytest

from lightning_flops.analysis.ranks import (
    RECORD_LIMIT_BYTES,
    RankAbsence,
    RankRecord,
    chance_sec,
    find_stragglers,
    find_stragglers_in_traces,
    make_rank_record,
    pack,
    unpack,
    with_ranks,
)
from lightning_flops.analysis.timing import build_timing
from lightning_flops.config import ADVICE_THRESHOLDS, ProfilerConfig
from lightning_flops.records import PhaseSeconds
from lightning_flops.report.scalars import profile_scalars
from lightning_flops.schema.profile import Profile
from lightning_flops.schema.step import Advice
from lightning_flops.schema.trace import RanksProfile, Straggler, TracedPart
from lightning_flops.units import name_ranks
from tests.analysis.in_memory import known
from tests.report import jobs, windows
from tests.report.traced_windows import mlp_traced
from tests.report.windows import build_profile


def merged(profile: Profile, answers: Sequence[RankRecord | RankAbsence]) -> RanksProfile:
    return known(with_ranks(profile, answers).ranks)


# ---- sums, spreads, copies of the model


def test_figures_of_the_job_are_those_of_its_ranks_added_up_and_of_a_copy_of_the_model_their_mean() -> None:
    ranks = merged(*jobs.job(jobs.uneven()))
    # Rank 0 spends 600 + 800 M, rank 1 half of that.
    assert (ranks.flops.forward, ranks.flops.backward) == (900_000_000, 1_200_000_000)
    assert (ranks.flops.model, ranks.flops.hardware) == (2_100_000_000, 2_100_000_000)
    assert (known(ranks.flops_of_model).forward, known(ranks.flops_of_model).model) == (450_000_000, 1_050_000_000)
    # 1.4 G and 0.7 G over 700 GFLOP/s x 20 ms: 10% and 5%.
    assert (ranks.rates.mfu, ranks.rates.hfu) == pytest.approx((0.075, 0.075), rel=1e-12)
    assert ranks.peak_flops_per_sec == 1.4e12


def test_tensor_parallel_ranks_make_up_one_copy() -> None:
    # 8 ranks, dp 4, tp 2, each half of every product: 700 M model FLOPs; two ranks are one copy, 1.4 G.
    base = windows.parallel_window()
    ranks = merged(*jobs.job([replace(base, context=replace(base.context, rank=rank)) for rank in range(8)]))
    assert ranks.flops.model == 8 * 700_000_000
    assert known(ranks.flops_of_model).model == 1_400_000_000
    assert ranks.rates.samples_per_sec == pytest.approx(20_000, rel=1e-12)
    assert ranks.params == 3_002_500


def test_stages_of_a_pipeline_add_up_to_the_model() -> None:
    ranks = merged(*jobs.job(jobs.pipeline()))
    # Stage 0 spends 2.8 G on each of two ranks, stage 1 1.4 G; a copy is one rank of each.
    assert [(one.stage, one.flops.model) for one in ranks.stages] == [(0, 2_800_000_000), (1, 1_400_000_000)]
    assert ranks.flops.model == 8_400_000_000
    assert known(ranks.flops_of_model).model == 4_200_000_000
    assert ranks.params == 2 * 3_002_500
    assert ranks.rates.samples_per_sec == pytest.approx(10_000, rel=1e-12)


def test_model_without_one_of_its_stages_is_not_known() -> None:
    profile, answers = jobs.job(jobs.pipeline())
    ranks = merged(profile, answers[:2])
    assert (ranks.flops_of_model, ranks.params, ranks.trainable_params) == (None, None, None)
    assert ranks.flops.model == 5_600_000_000
    assert [one.stage for one in ranks.stages] == [0]


def test_mfu_of_different_devices_is_over_the_sum_of_their_peaks() -> None:
    ranks = merged(*jobs.job(jobs.mixed_devices(), config=ProfilerConfig()))
    a100 = 3984e9 / (3744e9 / 312e12 + 240e9 / 19.5e12)
    h100 = 3984e9 / (3744e9 / 989.4e12 + 240e9 / 66.9e12)
    assert ranks.devices == {"NVIDIA A100-SXM4-80GB": 2, "NVIDIA H100 80GB HBM3": 2}
    assert ranks.peak_flops_per_sec == pytest.approx(2 * a100 + 2 * h100, rel=1e-12)
    assert ranks.rates.mfu == pytest.approx(4 * 3984e9 / ((2 * a100 + 2 * h100) * 0.1), rel=1e-12)
    *others, last = jobs.mixed_devices()
    job = merged(*jobs.job([*others, jobs.in_context(last, device_name="Abacus")], config=ProfilerConfig()))
    assert (job.rates.mfu, job.rates.hfu, job.peak_flops_per_sec) == (None, None, None)
    assert job.unavailable["mfu"] == (
        "no dense peak is known for bfloat16, float32 on Abacus; run lightning-flops peak, or set peak_flops_per_sec "
        "(rank 3)"
    )


def test_slower_rank_weighs_with_its_own_time() -> None:
    # Rank 1 takes 40 ms for the same FLOPs: 2 x 1.4 G over 700 GFLOP/s x (20 + 40) ms.
    first, _ = jobs.uneven()
    slow = jobs.in_seconds(jobs.in_context(first, rank=1), PhaseSeconds(forward=0.02, backward=0.02))
    ranks = merged(*jobs.job([first, slow]))
    assert ranks.rates.mfu == pytest.approx(2.8e9 / (700e9 * 0.06), rel=1e-12)
    assert ranks.rates.samples_per_sec == pytest.approx(100 / 0.02 + 100 / 0.04, rel=1e-12)


def test_dtype_that_only_another_rank_uses_counts_with_this_devices_peak() -> None:
    # Stage 0 multiplies in bfloat16, stage 1 in float32: 2.8 G and 1.4 G a rank, over 312 and 19.5 TFLOP/s.
    ranks = []
    for window in jobs.pipeline():
        dtype = "bfloat16" if window.context.pp_rank == 0 else "float32"
        cells = tuple(replace(one, dtype=dtype) for one in window.flops.cells)
        window = replace(window, flops=replace(window.flops, cells=cells))
        ranks.append(jobs.in_context(window, device_name="NVIDIA A100-SXM4-80GB"))
    job = merged(*jobs.job(ranks, config=ProfilerConfig()))
    # All 8.4 G take a device 5.6 G / 312 T + 2.8 G / 19.5 T; four of them have 20 ms.
    assert job.rates.mfu == pytest.approx((5.6e9 / 312e12 + 2.8e9 / 19.5e12) / (4 * 0.02), rel=1e-12)


def test_what_is_not_known_of_one_rank_is_named_with_it() -> None:
    first, second = jobs.uneven()
    unknown = replace(second, timed_steps=tuple(replace(one, samples=None) for one in second.timed_steps))
    ranks = merged(*jobs.job([first, unknown]))
    assert ranks.rates.samples_per_sec is None
    assert ranks.unavailable["samples_per_sec"] == "the batch size is not known; set batch_size (rank 1)"
    assert ranks.unavailable["tokens_per_sec"] == "how to count tokens was not said; set tokens_per_sample"


def test_rank_that_timed_no_step_leaves_rates_unknown_and_times_to_the_others() -> None:
    first, second = jobs.uneven()
    ranks = merged(*jobs.job([first, replace(second, timed_steps=())]))
    assert ranks.rates.mfu is None
    assert ranks.unavailable["mfu"] == ranks.unavailable["samples_per_sec"] == "no step was timed (rank 1)"
    assert [bool(one.parts_sec) for one in ranks.ranks] == [True, False]
    assert ranks.flops.model == 2_100_000_000


def test_figures_are_those_of_the_ranks_that_answered() -> None:
    ranks = merged(*jobs.missing())
    assert (ranks.answered, ranks.world_size) == (2, 4)
    assert ranks.absences == {
        "no record came within 30 s": (1,),
        "its profiler failed: RuntimeError: no more memory": (3,),
    }
    assert ranks.flops.model == 2 * 1_400_000_000
    assert known(ranks.flops_of_model).model == 1_400_000_000
    assert [one.rank for one in ranks.ranks] == [0, 2]


# ---- communication and stragglers


def test_wait_of_each_rank_is_what_its_calls_took_longer_than_the_shortest() -> None:
    ranks = merged(*jobs.thousands(24))
    # Rank 22 is late: its calls take 2 + 3 ms, those of the others 2 + 11.
    communication = known(ranks.communication)
    assert len(communication.ranks) == 22  # 7 and 17 sent nothing
    *others, late, last = communication.ranks
    assert [(row.transfer_us, row.wait_us, row.overlap.exposed_us) for row in (*others, last)] == [
        (5000, 8000, 11500)
    ] * 21
    assert (late.rank, late.transfer_us, late.wait_us, late.overlap.exposed_us) == (22, 5000, 0, 3500)
    (collective,) = late.collectives
    assert (collective.name, collective.calls, collective.bytes) == ("allreduce", 2, 12_000_000)


def test_late_rank_is_named_in_the_advice_with_its_cause_before_all_else() -> None:
    profile, answers = jobs.job(jobs.slow_loader())
    whole = with_ranks(profile, answers)
    assert [(one.rank, one.part) for one in known(whole.ranks).stragglers] == [(2, "data wait")]
    assert [one.rule for one in whole.advice] == ["straggler"]
    assert whole.advice[0].saves == pytest.approx(8 / 24, rel=1e-12)
    assert "rank 2: its data wait takes 8 ms longer than theirs" in whole.advice[0].fact


def test_the_most_that_advice_saves_stays_so_where_a_rank_was_starved() -> None:
    profile, answers = jobs.job(jobs.slow_loader())
    starved = [
        replace(one, profile=replace(one.profile, starved="It waited.")) if one.rank == 1 else one
        for one in answers
        if isinstance(one, RankRecord)
    ]
    found = [with_ranks(profile, those).advice[0] for those in (answers, starved)]
    assert [(one.rule, one.at_least) for one in found] == 2 * [("straggler", False)]


def test_what_ranks_wait_for_a_straggler_is_no_transfer() -> None:
    profile, answers = jobs.thousands(24)
    exposed = Advice(
        rule="exposed_communication", fact="Rank 0's.", threshold="", remedy="", source="", unless="", saves=11.5 / 24
    )
    whole = with_ranks(replace(profile, advice=(exposed,)), answers)
    # Of the others' 24 ms 11.5 are exposed, 8 of them waiting for rank 22.
    found = {one.rule: one.saves for one in whole.advice}
    assert list(found) == ["straggler", "exposed_communication"]
    assert found["straggler"] == pytest.approx(8 / 24, rel=1e-12)
    assert found["exposed_communication"] == pytest.approx(3.5 / 24, rel=1e-12)


def test_a_wait_that_computation_hides_is_not_advised_on() -> None:
    profile, answers = jobs.thousands(24)
    (usual, *others) = (one for one in answers if isinstance(one, RankRecord))
    # The others' calls wait 8 of 13 ms for one rank, whose own time is theirs; 9 of the 13 run beside computation.
    hidden = replace(jobs.overlap(13_000), overlap_us=9_000.0)
    alike = [
        replace(
            usual,
            profile=replace(usual.profile, context=one.profile.context),
            traced=replace(one.traced, overlap=hidden),
        )
        for one in (usual, *others)
        if one.traced is not None
    ]
    (advice,) = with_ranks(replace(profile, advice=()), alike).advice
    assert advice.rule == "waiting" and advice.saves == pytest.approx(4 / 24)


def test_advice_on_the_reporting_rank_stays() -> None:
    first, second = jobs.uneven()
    waiting = PhaseSeconds(data_wait=0.004, forward=0.006, backward=0.008, optimizer=0.002)
    profile, answers = jobs.job([jobs.in_seconds(first, waiting), jobs.in_seconds(second, waiting)])
    assert [one.rule for one in profile.advice] == ["data_wait"]
    assert [one.rule for one in with_ranks(profile, answers).advice] == ["data_wait"]
    few = replace(first, timed_steps=first.timed_steps[:7])
    profile, answers = jobs.job([jobs.in_seconds(few, waiting), jobs.in_seconds(second, waiting)])
    assert with_ranks(profile, answers).advice == ()


# ---- what becomes the job's


def test_scalars_are_the_jobs_where_the_ranks_are_known() -> None:
    profile, answers = jobs.job(jobs.uneven())
    alone, whole = profile_scalars(profile), profile_scalars(with_ranks(profile, answers))
    changed = {tag for tag in alone if alone[tag] != whole[tag]}
    assert changed == {f"flops_profiler/{tag}" for tag in ("mfu", "hfu", "samples_per_sec", "iter_samples_per_sec")}
    for found, rates in ((alone, [0.1, 10_000]), (whole, [0.075, 7_500])):
        mfu, samples_per_sec = found["flops_profiler/mfu"], found["flops_profiler/samples_per_sec"]
        assert [mfu, samples_per_sec] == pytest.approx(rates, rel=1e-12)


@pytest.mark.parametrize(
    ("ranks", "words"),
    [
        ([3], "rank 3"),
        ([1, 0], "ranks 0-1"),
        ([0, 1, 2, 5], "ranks 0-2 and 5"),
        ([0, 2, 4, 6], "ranks 0, 2, 4 and 6"),
        (range(0, 100, 2), "ranks 0, 2, 4, 6 and 46 more"),
        (range(4096), "ranks 0-4095"),
    ],
)
def test_ranks_are_named_in_few_words(ranks: list[int], words: str) -> None:
    assert name_ranks(ranks) == words


# ---- what a rank sends: it arrives as it was, it fits, and nothing else is taken for it

WINDOW, TRACED = mlp_traced()
PROFILE = build_profile(WINDOW, config=ProfilerConfig(peak_flops_per_sec=700e9), traced=TRACED)
RECORD = make_rank_record(PROFILE)


def test_record_has_the_modules_own_times_in_nanoseconds() -> None:
    # mlp_traced: fc1 takes 2 ms forward and 3 backward, act 0.5 and 1, fc2 1 and 4, the root 1.5 forward.
    found = dict(zip(RECORD.module_names, zip(RECORD.own_forward_ns, RECORD.own_backward_ns, strict=True), strict=True))
    assert found == {
        "": (1_500_000, 0),
        "fc1": (2_000_000, 3_000_000),
        "act": (500_000, 1_000_000),
        "fc2": (1_000_000, 4_000_000),
    }


@pytest.mark.parametrize("name", windows.WINDOWS)
def test_record_of_any_window_arrives_as_it_was(name: str) -> None:
    record = make_rank_record(build_profile(windows.WINDOWS[name](), config=ProfilerConfig()))
    assert unpack(pack(record)) == record


def test_absence_arrives_with_as_much_of_its_reason_as_fits() -> None:
    absence = RankAbsence(rank=3, reason='its profiler failed: RuntimeError: "no" \u2028 memory')
    assert unpack(pack(absence)) == absence
    long = RankAbsence(rank=3, reason="why " * 100_000)
    assert unpack(pack(long)) == long._replace(reason=long.reason[:500])


def test_too_large_a_record_goes_without_modules_and_single_calls_and_says_so() -> None:
    # 8,000 names of 12 bytes that share nothing do not fit.
    names = tuple(f"{(i * 2654435761 * 40503) % 2**48:012x}" for i in range(8000))
    times = array("q", range(8000))
    record = replace(RECORD, module_names=names, own_forward_ns=times, own_backward_ns=times)
    called = jobs.thousands(4)[1][0]
    assert isinstance(called, RankRecord)
    calls = replace(known(called.traced), collectives=(jobs.all_reduces(*times[:1_000]),))
    packed = pack(replace(record, traced=calls))
    arrived = unpack(packed)
    assert len(packed) <= RECORD_LIMIT_BYTES
    assert isinstance(arrived, RankRecord) and arrived.traced is not None
    assert (arrived.module_names, len(arrived.own_forward_ns), len(arrived.own_backward_ns)) == ((), 0, 0)
    assert [(one.calls, len(one.latency_ns)) for one in arrived.traced.collectives] == [(1_000, 0)]
    assert arrived.is_shortened


# ---- milliseconds of each rank are given, and who is late, by how much and where, is worked out by hand

MS = 0.001
MODULES = ("", "first", "second")
TIMED = 20


def record(
    rank: int,
    timed: Mapping[str, float] | Sequence[Mapping[str, float]],
    *,
    exposed: Mapping[str, float] | None = None,
    traced: Mapping[str, float] | None = None,
    stage: int = 0,
    own_forward: Sequence[float] = (),
    own_backward: Sequence[float] = (),
) -> RankRecord:
    """A rank's record, in milliseconds; its timed steps are alike or given one by one, *exposed* None is no trace."""
    steps = [timed] * TIMED if isinstance(timed, Mapping) else list(timed)
    seconds = [PhaseSeconds(**{name: ms * MS for name, ms in one.items()}) for one in steps]
    waits = {name: ms * MS for name, ms in (exposed or {}).items()}
    parts = tuple(
        TracedPart(name=name, wall_sec=ms * MS, exposed_sec=waits.get(name, 0.0))
        for name, ms in (traced or steps[0]).items()
    )
    return replace(
        RECORD,
        profile=replace(
            RECORD.profile,
            context=replace(RECORD.profile.context, rank=rank, world_size=8, pp_rank=stage),
            timing=build_timing([windows.step(0, seconds=one) for one in seconds], mixed_phases=()),
            traced=None if exposed is None else windows.traced(parts=parts),
        ),
        module_names=MODULES if own_forward else (),
        own_forward_ns=array("q", [round(one * 1e6) for one in own_forward]),
        own_backward_ns=array("q", [round(one * 1e6) for one in own_backward]),
    )


def only(*records: RankRecord, **limits: float) -> tuple[Straggler, float]:
    """The only straggler, and by how many milliseconds it is late."""
    (one,) = find_stragglers(records, thresholds={**ADVICE_THRESHOLDS, **limits})
    return one, round(one.late_sec / MS, 6)


HEALTHY = {"data_wait": 1.0, "forward": 30.0, "backward": 60.0, "optimizer": 9.0}
"""A step of 100 ms."""
WAITING = {"backward": 5.0}
"""Of its backward, gradients are exchanged without being hidden."""


def healthy(rank: int) -> RankRecord:
    return record(rank, HEALTHY, exposed=WAITING)


# ---- where it is slow


def test_a_slow_reader_is_named_by_its_waits_for_data() -> None:
    # Rank 2 waits 41 ms for data, the others 1; they wait 40 ms for it in their backwards.
    others = [record(rank, HEALTHY | {"backward": 100}, exposed={"backward": 45}) for rank in (0, 1, 3)]
    found, late_ms = only(*others, record(2, HEALTHY | {"data_wait": 41}, exposed=WAITING))
    assert (found.rank, found.part, found.module, late_ms) == (2, "data wait", None, 40)
    assert (known(found.part_sec), found.share) == pytest.approx((40 * MS, 40 / 140))


def test_a_slow_module_is_named_with_its_forward() -> None:
    usual, slow = (2, 8, 20), (2, 8, 50)
    other = record(0, HEALTHY | {"backward": 90}, exposed={"backward": 35}, own_forward=usual, own_backward=usual)
    mine = record(1, HEALTHY | {"forward": 60}, exposed=WAITING, own_forward=slow, own_backward=usual)
    found, late_ms = only(mine, other)
    assert (found.rank, found.part, found.module, late_ms) == (1, "forward", "second", 30)
    assert found.evidence == (
        "The other ranks wait 30 ms a step (23.1% of it) for rank 1: its forward takes 30 ms longer than theirs, "
        "mostly in second."
    )


def test_a_slow_forward_under_sharding_is_separate_from_the_waits_of_the_others_in_it() -> None:
    # Weights are gathered in the forward, so there the others wait, and all forwards take as long.
    parts = HEALTHY | {"forward": 60}
    found, late_ms = only(record(0, parts, exposed={"forward": 40}), record(1, parts, exposed={"forward": 10}))
    assert (found.rank, found.part, late_ms) == (1, "forward", 30)


def unsteady_backward(**parts: float) -> list[dict[str, float]]:
    """Steps whose backward takes 30 and 90 ms in turn, and all else as given, or as always."""
    return [HEALTHY | parts | {"backward": 90.0 if place % 2 else 30.0} for place in range(TIMED)]


def test_a_part_that_never_waits_is_held_against_its_own_spread_alone() -> None:
    # Six standard errors of both backwards are 38 ms; of the waits for data, nothing.
    others = [record(rank, unsteady_backward(), exposed=WAITING) for rank in (0, 2, 3)]
    found, late_ms = only(*others, record(1, unsteady_backward(data_wait=21), exposed=WAITING))
    assert (found.rank, found.part, late_ms) == (1, "data wait", 20)
    chance_ms = {part: sec / MS for part, sec in chance_sec(others).items()}
    assert chance_ms["data wait"] == chance_ms["forward"] == 0
    # Six means of three steps, 50 and 70 ms in turn: variance 6/5 of 100, that of the mean 20, of two ranks 40.
    assert chance_ms["backward"] == pytest.approx(6 * math.sqrt(40))
    assert find_stragglers(others) == () == find_stragglers([*others, record(1, unsteady_backward(), exposed=WAITING)])


def test_a_part_that_waits_is_held_against_its_traced_steps() -> None:
    # Timed backwards of 30 and 90 ms in turn, for the ranks wait for one another; of their own they take 20, 21 and 19,
    # then 40, 41 and 39 ms: variances of 1, a third of the mean; few steps, so 1.5 x 4 standard errors of two ranks.
    def of_steps(rank: int, own_ms: Sequence[float]) -> RankRecord:
        made = record(rank, unsteady_backward(), exposed=WAITING)
        waiting = [60.0 - one for one in own_ms]
        part = TracedPart(
            name="backward",
            wall_sec=60 * MS,
            exposed_sec=fmean(waiting) * MS,
            own_steps_sec=tuple(one * MS for one in own_ms),
        )
        traced = known(made.profile.traced)
        parts = tuple(part if one.name == "backward" else one for one in traced.parts)
        return replace(made, profile=replace(made.profile, traced=replace(traced, parts=parts)))

    ranks = [of_steps(0, (20, 21, 19)), of_steps(1, (40, 41, 39))]
    found, late_ms = only(*ranks)
    assert (found.rank, found.part, late_ms) == (1, "backward", 20)
    assert chance_sec(ranks)["backward"] / MS == pytest.approx(6 * math.sqrt(2 / 3))


def test_parts_that_are_late_a_little_each_are_late_together() -> None:
    # Six means of three steps, +- off: their variance is 6/5 off^2, that of the mean 1/5 off^2, of two ranks 2/5 off^2;
    # 1.5 x 4 standard errors are 5 ms in each of two parts that have nothing to do with each other, 7.07 ms together.
    off = 5 / 6 / math.sqrt(2 / 5)

    def steps(late: float) -> list[dict[str, float]]:
        forward, optimizer = [*"+++---" * 3, ""], [*"+++++++++---------", ""]
        signs = {"+": off, "-": -off, "": 0.0}
        return [
            HEALTHY | {"forward": 30 + late + signs[one], "optimizer": 19 + late + signs[other]}
            for one, other in zip(forward, optimizer, strict=True)
        ]

    alike = record(0, steps(0), exposed=WAITING)
    found, late_ms = only(alike, record(1, steps(4.5), exposed=WAITING), straggler=1.05)
    assert (found.rank, late_ms) == (1, 9)
    assert chance_sec([alike, alike])["forward"] / MS == pytest.approx(5)


def test_what_a_rank_does_around_its_modules_is_no_modules_fault() -> None:
    # Rank 1 takes 30 ms more between its forward and its backward. What its modules take is scaled to the forward that
    # it timed, 60 ms by 30, so that each seems to take twice as long.
    usual, scaled = (2, 8, 20), (4, 16, 40)
    other = record(0, HEALTHY | {"backward": 90}, exposed={"backward": 35}, own_forward=usual, own_backward=usual)
    mine = record(1, HEALTHY | {"forward": 60}, exposed=WAITING, own_forward=scaled, own_backward=usual)
    profile = mine.profile
    mine = replace(mine, profile=replace(profile, traced=replace(known(profile.traced), forward_scale=2.0)))
    found, late_ms = only(mine, other)
    assert (found.part, found.module, found.outside_modules, late_ms) == ("forward", None, True, 30)
    assert found.evidence.endswith("its forward takes 30 ms longer than theirs, outside its modules.")
    assert "around its modules in its forward" in found.action


def test_several_slow_ranks_are_all_named_the_slowest_first() -> None:
    ranks = [healthy(rank) for rank in (0, 2, 4, 5)]
    late = {1: 30, 3: 50, 6: 40}
    ranks += [record(rank, HEALTHY | {"data_wait": 1 + ms}, exposed=WAITING) for rank, ms in late.items()]
    found = find_stragglers(ranks)
    assert [(one.rank, round(one.late_sec / MS, 6)) for one in found] == [(3, 50), (6, 40), (1, 30)]
    # Traces alone name them in the same order.
    parts = {one.rank: known(one.profile.traced).parts for one in ranks}
    assert [one.rank for one in find_stragglers_in_traces(parts)] == [3, 6, 1]


def test_three_standard_errors_are_chance_and_five_are_not() -> None:
    # Sixteen means of four steps, +- off in turn: their variance is 16/15 off^2, of two ranks' means 2/15 off^2.
    off, error = 10.0, 10.0 * math.sqrt(2 / 15)

    def waits(late: float) -> list[dict[str, float]]:
        return [HEALTHY | {"data_wait": 50 + late + off * (-1) ** (place // 4)} for place in range(64)]

    for errors, named in ((3.0, []), (5.0, [1])):
        pair = [record(0, waits(0), exposed=WAITING), record(1, waits(errors * error), exposed=WAITING)]
        assert [one.rank for one in find_stragglers(pair, thresholds={**ADVICE_THRESHOLDS, "straggler": 1.01})] == named


def test_a_part_is_named_if_it_has_most_of_what_the_rank_is_late_by() -> None:
    for waits_ms, named in ((60, "data wait"), (45, None)):
        late = {
            "data_wait": 1.0 + waits_ms,
            "optimizer": 9.0 + (100 - waits_ms) / 2,
            "forward": 30.0 + (100 - waits_ms) / 2,
        }
        found, late_ms = only(healthy(0), record(1, HEALTHY | late, exposed=WAITING))
        assert (found.part, late_ms) == (named, 100)


# ---- what is no straggler


def test_a_hiccup_of_the_traced_step_names_no_rank() -> None:
    # Rank 1 came 50 ms late in that one step, which therefore took 150; no timed step took more than 100.
    late = HEALTHY | {"forward": 80.0}
    waited = HEALTHY | {"backward": 110.0}
    mine = record(1, HEALTHY, exposed=WAITING, traced=late)
    assert find_stragglers([record(0, HEALTHY, exposed={"backward": 55}, traced=waited), mine]) == ()


def test_parts_that_differ_by_chance_name_no_rank() -> None:
    # Forwards of 10 and 60 ms in turn, on rank 1 one more of the long ones: its mean is 2.6 ms above the other's.
    def unsteady(long: int) -> list[dict[str, float]]:
        return [HEALTHY | {"forward": 60.0}] * long + [HEALTHY | {"forward": 10.0}] * (TIMED - long)

    ranks = [record(0, unsteady(10), exposed=WAITING), record(1, unsteady(11), exposed=WAITING)]
    assert find_stragglers(ranks, thresholds={**ADVICE_THRESHOLDS, "straggler": 1.0}) == ()
    steady = record(1, HEALTHY | {"forward": 32.6}, exposed=WAITING)
    assert only(healthy(0), steady, straggler=1.0)[0].rank == 1


@pytest.mark.parametrize(("late_ms", "named"), [(10.0, []), (12.0, [1])])
def test_a_straggler_is_later_than_a_tenth_of_the_others_step(late_ms: float, named: list[int]) -> None:
    slow = record(1, HEALTHY | {"data_wait": 1.0 + late_ms}, exposed=WAITING)
    assert [one.rank for one in find_stragglers([healthy(0), slow])] == named


def test_without_traces_only_waits_for_data_and_transfers_tell() -> None:
    found, _ = only(record(0, HEALTHY), record(1, HEALTHY | {"data_wait": 41}))
    assert (found.rank, found.part) == (1, "data wait")
    # A long forward may well be a wait for the others.
    assert find_stragglers([record(0, HEALTHY), record(1, HEALTHY | {"forward": 70})]) == ()


def test_stages_of_a_pipeline_are_held_against_their_own_ranks() -> None:
    # The second stage's forward is three times the first's: unbalanced, and no rank's fault.
    first = [record(rank, HEALTHY, exposed=WAITING) for rank in (0, 1)]
    second = [record(rank, HEALTHY | {"forward": 90}, exposed=WAITING, stage=1) for rank in (2, 3)]
    assert find_stragglers([*first, *second]) == ()
    late = record(3, HEALTHY | {"forward": 90, "data_wait": 41}, exposed=WAITING, stage=1)
    assert only(*first, second[0], late)[0].rank == 3


def test_no_rank_is_named_where_all_keep_pace_nor_a_rank_alone_or_untimed() -> None:
    assert find_stragglers([healthy(rank) for rank in range(4)]) == ()
    slow = record(1, HEALTHY | {"data_wait": 41}, exposed=WAITING)
    untimed = replace(healthy(0), profile=replace(healthy(0).profile, timing=None))
    assert find_stragglers([]) == find_stragglers([slow]) == find_stragglers([slow, untimed]) == ()


def in_backwards(rank: int, own_ms: Sequence[float], modules_ms: Sequence[float], starved: float = 0.0) -> RankRecord:
    """A rank whose backwards of 60 ms are its own for *own_ms* in five traced steps, and its modules' for so many."""
    made = record(rank, HEALTHY, exposed=WAITING, own_forward=modules_ms, own_backward=modules_ms)
    profile, exposed = made.profile, fmean(60.0 - one for one in own_ms)
    of_steps = tuple(one * MS for one in own_ms)
    part = TracedPart(name="backward", wall_sec=60 * MS, exposed_sec=exposed * MS, own_steps_sec=of_steps)
    traced = known(profile.traced)
    parts = tuple(part if one.name == "backward" else one for one in traced.parts)
    timing = replace(known(profile.timing), starved_share=starved)
    profile = replace(profile, timing=timing, traced=replace(traced, parts=parts))
    return replace(made, profile=profile, modules_error_sec=1 * MS)


USUAL, SLEEPING = (27.0, 19.0, 25.0, 25.0, 30.0), (50.0, 33.0, 49.0, 25.0, 45.0)
"""Two gloo ranks were seen so: one sleeps 19 ms in a module, in a step while a bucket of gradients is under way."""


def test_a_sleep_in_a_module_is_no_wait_for_the_communication_under_way_meanwhile() -> None:
    usual = in_backwards(0, USUAL, (1, 0, 20))
    found, late_ms = only(usual, in_backwards(1, SLEEPING, (1, 19, 20)))
    assert (found.rank, found.part, found.module, late_ms) == (1, "backward", "first", 19)


def test_what_all_ranks_waited_for_processors_is_chance() -> None:
    # Of 40 ms and of 21 the same half was a wait for a processor: they may differ by 30 ms for that alone.
    usual = in_backwards(0, USUAL, (1, 0, 20), starved=0.5)
    assert find_stragglers([usual, in_backwards(1, SLEEPING, (1, 19, 20), starved=0.5)]) == ()
    # A rank that alone has no processor is late.
    usual = in_backwards(0, USUAL, (1, 0, 20))
    assert only(usual, in_backwards(1, SLEEPING, (1, 19, 20), starved=0.5))[0].rank == 1
