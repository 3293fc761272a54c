"""The tab FLOPs in a real TensorBoard: what the sinks wrote into event files, in a browser and over HTTP."""

from __future__ import annotations

import contextlib
import importlib
import json
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlencode

import pytest

from lightning_flops.report.scalars import profile_scalars, scalar_charts
from lightning_flops.schema.profile import Profile
from lightning_flops.session.output import own_pages, tab_window
from lightning_flops.sinks.loggers import LoggersSink
from lightning_flops.sinks.tensorboard_tab import PLUGIN, TabWindow
from lightning_flops.sinks.writers import TensorBoardFiles, WritersSink
from tests.page import samples
from tests.page.browser import Watched, browser, needs_browser
from tests.test_packaging import PROJECT, REPOSITORY, loaded_by

ADDRESS = "data/plugin/lightning_flops"
PROFILES = "flops_profiler"
FOUND = """import sys
from tensorboard import default
for plugin in default.get_dynamic_plugins():
    if plugin.plugin_name == sys.argv[1]:
        print(f"{plugin.__module__}.{plugin.__qualname__}")
"""


@pytest.fixture(scope="module")
def logs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two runs: one with three windows and a predict loop, one with markup as names and with broken windows."""
    writer_of = importlib.import_module("torch.utils.tensorboard").SummaryWriter
    folder = tmp_path_factory.mktemp("logs")
    first, second = writer_of(str(folder / "version_0")), TensorBoardFiles(str(folder / "version_1"))
    loggers = LoggersSink([SimpleNamespace(experiment=first)])
    for step in (110, 10, 60):
        loggers.write_record(tab_window(samples.decoder(step), prefix="flops_profiler"), step=step)
    for step in (10, 60):
        loggers.write_record(own_pages(samples.decoder(step), prefix=PROFILES, charts_of="flops_profiler"), step=step)
        for tag, value in profile_scalars(samples.decoder(step), prefix=PROFILES).items():
            first.add_scalar(tag, value, step)
    loggers.write_record(tab_window(samples.many_ranks(), prefix="flops_profiler/predict"), step=1)
    writers = WritersSink([second])
    hostile = replace(samples.hostile(), profile_step=7)
    writers.write_record(tab_window(hostile, prefix="flops_profiler"), step=7)
    good = tab_window(samples.decoder(9), prefix="flops_profiler")
    writers.write_record(replace(good, packed=good.packed[:-20]), step=9)
    writers.write_record(TabWindow(tag="flops_profiler/window/8", figures=b"[", packed=b""), step=8)
    first.close()
    writers.close()
    return folder


@pytest.fixture(scope="module")
def address(logs: Path) -> Iterator[str]:
    """A TensorBoard with its own pages and ours, in a process of its own."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-W", "ignore", "-m", "tests.page.serve_tensorboard", str(logs), str(port)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.DEVNULL, cwd=REPOSITORY) as server:
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
    """What the server tells of its runs, once it has read the files."""
    found: dict[str, Any] = {"runs": []}
    for _ in range(600):
        with contextlib.suppress(urllib.error.URLError):  # it is not up yet
            found = json.loads(ask(address, "runs")[1])
        if sum(len(run["windows"]) for run in found["runs"]) == 6:
            return found
        time.sleep(0.1)
    raise AssertionError(found)


def test_the_server_lists_runs_with_their_windows_in_order(document: dict[str, Any]) -> None:
    listed = {run["name"]: [one["profile_step"] for one in run["windows"]] for run in document["runs"]}
    assert listed == {"version_0": [10, 60, 110], "version_0 predict": [3], "version_1": [7, 9]}
    assert [run["problems"] for run in document["runs"]] == [
        [],
        [],
        ["flops_profiler/window/8: its figures cannot be read"],
    ]


def test_the_server_gives_a_profile_as_it_was_written(address: str, document: dict[str, Any]) -> None:
    status, text = ask(address, f"profile?{document['runs'][0]['windows'][1]['address']}")
    assert status == 200
    assert Profile.from_json(text) == Profile.from_json(samples.decoder(60).to_json())


@pytest.mark.parametrize(
    ("place", "status", "reason"),
    [
        ({"run": "version_0", "tag": "flops_profiler/window/11"}, 404, "no such window"),
        ({"run": "../version_0", "tag": "flops_profiler/window/10"}, 404, "no such window"),
        ({}, 404, "no such window"),
        ({"run": "version_1", "tag": "flops_profiler/window/9"}, 422, "cut off"),
    ],
)
def test_the_server_says_what_it_cannot_give(
    place: dict[str, str], status: int, reason: str, address: str, document: dict[str, Any]
) -> None:
    answered, text = ask(address, f"profile?{urlencode(place)}")
    assert answered == status and reason in text


