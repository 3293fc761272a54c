from __future__ import annotations

from dataclasses import replace

import pytest

from lightning_flops.analysis.rank_names import name_ranks
from lightning_flops.analysis.rank_record import RankRecord
from lightning_flops.analysis.ranks import with_ranks
from lightning_flops.config import ProfilerConfig
from lightning_flops.records import PhaseSeconds
from lightning_flops.report.scalars import profile_scalars
from lightning_flops.schema.advice import Advice
from lightning_flops.schema.profile import Profile
from lightning_flops.schema.ranks import RankAbsence, RanksProfile
from tests.analysis.in_memory import known
from tests.report import jobs, windows

Answers = list[RankRecord | RankAbsence]


def merged(profile: Profile, answers: Answers) -> RanksProfile:
    ranks = known(with_ranks(profile, answers).ranks)
    return ranks


# ---- sums, spreads, copies of the model


def test_flops_of_the_job_are_those_of_its_ranks_added_up() -> None:
    ranks = merged(*jobs.job(jobs.uneven()))
    # Rank 0 spends 600 + 800 M, rank 1 half of that.
    assert (ranks.flops.forward, ranks.flops.backward) == (900_000_000, 1_200_000_000)
    assert (ranks.flops.model, ranks.flops.hardware) == (2_100_000_000, 2_100_000_000)


def test_copies_of_the_model_are_averaged_over_those_that_see_different_data() -> None:
    ranks = merged(*jobs.job(jobs.uneven()))
    assert (known(ranks.flops_of_model).forward, known(ranks.flops_of_model).model) == (450_000_000, 1_050_000_000)


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
    assert ranks.flops_of_model is None
    assert (ranks.params, ranks.trainable_params) == (None, None)
    assert ranks.flops.model == 5_600_000_000
    assert [one.stage for one in ranks.stages] == [0]


def test_mfu_of_equal_devices_is_the_mean_of_the_ranks() -> None:
    profile, answers = jobs.job(jobs.uneven())
    ranks = merged(profile, answers)
    # 1.4 G and 0.7 G over 700 GFLOP/s x 20 ms: 10% and 5%.
    assert ranks.rates.mfu == pytest.approx(0.075, rel=1e-12)
    assert ranks.rates.hfu == pytest.approx(0.075, rel=1e-12)
    assert ranks.peak_flops_per_sec == 1.4e12


def test_mfu_of_different_devices_is_over_the_sum_of_their_peaks() -> None:
    ranks = merged(*jobs.job(jobs.mixed_devices(), config=ProfilerConfig()))
    a100 = 3984e9 / (3744e9 / 312e12 + 240e9 / 19.5e12)
    h100 = 3984e9 / (3744e9 / 989.4e12 + 240e9 / 66.9e12)
    assert [(one.device_name, one.ranks) for one in ranks.devices] == [
        ("NVIDIA A100-SXM4-80GB", 2),
        ("NVIDIA H100 80GB HBM3", 2),
    ]
    assert [one.peak_flops_per_sec for one in ranks.devices] == pytest.approx([a100, h100], rel=1e-12)
    assert ranks.peak_flops_per_sec == pytest.approx(2 * a100 + 2 * h100, rel=1e-12)
    assert ranks.rates.mfu == pytest.approx(4 * 3984e9 / ((2 * a100 + 2 * h100) * 0.1), rel=1e-12)


def test_slower_rank_weighs_with_its_own_time() -> None:
    # Rank 1 takes 40 ms for the same FLOPs: 2 x 1.4 G over 700 GFLOP/s x (20 + 40) ms.
    first, _ = jobs.uneven()
    second = replace(first, context=replace(first.context, rank=1))
    slow = jobs.in_seconds(second, PhaseSeconds(forward=0.02, backward=0.02))
    ranks = merged(*jobs.job([first, slow]))
    assert ranks.rates.mfu == pytest.approx(2.8e9 / (700e9 * 0.06), rel=1e-12)
    assert ranks.rates.samples_per_sec == pytest.approx(100 / 0.02 + 100 / 0.04, rel=1e-12)


def test_one_unknown_peak_leaves_the_utilization_of_the_job_unknown() -> None:
    ranks = jobs.mixed_devices()
    ranks[3] = replace(ranks[3], context=replace(ranks[3].context, device_name="Abacus"))
    job = merged(*jobs.job(ranks, config=ProfilerConfig()))
    assert (job.rates.mfu, job.rates.hfu, job.peak_flops_per_sec) == (None, None, None)
    assert job.unavailable["mfu"] == (
        "no dense peak is known for bfloat16, float32 on Abacus; run lightning-flops peak, or set peak_flops_per_sec "
        "(rank 3)"
    )


def test_dtype_that_only_another_rank_uses_counts_with_this_devices_peak() -> None:
    # Stage 0 multiplies in bfloat16, stage 1 in float32: 2.8 G and 1.4 G a rank, over 312 and 19.5 TFLOP/s.
    ranks = []
    for window in jobs.pipeline():
        dtype = "bfloat16" if window.context.pp_rank == 0 else "float32"
        cells = tuple(replace(one, dtype=dtype) for one in window.flops.cells)
        context = replace(window.context, device_name="NVIDIA A100-SXM4-80GB")
        ranks.append(replace(window, context=context, flops=replace(window.flops, cells=cells)))
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
    assert ranks.absences == (
        RankAbsence(rank=1, reason="no record came within 30 s"),
        RankAbsence(rank=3, reason="its profiler failed: RuntimeError: no more memory"),
    )
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
    assert (late.rank, late.transfer_us, late.wait_us, late.overlap.exposed_us) == (22, 5000, 0, 1500)
    (collective,) = late.collectives
    assert (collective.name, collective.calls, collective.bytes) == ("allreduce", 2, 12_000_000)


def test_late_rank_is_named_in_the_advice_with_its_cause_before_all_else() -> None:
    profile, answers = jobs.job(jobs.slow_loader())
    whole = with_ranks(profile, answers)
    assert [(one.rank, one.part) for one in known(whole.ranks).stragglers] == [(2, "data wait")]
    assert [one.rule for one in whole.advice] == ["straggler"]
    assert whole.advice[0].ceiling == pytest.approx(8 / 24, rel=1e-12)
    assert "rank 2: its data wait takes 8 ms longer than theirs" in whole.advice[0].fact


def test_what_ranks_wait_for_a_straggler_is_no_transfer() -> None:
    profile, answers = jobs.thousands(24)
    exposed = Advice(
        rule="exposed_communication", fact="Rank 0's.", threshold="", remedy="", source="", unless="", ceiling=11.5 / 24
    )
    whole = with_ranks(replace(profile, advice=(exposed,)), answers)
    # Of the others' 24 ms 11.5 are exposed, 8 of them waiting for rank 22.
    found = {one.rule: one.ceiling for one in whole.advice}
    assert list(found) == ["straggler", "exposed_communication"]
    assert found["straggler"] == pytest.approx(8 / 24, rel=1e-12)
    assert found["exposed_communication"] == pytest.approx(3.5 / 24, rel=1e-12)


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
    assert (alone["flops_profiler/mfu"], alone["flops_profiler/samples_per_sec"]) == pytest.approx(
        (0.1, 10_000), rel=1e-12
    )
    assert (whole["flops_profiler/mfu"], whole["flops_profiler/samples_per_sec"]) == pytest.approx(
        (0.075, 7_500), rel=1e-12
    )


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
