"""The page in a browser, opened from disk: what it shows, clicks, keys, search and zoom, and that it stays alone."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lightning_flops import Profile, compare_profiles
from lightning_flops.report.html_page import RunPages, ShownRun, render_page
from tests.page import samples, traces
from tests.page.browser import Opened, browser, needs_browser
from tests.report import compared

pytestmark = needs_browser

HOW_LONG = """async ({ actions }) => {
  const frame = () => new Promise((done) => requestAnimationFrame(() => setTimeout(done)));
  const search = document.querySelector('#modules input[type=search]');
  const took = [];
  for (const [kind, value] of actions) {
    await frame();
    const begun = performance.now();
    if (kind === 'search') {
      search.value = value;
      search.dispatchEvent(new Event('input', { bubbles: true }));
    } else {
      location.hash = '#' + new URLSearchParams({ module: value });
    }
    await frame();
    took.push(performance.now() - begun);
  }
  return took;
}"""
"""Milliseconds from an action to the end of the frame that shows it, of each action."""


@pytest.fixture(scope="module")
def started() -> Iterator[Any]:
    with browser() as made:
        yield made


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    windows = [samples.decoder(step) for step in (10, 60, 110)]
    other = ShownRun(name="version_1", windows=[samples.many_ranks()], problems=["profile-2.json: cut off"])
    made = {
        "decoder": render_page([ShownRun(name="version_0", windows=windows), other]),
        "ranks": samples.many_ranks().to_html(),
        "hostile": render_page(
            [ShownRun(name=samples.HOSTILE[0], windows=[samples.hostile()], problems=[samples.HOSTILE[1]])]
        ),
        "wide": samples.of_modules(10_000).to_html(),
        "later": _later_page(),
        "lengths": _with_memory(samples.decoder()).to_html(),
        "long_names": _with_long_names(samples.decoder()).to_html(),
        "compared": compare_profiles(compared.run(), compared.wider(data_wait_ms=3.5)).to_html(),
        "compared_hostile": compare_profiles(samples.decoder(), samples.hostile()).to_html(),
    }
    folder = tmp_path_factory.mktemp("pages")
    for name, text in made.items():
        (folder / f"{name}.html").write_text(text, encoding="utf-8")
    return {name: folder / f"{name}.html" for name in made}


def _with_memory(profile: Profile) -> Profile:
    """*profile*, its traced step with the memory over time of a trace."""
    assert profile.traced is not None and profile.traced.tables is not None
    curves = traces.report(traces.events()).traces[0].memory_curves
    tables = replace(profile.traced.tables, memory_curves=curves)
    return replace(profile, traced=replace(profile.traced, tables=tables))


def _with_long_names(profile: Profile) -> Profile:
    modules = [
        replace(one, type_name=one.type_name * 6, name=one.name.replace("blocks", "b" * 60)) for one in profile.modules
    ]
    return replace(profile, modules=tuple(modules))


def _later_page() -> str:
    """Of a run that was profiled four times, when three windows are kept."""
    run = RunPages(3)
    return [run.add(samples.decoder(step)) for step in (10, 60, 110, 160)][-1]


@pytest.fixture()
def decoder(started: Any, pages: dict[str, Path]) -> Iterator[Opened]:
    opened = Opened(started, pages["decoder"])
    yield opened
    opened.assert_quiet()
    opened.context.close()


def test_the_answer_comes_first(decoder: Opened) -> None:
    cards = dict(zip(decoder.texts(".card-word"), decoder.texts(".card-figure"), strict=True))
    # Worked out in tests.report.windows: 100 ms a step of 8 samples and 4000 tokens; 3984 GFLOP of which 3744 are
    # bfloat16 and 240 float32, so 12 + 12.3077 ms at the peaks of an A100.
    assert cards == {
        "step time": "100 ms",
        "samples/s": "80",
        "tokens/s": "40,000",
        "MFU": "24.31%",
        "HFU": cards["HFU"],
        "FLOPs": "3.98 T",
        "parameters": "154 M",
        "peak memory": "5.5 GB",
    }
    legend = decoder.texts("#answer .legend li")
    assert legend == [
        "data wait 5 ms 5.0%",
        "transfer 1 ms 1.0%",
        "forward 30 ms 30.0%",
        "backward 50 ms 50.0%",
        "optimizer 10 ms 10.0%",
        "other 4 ms 4.0%",
    ]
    assert decoder.texts("#answer .longest a")[0] == samples.SLOWED


def test_every_part_of_the_page_is_there_and_named(decoder: Opened) -> None:
    assert decoder.texts("main h2") == [
        *(
            "The answer",
            "Budget",
            "Modules",
            "Roofline",
            "Operators",
            "Kernels",
            "Timed steps",
            "Memory",
            "Windows",
            "Advice",
        ),
        "Where the figures come from",
    ]
    for part in decoder.texts(".nav a"):
        decoder.page.get_by_role("link", name=part, exact=True).first.click()
    assert decoder.page.evaluate("document.activeElement.id") == "provenance"


def test_a_click_zooms_and_the_address_keeps_the_place(decoder: Opened) -> None:
    page = decoder.page
    page.locator("#modules .grid tbody a", has_text="blocks").first.click()
    page.locator("#modules .grid tbody a").filter(has_text=re.compile("^5$")).click()
    assert page.url.endswith("#module=blocks.5")
    assert decoder.texts(".crumbs")[0] == "GPT › blocks › 5"
    names = decoder.texts("#modules .grid tbody td:first-child a")
    assert names == ["5", "attn", "qkv", "out", "mlp", "up", "act", "down"]
    page.go_back()
    assert decoder.texts(".crumbs")[0] == "GPT › blocks"
    page.locator(".crumbs a").first.click()
    assert decoder.texts(".crumbs")[0] == "GPT"


def test_a_place_in_the_address_is_opened(started: Any, pages: dict[str, Path]) -> None:
    opened = Opened(started, pages["decoder"], f"#module={samples.SLOWED}&size=flops&window=1")
    assert opened.texts(".crumbs")[0] == "GPT › blocks › 5 › mlp › up"
    assert opened.texts("#modules .choice .chosen") == ["FLOPs"]
    assert "step 60 counted" in opened.texts(".where")[0]
    opened.assert_quiet()
    opened.context.close()


def test_the_icicle_zooms_by_click_and_by_keys(decoder: Opened) -> None:
    page = decoder.page
    icicle = page.locator(".icicle svg")
    box = decoder.box_of(icicle)
    page.mouse.move(box["x"] + box["width"] * 0.4, box["y"] + 130)  # the fourth row
    assert decoder.texts("#tip .tip-first") == ["blocks.5.mlp (MLP)"]
    page.mouse.click(box["x"] + box["width"] * 0.4, box["y"] + 45)  # the second row is that of the blocks
    assert decoder.texts(".crumbs")[0] == "GPT › blocks"
    icicle.focus()
    page.keyboard.press("ArrowDown")  # the child that takes most time is the slowed one
    assert decoder.texts(".looked h3") == ["blocks.5"]
    page.keyboard.press("ArrowRight")
    assert decoder.texts(".looked h3") == ["blocks.6"]
    page.keyboard.press("Enter")
    assert decoder.texts(".crumbs")[0] == "GPT › blocks › 6"
    page.keyboard.press("Backspace")
    assert decoder.texts(".crumbs")[0] == "GPT › blocks"


def test_the_table_goes_by_keys(decoder: Opened) -> None:
    page = decoder.page
    table = page.locator("#modules .grid")
    table.focus()
    assert table.get_attribute("role") == "treegrid"
    for key in ("ArrowDown", "ArrowDown", "ArrowDown"):
        page.keyboard.press(key)
    active = page.locator(f"[id='{table.get_attribute('aria-activedescendant')}']")
    assert "0 Block" in active.inner_text().replace("\t", " ").replace("\n", " ")
    assert active.get_attribute("aria-expanded") == "false" and active.get_attribute("aria-selected") == "true"
    page.keyboard.press("ArrowRight")
    assert active.get_attribute("aria-expanded") == "true"
    page.keyboard.press("ArrowRight")
    assert decoder.texts(".looked h3") == ["blocks.0.attn"]
    for _ in range(3):  # to the block, which folds, and up
        page.keyboard.press("ArrowLeft")
    assert decoder.texts(".looked h3") == ["blocks"]
    page.keyboard.press("End")
    assert decoder.texts(".looked h3") == ["head"]
    page.keyboard.press("Enter")
    assert page.url.endswith("#module=head")
    page.keyboard.press("Backspace")
    assert decoder.texts(".crumbs")[0] == "GPT"


def test_a_search_finds_modules_in_both_views(decoder: Opened) -> None:
    page = decoder.page
    page.locator("#modules input[type=search]").fill("mlp.up")
    assert decoder.texts("#modules .search .note") == ["12 of 100 modules"]
    names = decoder.texts("#modules .grid tbody tr:not(.faded) td:first-child a")
    assert len(names) >= 5 and set(names) == {"up"}  # the others are scrolled to
    assert page.locator(".icicle .slabs.faded").count() > 0
    page.locator("#modules .check input").check()
    assert page.locator("#modules .grid tbody td:first-child a").first.inner_text() == samples.SLOWED


def test_a_column_sorts_both_ways(decoder: Opened) -> None:
    page = decoder.page
    page.get_by_role("button", name="Sort by self time").click()  # it was sorted by it, the most first
    names = page.locator("#operators .grid tbody code").all_inner_texts()
    assert names[0] == "aten.gelu" and names[-1] == "aten.mm"
    head = page.locator("#operators thead th", has_text="self time")
    assert head.get_attribute("aria-sort") == "ascending"


def test_the_width_is_the_readers_choice_and_what_cannot_be_chosen_says_why(decoder: Opened) -> None:
    page = decoder.page
    page.get_by_role("button", name="Parameters", exact=True).click()
    assert page.url.endswith("size=params")
    memory = page.get_by_role("button", name="Memory kept")
    assert memory.is_disabled() and "profile_memory=True" in (memory.get_attribute("title") or "")


def test_a_step_that_stands_out_is_marked_and_told(decoder: Opened) -> None:
    assert "1 outlier" in decoder.texts("#steps .note")[0] and "step 20" in decoder.texts("#steps .note")[0]
    strip = decoder.page.locator("#steps .strip svg")
    strip.focus()
    for _ in range(8):
        decoder.page.keyboard.press("ArrowRight")
    assert decoder.texts("#steps .readout")[0].startswith("step 20: 152 ms · data wait 55")


def test_words_are_defined_for_pointer_and_keyboard(decoder: Opened) -> None:
    word = decoder.page.locator("#answer .card dfn", has_text="MFU")
    word.hover()
    assert "could do at its peak" in decoder.page.locator("#tip").inner_text()
    decoder.page.mouse.move(0, 0)
    assert decoder.page.locator("#tip").is_hidden()
    word.focus()
    assert decoder.page.locator("#tip").is_visible()
    assert "could do at its peak" in (word.get_attribute("aria-description") or "")


def test_the_page_of_a_run_shows_its_latest_windows_the_last_one_first(started: Any, pages: dict[str, Path]) -> None:
    opened = Opened(started, pages["later"])
    assert "step 160 counted" in opened.texts(".where")[0]
    assert opened.texts("#windows tbody td:first-child") == ["60", "110", "160"]
    opened.page.locator("#windows tbody a", has_text="60").first.click()
    opened.wait_until_whole()
    assert "step 60 counted" in opened.texts(".where")[0]
    opened.assert_quiet()
    opened.context.close()


def test_runs_and_windows_can_be_chosen(decoder: Opened) -> None:
    page = decoder.page
    assert decoder.texts("#windows tbody td:first-child") == ["10", "60", "110"]
    page.locator("#windows tbody a", has_text="60").click()
    assert "step 60 counted" in decoder.texts(".where")[0] and page.url.endswith("window=1")
    page.get_by_label("Run", exact=True).select_option("version_1")
    page.get_by_role("heading", name="Ranks", exact=True).wait_for()
    assert decoder.texts(".callout")[0] == "profile-2.json: cut off"


def test_memory_of_the_traced_step_is_drawn_over_time(started: Any, pages: dict[str, Path]) -> None:
    opened = Opened(started, pages["lengths"])
    label = opened.page.locator("#memory .curve svg").get_attribute("aria-label") or ""
    assert label.startswith("Memory over time on device 0. Peak 6 GB\n101 µs after the first event")
    assert opened.texts("#memory .mark") == ["peak 6 GB"]
    assert "first.linear" in opened.texts("#memory .grid")[-1]
    opened.assert_quiet()
    opened.context.close()


def test_the_straggler_stands_out_with_its_evidence(started: Any, pages: dict[str, Path]) -> None:
    opened = Opened(started, pages["ranks"])
    assert opened.texts("#ranks .callout") == [
        "Straggler: the others wait 8 ms a step (33.3%) for rank 2, mostly in data wait (8 ms longer); "
        "shown by the timed steps."
    ]
    assert opened.texts("#ranks .mark") == ["▼ rank 2"]
    assert opened.texts("#ranks tr.late td:first-child") == ["2"]
    opened.assert_quiet()
    opened.context.close()


def test_two_runs_compared_are_the_second_mode(started: Any, pages: dict[str, Path]) -> None:
    opened = Opened(started, pages["compared"])
    page = opened.page
    # fc1 is twice as wide: forward 2 -> 4 ms, all of it work; backward 3 -> 5 ms, of which work is ln 2 times the
    # logarithmic mean of 3 and 5, 2 / ln(5 / 3): 2.71383 ms, and efficiency the rest. Each batch comes 1.5 ms later.
    cards = dict(zip(opened.texts(".card-word"), opened.texts(".card-figure"), strict=True))
    assert cards == {
        "one global step of A": "22 ms",
        "one global step of B": "27.5 ms",
        "difference B − A": "+5.5 ms",
        "more work": "+4.71 ms",
        "better efficiency": "−713.83 µs",
        "more waiting": "+1.5 ms",
    }
    assert opened.texts(".bridge-words") == ["22 ms", "+4.71 ms", "−713.83 µs", "+1.5 ms", "27.5 ms"]
    assert opened.texts("#modules tbody td:first-child")[0].startswith("fc1")
    parts = [row.split() for row in opened.texts("#parts tbody tr")]
    assert parts[0][0] == "data" and parts[-1][0] == "global"
    page.get_by_role("button", name="Sort by module").click()
    opened.assert_quiet()
    opened.context.close()


def test_compared_names_are_text_too(started: Any, pages: dict[str, Path]) -> None:
    opened = Opened(started, pages["compared_hostile"])
    assert opened.page.title() != "owned"
    assert opened.page.locator("main img, main svg[onload], main script, [onerror]").count() == 0
    assert samples.HOSTILE[1] in opened.page.locator("#modules").inner_text()
    opened.assert_quiet()
    opened.context.close()


def test_names_are_text_and_never_markup(started: Any, pages: dict[str, Path]) -> None:
    opened = Opened(started, pages["hostile"])
    page = opened.page
    page.locator("#modules .check input").check()
    page.locator("#modules input[type=search]").fill("<img")
    assert page.title() != "owned" and "</script>" in page.title()
    assert page.locator("main img, main svg[onload], main script, [onerror]").count() == 0
    for name in samples.HOSTILE[:7]:
        assert name in page.content().replace("&lt;", "<").replace("&gt;", ">").replace("&amp;", "&").replace(
            "&quot;", '"'
        )
    assert "a\\u2028b\\u202ec" in page.locator("#provenance").inner_text()
    opened.assert_quiet()
    opened.context.close()


def test_the_policy_stops_a_script_of_someone_else(started: Any, pages: dict[str, Path], tmp_path: Path) -> None:
    text = pages["ranks"].read_text(encoding="utf-8")
    (tmp_path / "changed.html").write_text(
        text.replace("</body>", "<script>document.title='owned'</script><img src='http://127.0.0.1:9/x'></body>")
    )
    opened = Opened(started, tmp_path / "changed.html")
    assert opened.page.title() != "owned"
    assert len(opened.complaints) == 2 and all("Content Security Policy" in said for said in opened.complaints)
    opened.context.close()


def test_ten_thousand_modules_stay_smooth(started: Any, pages: dict[str, Path]) -> None:
    opened = Opened(started, pages["wide"])
    page = opened.page
    assert "10,000 modules" in opened.texts("#modules .note")[0]
    assert page.locator("#modules .grid tbody tr").count() < 60  # the others exist when they are scrolled to
    first_screen, whole = [], []
    for _ in range(10):  # other work of the machine makes it slower, nothing makes it faster: the best counts
        page.reload()
        opened.wait_until_whole()
        first_screen.append(page.evaluate("performance.getEntriesByName('shown')[0].startTime"))
        whole.append(page.evaluate("performance.getEntriesByName('whole')[0].startTime"))
        if min(first_screen) <= 1000 and min(whole) <= 1500:
            break
    else:
        pytest.fail(f"first screen after {first_screen} ms, whole page after {whole} ms")
    for kind, values in {
        "search": ("linear1", "blocks.5", "attention", "dropout", "blocks.7", ""),
        "zoom": ("blocks", "blocks.500", "blocks.500.attention", "blocks.7", ""),
    }.items():
        took = page.evaluate(HOW_LONG, {"actions": [[kind, value] for value in values]})
        assert sorted(took)[len(took) // 2] <= 100 or min(took[1:]) <= 60, (kind, took)
    opened.assert_quiet()
    opened.context.close()


@pytest.mark.parametrize("width", [390, 820, 1440])
@pytest.mark.parametrize("name", ["decoder", "long_names"])
def test_nothing_is_wider_than_the_screen(name: str, width: int, started: Any, pages: dict[str, Path]) -> None:
    opened = Opened(started, pages[name], viewport={"width": width, "height": 900})
    assert opened.page.evaluate("document.documentElement.scrollWidth") <= width
    opened.assert_quiet()
    opened.context.close()


def test_light_and_dark_follow_the_system_and_the_reader(started: Any, pages: dict[str, Path]) -> None:
    opened = Opened(started, pages["ranks"], color_scheme="dark")
    page = opened.page

    def ground() -> str:
        opened.texts("h1")
        return str(page.evaluate("getComputedStyle(document.body).backgroundColor"))

    dark = ground()
    page.get_by_label("Colours").select_option("light")
    assert ground() != dark
    page.get_by_label("Colours").select_option("dark")
    assert ground() == dark
    opened.assert_quiet()
    opened.context.close()


def test_print_shows_rows_that_the_screen_scrolls_to(started: Any, pages: dict[str, Path]) -> None:
    opened = Opened(started, pages["wide"])
    opened.page.locator("#modules .check input").check()
    opened.page.emulate_media(media="print")
    opened.page.locator("#modules .grid tbody tr").nth(300).wait_for()
    assert opened.page.locator(".nav").is_hidden()
    assert len(opened.page.pdf()) > 10_000
    opened.assert_quiet()
    opened.context.close()


def test_every_picture_has_words_and_a_table(decoder: Opened) -> None:
    page = decoder.page
    for picture in page.locator("main svg, main [role=img]").all():
        assert picture.get_attribute("aria-label")
    for section in ("answer", "modules", "roofline", "steps", "memory", "windows"):
        assert page.locator(f"#{section} table").count() >= 1, section


def test_contrast_of_words_is_enough(started: Any, pages: dict[str, Path]) -> None:
    for scheme in ("light", "dark"):
        opened = Opened(started, pages["decoder"], color_scheme=scheme)
        colours = opened.page.evaluate(
            """() => ['.note', '.card-figure', '.axis', '.nav a', '.crumbs b'].map((one) => {
                const style = getComputedStyle(document.querySelector(one));
                return one === '.axis' ? style.fill : style.color;
            }).concat(getComputedStyle(document.querySelector('.section')).backgroundColor)"""
        )
        *inks, panel = [_luminance(colour) for colour in colours]
        for ink in inks:
            light, dark = max(ink, panel), min(ink, panel)
            assert (light + 0.05) / (dark + 0.05) >= 4.5, (scheme, colours)
        opened.context.close()


def _luminance(colour: str) -> float:
    """Relative luminance of ``rgb(…)``, as WCAG has it."""
    parts = [int(part) / 255 for part in re.findall(r"\d+", colour)[:3]]
    red, green, blue = (part / 12.92 if part <= 0.03928 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def test_the_numbers_in_the_page_are_those_of_the_profile(pages: dict[str, Path]) -> None:
    found = re.search(r'id="document">(.*?)</script>', pages["ranks"].read_text(encoding="utf-8"))
    assert found is not None
    document = json.loads(found[1])
    assert [run["name"] for run in document["runs"]] == ["this run"]
    (window,) = document["runs"][0]["windows"]
    assert window["global_step_sec"] == pytest.approx(0.024)
    assert window["parts_sec"]["backward"] == pytest.approx(0.012)
