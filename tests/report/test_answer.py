"""The summary: what a report says in its first lines, and in one line."""

from __future__ import annotations

import re
from dataclasses import asdict, replace
from typing import Any

import pytest

from lightning_flops.config import ProfilerConfig
from lightning_flops.records import OUTSIDE, ModuleRecord, PhaseFlops, PhaseSeconds
from lightning_flops.report.html_page import profile_view
from lightning_flops.report.profile_document import name_of_all, own_sec, top_modules, without_advice
from lightning_flops.report.text import figures, render_advice, render_text, summary, summary_lines
from lightning_flops.schema.plan import MemoryReport, ModuleMemory, PeakMoment
from lightning_flops.schema.profile import Profile
from lightning_flops.schema.step import Advice, LineProfile, LinesProfile, ModuleTimes, PhaseProfile
from tests.analysis.in_memory import known
from tests.golden_files import golden
from tests.report import windows
from tests.report.test_ranks_text import CASES as JOBS
from tests.report.test_text import profile_of
from tests.report.windows import build_profile

PROFILES = {
    "cpu": profile_of("traced"),
    "gpu_trace": profile_of("traced_on_device"),
    "many_ranks": JOBS["thousands"],
    "mixed_devices": JOBS["mixed_devices"],
    "variable_shapes": profile_of("variable"),
    "no_trace": profile_of("mlp"),
    "no_peak": build_profile(windows.mlp_window(), config=ProfilerConfig()),
    "lower_bound": profile_of("lower_bound"),
    "untimed": profile_of("untimed"),
    "predict": profile_of("predict"),
}


@pytest.mark.parametrize("name", PROFILES)
def test_the_short_report_opens_with_the_answer_and_fits_a_screen_of_60_lines_and_100_columns(name: str) -> None:
    profile = PROFILES[name]
    lines, text = summary_lines(profile), str(profile)
    golden(f"headline/{name}.txt", "\n".join(lines) + "\n")
    assert len(lines) <= 12 and text.startswith("\n".join((*lines, "", "-")))
    assert text.count("\n") <= 60 and max(map(len, text.split("\n"))) <= 100
    assert text == render_text(profile, detailed=False)
    detailed = render_text(profile, detailed=True)
    assert detailed.startswith("\n".join((*lines, "", "-")))
    # The first samples a second that a reader meets are over the wall clock.
    assert detailed.index("samples/s") < detailed.index("samples/second")
    rate = profile.job_rates.samples_per_sec
    assert rate is None or f"{rate:,.2f}".rstrip("0").rstrip(".") + " samples/s" in text.split("\n-", 1)[0]


def test_a_starved_run_says_so_above_what_to_try() -> None:
    warning = "For 30.0% of the timed steps' time this process waited: all times are those of a starved run."
    profile = replace(PROFILES["cpu"], starved=f"{warning} Give it cores of its own, and profile again.")
    lines = summary(profile)
    assert lines[2] == f"STARVED. {warning}"
    assert lines[3:] == summary(PROFILES["cpu"])[2:]
    assert "starved of processors" in figures(profile)


def test_the_text_of_advice_alone_says_what_the_report_says_of_advice() -> None:
    starved, unexplained = "It waited for 30.0% of its time. Give it cores.", "other takes 40.0%, and no rule says why."
    for advice in (PROFILES["gpu_trace"].advice, ()):
        profile = replace(PROFILES["gpu_trace"], advice=advice, starved=starved, unexplained=unexplained)
        _, below = render_text(profile, detailed=True).split(" Advice -", 1)
        assert render_advice(profile) in below
        first, *_, last = render_advice(profile).splitlines()
        assert first == f"STARVED. {starved}" and last == unexplained
        assert without_advice(profile) in render_advice(profile) or advice


@pytest.mark.parametrize(
    ("framework", "whose"),
    [
        ("lightning.pytorch", "Lightning's own loop"),
        ("pytorch_lightning", "Lightning's own loop"),
        ("lightning.fabric", "the loop"),
        ("lightning_fabric", "the loop"),
        ("torch", "the loop"),
    ],
)
def test_a_line_that_enters_the_framework_is_no_cause(framework: str, whose: str) -> None:
    profile = PROFILES["no_trace"]
    assert profile.timing is not None
    slow = [replace(one, typical_sec=1.0) if one.name == "other" else one for one in profile.timing.parts]
    row = LineProfile(
        file="train.py", line=9, function="<module>", text="trainer.fit(" + 70 * "x", hook="", in_module=False,
        part="other", seconds=1.0, share=0.4, samples=9, only_enters=True,
    )  # fmt: skip
    words = []
    for one in (row, replace(row, only_enters=False)):
        lines = LinesProfile(steps=9, rows=(one,))
        timing = replace(profile.timing, parts=tuple(slow))
        found = replace(profile, timing=timing, lines=lines, context=replace(profile.context, framework=framework))
        words.append(without_advice(found))
    assert f", 40.0% in {whose}" in words[0] and "train.py" not in words[0]
    assert words[1].endswith(f", 40.0% at train.py:9: trainer.fit({47 * 'x'}…")


