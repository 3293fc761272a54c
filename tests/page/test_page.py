"""The page in a browser, opened from disk: what it shows, clicks, keys, sorting and search, and that it stays alone."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from lightning_flops import compare_profiles
from lightning_flops.report.html_page import render_latest, render_page, render_traces_page
from lightning_flops.schema.profile import ProfiledRun
from tests.page import samples
from tests.page.browser import Opened, browser, needs_browser
from tests.report import compared

pytestmark = needs_browser


@pytest.fixture(scope="module")
def started() -> Iterator[Any]:
    with browser() as made:
        yield made


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    windows = tuple(samples.decoder(step) for step in (10, 60, 110))
    other = ProfiledRun(name="version_1", windows=(samples.many_ranks(),), problems=("profile-2.json: cut off",))
    latest: deque[Any] = deque(maxlen=3)
    evil = ProfiledRun(name=samples.HOSTILE[0], windows=(samples.hostile(),), problems=(samples.HOSTILE[1],))
    made = {
        "decoder": render_page([ProfiledRun(name="version_0", windows=windows), other]),
        "ranks": samples.many_ranks().to_html(),
        "hostile": render_page([evil]),
        "wide": samples.of_modules(10_000).to_html(),
        "later": [render_latest(samples.decoder(step), latest) for step in (10, 60, 110, 160)][-1],
        "compared": compare_profiles(compared.run(), compared.wider(data_wait_ms=3.5)).to_html(),
        "trace": render_traces_page(samples.traced()),
    }
    folder = tmp_path_factory.mktemp("pages")
    for name, text in made.items():
        (folder / f"{name}.html").write_text(text, encoding="utf-8")
    return {name: folder / f"{name}.html" for name in made}


@pytest.fixture
def opened(started: Any, pages: dict[str, Path]) -> Iterator[Callable[..., Opened]]:
    """Opens a page by its name, at a place; none of those that were opened may complain of anything."""
    made: list[Opened] = []

    def open_page(name: str, place: str = "", **context: Any) -> Opened:
        made.append(Opened(started, pages[name], place, **context))
        return made[-1]

    yield open_page
    for one in made:
        one.assert_quiet()
        one.context.close()


@pytest.fixture
def decoder(opened: Callable[..., Opened]) -> Opened:
    return opened("decoder", "#window=0")


def _cells(opened: Opened, section: str, *, table: int = 0) -> list[list[str]]:
    rows = opened.page.locator(f"#{section} table").nth(table).locator("tbody tr").all()
    return [row.locator("td").all_inner_texts() for row in rows]


def test_the_page_shows_the_words_and_tables_of_the_text_report(decoder: Opened) -> None:
    assert decoder.texts("h1") == ["GPT"] and "step 10 counted" in decoder.texts(".where")[0]
    assert (
        "A typical step: 100 ms; mean of 20: 100 ms, 80 samples/s, 40,000 tokens/s over the wall clock."
        in decoder.texts("#summary")[0]
    )
    text = str(samples.decoder(10))
    for section in ("time-of-a-typical-global-step", "step-time-breakdown", "top-modules-by-self-time"):
        for row in _cells(decoder, section)[:10]:
            assert re.search(r"\s+".join(re.escape(cell) for cell in row if cell), text), row


def test_a_column_sorts_both_ways_by_its_numbers(decoder: Opened) -> None:
    mean = decoder.page.locator("#time-of-a-typical-global-step thead th").nth(1)
    for order in ("descending", "ascending"):
        mean.locator("button").click()
        assert mean.get_attribute("aria-sort") == order
        values = [float(row[1]) for row in _cells(decoder, "time-of-a-typical-global-step")]
        assert values == sorted(values, reverse=order == "descending") and len(values) == 7


def test_a_search_finds_rows_and_more_are_shown_when_asked_for(decoder: Opened) -> None:
    modules = decoder.page.locator("#modules .table")
    assert modules.locator("tbody tr").count() == 12
    modules.locator("button.more").click()
    assert modules.locator("tbody tr").count() == 100
    modules.locator("input").fill("mlp.up")
    assert modules.locator(".search .note").inner_text() == "12 of 100"
    assert {row[0].rpartition(".")[2] for row in _cells(decoder, "modules")} == {"up"}


def test_the_icicle_zooms_by_click_keys_and_address(decoder: Opened) -> None:
    page, icicle = decoder.page, decoder.page.locator(".icicle svg")
    box = decoder.box_of(icicle)
    page.mouse.move(box["x"] + box["width"] * 0.4, box["y"] + 130)  # the fourth row
    assert decoder.texts("#tip .tip-first") == ["blocks.7.attn (SelfAttention)"]
    page.mouse.click(box["x"] + box["width"] * 0.4, box["y"] + 45)  # the second row is that of the blocks
    assert decoder.texts(".crumbs")[0] == "GPT › blocks" and "module=blocks" in page.url
    icicle.focus()
    page.keyboard.press("ArrowDown")  # the child that takes most time
    assert decoder.texts(".looked h3") == ["blocks.11"]
    page.keyboard.press("ArrowLeft")
    page.keyboard.press("Enter")
    assert decoder.texts(".crumbs")[0] == "GPT › blocks › 10"
    page.keyboard.press("Backspace")
    page.locator(".crumbs a").first.click()
    assert decoder.texts(".crumbs")[0] == "GPT"
    page.get_by_role("button", name="Parameters", exact=True).click()
    assert page.url.endswith("size=params")


def test_a_place_in_the_address_is_opened(opened: Callable[..., Opened]) -> None:
    found = opened("decoder", f"#module={samples.SLOWED}&size=flops&window=1")
    assert found.texts(".crumbs")[0] == "GPT › blocks › 11 › mlp › up"
    assert "step 60 counted" in found.texts(".where")[0]


def test_runs_and_windows_can_be_chosen_and_what_is_wrong_with_one_is_shown(decoder: Opened) -> None:
    page = decoder.page
    assert decoder.texts(".callout") == ["version_1: profile-2.json: cut off"]
    page.get_by_label("Step", exact=True).select_option(label="60")
    page.locator(".where", has_text="step 60 counted").wait_for()
    page.get_by_label("Run", exact=True).select_option("version_1")
    page.get_by_role("heading", name="All ranks", exact=True).wait_for()
    assert "STRAGGLER" in decoder.texts("#all-ranks")[0]


def test_the_page_of_a_run_shows_its_latest_windows_the_last_one_first(opened: Callable[..., Opened]) -> None:
    found = opened("later")
    assert "step 160 counted" in found.texts(".where")[0]
    assert found.texts("select[aria-label=Step] option") == ["60", "110", "160"]


def test_steps_are_a_strip_that_goes_by_keys(decoder: Opened) -> None:
    strip = decoder.page.locator("#time-of-a-typical-global-step .strip svg")
    strip.focus()
    for _ in range(8):
        decoder.page.keyboard.press("ArrowRight")
    assert decoder.texts("#time-of-a-typical-global-step .readout")[0].startswith("step 20: 152 ms · data wait 55")


def test_a_trace_and_a_comparison_are_pages_of_the_same_parts(opened: Callable[..., Opened]) -> None:
    found = opened("compared")
    # fc1 is twice as wide, and each batch comes 1.5 ms later: 27.5 ms instead of 22.
    assert "One global step takes 27.5 ms in B and 22 ms in A" in found.texts("#summary")[0]
    assert "One global step" not in found.texts("#two-runs-compared")[0]
    assert _cells(found, "by-module")[0][:4] == ["fc1", "5.00", "9.00", "4.00"]
    found = opened("trace")
    assert found.page.locator("#kernels, #operators, #memory").count() == 3
    assert found.page.locator(".roofline circle").count() > 0
    label = found.page.locator(".curve svg").get_attribute("aria-label") or ""
    assert label.startswith("Memory over time on device 0. Peak 6 GB")
    assert found.texts(".curve .mark") == ["peak 6 GB, in forward"]
    # The phases of the step lie below the curve.
    assert "forward" in found.texts(".curve rect.phase title")


def test_names_are_text_and_never_markup(opened: Callable[..., Opened]) -> None:
    page = opened("hostile").page
    page.locator("#modules .table input").fill("<img")
    assert page.title() == "FLOPs profile"
    assert page.locator("main img, main svg[onload], main script, [onerror]").count() == 0
    assert "a\\u2028b\\u202ec" in page.locator("main").inner_text()


def test_the_policy_stops_a_script_of_someone_else(started: Any, pages: dict[str, Path], tmp_path: Path) -> None:
    text = pages["ranks"].read_text(encoding="utf-8")
    (tmp_path / "changed.html").write_text(
        text.replace("</body>", "<script>document.title='owned'</script><img src='http://127.0.0.1:9/x'></body>")
    )
    opened = Opened(started, tmp_path / "changed.html")
    assert opened.page.title() != "owned"
    assert len(opened.complaints) == 2 and all("Content Security Policy" in said for said in opened.complaints)
    opened.context.close()


def test_ten_thousand_modules_are_few_elements(opened: Callable[..., Opened]) -> None:
    found = opened("wide")
    assert found.page.evaluate("document.querySelectorAll('*').length") < 2_500
    assert found.page.locator(".icicle path").count() < 20
    assert "Show 200 more of 10,000" in found.texts("#modules button.more")


@pytest.mark.parametrize("width", [390, 820, 1440])
@pytest.mark.parametrize("name", ["decoder", "hostile", "trace"])
def test_nothing_is_wider_than_the_screen(name: str, width: int, opened: Callable[..., Opened]) -> None:
    found = opened(name, viewport={"width": width, "height": 900})
    assert found.page.evaluate("document.documentElement.scrollWidth") <= width
    values = found.page.evaluate("Array.from(document.querySelectorAll('.figures dd'), (one) => one.clientWidth)")
    assert min(values) > width / 3  # and not one character a line


def test_light_and_dark_follow_the_system_and_the_reader(opened: Callable[..., Opened]) -> None:
    grounds = []
    for scheme, other in (("light", "dark"), ("dark", "light")):
        found = opened("decoder", color_scheme=scheme)
        grounds.append(found.page.evaluate("getComputedStyle(document.body).backgroundColor"))
        found.page.get_by_label("Colours").select_option(other)
        found.draw()
        grounds.append(found.page.evaluate("getComputedStyle(document.body).backgroundColor"))
    assert grounds[0] == grounds[3] != grounds[1] == grounds[2]


def test_every_picture_has_words(decoder: Opened) -> None:
    for picture in decoder.page.locator("main svg, main [role=img]").all():
        assert picture.get_attribute("aria-label")
