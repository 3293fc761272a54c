"""Jobs of several ranks with round numbers, a window each, so that every merged figure can be worked out by hand."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from lightning_flops.analysis.ranks import RankAbsence, RankRecord, TracedRank, make_rank_record, pack, unpack
from lightning_flops.config import ProfilerConfig
from lightning_flops.records import PhaseFlops, PhaseSeconds, WindowRecord
from lightning_flops.schema.profile import Profile
from lightning_flops.schema.trace import CollectiveCalls, Overlap
from tests.report import windows
from tests.report.windows import build_profile

CONFIG = ProfilerConfig(peak_flops_per_sec=700e9, detailed=False)


def sent(profile: Profile) -> RankRecord:
    """The record of *profile* as it arrives."""
    answer = unpack(pack(make_rank_record(profile)))
    assert isinstance(answer, RankRecord)
    return answer


def job(
    ranks: Sequence[WindowRecord], *, config: ProfilerConfig = CONFIG
) -> tuple[Profile, list[RankRecord | RankAbsence]]:
    """The profile of the first of *ranks*, and what all of them sent."""
    profiles = [build_profile(window, config=config) for window in ranks]
    return profiles[0], [sent(profile) for profile in profiles]


def in_seconds(window: WindowRecord, seconds: PhaseSeconds) -> WindowRecord:
    """*window* with timed steps of *seconds* each."""
    return replace(window, timed_steps=tuple(replace(one, seconds=seconds) for one in window.timed_steps))


def in_context(window: WindowRecord, **facts: Any) -> WindowRecord:
    """*window* with these facts of its run."""
    return replace(window, context=replace(window.context, **facts))


def _ranks(window: WindowRecord, number: int, **facts: Any) -> list[WindowRecord]:
    """*window* on so many ranks that see different data, two on a machine."""
    facts = {"world_size": number, "dp_size": number, "strategy": "DDPStrategy", **facts}
    return [in_context(window, rank=rank, host=f"node{rank // 2}", **facts) for rank in range(number)]


def with_flops(window: WindowRecord, factor: float) -> WindowRecord:
    """*window* with *factor* times all its FLOPs."""
    cells = tuple(replace(one, flops=int(factor * one.flops)) for one in window.flops.cells)
    return replace(window, flops=replace(window.flops, cells=cells))


def half_a_batch(window: WindowRecord) -> WindowRecord:
    """*window* with 50 samples a step in place of 100, and half of all FLOPs."""
    flops = PhaseFlops(forward=300_000_000, backward=400_000_000)
    return replace(
        with_flops(window, 0.5),
        counted_steps=tuple(replace(one, samples=50, flops=flops) for one in window.counted_steps),
        timed_steps=tuple(replace(one, samples=50) for one in window.timed_steps),
    )


def uneven() -> list[WindowRecord]:
    """DDP on two ranks: rank 0 has 100 samples a step, rank 1 has 50 and waits 3 ms longer in its backward.

    Both take 20 ms. FLOPs 1.4 G and 0.7 G, together 2.1 G; of one copy of the model 1.05 G. At 700 GFLOP/s each can do
    14 GFLOP in a step: MFU 2.1 / 28 = 7.5%. Samples 100 / 0.02 + 50 / 0.02 = 7,500 a second.
    """
    first, second = _ranks(windows.mlp_window(), 2)
    return [
        in_seconds(first, PhaseSeconds(data_wait=0.001, forward=0.006, backward=0.008, optimizer=0.004, other=0.001)),
        in_seconds(
            half_a_batch(second),
            PhaseSeconds(data_wait=0.001, forward=0.003, backward=0.011, optimizer=0.004, other=0.001),
        ),
    ]


def slow_loader() -> list[WindowRecord]:
    """DDP on four ranks; rank 2 waits 9 ms for data where the others wait 1 ms, and they wait for it in their backward.

    All take 24 ms. No rank's step was traced.
    """
    usual = PhaseSeconds(data_wait=0.001, forward=0.006, backward=0.012, optimizer=0.004, other=0.001)
    late = PhaseSeconds(data_wait=0.009, forward=0.006, backward=0.004, optimizer=0.004, other=0.001)
    return [in_seconds(one, late if one.context.rank == 2 else usual) for one in _ranks(windows.mlp_window(), 4)]


def mixed_devices() -> list[WindowRecord]:
    """The transformer on two A100 and two H100 (SXM), a step of 100 ms on each.

    Of a rank's 3984 GFLOP, 3744 are bfloat16 and 240 float32. A100: 312 and 19.5 TFLOP/s, so 12 + 12.3077 ms; H100:
    989.5 and 67, so 3.7837 + 3.5821 ms. Peaks for this mix: 3984 G / 24.3077 ms = 163.9 and 3984 G / 7.3658 ms = 540.9
    TFLOP/s; all four 1409.5. MFU 4 x 3984 G / (1409.5 T x 0.1 s) = 11.306%.
    """
    names = ("NVIDIA A100-SXM4-80GB", "NVIDIA H100 80GB HBM3")
    return [
        in_context(one, device_name=names[one.context.rank // 2]) for one in _ranks(windows.transformer_window(), 4)
    ]


def pipeline() -> list[WindowRecord]:
    """Two stages, each on two ranks that see different data. Ranks 0 and 1 are stage 0, which has twice the FLOPs."""
    ranks = _ranks(windows.stage_window(), 4, dp_size=2, strategy="ZeRO-1")
    ranks = [in_context(one, pp_rank=one.context.rank // 2) for one in ranks]
    return [*(with_flops(one, 2) for one in ranks[:2]), *ranks[2:]]


def missing() -> tuple[Profile, list[RankRecord | RankAbsence]]:
    """The four ranks of ``slow_loader`` without rank 1, which died, and rank 3, whose profiler failed."""
    profile, answers = job(slow_loader())
    answers[1] = RankAbsence(rank=1, reason="no record came within 30 s")
    answers[3] = RankAbsence(rank=3, reason="its profiler failed: RuntimeError: no more memory")
    return profile, answers


def thousands(ranks: int = 4096) -> tuple[Profile, list[RankRecord | RankAbsence]]:
    """DDP on *ranks* ranks that all take 24 ms a step; the last but one is late as in ``slow_loader``.

    Each traced one all-reduce of 2 ms and one of 3 ms, but the late rank, for which the others wait 8 ms in the second.
    Ranks whose number ends in 7 sent nothing.
    """
    profile, answers = job([in_context(window, world_size=ranks, dp_size=ranks) for window in slow_loader()])
    usual, late = answers[0], answers[2]
    assert isinstance(usual, RankRecord) and isinstance(late, RankRecord)
    found: list[RankRecord | RankAbsence] = []
    for rank in range(ranks):
        if rank % 10 == 7:
            found.append(RankAbsence(rank=rank, reason="no record came within 30 s"))
            continue
        is_late = rank == ranks - 2
        record = late if is_late else usual
        context = replace(record.profile.context, rank=rank, host=f"node{rank // 8}")
        traced = TracedRank(
            rank=rank,
            steps=1,
            overlap=overlap(5_000 if is_late else 13_000),
            collectives=(all_reduces(2_000_000, 3_000_000 if is_late else 11_000_000, group_size=ranks),),
        )
        mine = replace(record.profile, context=context, traced=windows.traced())
        found.append(replace(record, profile=mine, traced=traced))
    return profile, found


def overlap(communication_us: float) -> Overlap:
    """Of a step of 24 ms."""
    return Overlap(
        wall_us=24_000.0,
        computation_us=10_000.0,
        communication_us=communication_us,
        overlap_us=1_500.0,
        other_us=24_000.0 - 10_000.0 - communication_us + 1_500.0,
        overlap_ratio=1_500.0 / communication_us,
    )


def all_reduces(*latency_ns: int, group_size: int = 2) -> CollectiveCalls:
    """Calls of these lengths, of 12 MB in all."""
    return CollectiveCalls(
        name="allreduce",
        group="world",
        group_size=group_size,
        step=8,
        calls=len(latency_ns),
        bytes=12_000_000,
        total_ns=sum(latency_ns),
        latency_ns=array("q", latency_ns),
    )