def test_without_advice_the_line_that_calls_what_takes_long_is_named() -> None:
    """A metric's function runs the model again below one line; most of the rest is entered elsewhere."""
    profile = PROFILES["no_trace"]
    assert profile.timing is not None
    slow = [replace(one, typical_sec=1.0) if one.name == "forward" else one for one in profile.timing.parts]
    metric = LineProfile(
        file="train.py", line=9, function="accuracy", text="model(held_out)", hook="", in_module=False,
        part="forward", seconds=3.0, share=0.3, samples=9, only_enters=True,
    )  # fmt: skip
    lines = LinesProfile(steps=9, rows=(metric, replace(metric, line=30, share=0.1), replace(metric, part="backward")))
    words = without_advice(replace(profile, lines=lines, timing=replace(profile.timing, parts=tuple(slow))))
    assert words.endswith(" of a step, 30.0% in what accuracy train.py:9 calls.")
    # Of a forward that cannot be told from the loop around it nobody knows whose it is.
    mixed = [replace(one, phases=("forward", "other")) if one.name == "forward" else one for one in slow]
    lines = LinesProfile(steps=9, rows=(replace(metric, part="forward + other"),))
    words = without_advice(replace(profile, lines=lines, timing=replace(profile.timing, parts=tuple(mixed))))
    assert words.endswith(" of a step, 30.0% in what accuracy train.py:9 calls.")


def test_nothing_is_slow_only_where_a_trace_shows_it_and_no_part_is_unexplained() -> None:
    profile = replace(PROFILES["gpu_trace"], advice=())
    assert without_advice(profile) == "Nothing slow was found: backward takes 50.0% of a step."
    apart = replace(known(profile.traced), is_apart=True)  # its modules were not looked at
    for other in (
        {"traced": None},
        {"traced": apart},
        {"starved": "It waited. So."},
        {"unexplained": "other takes 30.0% of the step."},
    ):
        assert without_advice(replace(profile, **other)) == "No rule names a cause: backward takes 50.0% of a step."


def test_what_the_users_own_class_computes_by_itself_is_not_said_to_be_fast() -> None:
    """A layer that adds a product to its weight in every forward: no rule looks into it."""
    profile = replace(PROFILES["gpu_trace"], advice=())
    step_sec = known(profile.timing).global_step.typical_sec
    own = LineProfile(
        file="lora.py", line=10, function="LoRA.forward", text="return linear(x, w + b @ a)", hook="", in_module=True,
        part="forward", seconds=0.1, share=0.3, samples=9, only_enters=False,
    )  # fmt: skip
    for share, named in ((0.26, "No rule names a cause"), (0.24, "Nothing slow was found")):
        spent = ModuleTimes(
            clock="host",
            forward_sec=step_sec, own_forward_sec=share / 3 * step_sec, backward_sec=None,
            own_backward_sec=share * 2 / 3 * step_sec,
        )  # fmt: skip
        modules = tuple(replace(one, times=spent if one is profile.modules[-1] else None) for one in profile.modules)
        modules = (*modules[:-1], replace(modules[-1], type_name="LoRA"))
        found = replace(profile, modules=modules, lines=LinesProfile(steps=9, rows=(own,)))
        assert without_advice(found).startswith(named)


def test_flops_of_another_model_are_said_to_have_no_row() -> None:
    """A teacher of 4.2 GFLOPs beside 1.4 G of the model's own: 600 M forward, 800 M backward."""
    words = "75.0% of the FLOPs, 4.2 G, ran in no module of these. In a loop of your own, give every model, as a dict; "
    words += "what the loop itself multiplies has no row."
    text = str(replace(PROFILES["no_peak"], outside=PhaseFlops(forward=4_200_000_000, optimizer=10**12)))
    assert words in " ".join(text.split()) and "ran in no module" not in str(PROFILES["no_peak"])


