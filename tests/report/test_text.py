"""The report on one window, short and with all its details, as text."""

from __future__ import annotations

import html
import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import nn

from lightning_flops import flops_formula
from lightning_flops.config import ProfilerConfig
from lightning_flops.records import WindowRecord
from lightning_flops.report.predicted_document import estimate_text
from lightning_flops.report.text import fenced, render_text
from lightning_flops.schema.profile import Profile, Spread, ThroughputSummary
from tests.golden_files import golden
from tests.report import windows
from tests.report.traced_windows import mlp_traced, transformer_traced
from tests.report.windows import build_profile

PEAK: dict[str, Any] = {"peak_flops_per_sec": 700e9}
SETTINGS: dict[str, dict[str, Any]] = {
    "mlp": PEAK,
    "transformer": {"top_modules": 3},
    "lower_bound": {"recompute_fwd_factor": 1.0, "peak_flops_per_sec": {"float32": 1e12}},
    "variable": {"module_depth": 0},
    "predict": PEAK,
    "traced": PEAK,
    "traced_on_device": {"top_modules": 2},
}
TRACED = {"traced": mlp_traced(), "traced_on_device": transformer_traced()}
CASES = (*windows.WINDOWS, *TRACED)


def profile_of(name: str) -> Profile:
    """The profile of a case."""
    window, traced = TRACED[name] if name in TRACED else (windows.WINDOWS[name](), None)
    return build_profile(window, config=ProfilerConfig(**SETTINGS.get(name, {})), traced=traced)


def _lines(window: WindowRecord, **config: Any) -> list[str]:
    return render_text(build_profile(window, config=ProfilerConfig(**config)), detailed=True).split("\n")


@pytest.mark.parametrize("name", CASES)
def test_report_is_the_file_people_read_and_its_json_gives_it_back(name: str) -> None:
    profile = profile_of(name)
    golden(f"text/{name}.txt", render_text(profile, detailed=True))
    assert Profile.from_json(profile.to_json()) == profile


GREPS = (  # how scripts search what DeepSpeed 0.19.8 prints
    r"^-+ DeepSpeed Flops Profiler -+$", r"^Profile Summary at step \d+:$", r"^Notations:$",
    r"data parallel size \(dp_size\), model parallel size \(mp_size\)", r"number of parameters \(params\)",
    r"^world size: +\d+$", r"^data parallel size: +\d+$", r"^model parallel size: +\d+$", r"^batch size per GPU: +\d+$",
    r"^params per GPU: +[\d.]+ [KMB]?$", r"^fwd MACs per GPU: +[\d.]+ [KMGT]?MACs$",
    r"^fwd flops per GPU: +[\d.]+ [KMGT]$",
    r"^fwd latency: +[\d.]+ [mu]?s$", r"^bwd latency: +[\d.]+ [mu]?s$", r"^step latency: +[\d.]+ [mu]?s$",
    r"^iter latency: +[\d.]+ [mu]?s$", r"^fwd FLOPS per GPU = fwd flops per GPU / fwd latency: +[\d.]+ [KMGT]FLOPS$",
    r"^bwd FLOPS per GPU = 2 \* fwd flops per GPU / bwd latency: +[\d.]+ [KMGT]FLOPS$",
    r"^fwd\+bwd FLOPS per GPU = 3 \* fwd flops per GPU / \(fwd\+bwd latency\): +[\d.]+ [KMGT]FLOPS$",
    r"^FLOPS per GPU = 3 \* fwd flops per GPU / iter latency: +[\d.]+ [KMGT]FLOPS$", r"^samples/second: +[\d.]+$",
    r"^-+ Aggregated Profile per GPU -+$", r"^-+ Detailed Profile per GPU -+$",
    r"^Top 1 modules in terms of params, MACs .* at different model depths",
)  # fmt: skip


