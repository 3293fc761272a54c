"""Two runs compared: every number of these differences can be worked out by hand (``tests/report/compared.py``)."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, get_args

import numpy as np
import pytest

from lightning_flops import Comparison, compare_profiles
from lightning_flops.analysis.counts import rows_of_both
from lightning_flops.analysis.differences import Work, judge, noise_factor, noise_ns, split
from lightning_flops.analysis.rates import flops_per_byte, with_given_peaks
from lightning_flops.config import ProfilerConfig
from lightning_flops.errors import ComparisonError
from lightning_flops.records import OUTSIDE, ModuleRecord, PhaseBytes, PhaseFlops
from lightning_flops.schema.comparison import SHARED, STARTS, Cause, CausedDifference
from lightning_flops.schema.profile import Profile
from lightning_flops.schema.step import ModuleProfile
from tests.analysis.test_trace_compare import named
from tests.report import compared, windows
from tests.report.compared import BACKWARD_MS, CELLS, FORWARD_MS, MS, on_device, run, traced_step
from tests.report.windows import cell


def against(a: Profile, b: Profile) -> Comparison:
    """The two compared; all sums are right."""
    comparison = compare_profiles(a, b)
    assert_adds_up(comparison)
    return comparison


def assert_adds_up(comparison: Comparison) -> None:
    """Every sum of the comparison is right to the nanosecond."""
    for one in (comparison.step, *comparison.parts, *comparison.modules):
        assert sum(one.causes.values()) == one.work_ns + one.efficiency_ns + one.waiting_ns == one.b_ns - one.a_ns
        assert {*get_args(Cause)}.issuperset(one.causes) and 0 not in one.causes.values()
    assert totals(comparison.parts) == totals([comparison.step]) == totals(comparison.modules)


def three(one: CausedDifference) -> tuple[float, float, float]:
    """Work, efficiency and waiting in milliseconds."""
    return one.work_ns / MS, one.efficiency_ns / MS, one.waiting_ns / MS


def totals(every: Sequence[CausedDifference]) -> Counter[str]:
    """The sums of all their numbers."""
    found: Counter[str] = Counter()
    for one in every:
        found.update(one.causes, a=one.a_ns, b=one.b_ns)
    return Counter({name: value for name, value in found.items() if value})


def test_a_run_differs_from_itself_in_nothing() -> None:
    comparison = against(run(), run())
    assert comparison.step.a_ns == 22 * MS == comparison.step.b_ns
    assert three(comparison.step) == (0, 0, 0) and comparison.settings == {}
    assert {one.beyond_noise for one in (comparison.step, *comparison.parts)} == {False}
    assert not any(one.beyond_noise for one in comparison.modules)
    assert all(one.ratio in (1.0, None) for one in comparison.figures)


def test_a_slower_module_is_efficiency_of_that_module() -> None:
    comparison = against(run(), compared.slow_module())
    assert three(comparison.step) == three(named(comparison.parts)["forward"]) == (0, 3, 0)
    assert three(named(comparison.parts)["backward"]) == (0, 0, 0)
    assert {one.name: three(one) for one in comparison.modules} == {
        "": (0, 0, 0), "fc1": (0, 0, 0), "act": (0, 3, 0), "fc2": (0, 0, 0), OUTSIDE: (0, 0, 0),
    }  # fmt: skip
    assert [one.name for one in comparison.modules if one.beyond_noise] == ["act"]


@pytest.mark.parametrize(("error", "beyond"), [(0.1, True), (0.2, False), (None, None)])
def test_a_module_is_held_against_its_spread_over_the_traced_steps(error: float | None, beyond: bool | None) -> None:
    # Act takes 1.5 ms in A and 4.5 in B; 4 sqrt(1.5^2 + 4.5^2) = 18.97, so with errors of 10% up to 1.897 ms are noise.
    slow = {**FORWARD_MS, "act": 3.5}
    a = run(traced=traced_step(FORWARD_MS, BACKWARD_MS, error=error))
    b = run(mean_ms={"forward": 8}, traced=traced_step(slow, BACKWARD_MS, error=error))
    act = named(compare_profiles(a, b).modules)["act"]
    assert (act.difference_ns, act.beyond_noise) == (3 * MS, beyond)
    assert act.noise_ns is None if error is None else act.noise_ns == pytest.approx(18.97367 * error * MS, rel=1e-6)
    # The part of the step is named where no module is beyond its noise.
    most = {True: "act", False: "forward", None: "forward"}[beyond]
    assert f"Most of it: {most} +3 ms (worse efficiency).\n" in str(compare_profiles(a, b))
    apart = replace(traced_step(slow, BACKWARD_MS), is_apart=True)
    uncertain = compare_profiles(run(), run(mean_ms={"forward": 8}, traced=apart))
    assert named(uncertain.modules)["act"].beyond_noise is None
    assert any(note.startswith("B: the traced steps took over twice") for note in uncertain.notes)


def test_other_counts_are_evidence_without_times() -> None:
    # fc1 has 40 M FLOPs more, 5%, in times that are the same.
    cells = [replace(one, flops=one.flops + 20_000_000) if one.module == "fc1" else one for one in CELLS]
    comparison = compare_profiles(run(), run(cells=cells))
    assert [one.name for one in comparison.modules if one.other_counts] == ["fc1"]
    named = "Other counts, whatever the times are: fc1 (+40 MFLOPs).\n"
    assert named in str(comparison) and "By cause" not in str(comparison)
    untimed = compare_profiles(run(), run(cells=cells, traced=None))
    assert named in str(untimed)
    # In a step that is told, a module within noise stands with its counts.
    slower = compare_profiles(run(), run(cells=cells, forward_ms={"fc1": 2.01}, mean_ms={"optimizer": 7}))
    assert re.search(r"^fc1 .*  noise, \+40 MFLOPs$", str(slower), re.MULTILINE)
    assert "Most of it: optimizer +4 ms (worse efficiency).\n" in str(slower) and named in str(slower)


def flash_and_written_out() -> tuple[Profile, Profile]:
    """Attention by one kernel; and written out: 10% fewer FLOPs, the bytes of ten score matrices, 3 ms more."""
    written_out = [replace(one, flops=one.flops * 9 // 10) if one.module == "fc2" else one for one in CELLS]
    with_bytes = [
        cell("fc2", "forward", 0, operator="aten._softmax", bytes_read=amount) for amount in (9_000_000, 97_000_000)
    ]
    a = run(cells=[*CELLS, with_bytes[0]])
    b = run(cells=[*written_out, with_bytes[1]], mean_ms={"forward": 8}, forward_ms={"fc2": 4})
    return a, b


def test_the_cause_of_a_module_is_the_count_that_took_the_time() -> None:
    # At 10 FLOPs a byte the forward's W of fc2 is 200 M + 90 M, then 180 M + 970 M: its bytes took the time.
    comparison = against(*flash_and_written_out())
    fc2 = named(comparison.modules)["fc2"]
    assert fc2.causes["bytes"] > 0 > fc2.causes["flops"]
    assert "Most of it: fc2 +3 ms (more work: +88 MB).\n" in str(comparison)


@pytest.mark.parametrize(
    ("peak", "bandwidth", "per_byte"), [(19.5e12, 1.95e12, 10), (989e12, 3.35e12, 295.2), (None, None, 10)]
)
def test_a_byte_weighs_as_much_as_the_flops_that_the_device_does_meanwhile(
    peak: float | None, bandwidth: float | None, per_byte: float
) -> None:
    a, b = (
        replace(one, peaks_flops_per_sec={"float32": peak} if peak else {}, memory_bytes_per_sec=bandwidth)
        for one in flash_and_written_out()
    )
    assert flops_per_byte([a, b]) == pytest.approx(per_byte, rel=1e-3)
    # W = FLOPs + r x bytes: work is L(1 ms, 4 ms) x ln(W_B / W_A), of which bytes have their share of W_B - W_A.
    in_a, in_b = 2e8 + per_byte * 9e6, 1.8e8 + per_byte * 97e6
    work_ms = 3 / math.log(4) * math.log(in_b / in_a)
    forward = named(against(a, b).parts)["forward"]
    of_bytes = work_ms * per_byte * 88e6 / (in_b - in_a)
    assert forward.causes["bytes"] / MS == pytest.approx(min(of_bytes, 4 * of_bytes / work_ms), rel=2e-3)
    assert f"a byte weighs as much as {per_byte:.3g} FLOPs." in compare_profiles(a, b).notes[0]


def test_what_may_be_chance_has_no_cause_and_names_no_module() -> None:
    def words(comparison: Comparison) -> tuple[bool, bool, set[bool | None]]:
        text = str(comparison)
        return "By cause" in text, bool(re.search("^(Most|Part) of it", text, re.MULTILINE)), {
            one.beyond_noise for one in comparison.modules
        }  # fmt: skip

    slow = {**FORWARD_MS, "act": 3.5}
    nothing = False, False, {None}
    # Act is 3 ms slower, and the step by 14%; then its steps stray by 40%; then a run was starved.
    traced = traced_step(slow, BACKWARD_MS)
    wild = tuple(20 * one for one in compared.STRAYING)
    assert words(compare_profiles(run(), run(mean_ms={"forward": 8}, traced=traced)))[:2] == (True, True)
    assert (
        words(compare_profiles(run(straying=wild), run(mean_ms={"forward": 8}, traced=traced, straying=wild)))
        == nothing
    )
    starved = run(mean_ms={"forward": 8}, traced=traced, processor=compared.processor(8, lost=0.5))
    comparison = compare_profiles(run(), starved)
    assert words(comparison) == nothing
    assert (
        "+3 ms (+13.6%), which decides nothing: B had to wait for processors. Run that again where nothing"
        in " ".join(str(comparison).split())
    )
    # 0.9 ms of 22 are 4.1%: beyond the spread of steady steps, within what two starts of one program may differ by.
    steady = tuple(0.1 * one for one in compared.STRAYING)
    small = run(mean_ms={"forward": 5.9}, traced=traced, straying=steady)
    comparison = compare_profiles(run(straying=steady), small)
    assert comparison.step.beyond_noise and words(comparison) == nothing
    assert "but two starts of one program may differ by 5% more" in " ".join(str(comparison).split())


def test_on_a_cpu_one_run_a_side_leaves_a_difference_unexplained() -> None:
    on_cpu = windows.mlp_window().context
    comparison = compare_profiles(run(context=on_cpu), run(mean_ms={"forward": 8}, context=on_cpu))
    assert not comparison.is_told and comparison.step.beyond_noise
    assert "but two starts of one program may differ by 30% more (99%" in " ".join(str(comparison).split())
    # 15 ms more are 68%.
    assert compare_profiles(run(context=on_cpu), run(mean_ms={"forward": 20}, context=on_cpu)).is_told
    # 3 ms are 14%: on a device they are told, and beside a run on a CPU not.
    assert compare_profiles(run(), run(mean_ms={"forward": 8})).is_told
    assert not compare_profiles(run(context=on_cpu), run(mean_ms={"forward": 8})).is_told


def test_the_next_command_can_be_pasted_and_is_of_files_alone() -> None:
    of_files = compare_profiles(run(), run(), sources=("my logs/profile.json", "b"))
    assert "`lightning-flops compare 'my logs/profile.json' A2 -- b B2` decides." in " ".join(str(of_files).split())
    assert "decides" not in str(compare_profiles(run(), run()))


def test_of_several_runs_a_side_noise_is_that_between_the_runs() -> None:
    def runs(*forward_ms: float, act: float = 0.5) -> list[Profile]:
        traced = traced_step({**FORWARD_MS, "act": act}, BACKWARD_MS)
        return [run(mean_ms={"forward": ms}, traced=traced) for ms in forward_ms]

    # Steps of 21, 22, 23 ms and of 22, 23, 24: variances of 1, 4 degrees of freedom, t of 99% 4.60; sqrt(2 / 3) ms.
    comparison = against_many(runs(4, 5, 6), runs(5, 6, 7))
    assert (comparison.step.a_ns, comparison.step.b_ns) == (22 * MS, 23 * MS)
    assert comparison.step.noise_ns == pytest.approx(4.60 * math.sqrt(2 / 3) * MS, rel=1e-6)
    assert not comparison.is_told and "by 3 and 3 runs" in " ".join(str(comparison).split())
    # Each run's own eight steps would prove 1 ms of 22, as one run a side does.
    one = compare_profiles(*runs(5, 6.2))
    assert one.step.beyond_noise and one.a.runs == 1
    # 3 ms in each of three runs, 0.1 ms apart: a cause, although the traced steps' own errors are not known.
    slow = against_many(runs(5, 5.1, 4.9), runs(8, 8.1, 7.9, act=3.5))
    assert slow.is_told and "Most of it: act +3 ms (worse efficiency)." in str(slow)
    # A module's noise, too: act has 0.5 of 5 ms traced forward, then 3.5 of 8, and 1 of 10 backward. So 1.5 ms +- 0.01,
    # and 4.5 +- 0.04375.
    spread_ms = math.sqrt((2 * 0.01**2 + 2 * 0.04375**2) / 4 * 2 / 3)
    assert named(slow.modules)["act"].noise_ns == pytest.approx(4.60 * spread_ms * MS, rel=1e-4)
    # 0.5 ms are below 5% of the step, and told: starts of the program are compared.
    assert against_many(runs(5, 5.01, 4.99), runs(5.5, 5.51, 5.49)).is_told
    ratio = named(slow.figures)["global_step_sec"]
    assert ratio.ratio == pytest.approx(25 / 22) and ratio.ends is not None and ratio.ends[0] > 1.1
    assert judge(slow, "global_step_sec > 1.1")[0] == "holds"
    assert judge(comparison, "global_step_sec > 1")[0] == "does not hold"
    # One run against several has no noise between runs, and no command of one file a side decides it.
    text = " ".join(str(compare_profiles(run(), runs(5.5, 5.5, 5.5))).split())
    assert "by 1 and 3 runs). A: A (" in text and "may differ by 5% more" in text
    # One run on a CPU makes the side one.
    beside = compare_profiles(run(), [run(), run(context=windows.mlp_window().context)])
    assert (beside.a.starts_share, beside.b.starts_share) == (STARTS, SHARED)
    # Few steps say nothing of their spread, but means of runs do.
    few = [run(straying=(0.01, -0.01)), run(straying=(0.02, -0.02))]
    assert not any("what is noise is not known" in note for note in against_many(few, few).notes)
    with pytest.raises(ComparisonError, match="cannot be one side: their modules differ"):
        compare_profiles([run(), run_with(TAIL)], run())


def test_a_starved_share_explains_no_more_than_its_part_of_the_slower_run() -> None:
    steady = (0.0,) * 8

    def waited(ms: float, act: float = 0.5, **window: Any) -> Profile:
        quarter = compared.processor(8, lost=0.25)
        given = {"mean_ms": {"forward": ms}, "forward_ms": {"act": act}, "straying": steady, "processor": quarter}
        return run(**{**given, **window})

    # 22 ms in A. Of 30 ms a quarter, 7.5, may be waits, and 5% of 22, 1.1, another start: 8 ms more. Of 31, 9 ms more.
    undecided, slower = (compare_profiles(run(straying=steady), waited(ms, act=ms - 4.5)) for ms in (13, 14))
    assert [one.step.noise_ns for one in (undecided, slower)] == [7.5 * MS, 7.75 * MS]
    assert "which decides nothing: B had to wait for processors" in " ".join(str(undecided).split())
    assert "more than noise explains (99%: +1.25 ms to +16.8 ms" in " ".join(str(slower).split())
    assert "Most of it: act +9 ms (worse efficiency).\n" in str(slower)
    # All of the waits may be in act, which is beyond them. Of 34 ms they are 8.5, and all of 5 ms may be such waits.
    noise = named(slower.modules)["act"].noise_ns
    assert noise == pytest.approx(7.75 * MS + 4 * math.hypot(0.01 * 1.5, 0.01 * 10.5) * MS, abs=1)
    both = compare_profiles(run(straying=steady), waited(0, mean_ms={"data_wait": 5, "forward": 14})).parts
    assert {one.name: one.noise_ns for one in both if one.difference_ns} == {"data wait": 5 * MS, "forward": 8.5 * MS}
    # Waits of the faster run explain nothing: without them it was faster still.
    faster, other = waited(5), run(mean_ms={"forward": 8}, straying=steady)
    assert compare_profiles(faster, other).is_told and compare_profiles(other, faster).is_told
    assert not compare_profiles(run(mean_ms={"forward": 2}, straying=steady), faster).is_told
    # Of two runs a side, the ratio is between 31 / 22, 1.409, and 3 / 4 of that, as B may have waited and A has not.
    several = compare_profiles([run(straying=steady)] * 2, [waited(14)] * 2)
    verdicts = {"> 1.05": "holds", "> 1.06": "is inconclusive", "> 1.4": "is inconclusive", "> 1.41": "does not hold"}
    assert {limit: judge(several, f"global_step_sec {limit}")[0] for limit in verdicts} == verdicts
    rates = {"< 0.95": "holds", "< 0.9": "is inconclusive", "< 0.7": "does not hold"}
    assert {limit: judge(several, f"samples_per_sec {limit}")[0] for limit in rates} == rates
    # How much of such waits is in the wait for data is not known.
    assert judge(several, "data_wait_ratio > 1000")[0] == "is inconclusive"


def test_a_starved_run_among_several_is_named_with_what_to_do() -> None:
    def with_losses(*lost: float) -> list[Profile]:
        return [run(processor=compared.processor(8, lost=share)) for share in lost]

    # Of three runs one waited for half of its time: the median, and so the side, had enough.
    comparison = against_many(with_losses(0, 0, 0), with_losses(0, 0.5, 0.01))
    words = "b1 (50.0% of its time) had to wait for a processor. Repeat such runs where nothing else runs, "
    words += "or leave them out."
    assert (comparison.starved, comparison.b.starved_share, comparison.b.starved_runs) == ((), 0, words)
    assert comparison.a.starved_runs == ""
    lines = str(comparison).splitlines()
    assert "by 3 and 3 runs" in " ".join(lines[1:3]) and f"Starved in B: {words}" in " ".join(lines[2:5])
    # Two of three: their side decides nothing, and one run that is left would have no noise between runs.
    comparison = against_many(with_losses(0, 0, 0), with_losses(0.2, 0.5, 0))
    assert comparison.starved == ("B",) and "decides nothing: B had to wait" in " ".join(str(comparison).split())
    words = "b0 (20.0% of its time), b1 (50.0% of its time) had to wait for a processor. Repeat such runs where "
    assert comparison.b.starved_runs == f"{words}nothing else runs."
    # Profiles without files are named by their places.
    assert compare_profiles([run()] * 2, with_losses(0, 0.5)).b.starved_runs.startswith("B[1] (50.0%")
    assert compare_profiles(run(), *with_losses(0.5)).b.starved_runs == ""


def test_what_flops_and_bytes_do_not_explain_comes_with_what_to_do() -> None:
    def advice(a: Profile, b: Profile) -> str:
        text = " ".join(str(compare_profiles(a, b)).split())
        name, said, do = text.partition(" is time that the counted FLOPs and bytes do not explain: ")
        return f"{name.rpartition('Efficiency of ')[2]}: {do.partition(' A: A (')[0]}" if said else ""

    do = "compare traces of both (trace_dir keeps them) for other kernels, dtypes and layouts; where these are alike, "
    do += "look at clocks and other programs."
    assert advice(run(), compared.slow_module()) == f"act: {do}" == advice(compared.slow_module(), run())
    a, b = (
        replace(one, set_up={"optimizer": f"AdamW, {how}", "cores": "2"})
        for one, how in ((run(), "fused"), (run(mean_ms={"optimizer": 6}), "foreach"))
    )
    assert advice(a, b) == f"optimizer: set both up alike and run them again; if it stays, {do}"
    # Twice the FLOPs of fc1 in five times its time: they explain some of it, and stand beside what they do not.
    cells = [replace(one, flops=2 * one.flops) if one.module == "fc1" else one for one in CELLS]
    mean_ms = {"forward": 13, "backward": 22}
    both = run(cells=cells, mean_ms=mean_ms, forward_ms={"fc1": 10}, backward_ms={"fc1": 15})
    assert advice(run(), both) == f"fc1: {do}"
    assert "Most of it: fc1 +20 ms (worse efficiency, with +800 MFLOPs).\n" in str(compare_profiles(run(), both))
    # Other work, waiting, and what may be chance have none.
    starved = run(mean_ms={"optimizer": 6}, processor=compared.processor(8, lost=0.5))
    assert [advice(run(), one) for one in (compared.wider(), compared.slow_loader(), run(), starved)] == [""] * 4


def against_many(a: Sequence[Profile], b: Sequence[Profile]) -> Comparison:
    comparison = compare_profiles(a, b, sources=([f"a{n}" for n in range(len(a))], [f"b{n}" for n in range(len(b))]))
    assert_adds_up(comparison)
    assert (comparison.a.source, comparison.a.runs, comparison.b.runs) == (f"a0 and {len(a) - 1} more", len(a), len(b))
    return comparison


def test_a_wider_layer_is_work_of_that_layer() -> None:
    comparison = against(run(), compared.wider())
    # Forward: twice the work in twice the time, 2 ms. Backward: twice the work in 5 / 3 of it: 2 ms / ln(5 / 3) x ln 2
    # are work, 2.713831 ms, and as much less as the difference is less than that because a FLOP takes less.
    assert three(named(comparison.modules)["fc1"]) == three(comparison.step) == (4.713831, -0.713831, 0)
    assert named(comparison.modules)["fc1"].causes == {"flops": 4_713_831, "efficiency": -713_831}
    assert [(name, *values) for name, values in comparison.settings.items()] == [
        ("params", "3,002,500", "5,004,500"),
        ("trainable_params", "3,002,500", "5,004,500"),
    ]
    side = named(comparison.modules)["fc1"].b
    assert side is not None and side.flops == 1_600_000_000


@pytest.mark.parametrize(
    ("name", "mean_ms", "three_ms", "causes"),
    [
        ("data wait", {"data_wait": 6}, (0, 0, 4), {"data": 4 * MS}),
        ("other", {"other": 5}, (0, 0, 3), {"loop": 3 * MS}),
        ("optimizer", {"optimizer": 5}, (0, 2, 0), {"efficiency": 2 * MS}),
    ],
)
def test_a_part_of_the_loop_that_takes_longer_has_its_cause(
    name: str, mean_ms: dict[str, float], three_ms: tuple[float, float, float], causes: dict[str, int]
) -> None:
    comparison = against(run(), run(mean_ms=mean_ms))
    assert three(named(comparison.parts)[name]) == three_ms == three(named(comparison.modules)[OUTSIDE])
    assert comparison.step.causes == causes


def test_the_bytes_of_a_module_are_without_those_below_it() -> None:
    # The root reads 1 MB itself, in 1.5 ms of its own; then 3 MB in 4.5 ms. What fc1 reads stays.
    def with_bytes(own: int, **times: Any) -> Profile:
        mine = cell("", "forward", 0, operator="aten.add", bytes_read=own)
        return run(cells=[*CELLS, mine, cell("fc1", "forward", 0, operator="aten.cat", bytes_read=5_000_000)], **times)

    comparison = against(with_bytes(1_000_000), with_bytes(3_000_000, mean_ms={"forward": 8}, forward_ms={"": 4.5}))
    assert three(named(comparison.modules)[""]) == (3, 0, 0)
    assert three(named(comparison.modules)["fc1"]) == (0, 0, 0)


TAIL = ModuleRecord(name="tail", type_name="Linear", params=7, trainable_params=7, local_params=7)


def run_with(last: ModuleRecord) -> Profile:
    """The first run with one more layer of 100 M, which takes 1 ms forward and 2 backward."""
    modules = [one for one in windows.mlp_window().modules if one.name != "drop"]
    return run(
        mean_ms={"forward": 6, "backward": 12},
        forward_ms={last.name: 1},
        backward_ms={last.name: 2},
        cells=[*CELLS, cell(last.name, "forward", 100_000_000), cell(last.name, "backward", 200_000_000)],
        modules=[*modules, last],
    )


def test_new_gone_and_renamed_modules() -> None:
    comparison = against(run(), run_with(TAIL))
    new = named(comparison.modules)["tail"]
    assert new.a is None and new.beyond_noise and new.causes == {"modules": 3 * MS}
    assert three(new) == three(comparison.step) == (3, 0, 0)
    gone = named(compare_profiles(run_with(TAIL), run()).modules)["tail"]
    assert gone.b is None and three(gone) == (-3, 0, 0)
    renamed = compare_profiles(run_with(TAIL), run_with(replace(TAIL, name="head")))
    head = named(renamed.modules)["head"]
    assert head.a is not None and head.a.name == "tail"
    assert three(renamed.step) == (0, 0, 0)


def test_on_a_device_waiting_for_ranks_and_for_the_host_are_told_from_work() -> None:
    # Of 5 ms 3 are work, 0.5 communication, 1.5 idle; of 9 ms 3, 2, 3 idle and 1 of copies that no module has.
    a = on_device(forward_ms=5, busy_ms=3, exposed_ms=0.5, idle_ms=1.5)
    comparison = against(a, on_device(forward_ms=9, busy_ms=3, exposed_ms=2, idle_ms=3))
    forward = named(comparison.parts)["forward"]
    assert three(forward) == (0, 1, 3)
    assert forward.causes == {"communication": 1.5 * MS, "idle": 1.5 * MS, "efficiency": MS}
    assert three(named(comparison.modules)["fc1"]) == (0, 0, 0)
    # torch.profiler slows the host, so the device waits longer while traced: 5.1 ms, and for other ranks 0.9.
    slowed = on_device(forward_ms=5, traced_ms=9, busy_ms=3, exposed_ms=0.9, idle_ms=5.1)
    assert named(against(a, slowed).parts)["forward"].causes == {}
    # fc1's own 5 ms hold 2 ms of communication that nothing hides: of a wall of 5 ms 3 are left to compute.
    same, waits = (on_device(forward_ms=5, busy_ms=busy, exposed_ms=2, idle_ms=0) for busy in (3, 5))
    comparison = against(same, waits)
    assert named(comparison.modules)["fc1"].b_ns == (3 + 3) * MS == named(comparison.modules)["fc1"].a_ns
    assert three(named(comparison.parts)["forward"]) == (0, 0, 0)


def test_processor_time_of_a_step_is_a_figure_that_load_hardly_moves() -> None:
    starved = run(processor=compared.processor(8, lost=0.5))
    comparison = compare_profiles(run(), starved)
    found = named(comparison.figures)["cpu_time_sec"]
    assert found.a == pytest.approx(0.02) and (found.ratio, found.noise_factor) == (1.0, 1.0)
    unknown = named(compare_profiles(run(processor=None), run()).figures)["cpu_time_sec"]
    assert (unknown.ratio, unknown.reason) == (None, "not known in A")
    assert "\nB was starved: its threads together had to wait for a processor for 50.0% of the time in" in str(
        comparison
    )
    conditions = ("global_step_sec > 0.5", "cpu_time_sec > 1.02", "hardware_flops >= 1")
    assert [judge(comparison, one)[0] for one in conditions] == ["is inconclusive", "does not hold", "holds"]


def test_a_time_of_one_run_a_side_must_exceed_the_limit_by_what_two_starts_differ_by() -> None:
    a, b = compared.run(), compared.slow_loader()
    one, several = compare_profiles(a, b), compare_profiles([a] * 2, [b] * 2)
    least = [of.ends[0] for each in (one, several) if (of := named(each.figures)["global_step_sec"]).ends]
    assert (one.starts_share, several.starts_share) == (0.05, 0.0)
    assert judge(one, f"global_step_sec > {least[0] / 1.05 - 0.001}")[0] == "holds"
    verdict, words = judge(one, f"global_step_sec > {least[0] - 0.001}")
    assert (verdict, words.endswith("two starts of one program may differ by 5% more")) == ("is inconclusive", True)
    assert judge(several, f"global_step_sec > {least[1] - 0.001}")[0] == "holds"


def test_without_a_comparable_trace_the_parts_are_split_as_a_whole() -> None:
    wider = compared.wider()
    wider = replace(wider, traced=None, modules=tuple(replace(one, times=None) for one in wider.modules))
    comparison = against(run(traced=None), wider)
    # Forward: 600 M to 1000 M in 5 to 7 ms: 2 ms / ln(7 / 5) x ln(10 / 6) = 3.036361 ms; the rest is efficiency.
    assert three(named(comparison.parts)["forward"]) == (3.036361, -1.036361, 0)
    assert not any(one.a_ns or one.b_ns or one.causes for one in comparison.modules[:-1])
    assert "are not known without times of modules in A and B." in comparison.notes[0]


def test_parts_that_one_run_cannot_tell_apart_stand_together() -> None:
    comparison = against(run(), run(mixed_phases=("transfer", "other"), mean_ms={"other": 3}))
    names = ["data wait", "transfer + other", "forward", "backward", "optimizer"]
    assert [one.name for one in comparison.parts] == names
    assert three(named(comparison.parts)["transfer + other"]) == (0, 0, 1)
    both = against(run(mixed_phases=("forward", "backward")), run(mixed_phases=("backward", "optimizer")))
    assert [one.name for one in both.parts] == ["data wait", "transfer", "forward + backward + optimizer", "other"]


def test_what_is_set_up_differently_is_listed() -> None:
    context = replace(run().context, world_size=4, dp_size=4, torch_version="2.14.0", host="b")
    comparison = compare_profiles(run(), replace(run(), context=context, lower_bound=True))
    assert {name.removeprefix("context."): values for name, values in comparison.settings.items()} == {
        "world_size": ("1", "4"),
        "torch_version": ("2.13.0", "2.14.0"),
        "host": ("(none)", "b"),
        "dp_size": ("1", "4"),
    }
    assert "B: times are those of rank 0 of 4." in comparison.notes
    assert "B: FLOPs are lower bounds: what could not be counted is not in them." in comparison.notes


def test_figures_are_ratios_with_the_noise_of_their_times() -> None:
    comparison = compare_profiles(run(), compared.slow_loader())
    step = named(comparison.figures)["global_step_sec"]
    assert step.ratio == pytest.approx(26 / 22) and step.reason == ""
    assert step.ends is not None and 26 / 22 - 0.1 < step.ends[0] < 26 / 22 < step.ends[1] < 26 / 22 + 0.1
    for name in ("samples_per_sec", "mfu"):
        rate = named(comparison.figures)[name]
        assert rate.ratio == pytest.approx(22 / 26) and rate.ends is not None
        assert rate.ends[0] == pytest.approx(1 / step.ends[1], rel=1e-6)
    flops = named(comparison.figures)["hardware_flops"]
    assert (flops.ratio, flops.ends) == (1.0, (1.0, 1.0))
    assert named(comparison.figures)["data_wait_ratio"].ratio == pytest.approx((6 / 26) / (2 / 22))
    tokens = named(comparison.figures)["tokens_per_sec"]
    assert tokens.ratio is None
    assert tokens.reason == "not known in A: how to count tokens was not said; set tokens_per_sample"
    assert [one.name for one in comparison.figures] == [name for name in run().summary() if name != "advice"]
    none = run(mean_ms={"data_wait": 0})
    was_zero, is_zero = (named(compare_profiles(none, one).figures)["data_wait_ratio"] for one in (run(), none))
    assert (was_zero.ratio, was_zero.reason) == (None, "0 in A")
    assert (is_zero.ratio, is_zero.ends) == (1.0, (1.0, 1.0))
    gone = named(compare_profiles(run(), none).figures)["data_wait_ratio"]
    assert (gone.ratio, gone.ends) == (0.0, (0.0, 0.0))


def test_shares_of_other_peaks_have_no_ratio() -> None:
    comparison = compare_profiles(run(), with_given_peaks(run(), flops_per_sec=350e9, memory_bytes_per_sec=2e11))
    peaks = "700 GFLOP/s (float32)", "350 GFLOP/s (float32)"
    assert comparison.settings["peaks"] == peaks
    assert comparison.settings["memory_bandwidth"] == ("n/a", "200 GB/s")
    mfu = named(comparison.figures)["mfu"]
    assert mfu.a is not None and mfu.b == pytest.approx(2 * mfu.a) and (mfu.ratio, mfu.noise_factor) == (None, None)
    with pytest.raises(ComparisonError, match=re.escape(f"it is of other peaks: {peaks[0]} in A, {peaks[1]} in B")):
        judge(comparison, "mfu < 0.95")


def test_noise_is_not_known_of_few_steps() -> None:
    few = compare_profiles(run(), run(straying=(0.01, -0.01)))
    assert few.step.noise_ns is None
    assert any(
        "B: what is noise is not known: it has 2 timed steps, and less than 4 say nothing" in note for note in few.notes
    )
    with pytest.raises(ComparisonError, match="global_step_sec cannot be compared: single steps are not known"):
        judge(few, "global_step_sec > 1.05")
    assert judge(few, "hardware_flops > 1")[0] == "does not hold"


def test_what_cannot_be_compared_says_why() -> None:
    with pytest.raises(ComparisonError, match="before has no timed step"):
        compare_profiles(run(straying=()), run(), sources=("before", "after"))
    predicting = windows.build_profile(windows.predict_window(), config=ProfilerConfig())
    with pytest.raises(ComparisonError, match="A is of a training loop, B of a predict loop"):
        compare_profiles(run(), predicting)


@pytest.mark.parametrize(
    ("condition", "holds"),
    [
        ("global_step_sec > 1.05", True),  # 26 / 22 = 1.18, and its noise is 2%
        ("global_step_sec > 1.18", False),  # more, but within noise
        ("global_step_sec>=1.3", False),
        ("samples_per_sec < 0.95", True),
        ("samples_per_sec <= 8e-1", False),
        ("data_wait_ratio > 2", True),
        ("hardware_flops > 1", False),
        ("hardware_flops >= 1", True),
        ("params < 1.", False),
    ],
)
def test_a_condition_holds_beyond_noise_or_not(condition: str, holds: bool) -> None:
    comparison = compare_profiles(run(), compared.slow_loader())
    verdict, words = judge(comparison, condition)
    assert verdict == ("holds" if holds else "does not hold")
    assert ("within noise" in words) == (condition == "global_step_sec > 1.18")


@pytest.mark.parametrize("condition", ["", "mfu", "mfu == 1", "mfu > -1", "mfu > nan", "1.05 < mfu", "\x1b[2J > 1"])
def test_a_condition_that_is_none_names_the_rule_and_the_value(condition: str) -> None:
    message = "must be a figure, one of > >= < <=, and a number, as 'global_step_sec > 1.05', got "
    with pytest.raises(ComparisonError, match=re.escape(message + repr(condition))):
        judge(compare_profiles(run(), run()), condition)


# ---- a difference split by cause, and its noise, by hand


def causes(one: Mapping[Cause, int]) -> tuple[int, ...]:
    return tuple(one.get(name, 0) for name in ("flops", "bytes", "modules", "efficiency"))


@pytest.mark.parametrize(
    ("a_ns", "b_ns", "a", "b", "expected"),
    [
        pytest.param(100, 130, Work(7, 5), Work(7, 5), (0, 0, 0, 30), id="the same work slower"),
        pytest.param(100, 200, Work(40), Work(80), (100, 0, 0, 0), id="twice the FLOPs at the same rate"),
        pytest.param(100, 200, Work(0, 4), Work(0, 8), (0, 100, 0, 0), id="twice the bytes at the same rate"),
        # 1000 ln 2 = 693.1
        pytest.param(1000, 1000, Work(40), Work(80), (693, 0, 0, -693), id="twice the work in the same time"),
        # 8 times the time by 4 times the work at half the rate: 2 of 3 doublings are work, of 700.
        pytest.param(100, 800, Work(3), Work(12), (467, 0, 0, 233), id="in proportion to the logarithms"),
        # 5900 ns / ln 60 x ln 1000 = 9954 would be more than all of B's time.
        pytest.param(100, 6000, Work(1), Work(1000), (6000, 0, 0, -100), id="a thousandfold work"),
        pytest.param(6000, 100, Work(1000), Work(1), (-6000, 0, 0, 100), id="a thousandth of the work"),
        # W 11 and 10,900,010 (bytes that A did not see): all of B's 10 ns, of which 10 x 1,090,000 of 10,899,999 bytes.
        pytest.param(10, 10, Work(1, 1), Work(0, 1_090_001), (0, 10, 0, -10), id="bytes that one run did not see"),
        # W: 600 + 10 x 40 = 1000, then 1200 + 10 x 180 = 3000. At 1 ns a unit, 600 ns are FLOPs and 1400 bytes.
        pytest.param(1000, 3000, Work(600, 40), Work(1200, 180), (600, 1400, 0, 0), id="work of two kinds"),
        pytest.param(0, 30, None, Work(5), (0, 0, 30, 0), id="new"),
        pytest.param(30, 0, Work(5), None, (0, 0, -30, 0), id="gone"),
        # Units 100 + 10 x 30 = 400: a quarter of them FLOPs.
        pytest.param(10, 50, Work(), Work(100, 30), (10, 30, 0, 0), id="counted in B alone"),
        pytest.param(10, 50, Work(), Work(), (0, 0, 0, 40), id="counted in neither"),
        pytest.param(0, 30, Work(5), Work(10), (0, 0, 0, 30), id="what took no time has no rate"),
        # 100 FLOPs more, 10 bytes less: as much work as before, at 2 ns a unit.
        pytest.param(400, 400, Work(100, 10), Work(200, 0), (200, -200, 0, 0), id="they make up for each other"),
    ],
)
def test_split_by_cause(a_ns: int, b_ns: int, a: Work | None, b: Work | None, expected: tuple[int, ...]) -> None:
    assert causes(split(a_ns=a_ns, b_ns=b_ns, a=a, b=b)) == expected


def test_an_interval_is_welchs() -> None:
    # Four steps of 8, 10, 12 and 10 s: variance 8 / 3, of the mean 2 / 3; the other run's is four times that, 8 / 3.
    # Freedom: (10 / 3)^2 / ((2 / 3)^2 / 3 + (8 / 3)^2 / 3) = 100 x 3 / 68 = 4.41; of four, t is 4.60.
    a, b = np.array([8.0, 10.0, 12.0, 10.0]), np.array([16.0, 20.0, 24.0, 20.0])
    found = noise_ns([a], [b])
    assert found is not None and found / 1e9 == pytest.approx(4.60 * math.sqrt(10 / 3), rel=1e-9)
    assert noise_ns([a[:3]], [b]) is None


@pytest.mark.parametrize("freedom", range(2, 21))
def test_noise_between_runs_is_students_interval_of_99_percent(freedom: int) -> None:
    """The factor of the standard error is what Student's density leaves 1% outside of, integrated here."""
    a = [np.array([value]) for value in (1.0, 3.0)]
    b = [np.array([2.0 + (-1) ** place]) for place in range(freedom)]
    squares = sum(float(((side - np.mean(side)) ** 2).sum()) for side in (np.array(a), np.array(b)))
    error = math.sqrt(squares / freedom * (1 / 2 + 1 / freedom))
    found = noise_ns(a, b)
    assert found is not None
    t = found / 1e9 / error
    at = np.linspace(0, t, 200_001)
    density = (1 + at**2 / freedom) ** (-(freedom + 1) / 2)
    scale = math.gamma((freedom + 1) / 2) / (math.sqrt(freedom * math.pi) * math.gamma(freedom / 2))
    inside = 2 * scale * float(((density[1:] + density[:-1]) / 2).sum()) * t / 200_000
    assert 1 - inside == pytest.approx(0.01, rel=0.02)


