"""The page of traces in a browser: ``lightning-flops trace FILES --html FILE``."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lightning_flops.cli import main
from lightning_flops.report.html_page import bundled, render_traces_page
from lightning_flops.schema.trace import TracesReport
from tests.page import samples, traces
from tests.page.browser import Opened, browser, needs_browser

FILES = Path(__file__).parents[1] / "data" / "traces"
RESNET = FILES / "resnet50_num_workers_0.pt.trace.json.gz"


@pytest.fixture(scope="module")
def started() -> Iterator[Any]:
    with browser() as made:
        yield made


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made = {
        "one": traces.report(traces.events()),
        "ranks": traces.report(traces.events(), traces.events(late_us=200), ranks=True),
        "runs": traces.report(traces.events(), traces.events(late_us=200)),
        "long": traces.report(traces.long(3000, 2)),
        "unknown": traces.report(traces.events(), device={"deviceProperties": [{"id": 0, "name": "NVIDIA X1"}]}),
        "hostile": traces.hostile(),
    }
    folder = tmp_path_factory.mktemp("traces")
    for name, report in made.items():
        (folder / f"{name}.html").write_text(render_traces_page(report), encoding="utf-8")
    return {name: folder / f"{name}.html" for name in made}


@pytest.fixture()
def one(started: Any, pages: dict[str, Path]) -> Iterator[Opened]:
    opened = Opened(started, pages["one"])
    yield opened
    opened.assert_quiet()
    opened.context.close()


@needs_browser
def test_without_mfu_the_card_says_why(started: Any, pages: dict[str, Path]) -> None:
    opened = Opened(started, pages["unknown"])
    told = dict(zip(opened.texts(".card-word"), opened.texts(".card-below"), strict=True))
    assert told["MFU"] == "no figure is known for a device called NVIDIA X1"
    opened.assert_quiet()
    opened.context.close()


@needs_browser
def test_the_answer_is_worked_out_over_all_steps(one: Opened) -> None:
    cards = dict(zip(one.texts(".card-word"), one.texts(".card-figure"), strict=True))
    # Steps of 1 and 2 ms with 2 GFLOPs each: 4 GFLOPs in 3 ms. At 19.5 TFLOP/s they take 0.205128 ms: 6.8376%.
    assert cards == {
        "traced step time": "1.5 ms",
        "MFU": "6.84%",
        "HFU": "6.84%",
        "FLOPs": "2 G",
        "FLOP/s": "1.33 T",
        "GPU utilization": "33.3%",
        "kernels": "1",
        "memory at its peak": "6 GB",
    }
    # Of each step: 50 us of data, an operator of 20 us that launches for 10, and the kernel's 500 behind it.
    assert one.texts("#answer .legend li") == [
        "kernels 500 µs 33.3%",
        "runtime calls 10 µs 0.7%",
        "data loader 50 µs 3.3%",
        "host operators 10 µs 0.7%",
        "nothing recorded 930 µs 62.0%",
    ]


@needs_browser
def test_every_part_of_the_page_is_there_and_named(one: Opened) -> None:
    assert one.texts("main h2") == [
        *("The answer", "Steps", "Phases", "Modules", "Roofline", "Operators", "Kernels", "Memory", "Host and device"),
        *("Advice", "Where the figures come from"),
    ]
    for part in one.texts(".nav a"):
        one.page.get_by_role("link", name=part, exact=True).first.click()
    assert one.page.evaluate("document.activeElement.id") == "provenance"
    assert "NVIDIA A100-SXM4-80GB · 2 steps · " in one.texts(".where")[0]


@needs_browser
def test_each_step_has_its_flops_and_its_mfu(one: Opened) -> None:
    # 2 GFLOPs take 0.102564 ms at the peak, of 1 and of 2 ms.
    rows = [[text for text in row.split(" ") if text] for row in one.texts("#steps tbody tr")]
    assert [row[:3] for row in one_table(one, "#steps")] == [["step 3", "1 ms", "500 µs"], ["step 4", "2 ms", "500 µs"]]
    assert [row[-2:] for row in one_table(one, "#steps")] == [["10.26%", "10.26%"], ["5.13%", "5.13%"]]
    assert len(rows) == 2


def one_table(opened: Opened, section: str, place: int = 0) -> list[list[str]]:
    """The cells of a table of *section* as they stand."""
    table = opened.page.locator(f"{section} table").nth(place)
    return [
        [" ".join(cell.split()) for cell in row.locator("td").all_text_contents()]
        for row in table.locator("tbody tr").all()
    ]


@needs_browser
def test_an_operator_has_its_rate_and_shows_its_shapes_when_it_is_chosen(one: Opened) -> None:
    cells = dict(zip(one.texts("#operators thead th"), one_table(one, "#operators")[0], strict=True))
    cells = {name.rstrip("▼▲↕"): value for name, value in cells.items()}
    # 2 GFLOPs in 500 us are 4 TFLOP/s, of 19.5; 12 MB are read and written.
    assert cells["operator"] == "aten::mm" and cells["self time"] == "500 µs"
    assert [cells[name] for name in ("FLOPs", "FLOP/s", "of peak", "bytes", "FLOPs a byte")] == [
        *("2 G", "4 T", "20.5%", "12 MB", "167"),
    ]
    one.page.locator("#operators tbody td").first.click()
    panel = one.page.locator("#operators .chosen-operator")
    assert panel.locator("h3").inner_text() == "aten::mm 500 µs to 500 µs a call"
    assert panel.locator(".sizes").all_text_contents() == [traces.THOUSAND]
    assert "ampere_sgemm_128x64_nn" in panel.inner_text()
    one.page.get_by_role("button", name="By input shape").click()
    cells = dict(zip(one.texts("#operators thead th"), one_table(one, "#operators")[0], strict=True))
    cells = {name.rstrip("▼▲↕"): value for name, value in cells.items()}
    assert [cells[name] for name in ("operator", "sizes of its inputs", "calls", "FLOPs", "FLOP/s", "of peak")] == [
        *("aten::mm", traces.THOUSAND, "1", "2 G", "4 T", "20.5%"),
    ]


@needs_browser
def test_kernels_have_flops_and_how_they_were_launched(one: Opened) -> None:
    (kernel,) = one_table(one, "#kernels")
    assert kernel[:8] == ["ampere_sgemm_128x64_nn", "500 µs", "100.0%", "1", "500 µs", "2 G", "4 T", "20.5%"]
    assert "8×16×1 of 128×1×1" in kernel


@needs_browser
def test_modules_of_a_trace_are_the_tree_that_those_of_a_profile_are(one: Opened) -> None:
    rows = one_table(one, "#modules")
    assert [row[0].lstrip("▾▸") for row in rows] == ["(the root)", "first", "linear"]
    assert {row[1] for row in rows} == {"500 µs"}
    assert one.texts(".looked h3") == ["(the root)"]
    one.page.locator("#modules .grid tbody a", has_text="linear").click()
    assert one.page.url.endswith("#module=first.linear")
    assert one.texts(".crumbs")[0] == "(the root) › first › linear"
    one.page.get_by_role("button", name="FLOPs", exact=True).click()
    parameters = one.page.get_by_role("button", name="Parameters", exact=True)
    assert parameters.is_disabled() and parameters.get_attribute("title") == "n/a: a trace does not tell the parameters"


@needs_browser
def test_memory_is_drawn_with_its_peak_and_what_held_it(one: Opened) -> None:
    curve = one.page.locator("#memory .curve svg")
    label = curve.get_attribute("aria-label") or ""
    assert label.startswith(
        "Memory over time on device 0. Peak 6 GB\n"
        "101 µs after the first event, 100.0% of the peak, in the forward of step 3"
    )
    assert one.texts("#memory svg .axis")[-2:] == ["step 3", "step 4"]
    assert one.texts("#memory .legend li") == ["data loader", "forward"]
    assert one.texts("#memory .mark") == ["peak 6 GB"]
    assert one_table(one, "#memory", 1) == [
        ["–", "(before the trace)", "4 GB", "66.7%", "–"],
        ["first.linear", "aten::mm", "2 GB", "33.3%", "1"],
    ]
    curve.focus()
    one.page.keyboard.press("End")
    assert one.texts("#memory .readout") == ["4 GB · 1.7 ms after the first event, 66.7% of the peak, in step 4"]
    box = one.box_of(curve)
    one.page.mouse.move(box["x"] + 100, box["y"] + 100)  # shortly after the first allocation
    assert one.texts("#tip .tip-first") == ["6 GB"]


@needs_browser
def test_ranks_stand_side_by_side_and_one_can_be_chosen(started: Any, pages: dict[str, Path]) -> None:
    opened = Opened(started, pages["ranks"])
    assert opened.texts("h1") == ["rank 0"] and opened.texts("#ranks h2") == ["Ranks"]
    # Computation of a step: 500 and 700 us; their median is 600.
    assert [(row[0], row[5], row[-1]) for row in one_table(opened, "#ranks")] == [
        ("rank 0", "500 µs", "0.833"),
        ("rank 1", "700 µs", "1.167"),
    ]
    # 2 GFLOPs of each rank, in steps of 1 and 2 ms; of two devices with 19.5 TFLOP/s.
    assert opened.texts("#ranks table.plain td") == [
        *("3", "1 ms", "4 G", "0", "0", "0", "4 T", "10.26%", "10.26%"),
        *("4", "2 ms", "4 G", "0", "0", "0", "2 T", "5.13%", "5.13%"),
    ]
    opened.page.locator("#ranks tbody a", has_text="rank 1").click()
    opened.wait_until_whole()
    assert opened.texts("h1") == ["rank 1"] and opened.page.url.endswith("#trace=rank+1")
    assert opened.texts("#kernels tbody td:nth-child(2)") == ["700 µs"]
    opened.page.get_by_label("Rank", exact=True).select_option("rank 0")
    opened.wait_until_whole()
    assert opened.texts("#kernels tbody td:nth-child(2)") == ["500 µs"]
    opened.assert_quiet()
    opened.context.close()


@needs_browser
def test_a_place_in_the_address_is_opened(started: Any, pages: dict[str, Path]) -> None:
    opened = Opened(started, pages["ranks"], "#trace=rank+1&module=first")
    assert opened.texts("h1") == ["rank 1"] and opened.texts(".looked h3") == ["first"]
    opened.context.close()


@needs_browser
def test_traces_that_say_no_rank_are_runs(started: Any, pages: dict[str, Path]) -> None:
    opened = Opened(started, pages["runs"])
    assert opened.texts("#ranks h2") == ["Traces side by side"] and "separate runs" in opened.texts("#ranks .note")[0]
    assert [row[0] for row in one_table(opened, "#ranks")] == [f"/runs/{run}/step.pt.trace.json" for run in (0, 1)]
    assert opened.page.get_by_label("Trace", exact=True).count() == 1
    opened.assert_quiet()
    opened.context.close()


@needs_browser
def test_long_tables_stay_smooth(started: Any, pages: dict[str, Path]) -> None:
    opened = Opened(started, pages["long"])
    page = opened.page
    for section in ("operators", "kernels"):
        assert page.locator(f"#{section} tbody tr").count() < 60  # the others exist when they are scrolled to
        page.get_by_label(f"Search {section}").fill("_2999")
        assert len(opened.texts(f"#{section} tbody tr")) == 1
    took = page.evaluate(
        """async () => {
            const frame = () => new Promise((done) => requestAnimationFrame(() => setTimeout(done)));
            const search = document.querySelector('#operators input[type=search]');
            const took = [];
            for (const value of ['_1', '_12', '_123', '', 'tor_7', '']) {
              await frame();
              const begun = performance.now();
              search.value = value;
              search.dispatchEvent(new Event('input', { bubbles: true }));
              await frame();
              took.push(performance.now() - begun);
            }
            return took;
        }"""
    )
    assert min(took) <= 100, took
    opened.assert_quiet()
    opened.context.close()


@needs_browser
def test_names_are_text_and_never_markup(started: Any, pages: dict[str, Path]) -> None:
    opened = Opened(started, pages["hostile"])
    assert opened.page.title() == f"Trace of {samples.HOSTILE[1]}.json"
    assert opened.page.locator("main img, main svg[onload], main script, [onerror]").count() == 0
    for name in samples.HOSTILE[:4]:
        assert opened.page.locator("#operators code", has_text=name).count() >= 1
    opened.page.locator("#operators tbody td").first.click()
    assert opened.page.locator("main img, main svg[onload], main script, [onerror]").count() == 0
    opened.assert_quiet()
    opened.context.close()


@needs_browser
@pytest.mark.parametrize("width", [390, 820, 1440])
@pytest.mark.parametrize("name", ["one", "ranks", "long", "hostile"])
def test_nothing_is_wider_than_the_screen(name: str, width: int, started: Any, pages: dict[str, Path]) -> None:
    opened = Opened(started, pages[name], viewport={"width": width, "height": 900})
    assert opened.page.evaluate("document.documentElement.scrollWidth") <= width
    opened.assert_quiet()
    opened.context.close()


@needs_browser
def test_every_picture_has_words_and_a_table(one: Opened) -> None:
    for picture in one.page.locator("main svg, main [role=img]").all():
        assert picture.get_attribute("aria-label")
    for section in ("answer", "steps", "phases", "modules", "roofline", "operators", "kernels", "memory", "processors"):
        assert one.page.locator(f"#{section} table").count() >= 1, section


@needs_browser
def test_the_page_of_somebody_elses_trace_says_what_the_text_says(
    started: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["trace", str(RESNET), "--html", str(tmp_path / "page.html")]) == 0
    printed = capsys.readouterr().out
    opened = Opened(started, tmp_path / "page.html")
    for row in one_table(opened, "#steps"):
        said = re.search(rf"^{row[0]} +(.*)$", printed[printed.index(" FLOPs ---") :], re.MULTILINE)
        assert said is not None
        wall, *_, mfu, hfu = re.split(r"  +", said[1])
        assert [row[1], *row[-2:]] == [wall, mfu, hfu]
    assert opened.texts(".card-figure")[3] == "777.57 G"
    assert {row[1] for row in one_table(opened, "#provenance")} <= {""}  # everything that may have FLOPs was counted
    opened.assert_quiet()
    opened.context.close()


def test_json_and_a_page_can_be_had_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = [str(FILES / f"two_ranks_known_answers.rank{rank}.pt.trace.json") for rank in (0, 1)]
    page = tmp_path / "new" / "page.html"
    assert main(["trace", "--json", "--html", str(page), *files]) == 0
    assert [one["rank"] for one in json.loads(capsys.readouterr().out)["traces"]] == [0, 1]
    assert page.read_text(encoding="utf-8").count('<script type="text/plain"') == 3


def test_a_page_that_cannot_be_written_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "folder").mkdir()
    file = str(FILES / "two_ranks_known_answers.rank0.pt.trace.json")
    assert main(["trace", file, "--html", str(tmp_path / "folder")]) == 2
    said = capsys.readouterr()
    assert "folder" in said.err and said.err.count("\n") == 1 and said.out


def test_the_page_is_one_file_and_the_same_for_the_same_traces() -> None:
    report = traces.report(traces.events())
    assert render_traces_page(report) == render_traces_page(report)
    page = render_traces_page(report).replace(bundled("page.js"), "").replace(bundled("style.css"), "")
    assert not re.findall(r"""(?:src|href|action|url)\s*[=(]""", page)


def test_mfu_of_all_steps_is_unknown_where_that_of_one_is() -> None:
    report: TracesReport = traces.report(traces.events())
    flops = report.traces[0].flops
    assert flops is not None
    first, second = flops.steps
    assert replace(flops, steps=(replace(first, mfu=None), second)).mfu is None
    # 0.1 of 1 ms and 0.4 of 2 ms are 0.9 of 3 ms.
    some = replace(flops, steps=(replace(first, mfu=0.1), replace(second, mfu=0.4)))
    assert some.mfu == pytest.approx(0.3)
    assert replace(flops, steps=()).mfu is None
