"""Takes pictures for docs/: TensorBoard on the logs of a real run, as a browser shows it.

Needs TensorBoard, and Debian's ``chromium`` and ``chromium-driver``::

    python examples/train_digits.py
    python docs/take_screenshots.py logs
"""

from __future__ import annotations

import argparse
import base64
import json
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

CLOSE_SETTINGS = "[...document.querySelectorAll('button')].find(one => one.innerText.includes('Settings')).click()"

PAGES = {
    "tensorboard-scalars.png": ("?tagFilter=flops_#timeseries", CLOSE_SETTINGS, 1200),
    "tensorboard-text.png": ("#text", "", 1320),
}
"""File, place within TensorBoard, what to click there, and height of the picture."""

BROWSER_FLAGS = [
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--hide-scrollbars"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync", "--no-proxy-server"),
]
BROWSER_FRAME = 143  # of its height, in pixels: the part of the window that is not the page
STARTUP_LIMIT_SEC = 120.0
RENDERING_SEC = 8.0  # the page says nowhere that its charts are drawn

_opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def ask(address: str, body: Any = None) -> Any:
    """What the server at *address* answers, as JSON; with a *body* it is sent there."""
    data = None if body is None else json.dumps(body).encode()
    with _opener.open(
        urllib.request.Request(address, data, {"Content-Type": "application/json"}), timeout=60
    ) as answer:
        return json.load(answer)


def free_port() -> int:
    """A port of this machine that nothing listens on."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


@contextmanager
def serving(command: list[str], *, ready: Callable[[], Any]) -> Iterator[None]:
    """Run *command* until the block is done; the block begins when *ready* answers with something true."""
    process = subprocess.Popen(command)
    try:
        deadline = time.monotonic() + STARTUP_LIMIT_SEC
        while True:
            try:
                if ready():
                    break
            except urllib.error.URLError:
                pass
            if time.monotonic() > deadline or process.poll() is not None:
                raise TimeoutError(f"{command[0]} did not come up")
            time.sleep(0.5)
        yield
    finally:
        process.terminate()
        process.wait(timeout=20)


def take(tensorboard: str, driver: str, folder: Path) -> None:
    """Photograph every page of the server *tensorboard* through the browser that *driver* drives."""
    with tempfile.TemporaryDirectory() as profile:
        options = {"args": [*BROWSER_FLAGS, f"--user-data-dir={profile}"]}
        capabilities = {"alwaysMatch": {"goog:chromeOptions": options}}
        session = f"{driver}/session/{ask(f'{driver}/session', {'capabilities': capabilities})['value']['sessionId']}"
        for name, (place, click, height) in PAGES.items():
            ask(f"{session}/window/rect", {"width": 1500, "height": height + BROWSER_FRAME})
            ask(f"{session}/url", {"url": "about:blank"})  # else only the part behind the # would change
            ask(f"{session}/url", {"url": f"{tensorboard}/{place}"})
            time.sleep(RENDERING_SEC)
            if click:
                ask(f"{session}/execute/sync", {"script": click, "args": []})
                time.sleep(RENDERING_SEC)
            (folder / name).write_bytes(base64.b64decode(ask(f"{session}/screenshot")["value"]))
        _opener.open(urllib.request.Request(session, method="DELETE"), timeout=60).close()


def main() -> None:
    """Start a server and a browser, photograph, stop both."""
    parser = argparse.ArgumentParser(description="Take the pictures of TensorBoard in docs/.")
    parser.add_argument("logs", type=Path)
    parser.add_argument("--to", type=Path, default=Path(__file__).parent / "images")
    parser.add_argument("--driver", default="chromedriver")
    options = parser.parse_args()
    ports = free_port(), free_port()
    tensorboard, driver = (f"http://127.0.0.1:{port}" for port in ports)
    server_command = [
        *(sys.executable, "-m", "tensorboard.main", "--logdir", str(options.logs)),
        *("--host", "127.0.0.1", "--port", str(ports[0]), "--load_fast", "false"),
    ]
    options.to.mkdir(parents=True, exist_ok=True)
    with (
        serving(server_command, ready=lambda: ask(f"{tensorboard}/data/runs")),
        serving([options.driver, f"--port={ports[1]}"], ready=lambda: ask(f"{driver}/status")["value"]["ready"]),
    ):
        take(tensorboard, driver, options.to)


if __name__ == "__main__":
    main()
