"""The answer: what a report says in its first lines."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_flops.config import ProfilerConfig
from lightning_flops.records import ModuleRecord, PhaseSeconds
from lightning_flops.report.headline import answer_lines, apportioned
from lightning_flops.report.page_views import profile_view
from lightning_flops.report.profile_document import top_modules
from lightning_flops.report.text import render_text
from lightning_flops.schema.advice import Advice
from lightning_flops.schema.profile import Profile
from tests.golden_files import golden
from tests.report import windows
from tests.report.test_ranks_text import CASES as JOBS
from tests.report.test_text import CASES
from tests.report.traced_windows import mlp_traced, transformer_traced
from tests.report.windows import build_profile


def _deepspeed() -> Profile:
    window = windows.mlp_window()
    context = replace(window.context, framework="deepspeed", framework_version="0.19.8", strategy="ZeRO-1")
    return build_profile(replace(window, context=context), config=ProfilerConfig())


PROFILES = {
    "cpu": build_profile(mlp_traced()[0], config=ProfilerConfig(peak_flops_per_sec=700e9), traced=mlp_traced()[1]),
    "gpu_trace": build_profile(transformer_traced()[0], config=ProfilerConfig(), traced=transformer_traced()[1]),
    "many_ranks": JOBS["thousands"],
    "mixed_devices": JOBS["mixed_devices"],
    "variable_shapes": build_profile(*CASES["variable"][:1], config=CASES["variable"][1]),
    "no_trace": build_profile(CASES["mlp"][0], config=CASES["mlp"][1]),
    "no_peak": build_profile(windows.mlp_window(), config=ProfilerConfig()),
    "deepspeed": _deepspeed(),
    "lower_bound": build_profile(CASES["lower_bound"][0], config=CASES["lower_bound"][1]),
    "untimed": build_profile(CASES["untimed"][0], config=CASES["untimed"][1]),
    "predict": build_profile(CASES["predict"][0], config=CASES["predict"][1]),
}


@pytest.mark.parametrize("name", PROFILES)
def test_answer_is_the_file_people_read(name: str) -> None:
    golden(f"headline/{name}.txt", "\n".join(answer_lines(PROFILES[name])) + "\n")


@pytest.mark.parametrize("name", PROFILES)
def test_a_report_opens_with_the_answer_and_nothing_stands_before_it(name: str) -> None:
    lines = answer_lines(PROFILES[name])
    assert len(lines) <= 12
    assert render_text(PROFILES[name]).startswith("\n".join((*lines, "", "-")))


@pytest.mark.parametrize("name", PROFILES)
def test_the_short_report_fits_a_screen_of_60_lines_and_100_columns(name: str) -> None:
    text = str(PROFILES[name])
    assert text == render_text(PROFILES[name], detailed=False)
    assert text.count("\n") <= 60 and max(map(len, text.split("\n"))) <= 100
    assert render_text(PROFILES[name], detailed=True).startswith(text.rpartition("\n-")[0])


@pytest.mark.parametrize("name", PROFILES)
def test_first_samples_a_second_that_a_reader_meets_are_over_the_wall_clock(name: str) -> None:
    text = render_text(PROFILES[name], detailed=True)
    assert "samples/s" in text
    assert text.index("samples/s") < text.index("samples/second")
    rate = PROFILES[name].job_rates.samples_per_sec
    assert rate is None or f"{rate:,.2f}".rstrip("0").rstrip(".") + " samples/s" in text.split("\n-", 1)[0]


@given(
    st.lists(
        st.tuples(st.sampled_from("abcdefg"), st.floats(1e-9, 1e6)), min_size=1, max_size=7, unique_by=lambda x: x[0]
    )
)
def test_shares_of_the_bar_add_up_and_none_is_off_by_a_unit(parts: list[tuple[str, float]]) -> None:
    found = apportioned(parts, among=1000)
    assert sum(found.values()) == 1000
    whole = sum(size for _, size in parts)
    assert all(abs(found[name] - 1000 * size / whole) < 1 + 1e-6 for name, size in parts)


def test_shares_of_the_bar_are_those_of_the_step() -> None:
    lines = answer_lines(PROFILES["no_trace"])
    # 8, 6, 2, 2 and 2 of 20 ms, in 40 blocks of a half millisecond.
    assert lines[3:5] == [
        f"backward 40.0% {16 * '█'}  forward 30.0% {12 * '█'}",
        f"data wait 10.0% {4 * '█'}  optimizer 10.0% {4 * '█'}  other 10.0% {4 * '█'}",
    ]


def test_parts_too_short_to_see_are_left_out_and_the_others_still_add_up() -> None:
    window = windows.mlp_window()
    step = replace(window.timed_steps[0], seconds=PhaseSeconds(forward=0.0999999, other=0.0000001))
    lines = answer_lines(build_profile(replace(window, timed_steps=(step,)), config=ProfilerConfig()))
    assert f"forward 100.0% {40 * '█'}" in lines


def test_the_page_has_a_picture_for_the_bar_and_says_what_is_an_estimate() -> None:
    profile = PROFILES["cpu"]
    assert profile.traced is not None
    apart = replace(profile, traced=replace(profile.traced, like_counted=False))
    view = profile_view(apart)
    assert any("█" in line for line in answer_lines(profile)) and not any("█" in line for line in view["summary"])
    (section,) = (one for one in view["sections"] if one["title"] == "Modules")
    said = " FLOP/s are estimates: the traced steps' shapes are not those of the counted ones."
    assert section["note"].endswith(said)


def test_summary_of_a_job_is_of_all_its_ranks_but_for_its_times() -> None:
    # 3,687 ranks of 100 samples in 24 ms.
    found = PROFILES["many_ranks"].summary()
    assert (found["global_step_sec"], found["forward_flops"]) == (0.024, 600 * 10**6)
    assert found["samples_per_sec"] == pytest.approx(15_362_500)


def test_names_of_any_length_and_any_amount_of_advice_stay_within_twelve_lines() -> None:
    window = windows.mlp_window()
    long = "layer_with_a_name_that_nobody_wants_to_type." * 9
    name = f"{long}last"
    modules = (
        replace(window.modules[0], type_name="A" * 150),
        *(ModuleRecord(name=name[:i], type_name="x") for i in range(len(name)) if name[i] == "."),
        ModuleRecord(name=name, type_name="x"),
    )
    cells = tuple(replace(one, module=name) for one in window.flops.cells)
    profile = build_profile(
        replace(window, modules=modules, flops=replace(window.flops, cells=cells)), config=ProfilerConfig()
    )
    advice = Advice(
        rule="r", fact="Words " * 80, threshold="", remedy="Do this. " * 40, source="", unless="", ceiling=0.25
    )
    assert str(replace(profile, advice=(advice,) * 9, notes=("Note " * 90,) * 9)).count("\n") <= 60
    lines = answer_lines(profile)
    assert len(lines) <= 12 and max(map(len, lines[1:])) <= 100
    assert any(line.startswith("Top modules by FLOPs of their own: ..") and "last 100.0%" in line for line in lines)


def test_modules_are_told_by_their_own_time_of_a_typical_step() -> None:
    # fc1 2 + 3 ms and fc2 1 + 4 ms of 20; the root 1.5 ms by itself.
    found, of = top_modules(PROFILES["cpu"])
    assert of == "step"
    assert [(group.name, round((share or 0) * 20, 9)) for group, share in found[:3]] == [
        ("fc1", 5.0),
        ("fc2", 5.0),
        ("(root)", 1.5),
    ]


def test_flops_that_no_float_holds_have_shares() -> None:
    profile = build_profile(windows.mlp_window(), config=ProfilerConfig())
    huge = replace(
        profile,
        traced=None,
        modules=tuple(
            replace(module, times=None, own=replace(module.own, optimizer=10**400 if place == 1 else 0))
            for place, module in enumerate(profile.modules)
        ),
    )
    ((longest, share), *_), of = top_modules(huge)
    assert (longest.name, round(share or 0, 3), of) == (profile.modules[1].name, 1.0, "FLOPs")


def test_repeated_layers_are_one_and_layers_of_other_sizes_are_not() -> None:
    profile = build_profile(windows.mlp_window(), config=ProfilerConfig())
    linear = next(one for one in profile.modules if one.name == "fc1")
    same = [replace(linear, name=f"blocks.{number}.up") for number in range(12)]
    other = replace(linear, name="blocks.12.up", extra_repr="in_features=1, out_features=1")
    ((layers, together), (alone, share)), _ = top_modules(replace(profile, modules=(*same, other)))
    assert (layers.name, alone.name) == ("blocks.*.up", "blocks.12.up")
    assert share is not None and together == 12 * share