@pytest.mark.parametrize(
    ("longer", "differ"), [(0.521, "47.9%"), (0.74, "26.0%"), (0.76, ""), (1.3, ""), (1.4, "40.0%")]
)
def test_steps_that_got_longer_or_shorter_meanwhile_are_said_to_be_rough_in_the_summary(
    longer: float, differ: str
) -> None:
    timing = replace(known(PROFILES["cpu"].timing), whole_steps=10, longer=longer)
    rough = [one for one in summary(replace(PROFILES["cpu"], timing=timing)) if one.startswith("Rough")]
    words = f"Rough: the steps timed by parts and those timed as a whole differ by {differ}."
    assert rough == ([words] if differ else [])


@pytest.mark.parametrize(("width", "lines"), [(80, 74), (100, 60), (120, 60)])
def test_a_short_report_that_is_cut_says_so(width: int, lines: int) -> None:
    timing = known(PROFILES["cpu"].timing)
    long = replace(PROFILES["cpu"], timing=replace(timing, parts=timing.parts * 20))
    text = render_text(long, detailed=False, width=width).splitlines()
    assert len(text) == lines and text[-2] == "… more in the detailed report"


@pytest.mark.parametrize("width", [80, 100, 120])
def test_the_first_advice_and_the_users_lines_are_whole_beside_phases_and_a_warning(width: int) -> None:
    """A starved loop with a teacher: the tables of phases and of what fills the step give way."""
    phase = PhaseProfile(flops=1, dtype="float32", seconds=0.01, ratio=0.5, mfu=None, tokens=None)
    row = LineProfile(
        file="train.py", line=9, function="Photos.augment", text=60 * "x", hook="", in_module=False, part="data wait",
        seconds=0.002, share=0.1, samples=9, only_enters=False,
    )  # fmt: skip
    rows = tuple(replace(row, line=line) for line in range(9, 14))
    long: dict[str, Any] = {
        "fact": "It waits for data. " * 8,
        "remedy": "Prepare it once. " * 8,
        "unless": "it changes",
    }
    advice = Advice(rule="r", **long, threshold="", source="", saves=0.5)
    profile = replace(
        PROFILES["cpu"],
        phases=dict.fromkeys(("scoring", "training", "rest"), phase),
        lines=LinesProfile(steps=5, rows=rows, why=""),
        starved="For 9.00% of the time it waited for a processor: all are those of a starved run. Give it cores. " * 2,
        advice=(advice,) * 3,
        notes=("Note " * 40,) * 3,
    )
    text = render_text(profile, detailed=False, width=width)
    words = " ".join(text.split())
    assert "Do not follow it it changes." in words and all(f"train.py:{line} " in words for line in range(9, 13))
    assert "… more" not in text and len(text.splitlines()) <= (74 if width == 80 else 60)
    # Where there are no such tables, but many lines above and advice that is longer still, fewer lines are shown.
    longer = (replace(advice, fact="It waits for data. " * 40),) * 3
    starved, gpu = "It waited. Give it.", replace(PROFILES["gpu_trace"], lines=profile.lines, notes=profile.notes)
    gpu = replace(gpu, budget=None, starved=starved, advice=longer)
    assert "… more" not in render_text(gpu, detailed=False, width=width)


@pytest.mark.parametrize("width", [80, 100, 120])
def test_no_line_is_wider_than_the_terminal(width: int) -> None:
    for profile in (*PROFILES.values(), *JOBS.values()):
        for line in render_text(profile, detailed=False, width=width).split("\n"):
            assert len(line) <= width
        if profile.context.framework != "deepspeed":  # whose users search for whole lines
            for line in render_text(profile, detailed=True, width=width).split("\n"):
                assert len(line) <= width or (width >= 100 and "FLOPS per GPU = " in line)


def test_shares_of_the_bar_are_those_of_the_step() -> None:
    # 8, 6, 2, 2 and 2 of 20 ms, in 40 blocks of a half millisecond.
    assert summary_lines(PROFILES["no_trace"])[6:8] == [
        f"backward 40.0% {16 * '█'}  forward 30.0% {12 * '█'}",
        f"data wait 10.0% {4 * '█'}  optimizer 10.0% {4 * '█'}  other 10.0% {4 * '█'}",
    ]


def test_summary_of_a_job_is_of_all_its_ranks_but_for_its_times() -> None:
    # 3,687 ranks of 100 samples in 24 ms.
    found = PROFILES["many_ranks"].summary()
    assert (found["global_step_sec"], found["forward_flops"]) == (0.024, 600 * 10**6)
    assert found["samples_per_sec"] == pytest.approx(15_362_500)


def test_the_batch_is_said_to_be_on_each_of_the_ranks_that_see_other_data() -> None:
    profile = PROFILES["no_trace"]
    for world_size, dp_size, words in ((1, 1, ""), (8, 4, " on each of 4 ranks"), (8, 1, "")):  # tensor parallelism
        context = replace(profile.context, world_size=world_size, dp_size=dp_size, micro_batch_size=100)
        line = summary_lines(replace(profile, context=context))[0]
        assert re.findall(r"batch 100(?: on each of \d+ ranks)?", line) == [f"batch 100{words}"]