@pytest.mark.parametrize("config", [{}, {"module_depth": 1}])
@pytest.mark.parametrize("uncounted", [False, True])
@pytest.mark.parametrize("place", [{"framework": "deepspeed"}, {"strategy": "DeepSpeedStrategy"}])
def test_under_deepspeed_the_block_is_what_searches_of_its_lines_find(
    place: dict[str, Any], uncounted: bool, config: dict[str, Any]
) -> None:
    window = windows.lower_bound_window() if uncounted else windows.mlp_window()
    window = replace(window, context=replace(window.context, **place))
    text = render_text(build_profile(window, config=ProfilerConfig(**config)), detailed=True)
    missed = [one for one in GREPS if len(re.findall(one, text, re.MULTILINE)) != 1]
    assert missed == []
    # Each module stands in one line, whatever its length.
    tree = text.partition("Detailed Profile per GPU")[2]
    assert [len(re.findall(rf"^ *\({name}\): .*\)$", tree, re.MULTILINE)) for name in ("fc1", "fc2")] == [1, 1]
    assert ("at least what stands here" in " ".join(text.split())) is uncounted


@pytest.mark.parametrize("with_trace", [False, True])
def test_nothing_that_changes_with_flops_is_printed_unmarked_when_they_are_a_lower_bound(with_trace: bool) -> None:
    """What differs between a run and one of twice its FLOPs says lower bound, on its line or in its section."""
    window, traced = windows.lower_bound_window(), None
    if with_trace:
        window, traced = mlp_traced()
        window = replace(window, flops=replace(window.flops, uncounted=windows.lower_bound_window().flops.uncounted))
    doubled = tuple(replace(cell, flops=2 * cell.flops) for cell in window.flops.cells)
    twice = replace(window, flops=replace(window.flops, cells=doubled))
    changed = 0
    config = ProfilerConfig(peak_flops_per_sec=1e12)
    texts = [render_text(build_profile(one, config=config, traced=traced), detailed=True) for one in (window, twice)]
    sections = ([part.split("\n") for part in re.split(r"\n(?=-{5,} )", text)[1:]] for text in texts)
    for section, other in zip(*sections, strict=True):
        for line in set(section) - set(other):
            changed += 1
            summary = section[0].strip("- ") == "Flops Profiler"
            told = line if summary or section[0].strip("- ").startswith("Throughput") else " ".join(section)
            assert "lower bound" in told.lower(), line
    assert changed > 20


@pytest.mark.parametrize(("module_depth", "depths"), [(-1, 5), (0, 1), (1, 2), (3, 4), (99, 5)])
def test_module_depth_is_the_deepest_level_of_both_module_sections(module_depth: int, depths: int) -> None:
    lines = _lines(windows.transformer_window(), module_depth=module_depth)
    found = [line for line in lines if line.startswith("depth ")]
    assert found == [f"depth {depth}:" for depth in range(depths)]
    tree = lines[lines.index("GPT(") :]
    names = {line.strip().partition(")")[0] for line in tree if line.strip().startswith("(")}
    by_depth = [{"(embed", "(blocks", "(head"}, {"(0-11"}, {"(attn", "(mlp"}, {"(qkv", "(out", "(up", "(act", "(down"}]
    assert names == set().union(*by_depth[: depths - 1])
    if module_depth == 1:  # 12 blocks of 8 modules each: the block, attn, qkv, out, mlp, up, act, down
        assert "    ... 96 modules inside, deeper than module_depth" in lines
        assert "(module_depth is 1; the model has 4 levels below the root)" in lines


@pytest.mark.parametrize("top_modules", [1, 2, 3])
def test_top_modules_is_the_number_of_classes_at_each_depth(top_modules: int) -> None:
    lines = _lines(windows.transformer_window(), top_modules=top_modules)
    params = lines[lines.index("depth 1:") + 1]
    weights = ["'ModuleList': '144 M'", "'Embedding': '10 M'", "'Linear': '10 M'"]
    more = {1: " and 2 more", 2: " and 1 more", 3: ""}[top_modules]
    assert params == f"    params      - {{{', '.join(weights[:top_modules])}}}{more}"


