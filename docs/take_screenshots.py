"""Takes pictures for docs/: the page and TensorBoard on the logs of a real run, as a browser shows them.

Needs TensorBoard, and the browser of the page's tests (``make page-tools``)::

    python examples/train_digits.py --model conv --augment
    python examples/train_digits.py --model conv --augment --batch-size 64 --log-dir logs_of_64
    python -m docs.take_screenshots logs --compared logs_of_64
"""

from __future__ import annotations

import argparse
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.page.install_tools import browser_environment, browser_here

PAGES = {
    "tensorboard-scalars.png": ("?tagFilter=flops_#timeseries", "Settings", 1200),
    "tensorboard-text.png": ("#text", "", 1320),
}
"""File, place within TensorBoard, the button to press there, and height of the picture."""

TRACE = Path(__file__).parents[1] / "tests" / "data" / "traces" / "resnet50_num_workers_0.pt.trace.json.gz"
"""Of a ResNet-50 on a V100, recorded by another program."""

WIDTH = 1500
FIRST_SCREEN = {"width": 1200, "height": 1050}
WITH_MODULES = {"width": 1200, "height": 1560}
"""The first screen and the icicle of modules below it."""
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"]
STARTUP_LIMIT_SEC = 120.0
RENDERING_MS = 8_000  # TensorBoard says nowhere that its charts are drawn


@contextmanager
def tensorboard(logs: Path) -> Iterator[str]:
    """The address of a TensorBoard on *logs*, which ends with the block."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    address = f"http://127.0.0.1:{port}"
    command = [
        *(sys.executable, "-W", "ignore", "-m", "tensorboard.main", "--logdir", str(logs)),
        *("--host", "127.0.0.1", "--port", str(port), "--load_fast", "false"),
    ]
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with subprocess.Popen(command) as process:
        try:
            deadline = time.monotonic() + STARTUP_LIMIT_SEC
            while True:
                try:
                    opener.open(f"{address}/data/runs", timeout=60).close()
                    break
                except urllib.error.URLError:
                    if time.monotonic() > deadline or process.poll() is not None:
                        raise
                    time.sleep(0.5)
            yield address
        finally:
            process.terminate()


def newest_page(logs: Path) -> Path:
    """The page of the run that was written last."""
    return max(logs.rglob("profile.html"), key=lambda path: path.stat().st_mtime)


def take(browser: Any, logs: Path, folder: Path) -> None:
    """Photograph the first screen of the newest page, and every page of TensorBoard."""
    page = browser.new_page(viewport=FIRST_SCREEN)
    page.goto(newest_page(logs).resolve().as_uri())
    page.locator("main[aria-busy=false] #provenance").wait_for()
    page.screenshot(path=folder / "demo.png")
    page.set_viewport_size(WITH_MODULES)
    page.screenshot(path=folder / "page.png")
    with tensorboard(logs) as address:
        for name, (place, pressed, height) in PAGES.items():
            page = browser.new_page(viewport={"width": WIDTH, "height": height})
            page.goto(f"{address}/{place}")
            page.wait_for_timeout(RENDERING_MS)
            if pressed:
                page.get_by_role("button", name=pressed).first.click()
                page.wait_for_timeout(RENDERING_MS)
            page.screenshot(path=folder / name)
            page.close()
        page = browser.new_page(viewport=FIRST_SCREEN, color_scheme="dark")
        page.goto(f"{address}/#lightning_flops")
        tab = page.frame_locator("iframe").first
        tab.locator("main[aria-busy=false] #provenance").wait_for()
        tab.get_by_role("link", name="Modules", exact=True).click()
        page.wait_for_timeout(RENDERING_MS)
        page.screenshot(path=folder / "page-tensorboard.png")
        page.close()


def take_written(browser: Any, command: list[str], target: Path) -> None:
    """Photograph the first screen of the page that a command of ours writes."""
    with tempfile.TemporaryDirectory() as made:
        written = Path(made) / "page.html"
        whole = [sys.executable, "-m", "lightning_flops", *command, "--html", str(written)]
        subprocess.run(whole, check=True, stdout=subprocess.DEVNULL)
        page = browser.new_page(viewport=FIRST_SCREEN)
        page.goto(written.as_uri())
        page.locator("main[aria-busy=false] #provenance").wait_for()
        page.screenshot(path=target)


def main() -> None:
    """Start a browser, photograph, stop it."""
    from playwright.sync_api import sync_playwright

    parser = argparse.ArgumentParser(description="Take the pictures of the page and of TensorBoard in docs/.")
    parser.add_argument("logs", type=Path)
    parser.add_argument("--compared", type=Path, metavar="LOGS", help="of another run, for the page of two")
    parser.add_argument("--to", type=Path, default=Path(__file__).parent / "images")
    options = parser.parse_args()
    options.to.mkdir(parents=True, exist_ok=True)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=browser_here(), env=browser_environment(), args=FLAGS)
        try:
            take(browser, options.logs, options.to)
            take_written(browser, ["trace", os.path.relpath(TRACE)], options.to / "page-trace.png")
            if options.compared is not None:
                runs = [str(options.logs), str(options.compared)]
                take_written(browser, ["compare", *runs], options.to / "page-compared.png")
        finally:
            browser.close()


if __name__ == "__main__":
    main()