def test_names_of_any_length_and_any_amount_of_advice_stay_within_twelve_lines() -> None:
    window = windows.mlp_window()
    name = f"{'layer_with_a_name_that_nobody_wants_to_type.' * 9}last"
    modules = (
        replace(window.modules[0], type_name="A" * 150),
        *(ModuleRecord(name=name[:i], type_name="x") for i in range(len(name)) if name[i] == "."),
        ModuleRecord(name=name, type_name="x"),
    )
    cells = tuple(replace(one, module=name) for one in window.flops.cells)
    window = replace(window, modules=modules, flops=replace(window.flops, cells=cells))
    profile = build_profile(window, config=ProfilerConfig())
    long: dict[str, Any] = {"fact": "Words " * 80, "remedy": "Do this. " * 40}
    advice = Advice(rule="r", **long, threshold="", source="", unless="", saves=0.25)
    text = str(replace(profile, advice=(advice,) * 9, notes=("Note " * 90,) * 9))
    assert text.count("\n") <= 60 and max(map(len, text.splitlines()[1:])) <= 100
    assert len(summary_lines(profile)) <= 12
    assert re.search(r"^layer_with\S+…\S+last  x +100%", text, re.MULTILINE)


def test_modules_go_by_their_own_time_of_a_typical_step() -> None:
    # fc1 2 + 3 ms and fc2 1 + 4 ms of 20; the root 1.5 ms by itself.
    found, timed = top_modules(PROFILES["cpu"])
    assert timed
    assert [(name_of_all(group), round((share or 0) * 20, 9)) for group, share in found[:3]] == [
        ("fc1", 5.0),
        ("fc2", 5.0),
        ("(root)", 1.5),
    ]


def test_repeated_layers_are_one_and_layers_of_other_sizes_are_not() -> None:
    profile = PROFILES["no_trace"]
    linear = next(one for one in profile.modules if one.name == "fc1")
    same = [replace(linear, name=f"blocks.{number}.up") for number in range(12)]
    other = replace(linear, name="blocks.12.up", extra_repr="in_features=1, out_features=1")
    ((layers, together), (alone, share)), _ = top_modules(replace(profile, modules=(*same, other)))
    assert (name_of_all(layers), name_of_all(alone)) == ("12 x blocks.*.up", "blocks.12.up")
    assert share is not None and together == 12 * share


def test_the_top_modules_say_how_often_each_is_called_in_a_step() -> None:
    # fc1 is called for each of 7 time steps, as in a loop of Python's; of 12 blocks each is called once.
    profile = PROFILES["no_trace"]
    linear = next(one for one in profile.modules if one.name == "fc1")
    blocks = [replace(linear, name=f"blocks.{number}.up") for number in range(12)]
    text = str(replace(profile, modules=(replace(linear, calls=7), *blocks)))
    head, *rows = text.partition("--- Top modules")[2].partition("\n\n")[0].split("\n")[1:]
    calls = {row[: head.index("class")].strip(): row[: head.index("calls") + 5].split()[-1] for row in rows}
    assert (calls["fc1"], calls["12 x blocks.*.up"]) == ("7", "12")


def test_one_slow_layer_among_equal_ones_has_a_row_and_a_star_stands_only_where_names_differ() -> None:
    profile = PROFILES["cpu"]
    linear = next(one for one in profile.modules if one.name == "fc1")  # 2 ms forward, 3 ms backward
    layers = [replace(linear, name=f"blocks.{number}.mlp.0") for number in range(12)]
    assert linear.times is not None
    took = replace(linear.times, own_forward_sec=0.012, own_backward_sec=0.009)
    layers[7] = replace(layers[7], times=took)
    (others, _), (slow, _) = top_modules(replace(profile, modules=tuple(layers)))[0]
    assert (name_of_all(others), name_of_all(slow)) == ("11 x blocks.*.mlp.0", "blocks.7.mlp.0")
    assert own_sec(others, ["forward"]) == pytest.approx(11 * 0.002) and own_sec(slow, ["forward"]) == 0.012


