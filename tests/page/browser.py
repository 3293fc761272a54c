"""A browser for the tests of the page: a Chromium, which may reach nothing and must complain of nothing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.page.install_tools import browser_environment, browser_here

CHROMIUM = browser_here()
FLAGS = [
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"),
    *("--disable-component-update", "--disable-sync"),
]

needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="chromium is not here (python -m tests.page.install_tools)")


@contextmanager
def browser() -> Iterator[Any]:
    """A browser with a profile folder of its own, which goes with it."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS, env=browser_environment())
        try:
            yield started
        finally:
            started.close()


class Watched:
    """A page in a browser, with everything that it complained of or asked the network for."""

    def __init__(self, started: Any, *, own: str, **context: Any) -> None:
        self.complaints: list[str] = []
        self.requests: list[str] = []
        self.context = started.new_context(**{"viewport": {"width": 1440, "height": 1000}, **context})
        self.page = self.context.new_page()
        self.page.set_default_timeout(20_000)
        self.page.on("console", lambda said: self.complaints.extend([said.text] * (said.type in ("error", "warning"))))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("request", lambda asked: self.requests.extend([asked.url] * (not asked.url.startswith(own))))

    def assert_quiet(self) -> None:
        """Nothing was complained of, and the network was left alone."""
        assert self.complaints == []
        assert self.requests == []


class Opened(Watched):
    """A page of ours in a browser, opened from its file and shown.

    Args:
        started: the browser.
        path: the file.
        place: what its address ends with.
        context: of the browser, such as the size of the screen.
    """

    def __init__(self, started: Any, path: Path, place: str = "", **context: Any) -> None:
        super().__init__(started, own="file://", **context)
        self.page.goto(f"{path.as_uri()}{place}")
        self.wait_until_whole()

    def wait_until_whole(self) -> None:
        """Until all of it is drawn."""
        self.page.locator("main[aria-busy=false] #summary").wait_for()

    def draw(self) -> None:
        """Wait until what was asked for last is drawn, and its events have been heard."""
        self.page.evaluate("new Promise((done) => requestAnimationFrame(() => setTimeout(done)))")

    def box_of(self, one: Any) -> dict[str, float]:
        """Where *one* is after it was scrolled into view. A tip goes when the page scrolls, so that is over by then."""
        one.scroll_into_view_if_needed()
        self.draw()
        box = one.bounding_box()
        assert box is not None
        return dict(box)

    def texts(self, selector: str) -> list[str]:
        """Words of every such element, as they stand when what was asked for last is drawn."""
        self.draw()
        return [" ".join(text.split()) for text in self.page.locator(selector).all_text_contents()]
