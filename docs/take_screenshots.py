"""Takes the README's pictures: TensorBoard on the logs of a real run, as a browser shows it.

Needs Debian's ``chromium`` (or a path to another one) and TensorBoard::

    python examples/train_digits.py
    python docs/take_screenshots.py logs
"""

from __future__ import annotations

import argparse
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path

PAGES = {
    "tensorboard-scalars.png": ("#scalars&tagFilter=flops_(profiler|monitor)&_smoothingWeight=0", 1400, 1000),
    "tensorboard-text.png": ("#text", 1400, 1250),
}
"""File, place within TensorBoard, width and height of the window."""


def wait_for(address: str, *, limit_sec: float = 120.0) -> None:
    """Return once the server at *address* answers."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    deadline = time.monotonic() + limit_sec
    while True:
        try:
            with opener.open(f"{address}/data/runs", timeout=10) as answer:
                if answer.read() != b"[]":
                    return
        except urllib.error.URLError:
            pass
        if time.monotonic() > deadline:
            raise TimeoutError(f"no TensorBoard at {address} within {limit_sec:.0f} s")
        time.sleep(0.5)


def main() -> None:
    """Start a server, photograph its pages, stop it."""
    parser = argparse.ArgumentParser(description="Take the README's pictures of TensorBoard.")
    parser.add_argument("logs", type=Path)
    parser.add_argument("--to", type=Path, default=Path(__file__).parent / "images")
    parser.add_argument("--browser", default="chromium")
    options = parser.parse_args()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    address = f"http://127.0.0.1:{port}"
    server = subprocess.Popen(
        [sys.executable, "-m", "tensorboard.main", "--logdir", str(options.logs), "--host", "127.0.0.1"]
        + ["--port", str(port), "--load_fast", "false"],  # noqa: RUF005 - a line for each pair of flags
    )
    try:
        wait_for(address)
        options.to.mkdir(parents=True, exist_ok=True)
        for name, (place, width, height) in PAGES.items():
            with tempfile.TemporaryDirectory() as profile:
                subprocess.run(
                    [
                        options.browser,
                        *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
                        *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
                        *("--hide-scrollbars", "--virtual-time-budget=60000", f"--user-data-dir={profile}"),
                        *(f"--window-size={width},{height}", f"--screenshot={options.to / name}"),
                        f"{address}/{place}",
                    ],
                    check=True,
                    timeout=180,
                )
            print(options.to / name)
    finally:
        server.terminate()
        server.wait(timeout=20)


if __name__ == "__main__":
    main()