def test_each_rate_stands_beside_the_time_it_is_of() -> None:
    # Seven steps of 20 ms and one of 100: a typical step is 20 ms, their mean 30, with 100 samples 3,333 a second.
    window = windows.mlp_window()
    *usual, last = window.timed_steps
    assert last.seconds is not None
    slow = replace(last, seconds=replace(last.seconds, backward=last.seconds.backward + 0.08))
    profile = build_profile(replace(window, timed_steps=(*usual, slow)), config=ProfilerConfig(peak_flops_per_sec=7e11))
    line = next(line for line in summary_lines(profile) if line.startswith("A typical step: "))
    assert line.startswith("A typical step: 20 ms; mean of 8: 30 ms, 3,333 samples/s over the wall clock.")
    # 1.4 GFLOPs of 700 GFLOP/s: 2 ms of 30, of the breakdown's typical 20 a tenth.
    assert figures(profile) == "1.4 GFLOPs and 30 ms a step, 3,333 samples/s (wall clock), MFU 6.67%"
    assert re.search(r"^model FLOPs at the peak \(a typical step's MFU\) +2\.00 +10\.0%$", str(profile), re.MULTILINE)


@pytest.mark.parametrize(("shorter", "is_said"), [(1, False), (6, False), (7, True)])
def test_it_is_said_that_short_steps_may_read_too_long(shorter: int, is_said: bool) -> None:
    # The window's steps take 20 ms: a sixth of that is 3.3 ms, a seventh 2.9.
    window = windows.mlp_window()
    found = [asdict(one.seconds) for one in window.timed_steps if one.seconds is not None]
    short = [PhaseSeconds(**{part: sec / shorter for part, sec in one.items()}) for one in found]
    steps = [replace(step, seconds=one) for step, one in zip(window.timed_steps, short, strict=True)]
    profile = build_profile(replace(window, timed_steps=tuple(steps)), config=ProfilerConfig())
    text = " ".join(" ".join(summary_lines(profile)).split())
    assert ("A step this short may read 0.1 ms too long." in text) is is_said


# Model FLOPs, milliseconds and samples are worked out where the windows are made; MFU is FLOPs / time / peak.
FIGURES = {
    "mlp": "1.4 GFLOPs and 20 ms a step, 5,000 samples/s (wall clock), MFU 10.0%",
    # 3744 G of bfloat16 at 312 T/s and 240 G of float32 at 19.5 T/s take 24.31 ms of 100.
    "transformer": "3.98 TFLOPs and 100 ms a step, 80 samples/s (wall clock), MFU 24.3%",
    "untimed": "1.4 GFLOPs a step",
    # 700 M forward and 800 M backward in 20 ms are 75 G/s, of 1 T/s.
    "lower_bound": "at least 1.5 GFLOPs and 20 ms a step, 5,000 samples/s (wall clock), MFU at least 7.50%",
    # 700 M of tf32 in 20 ms are 35 G/s, of 156 T/s; 100 samples on each of 4 ranks.
    "parallel": "700 MFLOPs and 20 ms a step on rank 2 of 8, 20,000 samples/s in all (wall clock), MFU 0.02% of "
    "this rank",
    "stage": "1.4 GFLOPs and 20 ms a step on rank 2 of 4, 10,000 samples/s in all (wall clock)",
    "variable": "1.05 GFLOPs and 20 ms a step, 5,000 samples/s (wall clock)",
    # 600 M in 20 ms are 30 G/s, of 700 G/s.
    "predict": "600 MFLOPs and 20 ms a batch, 5,000 samples/s (wall clock), MFU 4.29%",
}


@pytest.mark.parametrize("name", FIGURES)
def test_figures_are_those_of_a_step_as_far_as_they_are_known(name: str) -> None:
    assert figures(profile_of(name)) == FIGURES[name]


def test_a_module_on_the_page_holds_what_those_inside_it_hold_and_nothing_of_code_outside_of_the_model() -> None:
    held = {"": 1, "fc1": 10, OUTSIDE: 100}
    report = MemoryReport(
        peak_bytes=111,
        batch_size=None,
        at_peak={"activations": 111},
        when=PeakMoment(part="forward", module="fc1", operator="aten.addmm"),
        modules=tuple(ModuleMemory(name=name, kept_bytes=0, peak_bytes=size) for name, size in held.items()),
        flops=0,
        available_bytes=None,
        largest=None,
        checkpointed=None,
        notes=(),
    )
    profile = PROFILES["no_trace"]

    def column(profile: Profile) -> dict[str, float] | None:
        view = profile_view(profile)
        place = view["modules"].index("memory") if "memory" in view["modules"] else None
        (rows,) = (item["rows"] for one in view["sections"] if one["title"] == "Modules" for item in one["items"][1:])
        return None if place is None else {row[0][0]: row[place][1] for row in rows}

    assert column(replace(profile, tensors=report)) == {"(root)": 11, "fc1": 10, "act": 0, "drop": 0, "fc2": 0}
    assert column(profile) is None
