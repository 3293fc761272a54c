"""What a notebook shows: tables of plain text, whatever the names are, and no longer than a screen."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from html.parser import HTMLParser
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_flops import FlopsProfilerCallback, render_text
from lightning_flops.analysis.flop_counts import FlopCounts
from lightning_flops.config import ProfilerConfig
from lightning_flops.records import OUTSIDE, FlopRecord, ModuleRecord, UncountedOperator
from lightning_flops.schema.profile import Profile
from lightning_flops.schema.throughput import Spread, ThroughputSummary
from tests.golden_files import golden
from tests.report import windows
from tests.report.test_hostile_names import PROFILES, hostile, renamed, with_suffix
from tests.report.test_ranks_text import CASES as JOBS
from tests.report.test_text import CASES
from tests.report.test_traced_text import profile_of
from tests.report.windows import build_profile, cell

UNKNOWN = build_profile(windows.unknown_window(), config=ProfilerConfig())
THROUGHPUT = ThroughputSummary(
    schema_version=1,
    batches=1200,
    reader_ratio=0.53514,
    reader_cost_sec=Spread(average=0.01367, maximum=0.01407, minimum=0.0131),
    batch_cost_sec=Spread(average=0.02555, maximum=0.02781, minimum=0.0222),
    ips=Spread(average=39.13907, maximum=45.03588, minimum=35.9583),
    ips_unit="samples/s",
)
NO_THROUGHPUT = replace(THROUGHPUT, reader_ratio=None, reader_cost_sec=None, ips=None, ips_unit="batches/s")


def mlp_counts(**changes: Any) -> FlopCounts:
    """1000 -> 2000 -> 500 on 100 samples: counts and parameters as in ``windows.mlp_window``."""
    window = windows.mlp_window()
    shapes = {"fc1": ((2000, 1000), (2000,)), "fc2": ((500, 2000), (500,))}
    modules = tuple(replace(one, parameter_shapes=shapes.get(one.name, ())) for one in window.modules)
    return FlopCounts(replace(window.flops, **changes), modules)


REPORTS: dict[str, Profile | ThroughputSummary | FlopCounts] = {
    "mlp": build_profile(CASES["mlp"][0], config=CASES["mlp"][1]),
    "transformer": build_profile(windows.transformer_window(), config=ProfilerConfig()),
    "lower_bound": build_profile(CASES["lower_bound"][0], config=CASES["lower_bound"][1]),
    "traced": profile_of("traced"),
    "ranks_slow_loader": JOBS["slow_loader"],
    "unknown": UNKNOWN,
    "throughput": THROUGHPUT,
    "throughput_unknown": NO_THROUGHPUT,
    "counts": mlp_counts(),
}


class Seen(HTMLParser):
    """What a browser makes of a text: the tags with their attributes, and the words between them."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[tuple[str, tuple[tuple[str, str | None], ...]]] = []
        self.closed: list[str] = []
        self.words: list[str] = []
        self.other: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, tuple(attrs)))

    def handle_endtag(self, tag: str) -> None:
        self.closed.append(tag)

    def handle_data(self, data: str) -> None:
        if data.strip():
            self.words.append(data.strip())

    def handle_comment(self, data: str) -> None:
        self.other.append(data)

    def handle_decl(self, decl: str) -> None:
        self.other.append(decl)

    def handle_pi(self, data: str) -> None:
        self.other.append(data)

    def unknown_decl(self, data: str) -> None:
        self.other.append(data)


def html_of(report: Profile | ThroughputSummary | FlopCounts) -> str:
    return report._repr_html_()


@pytest.mark.parametrize("name", REPORTS)
def test_a_notebook_shows_the_file_people_read(name: str) -> None:
    golden(f"html/{name}.html", html_of(REPORTS[name]))


@pytest.mark.parametrize("name", REPORTS)
def test_it_has_tables_and_paragraphs_alone_with_no_script_no_address_and_no_colour(name: str) -> None:
    seen = Seen(html_of(REPORTS[name]))
    assert {tag for tag, _ in seen.tags} <= {"div", "p", "b", "table", "thead", "tbody", "tr", "th", "td"}
    assert sorted(tag for tag, _ in seen.tags) == sorted(seen.closed)
    assert seen.other == []
    styles = [value or "" for _, attributes in seen.tags for key, value in attributes if key == "style"]
    assert {key for _, attributes in seen.tags for key, _ in attributes} <= {"class", "style"}
    assert [one for one in styles if "url" in one or "#" in one or "rgb" in one] == []
    # The bars are of the colour of the words around them, whatever theme that is.
    assert {one for one in styles if "background" in one} == {
        one for one in styles if one.startswith("background: currentColor;")
    }