@pytest.mark.parametrize("steps", [6, 20, 60])
def test_runs_of_one_program_hardly_ever_seem_to_differ(steps: int) -> None:
    """Of 1,000 pairs of runs whose steps spread by 10%, 1% may differ beyond noise; of steps 30% longer nearly all do.

    That 1% of them is by chance, too: between 0 and 20 is what a fair interval gives all but once in a thousand times.
    """
    random = np.random.default_rng(0)
    wrong = found = 0
    for _ in range(1_000):
        a, b = np.exp(0.1 * random.standard_normal((2, steps)))
        factor = noise_factor([a], [b])
        assert factor is not None
        wrong += abs(math.log(b.mean() / a.mean())) > math.log(factor)
        found += math.log(1.3 * b.mean() / a.mean()) > math.log(factor)
    assert 0 < wrong <= 20 and found > (500 if steps == 6 else 990)


# ---- which module of one run is which of another


def described(name: str, type_name: str = "Linear", *, params: int = 0, flops: int = 0) -> ModuleProfile:
    more: dict[str, Any] = {"own": PhaseFlops(forward=flops), "total": PhaseFlops(forward=flops), "calls": 1}
    return ModuleProfile(name=name, type_name=type_name, extra_repr="", params=params, total_bytes=PhaseBytes(), **more)