def test_the_tree_and_deepspeeds_summary_are_left_out_unless_details_are_asked_for() -> None:
    for detailed in (True, False):
        profile = build_profile(windows.mlp_window(), config=ProfilerConfig(detailed=detailed))
        text = render_text(profile)
        assert ("Detailed Profile" in text, "fwd flops per GPU" in text) == (detailed, detailed)
        assert render_text(profile, detailed=not detailed) != text


def test_a_layer_far_from_the_mean_of_equal_ones_shows_in_their_line() -> None:
    profile = profile_of("traced_on_device")
    assert " to " not in "".join(line for line in render_text(profile, detailed=True).split("\n") if "latency" in line)
    # Eleven blocks take 1.5 ms forward, the one in the middle 13.5: a mean of 2.5.
    slow = [
        replace(one, times=replace(one.times, forward_sec=0.0135)) if one.name == "blocks.5" and one.times else one
        for one in profile.modules
    ]
    lines = " ".join(render_text(replace(profile, modules=tuple(slow)), detailed=True).split())
    assert "<fwd latency 2.5 ms (1.5 ms to 13.5 ms), 9.62% fwd latency, " in lines


def test_what_is_special_about_a_module_stands_in_its_line() -> None:
    window = windows.mlp_window()
    shared = replace(window.modules[1], name="head", alias_of="fc1")
    unused = replace(window.modules[4], name="unused")
    flops = replace(window.flops, module_calls={**window.flops.module_calls, "act": 3})
    lines = _lines(replace(window, modules=(*window.modules, shared), flops=flops))
    # 2,002,000 + 1,000,500, as much as the whole network above it.
    assert lines[lines.index("depth 1:") + 1] == "    params      - {'Linear': '3 M'}"
    assert "  (act): ReLU(no params, no FLOPs, 3 calls)" in lines
    lines += _lines(replace(window, modules=(*window.modules, unused)))
    for begin in (
        "  (head): Linear(the same module as fc1, 2 M, 66.68% Params, no FLOPs,",
        "  (unused): Linear(no call seen, 1 M, 33.32% Params, no FLOPs,",
    ):
        assert any(line.startswith(begin) for line in lines)


