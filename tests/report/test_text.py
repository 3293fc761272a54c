from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from lightning_flops import flops_formula
from lightning_flops.config import ProfilerConfig
from lightning_flops.records import FlopRecord, ModuleRecord, PhaseSeconds, WindowRecord
from lightning_flops.report.text import render_text
from tests.golden_files import golden
from tests.report import windows
from tests.report.traced_windows import mlp_traced
from tests.report.windows import build_profile

CASES = {
    "mlp": (windows.mlp_window(), ProfilerConfig(peak_flops_per_sec=700e9)),
    "transformer": (windows.transformer_window(), ProfilerConfig(top_modules=3)),
    "energy": (
        replace(windows.transformer_window(), gpu=windows.GPU),
        ProfilerConfig(top_modules=1, module_depth=0, detailed=False),
    ),
    "untimed": (windows.untimed_window(), ProfilerConfig()),
    "lower_bound": (
        windows.lower_bound_window(),
        ProfilerConfig(recompute_fwd_factor=1.0, peak_flops_per_sec={"float32": 1e12}),
    ),
    "parallel": (windows.parallel_window(), ProfilerConfig(detailed=False)),
    "stage": (windows.stage_window(), ProfilerConfig(detailed=False)),
    "variable": (windows.variable_window(), ProfilerConfig(module_depth=0)),
    "unknown": (windows.unknown_window(), ProfilerConfig()),
    "predict": (windows.predict_window(), ProfilerConfig(peak_flops_per_sec=700e9)),
}


@pytest.mark.parametrize("name", CASES)
def test_report_is_the_file_people_read(name: str) -> None:
    window, config = CASES[name]
    golden(f"text/{name}.txt", render_text(build_profile(window, config=config), detailed=True))


def test_deepspeeds_labels_stand_in_deepspeeds_order() -> None:
    lines = _lines(*CASES["mlp"])
    labels = [
        "world size",
        "data parallel size",
        "model parallel size",
        "batch size per GPU",
        "params per GPU",
        "params of model = params per GPU * mp_size",
        "fwd MACs per GPU",
        "fwd flops per GPU",
        "fwd flops of model = fwd flops per GPU * mp_size",
        "fwd latency",
        "fwd FLOPS per GPU = fwd flops per GPU / fwd latency",
        "bwd latency",
        "bwd FLOPS per GPU = 2 * fwd flops per GPU / bwd latency",
        "fwd+bwd FLOPS per GPU = 3 * fwd flops per GPU / (fwd+bwd latency)",
        "step latency",
        "iter latency",
        "FLOPS per GPU = 3 * fwd flops per GPU / iter latency",
        "samples/second",
    ]
    places = [next(i for i, line in enumerate(lines) if line.startswith(f"{label}:")) for label in labels]
    assert places == sorted(places)
    assert all(lines[i].index("  ") <= 70 and lines[i][70:72] == "  " and lines[i][72] != " " for i in places)


def test_measured_line_stands_right_below_each_estimated_one() -> None:
    lines = _lines(*CASES["lower_bound"])
    estimated = [i for i, line in enumerate(lines) if "(estimated" in line and "FLOPS" in line]
    assert len(estimated) == 3
    assert all("(measured" in lines[i + 1] for i in estimated)


@pytest.mark.parametrize("with_trace", [False, True])
def test_nothing_that_changes_with_flops_is_printed_unmarked_when_they_are_a_lower_bound(with_trace: bool) -> None:
    """What differs between a run and one of twice its FLOPs says lower bound, on its line or in its section."""
    window, traced = windows.lower_bound_window(), None
    if with_trace:
        window, traced = mlp_traced()
        window = replace(window, flops=replace(window.flops, uncounted=windows.lower_bound_window().flops.uncounted))
    doubled = tuple(replace(cell, flops=2 * cell.flops, without_backward=0) for cell in window.flops.cells)
    twice = replace(window, flops=replace(window.flops, cells=doubled))
    changed = 0
    config = ProfilerConfig(peak_flops_per_sec=1e12)
    texts = [render_text(build_profile(one, config=config, traced=traced), detailed=True) for one in (window, twice)]
    for section, other in zip(*(_sections(text.split("\n")) for text in texts), strict=True):
        for line in set(section) - set(other):
            changed += 1
            summary = section[0].strip("- ") == "Flops Profiler"
            told = line if summary or section[0].strip("- ").startswith("Throughput") else " ".join(section)
            assert "lower bound" in told.lower(), line
    assert changed > 20


