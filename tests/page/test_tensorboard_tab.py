"""The tab FLOPs in a real TensorBoard: what runs wrote into event files, in a browser and over HTTP."""

from __future__ import annotations

import contextlib
import gzip
import json
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import msgspec
import pytest

from lightning_flops.config import OWN_FOLDER, ProfilerConfig
from lightning_flops.report.html_page import packed, profile_view, window_figures
from lightning_flops.run.output import RunFiles
from lightning_flops.schema.profile import Profile
from lightning_flops.sinks.services import event_file_name, tab_events
from tests.page import samples
from tests.page.browser import Watched, browser, needs_browser
from tests.pages import REPOSITORY

ADDRESS = "data/plugin/lightning_flops"


@pytest.fixture(scope="module")
def logs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two runs: one with three windows and a predict loop, one with markup as names and with broken windows."""
    folder = tmp_path_factory.mktemp("logs")
    first, second = (RunFiles(ProfilerConfig(), partial(str, folder / f"version_{run}")) for run in (0, 1))
    for step in (110, 10, 60):
        first.write_tab(samples.decoder(step), prefix="flops_profiler")
    first.write_tab(samples.many_ranks(), prefix="flops_profiler/predict")
    second.write_tab(replace(samples.hostile(), profile_step=7), prefix="flops_profiler")
    good = samples.decoder(9)
    figures = msgspec.json.encode(window_figures(good))
    later = good.to_json().replace('"schema_version": ', '"schema_version": 9')
    nan = figures.replace(b'"mfu":0', b'"mfu":NaN,"was":0')
    broken = [
        tab_events(tag="flops_profiler/window/9", figures=figures, packed=packed(good)[:-20], step=9),
        tab_events(tag="flops_profiler/window/8", figures=b"[" * 100_000, packed=b"", step=8),
        tab_events(tag="flops_profiler/window/6", figures=nan, packed=b"", step=6),
        tab_events(tag="flops_profiler/window/5", figures=b'{"profile_step": 5, "parts_sec": {}}', packed=b"", step=5),
        tab_events(tag="flops_profiler/window/4", figures=figures, packed=gzip.compress(later.encode()), step=4),
    ]
    for number, events in enumerate(broken, start=2):
        (folder / "version_1" / OWN_FOLDER / event_file_name(number)).write_bytes(events)
    return folder


@pytest.fixture(scope="module")
def address(logs: Path) -> Iterator[str]:
    """A TensorBoard in a process of its own, which finds our tab by the entry point that is installed."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-W", "ignore", "-m", "tensorboard.main", "--logdir", str(logs), "--port", str(port)]
    options = ("--host", "127.0.0.1", "--load_fast=false", "--reload_interval=1")
    with subprocess.Popen([*command, *options], stderr=subprocess.DEVNULL, cwd=REPOSITORY) as server:
        try:
            yield f"http://127.0.0.1:{port}/"
        finally:
            server.terminate()


def ask(address: str, path: str) -> tuple[int, str]:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(f"{address}{ADDRESS}/{path}", timeout=30) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


@pytest.fixture(scope="module")
def document(address: str) -> dict[str, Any]:
    """What the server lists of its runs, once it has read the files."""
    found: dict[str, Any] = {"runs": []}
    for _ in range(600):
        with contextlib.suppress(urllib.error.URLError):  # it is not up yet
            found = json.loads(ask(address, "runs")[1])
        if sum(len(run["windows"]) for run in found["runs"]) == 7:
            return found
        time.sleep(0.1)
    raise AssertionError(found)


def test_the_server_lists_runs_with_their_windows_in_order(document: dict[str, Any]) -> None:
    listed = {run["name"]: [one["profile_step"] for one in run["windows"]] for run in document["runs"]}
    assert listed == {"version_0": [10, 60, 110], "version_0 predict": [3], "version_1": [7, 9, 9]}
    assert [len(run["problems"]) for run in document["runs"]] == [0, 0, 3]
    assert [one.partition(": its figures cannot be read: ")[0] for one in document["runs"][2]["problems"]] == [
        f"flops_profiler/window/{step}" for step in (8, 6, 5)
    ]


def test_the_server_gives_the_view_of_a_profile(address: str, document: dict[str, Any]) -> None:
    status, text = ask(address, f"profile?{document['runs'][0]['windows'][1]['address']}")
    assert status == 200
    view = profile_view(Profile.from_json(samples.decoder(60).to_json()))
    assert text.encode() == gzip.decompress(packed(view))


@pytest.mark.parametrize(
    ("place", "status", "reason"),
    [
        ({"run": "version_0/lightning_flops", "tag": "flops_profiler/window/11"}, 404, "no such window"),
        ({"run": "version_0", "tag": "flops_profiler/window/10"}, 404, "no such window"),
        ({}, 404, "no such window"),
        ({"run": "version_1/lightning_flops", "tag": "flops_profiler/window/9"}, 422, "ended before the end"),
        ({"run": "version_1/lightning_flops", "tag": "flops_profiler/window/4"}, 422, "written by a newer"),
    ],
)
def test_the_server_says_what_it_cannot_give(
    place: dict[str, str], status: int, reason: str, address: str, document: dict[str, Any]
) -> None:
    answered, text = ask(address, f"profile?{urlencode(place)}")
    assert answered == status and reason in text


@needs_browser
def test_the_tab_shows_the_page_of_the_runs(address: str, document: dict[str, Any]) -> None:
    with browser() as started:
        watched = Watched(started, own=address)
        page = watched.page
        page.goto(f"{address}#lightning_flops")
        frame = page.frame_locator("iframe").first
        frame.locator("main[aria-busy=false] #summary").wait_for()
        assert page.get_by_text("FLOPs", exact=True).first.is_visible()
        assert "step 110 counted" in frame.locator(".where").inner_text()
        frame.get_by_label("Step", exact=True).select_option(label="60")
        frame.locator(".where", has_text="step 60 counted").wait_for()
        frame.locator(".icicle svg").press("ArrowDown")
        frame.locator(".icicle svg").press("Enter")
        frame.locator(".crumbs b", has_text="blocks").wait_for()
        frame.locator(".crumbs a").first.click()
        frame.locator(".crumbs b", has_text="GPT").wait_for()
        frame.get_by_label("Run", exact=True).select_option("version_0 predict")
        frame.get_by_role("heading", name="All ranks", exact=True).wait_for()
        frame.get_by_label("Run", exact=True).select_option("version_1")  # its last window is of a newer version
        frame.locator("[role=alert]", has_text="written by a newer").wait_for()
        frame.get_by_label("Step", exact=True).select_option(label="7")
        frame.locator("main[aria-busy=false] h2", has_text="Not counted").wait_for()
        assert page.title() != "owned"
        assert frame.locator("main img, main script").count() == 0
        ours = [said for said in watched.complaints if "lightning_flops" in said and "422" not in said]
        assert ours == [] and watched.requests == []
        watched.context.close()