def test_other_peoples_writers_and_other_loggers_are_left_alone() -> None:
    class SummaryWriter:
        def add_summary(self, *arguments: Any) -> None:
            raise AssertionError("written to")

    foreign = SummaryWriter()
    window = TabWindow(tag="a", figures=b"{}", packed=b"")
    LoggersSink([SimpleNamespace(experiment=foreign), SimpleNamespace()]).write_record(window, step=1)
    WritersSink([foreign, print]).write_record(window, step=1)


def test_tensorboard_is_told_of_the_tab() -> None:
    assert PROJECT["entry-points"]["tensorboard_plugins"] == {
        "lightning_flops": "lightning_flops.tensorboard:FlopsPlugin"
    }


def test_tensorboard_finds_the_tab_that_is_installed() -> None:
    found = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", FOUND, PLUGIN],
        cwd=REPOSITORY,
        check=True,
        capture_output=True,
        text=True,
    )
    assert found.stdout.split() == ["lightning_flops.tensorboard.FlopsPlugin"]


def test_the_tab_loads_neither_torch_nor_a_framework() -> None:
    loaded = loaded_by("import lightning_flops.tensorboard")
    assert loaded.isdisjoint({"torch", "lightning", "pytorch_lightning", "deepspeed", "transformers"})


@needs_browser
def test_the_tab_shows_the_page_of_the_runs(address: str, document: dict[str, Any]) -> None:
    with browser() as started:
        watched = Watched(started, own=address)
        page = watched.page
        page.goto(f"{address}#lightning_flops")
        frame = page.frame_locator("iframe").first
        frame.locator("main[aria-busy=false] #provenance").wait_for()
        assert page.get_by_text("FLOPs", exact=True).first.is_visible()
        assert "step 110 counted" in frame.locator(".where").inner_text()
        frame.get_by_label("Step", exact=True).select_option(label="60")
        frame.locator(".where", has_text="step 60 counted").wait_for()
        frame.locator("#modules .grid tbody a", has_text="blocks").first.click()
        frame.locator(".crumbs b", has_text="blocks").wait_for()
        frame.locator(".crumbs a").first.click()
        frame.locator(".crumbs b", has_text="GPT").wait_for()
        frame.get_by_label("Run", exact=True).select_option("version_0 predict")
        frame.get_by_role("heading", name="Ranks", exact=True).wait_for()
        frame.get_by_label("Run", exact=True).select_option("version_1")  # the last window of this run is cut off
        frame.locator("[role=alert]", has_text="cut off").wait_for()
        frame.get_by_label("Step", exact=True).select_option(label="7")
        frame.locator("main[aria-busy=false] h2", has_text="Modules").wait_for()
        assert page.title() != "owned"
        assert frame.locator("main img, main script").count() == 0
        ours = [said for said in watched.complaints if "lightning_flops" in said and "422" not in said]
        assert ours == [] and watched.requests == []
        watched.context.close()


@needs_browser
def test_tensorboards_own_pages_show_the_pictures_and_the_charts(address: str, document: dict[str, Any]) -> None:
    with browser() as started:
        watched = Watched(started, own=address)
        page = watched.page
        page.goto(f"{address}#images")
        pictures = page.locator("tf-image-loader img")
        pictures.nth(1).wait_for()
        assert page.get_by_text("flops_profiler/step", exact=True).is_visible()
        assert page.get_by_text("flops_profiler/modules", exact=True).is_visible()
        widths = [one.evaluate("one => one.decode().then(() => one.naturalWidth)") for one in pictures.all()]
        assert widths == [720, 720]
        page = watched.context.new_page()
        page.set_default_timeout(90_000)  # TensorBoard draws a dozen charts at once
        page.goto(f"{address}#custom_scalars")
        page.get_by_text("Seconds of a step", exact=True).wait_for()
        for group in scalar_charts():
            page.get_by_text(group, exact=True).wait_for(state="attached")
        # The line of each of its tags is there.
        page.get_by_text(f"{PROFILES}/global_step_sec (version_0)").wait_for(state="attached")
        page.get_by_text(f"{PROFILES}/bwd_latency_sec (version_0)").wait_for(state="attached")
        assert watched.requests == []
        watched.context.close()