def _sections(lines: list[str]) -> list[list[str]]:
    sections: list[list[str]] = []
    for line in lines:
        if line.startswith("-----") and line.strip("-"):
            sections.append([])
        if sections:
            sections[-1].append(line)
    return sections


def test_modules_in_which_something_was_not_counted_are_marked_and_others_not() -> None:
    lines = _lines(*CASES["lower_bound"])
    tree = lines[lines.index("Net(") :]
    assert [line.strip().partition(":")[0] for line in tree if "no FLOPs counted" in line] == ["(act)", "(drop)"]
    assert sum("lower bound" in line for line in tree) == 3  # the root and its two layers
    assert not any("lower bound" in line for line in tree if "(teacher)" in line)


def test_a_reader_is_told_how_to_teach_the_counter_an_operator() -> None:
    text = " ".join(_lines(*CASES["lower_bound"]))
    assert 'lightning_flops.register_flop_formula("mylib::fused_gemm", formula) has an operator counted; 0 in' in text


def test_every_figure_that_rests_on_flops_is_marked_when_it_is_a_lower_bound() -> None:
    marked = [
        line.partition(":")[0] for line in _lines(*CASES["lower_bound"]) if re.search(r"[(, ]lower bound\)", line)
    ]
    assert marked == [
        "fwd MACs per GPU",
        "fwd flops per GPU",
        "fwd flops of model = fwd flops per GPU * mp_size",
        "fwd FLOPS per GPU = fwd flops per GPU / fwd latency",
        "bwd FLOPS per GPU = 3 * fwd flops with bwd / bwd latency",
        "bwd FLOPS per GPU = bwd+recomputed flops / bwd latency",
        "fwd+bwd FLOPS per GPU = (fwd + 3 * fwd with bwd) / (fwd+bwd latency)",
        "fwd+bwd FLOPS per GPU = fwd+bwd+recomputed flops / (fwd+bwd latency)",
        "FLOPS per GPU = (fwd + 3 * fwd with bwd) / iter latency",
        "FLOPS per GPU = hardware flops per GPU / iter latency",
        "MFU = model FLOPs per process / peak FLOP/s / global step time",
        "HFU = hardware FLOPs per process / peak FLOP/s / global step time",
    ]
    assert not any("lower bound" in line.lower() for line in _lines(*CASES["mlp"]))


@pytest.mark.parametrize(("module_depth", "depths"), [(-1, 5), (0, 1), (1, 2), (3, 4), (4, 5), (99, 5)])
def test_module_depth_is_the_deepest_level_of_both_module_sections(module_depth: int, depths: int) -> None:
    lines = _lines(windows.transformer_window(), ProfilerConfig(module_depth=module_depth))
    assert _depths(lines) == list(range(depths))
    tree = lines[lines.index("GPT(") :]
    names = {line.strip().partition(")")[0] for line in tree if line.strip().startswith("(")}
    by_depth = [{"(embed", "(blocks", "(head"}, {"(0-11"}, {"(attn", "(mlp"}, {"(qkv", "(out", "(up", "(act", "(down"}]
    assert names == set().union(*by_depth[: depths - 1])


def _depths(lines: list[str]) -> list[int]:
    """The depths that the aggregated profile shows, those drawn together one by one."""
    return [int(line.removeprefix("depth ").rstrip(":")) for line in lines if line.startswith("depth ")]


def test_modules_cut_off_by_module_depth_are_told() -> None:
    lines = _lines(windows.transformer_window(), ProfilerConfig(module_depth=1))
    # 12 blocks of 8 modules each: the block, attn, qkv, out, mlp, up, act, down.
    assert "    ... 96 modules inside, deeper than module_depth" in lines
    assert "(module_depth is 1; the model has 4 levels below the root)" in lines


@pytest.mark.parametrize("top_modules", [1, 2, 3])
def test_top_modules_is_the_number_of_classes_at_each_depth(top_modules: int) -> None:
    lines = _lines(windows.transformer_window(), ProfilerConfig(top_modules=top_modules))
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


def test_parameters_of_a_shared_module_count_once_and_its_other_name_says_so() -> None:
    window = windows.mlp_window()
    shared = replace(window.modules[1], name="head", alias_of="fc1")
    lines = _lines(replace(window, modules=(*window.modules, shared)), ProfilerConfig())
    # 2,002,000 + 1,000,500, as much as the whole network above it.
    assert lines[lines.index("depth 1:") + 1] == "    params      - {'Linear': '3 M'}"
    assert any(
        line.startswith("  (head): Linear(the same module as fc1, 2 M, 66.68% Params, no FLOPs,") for line in lines
    )