@pytest.mark.parametrize("name", REPORTS)
def test_it_is_no_longer_than_a_screen(name: str) -> None:
    tags = [tag for tag, _ in Seen(html_of(REPORTS[name])).tags]
    assert tags.count("tr") + tags.count("p") <= 36


def test_of_many_modules_a_screen_has_the_upper_levels_and_says_what_is_left_out() -> None:
    modules = [ModuleRecord(name="", type_name="Net")]
    cells = []
    for i in range(100):  # no two of them are equal
        modules += [
            ModuleRecord(name=f"block{i}", type_name="Block"),
            ModuleRecord(name=f"block{i}.fc", type_name="Linear", params=i + 1),
        ]
        cells.append(cell(f"block{i}.fc", "forward", 1000 * (i + 1)))
    record = FlopRecord(cells=tuple(cells), module_calls={one.name: 1 for one in modules})
    counts = FlopCounts(record, tuple(modules))
    seen = Seen(html_of(counts))
    assert [tag for tag, _ in seen.tags].count("tr") == 25  # 24 and the head
    assert "And 177 more rows; by_module() has every module." in seen.words  # 1 + 200 less 24
    # The text has room for a level of them, and not for two.
    lines = str(counts).split("\n")
    assert sum("Block" in line for line in lines) == 100 and not any("Linear" in line for line in lines)
    assert "And 100 more rows; by_module() has every module." in lines
    window = replace(windows.mlp_window(), modules=tuple(modules), flops=record)
    shown = Seen(html_of(build_profile(window, config=ProfilerConfig())))
    assert [word for word in shown.words if word.endswith(".fc")] == [f"block{i}.fc" for i in range(99, 91, -1)]
    assert any(word.startswith("And 92 more.") for word in shown.words)


def test_equal_layers_are_one_row_of_the_modules_that_weigh_most() -> None:
    words = Seen(html_of(REPORTS["transformer"])).words
    start = words.index("blocks.*.mlp.up")
    # 12 x 32 G forward and twice that backward, of 4032 G: 1152 / 4032.
    assert words[start : start + 6] == ["blocks.*.mlp.up", "12 x Linear", "384 G", "768 G", "0", "28.57%"]
    start = words.index("head")
    assert words[start : start + 6] == ["head", "Linear", "80 G", "160 G", "0", "5.95%"]  # 240 / 4032


def test_modules_of_a_traced_step_come_by_their_own_time() -> None:
    words = Seen(html_of(REPORTS["traced"])).words
    rows = [words.index(name) for name in ("fc1", "fc2", "(the root)", "act")]
    assert rows == sorted(rows)
    # fc1 takes 2 + 3 ms, fc2 1 + 4, the root 1.5 of its own, act 0.5 + 1: 13 ms.
    assert words[rows[0] : rows[0] + 7] == ["fc1", "Linear", "400 M", "400 M", "57.14%", "5 ms", "38.46%"]


def test_what_is_not_known_is_not_available() -> None:
    words = Seen(html_of(UNKNOWN)).words
    head = words.index("step time")
    assert words[head : head + 18] == [
        "step time", "samples/s", "tokens/s", "MFU", "HFU",
        "FLOPs forward", "FLOPs backward", "hardware FLOPs", "parameters",
        "n/a", "n/a", "n/a", "n/a", "n/a",
        "0", "0", "0", "n/a",
    ]  # fmt: skip
    assert "n/a: samples/second, tokens/second, MFU, HFU: no step was timed." in words
    assert "Time of a step: n/a, no step was timed." in words
    assert "Modules: n/a, none was seen to spend FLOPs." in words


@pytest.mark.parametrize("report", [*REPORTS.values(), *JOBS.values(), *PROFILES.values()], ids=repr)
def test_repr_is_a_line_or_two(report: Any) -> None:
    assert repr(report).isprintable() and len(repr(report)) <= 300
    assert repr(report).startswith(f"<{type(report).__name__}") and repr(report).endswith(">")