ROOT = described("", "Net")


def block(prefix: str) -> list[ModuleProfile]:
    return [
        described(prefix, "Block", params=12, flops=16),
        described(f"{prefix}.up", params=6, flops=8),
        described(f"{prefix}.act", "GELU"),
        described(f"{prefix}.down", params=6, flops=8),
    ]


def partners(a: list[ModuleProfile], b: list[ModuleProfile]) -> dict[str, str]:
    found = {one: partner for partner, one in rows_of_both([ROOT, *a], [ROOT, *b]) if partner is not None}
    return {name: pair for name, pair in found.items() if name}


def test_a_renamed_tree_goes_as_a_whole() -> None:
    a, b = [*block("old0"), *block("old1"), *block("kept")], [*block("kept"), *block("new0"), *block("new1")]
    pairs = {"kept": "kept", "new0": "old0", "new1": "old1"}
    assert partners(a, b) == {
        f"{name}{end}": f"{pair}{end}" for name, pair in pairs.items() for end in ("", ".up", ".act", ".down")
    }


def test_a_layer_put_before_others_moves_their_names_and_not_their_partners() -> None:
    before, *others = [described("0", "LayerNorm"), described("1", params=4, flops=1), described("2", "ReLU")]
    last = described("3", params=5, flops=2)
    a = [replace(one, name=str(place)) for place, one in enumerate((*others, last))]
    assert partners(a, [before, *others, last]) == {"1": "0", "2": "1", "3": "2"}


def test_new_and_gone_modules_have_no_partner() -> None:
    assert partners([described("gone", "Conv2d", params=3)], [described("new", "LSTM", params=3)]) == {}
    # Where another one has taken its name, too.
    a, b = [described("x", params=4), described("y", "Conv2d", params=3)], [described("y", params=4)]
    assert rows_of_both([ROOT, *a], [ROOT, *b]) == [("", ""), ("x", "y"), ("y", None)]
    # One that has no parameters is like many others; elsewhere it is not taken for the same.
    a = [described("a", "Old", params=1), described("a.drop", "Dropout")]
    b = [described("b", "New", params=2), described("b.drop", "Dropout")]
    assert partners(a, b) == {}