def test_module_that_was_never_called_prints_its_params() -> None:
    window = windows.mlp_window()
    unused = replace(window.modules[4], name="unused")
    lines = _lines(replace(window, modules=(*window.modules, unused)), ProfilerConfig())
    assert any(line.startswith("  (unused): Linear(no call seen, 1 M, 33.32% Params, no FLOPs,") for line in lines)


def test_module_that_runs_more_often_than_the_batches_says_how_often() -> None:
    window = windows.mlp_window()
    flops = replace(window.flops, module_calls={**window.flops.module_calls, "act": 3})
    assert "  (act): ReLU(no params, no FLOPs, 3 calls)" in _lines(replace(window, flops=flops), ProfilerConfig())


def test_equation_of_deepspeeds_label_stands_only_where_it_holds() -> None:
    window = windows.mlp_window()
    sharded = tuple(replace(module, local_params=module.params // 4) for module in window.modules)
    assert f"{'params of model = params per GPU * mp_size:':<70}  3 M" in _lines(window, ProfilerConfig())
    lines = _lines(replace(window, modules=sharded), ProfilerConfig())
    assert f"{'params per GPU:':<70}  750.62 K" in lines  # 3,002,500 / 4 = 750,625
    assert f"{'params of model:':<70}  3 M" in lines


def test_each_printed_part_of_a_step_is_rounded_for_itself() -> None:
    thirds = PhaseSeconds(data_wait=0.01 / 3, forward=0.01 / 3, backward=0.01 / 3)
    lines = _lines(replace(windows.mlp_window(), timed_steps=(windows.step(5, seconds=thirds),)), ProfilerConfig())
    start = next(i for i, line in enumerate(lines) if "typical, ms" in line) + 1
    rows = {line[:13].strip(): line[13:].split()[:2] for line in lines[start : start + 4]}
    assert rows["data wait"] == rows["forward"] == rows["backward"] == ["3.33", "33.3%"]
    assert rows["global step"] == ["10.0", "100.0%"]


def test_phases_that_cannot_be_told_apart_are_one_part() -> None:
    lines = _lines(replace(windows.mlp_window(), mixed_phases=("forward", "backward")), ProfilerConfig())
    assert f"{'fwd latency:':<70}  n/a" in lines
    assert f"{'bwd latency:':<70}  n/a" in lines
    assert f"{'iter latency:':<70}  16 ms" in lines
    assert any(line.startswith("forward + backward         14.0") for line in lines)
    assert "n/a: fwd FLOP/s, bwd FLOP/s: the times of these phases cannot be separated." in lines


def test_description_in_characters_that_no_file_can_hold_prints() -> None:
    window = windows.mlp_window()
    modules = (replace(window.modules[0], extra_repr="\ud800"), *window.modules[1:])
    text = render_text(build_profile(replace(window, modules=modules), config=ProfilerConfig()), detailed=True)
    assert text.encode("utf-8")


def test_ten_thousand_modules_render_in_little_time_and_few_lines() -> None:
    layers = 5_000
    modules = [ModuleRecord(name="", type_name="Net")]
    for i in range(layers):
        modules += [ModuleRecord(name=f"{i}", type_name="Block"), ModuleRecord(name=f"{i}.fc", type_name="Linear")]
    lines = _lines(replace(windows.mlp_window(), modules=tuple(modules), flops=FlopRecord()), ProfilerConfig())
    assert f"  (0-{layers - 1}): {layers} x Block(" in lines


def _lines(window: WindowRecord, config: ProfilerConfig) -> list[str]:
    return render_text(build_profile(window, config=config), detailed=True).split("\n")


def test_formulas_are_rendered_as_they_are_printed() -> None:
    formula = flops_formula(nn.Linear(3, 4), torch.randn(2, 3), vary={0: [0]})
    assert render_text(formula) == render_text(formula.report()) == str(formula)


@pytest.mark.parametrize("other", [None, "profile.json", {}, windows.mlp_window()])
def test_of_anything_else_there_is_no_report(other: Any) -> None:
    with pytest.raises(TypeError, match=f"^render_text takes a Profile, .*, got {type(other).__name__}$"):
        render_text(other, detailed=True)