def test_equation_of_deepspeeds_label_stands_only_where_it_holds() -> None:
    window = windows.mlp_window()
    sharded = tuple(replace(module, local_params=module.params // 4) for module in window.modules)
    assert f"{'params of model = params per GPU * mp_size:':<70}  3 M" in _lines(window)
    lines = _lines(replace(window, modules=sharded))
    assert f"{'params per GPU:':<70}  750.62 K" in lines  # 3,002,500 / 4 = 750,625
    assert f"{'params of model:':<70}  3 M" in lines


def test_phases_that_cannot_be_told_apart_are_one_part() -> None:
    lines = _lines(replace(windows.mlp_window(), mixed_phases=("forward", "backward")))
    assert f"{'fwd latency:':<70}  n/a" in lines
    assert f"{'bwd latency:':<70}  n/a" in lines
    assert f"{'iter latency:':<70}  16 ms" in lines
    assert any(line.split()[:4] == ["forward", "+", "backward", "14.0"] for line in lines)
    reason = "backward_flops_per_sec_estimated: the times of these phases cannot be separated."
    assert f"n/a: forward_flops_per_sec, backward_flops_per_sec, {reason}" in " ".join(lines)


def test_formulas_are_rendered_as_they_are_printed() -> None:
    formula = flops_formula(nn.Linear(3, 4), torch.randn(2, 3), vary={0: [0]})
    assert render_text(formula) == render_text(formula.report()) == str(formula)


@pytest.mark.parametrize("other", [None, "profile.json", {}, windows.mlp_window()])
def test_of_anything_else_there_is_no_report(other: Any) -> None:
    with pytest.raises(TypeError, match=f"^render_text takes a Profile.* got {type(other).__name__}$"):
        render_text(other, detailed=True)


@pytest.mark.parametrize("text", [render_text(profile_of("transformer")), "```\n</code><b>bold</b>\n```\n# head\n"])
def test_tensorboard_shows_the_text_to_the_last_character(text: str) -> None:
    plugin_util = pytest.importorskip("tensorboard.plugin_util")
    shown: str = plugin_util.markdown_to_safe_html(fenced(text))
    shown = html.unescape(shown.removeprefix("<pre><code>").removesuffix("</code></pre>"))
    assert shown.rstrip("\n") == text.rstrip("\n")


@settings(deadline=None)  # a busy machine is no failure
@given(st.text(alphabet="`~a\n ", max_size=30))
def test_no_line_of_the_text_closes_the_block(text: str) -> None:
    first, *inside, last, end = fenced(text).split("\n")
    assert first == last and end == ""
    assert not any(line.strip().startswith(first) for line in inside)
    assert "\n".join(inside).rstrip("\n") == text.rstrip("\n")


OF_TEN_STEPS = ThroughputSummary(
    schema_version=3,
    batches=9,
    reader_ratio=None,
    reader_cost_sec=None,
    batch_cost_sec=Spread(average=0.1, maximum=0.4, minimum=0.05),
    ips=None,
    ips_unit="batches/s",
    model_flops=1_000,
    hardware_flops=1_000,
    steps_counted=10,
    flops_error=0.0,
    checks=3,
)


RUNS = {
    "throughput": ThroughputSummary(
        schema_version=3,
        batches=1200,
        reader_ratio=0.53514,
        reader_cost_sec=Spread(average=0.01367, maximum=0.01407, minimum=0.0131),
        batch_cost_sec=Spread(average=0.02555, maximum=0.02781, minimum=0.0222),
        ips=Spread(average=39.13907, maximum=45.03588, minimum=35.9583),
        ips_unit="samples/s",
    ),
    "throughput_unknown": replace(OF_TEN_STEPS, batches=1, model_flops=None, hardware_flops=None),
    # Of 1,000 steps 20 are estimated; tokens are those of all of them.
    "throughput_lengths": replace(
        OF_TEN_STEPS,
        mfu=0.342,
        flops_error=0.01,
        steps_counted=30,
        steps_by_formula=950,
        steps_estimated=20,
        checks=12,
        tokens=2_000_000,
        real_tokens=1_300_000,
        padding_ratio=0.35,
        tokens_per_sec=12_345.0,
        useful_mfu=0.2,
    ),
    "throughput_known": replace(
        OF_TEN_STEPS,
        batches=99,
        model_flops=123_456_789_000,
        hardware_flops=150_000_000_000,
        mfu=0.4125,
        lower_bound=True,
        steps_counted=100,
        checks=12,
        notes=("Step 5 needed more.", "Nothing else is known."),
    ),
}


@pytest.mark.parametrize("name", RUNS)
def test_the_summary_of_a_run_is_the_file_people_read(name: str) -> None:
    golden(f"text/{name}.txt", render_text(RUNS[name]))


def test_shares_carry_their_error() -> None:
    assert estimate_text(0.342, 0.0, 12) == "34.2%"
    assert estimate_text(0.342, 0.01, 12) == "≈ 34.2% ± 0.34%"
    assert estimate_text(0.342, None, 12) == "≈ 34.2% (12 checks agreed)"
    assert estimate_text(0.342, None, 2) == "≈ 34.2% (unchecked)"
    assert estimate_text(None, None, 0) == "n/a"


def test_checks_that_all_agreed_leave_so_many_steps_that_may_differ() -> None:
    """If 63.2% of the steps differed, three drawn at random would all agree once in twenty runs: 0.368 cubed."""
    for checks, share in ((3, "63.2%"), (12, "22.1%"), (59, "4.95%")):
        summary = replace(OF_TEN_STEPS, flops_error=None, checks=checks)
        words = (
            f"{checks} random checks agreed to the last FLOP: at most {share} of the steps differ, with 95% confidence."
        )
        assert words in " ".join(render_text(summary).split())


def test_a_run_whose_peak_is_not_known_says_that_its_mfu_is_not() -> None:
    why = "no dense peak is known for the device; run lightning-flops peak, or set peak_flops_per_sec"
    lines = render_text(replace(OF_TEN_STEPS, unavailable={"mfu": why})).splitlines()
    assert f"{'MFU:':<70}  n/a ({why})" in lines