def test_figures_of_several_counted_steps_are_not_said_to_be_of_the_first() -> None:
    several = replace(UNKNOWN, counted_steps=(0, 16, 17, 18))
    assert repr(several).startswith("<Profile of steps 0, 16-18: 0 FLOPs a step, ")
    assert "Steps 0, 16-18: 0 FLOPs a step, " in several._repr_html_()


def test_repr_of_a_profile_is_its_headline() -> None:
    assert repr(UNKNOWN) == "<Profile of step 0: 0 FLOPs a step, samples/s and MFU n/a (no step was timed).>"
    assert repr(NO_THROUGHPUT) == (
        "<ThroughputSummary: 1,200 batches, n/a batches/s, 25.55 ms a batch, of it in the data loader n/a>"
    )


def test_no_class_of_another_shape_is_shown_by_ours() -> None:
    assert not hasattr(FlopsProfilerCallback(), "_repr_html_")


EVIL = "<script>alert(1)</script></td></table>\"'&amp;<!--<img src=//a/b onerror=alert(1)>"


def with_evil(name: str) -> str:
    return with_suffix(EVIL)(name)


def test_hostile_names_read_like_their_golden_file() -> None:
    text = html_of(renamed(PROFILES["lower bound"], with_evil))
    golden("html/hostile.html", text)
    assert "<script" not in text and "<img" not in text and "<!--" not in text
    assert any(word.startswith("fc1<script>alert(1)</script></td>") for word in Seen(text).words)


@settings(deadline=None, max_examples=15)
@given(st.one_of(hostile, st.text("<>&\"'/=!-scriptabc ", min_size=1, max_size=30)))
@pytest.mark.parametrize("name", PROFILES)
def test_a_report_has_the_tags_that_it_has_with_harmless_names(name: str, suffix: str) -> None:
    shown = [Seen(html_of(renamed(PROFILES[name], with_suffix(one)))) for one in (suffix, "harmless")]
    assert shown[0].tags == shown[1].tags and shown[0].closed == shown[1].closed and shown[0].other == []
    assert all(word.isprintable() for word in shown[0].words)


@settings(deadline=None, max_examples=15)
@given(st.one_of(hostile, st.text("<>&\"'/=!-scriptabc ", min_size=1, max_size=30)))
def test_counts_have_the_tags_that_they_have_with_harmless_names(suffix: str) -> None:
    def named(add: Callable[[str], str]) -> FlopCounts:
        counts = mlp_counts(notes=(add("note"),))
        modules = tuple(replace(one, name=add(one.name), type_name=add(one.type_name)) for one in counts.modules)
        cells = tuple(replace(one, module=add(one.module)) for one in counts.record.cells)
        calls = {add(name): number for name, number in counts.record.module_calls.items()}
        return FlopCounts(replace(counts.record, cells=cells, module_calls=calls), modules)

    evil, plain = named(with_suffix(suffix.replace(".", ""))), named(with_suffix("harmless"))
    assert Seen(html_of(evil)).tags == Seen(html_of(plain)).tags
    lines = str(evil).split("\n")
    assert len(lines) >= len(str(plain).split("\n")) - 1 and all(line.isprintable() for line in lines)


def test_counts_print_as_the_table_people_read() -> None:
    uncounted = UncountedOperator(calls=1, modules=("act",), output_elements=4, heavy=True)
    optimizer = cell(OUTSIDE, "optimizer", 50_000_000)
    recompute = cell("fc1", "recompute", 400_000_000)
    plain = mlp_counts()
    more = mlp_counts(
        cells=(*plain.record.cells, recompute, optimizer),
        uncounted={"mylib.fused_gemm": uncounted},
        notes=("A thread was not seen.",),
    )
    golden("text/counts.txt", str(plain))
    golden("text/counts_lower_bound.txt", str(more))
    assert render_text(plain) == str(plain)
    assert repr(plain) == "<FlopCounts forward=600,000,000, backward=800,000,000, recompute=0, optimizer=0>"


def test_counts_of_modules_that_nobody_described_say_so() -> None:
    counts = FlopCounts(windows.mlp_window().flops)
    row = next(line for line in str(counts).split("\n") if "fc1" in line)
    assert row.split() == ["fc1:", "(not", "described)", "n/a", "n/a", "400", "M", "400", "M"]
    outside = FlopCounts(FlopRecord(cells=(cell(OUTSIDE, "forward", 5),)))
    assert [line.split() for line in str(outside).split("\n") if "outside" in line] == [["(outside)", "5", "0"]]
