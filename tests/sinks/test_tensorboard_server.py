"""What a person sees who starts TensorBoard on the logs."""

from __future__ import annotations

import json
import subprocess
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.loggers import TensorBoardLogger

from lightning_flops.sinks.services import Services

STARTUP_LIMIT_SEC = 120.0
# Port 0: the server picks a free one, and says which.
SERVER_FLAGS = ("--host", "127.0.0.1", "--port", "0", "--load_fast", "false", "--reload_interval", "1")
ALIGNED = "fwd flops per GPU:          115.69 M\n  (0): Linear(<64 -> 10>)   81.92 K"


def fetch(address: str) -> Any:
    """The JSON at *address* on this machine, past any proxy."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(address, timeout=10) as answer:
        return json.load(answer)


@pytest.fixture
def address(tmp_path: Path) -> Iterator[str]:
    """Address of a TensorBoard server on the logs of a run that wrote one report."""
    logger = TensorBoardLogger(tmp_path / "logs", name="digits")
    sink = Services([logger])
    sink.write_scalars({"flops_profiler/fwd_flops": 115_687_424.0}, step=32)
    sink.write_text("flops_profiler/profile", f"```\n{ALIGNED}\n```", step=32)
    logger.experiment.close()
    output = tmp_path / "server.txt"
    with output.open("w") as file:
        server = subprocess.Popen(
            [sys.executable, "-m", "tensorboard.main", "--logdir", str(tmp_path / "logs"), *SERVER_FLAGS],
            stdout=file,
            stderr=subprocess.STDOUT,
        )
        try:
            yield _address_when_up(server, output)
        finally:
            server.terminate()
            try:
                server.wait(timeout=20)
            except subprocess.TimeoutExpired:
                server.kill()
                server.wait()


def _address_when_up(server: subprocess.Popen[bytes], output: Path) -> str:
    deadline = time.monotonic() + STARTUP_LIMIT_SEC
    while time.monotonic() < deadline:
        said = output.read_text()
        assert server.poll() is None, f"the server ended by itself: {said}"
        if "http://127.0.0.1:" in said:
            found = "http://127.0.0.1:" + said.split("http://127.0.0.1:")[1].split("/")[0]
            try:
                if fetch(f"{found}/data/runs"):  # it answers before it has read the logs
                    return found
            except urllib.error.URLError:
                pass
        time.sleep(0.2)
    raise AssertionError(f"no server within {STARTUP_LIMIT_SEC:.0f} s: {output.read_text()}")


def test_the_server_shows_the_scalar_and_the_text_aligned(address: str) -> None:
    (run,) = fetch(f"{address}/data/runs")
    query = urllib.parse.urlencode({"run": run, "tag": "flops_profiler/fwd_flops"})
    ((_, step, value),) = fetch(f"{address}/data/plugin/scalars/scalars?{query}")
    assert (step, value) == (32, 115_687_424.0)  # a multiple of 64, so float32 holds it exactly

    query = urllib.parse.urlencode({"run": run, "tag": "flops_profiler/profile/text_summary"})
    (text,) = fetch(f"{address}/data/plugin/text/text?{query}")
    assert text["step"] == 32
    shown = ALIGNED.replace("<", "&lt;").replace(">", "&gt;")
    assert f"<pre><code>{shown}\n</code></pre>" in text["text"]
