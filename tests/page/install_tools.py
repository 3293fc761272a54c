"""Puts node, what ``web/`` is built and tested with, and a browser where the tests of the page find them.

What is missing is installed with Debian's packages, if we are root on a Debian. Nothing here fails: a test that finds
its tool missing skips, and says which::

    python -m tests.page.install_tools
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

WEB = Path(__file__).parents[2] / "web"
INSTALLED = WEB / "node_modules" / ".package-lock.json"
"""Written by npm last, when everything else is there."""

BROWSERS = ("chromium-headless-shell", "chromium")
"""Each is a command and its package. A page takes the first a third of the time that it takes the second, which has
windows and all that belongs to them; older Debians have the second only."""


def browser_here() -> str | None:
    """The first of the browsers that is here."""
    return next(filter(None, map(shutil.which, BROWSERS)), None)


def node_is_ready() -> bool:
    """Whether ``web/`` can be built: node is here, and what package-lock.json names is installed."""
    if shutil.which("node") is None or shutil.which("npm") is None or not INSTALLED.is_file():
        return False
    return INSTALLED.stat().st_mtime >= (WEB / "package-lock.json").stat().st_mtime


def _run(*command: str, folder: Path | None = None) -> bool:
    try:
        return subprocess.run(command, cwd=folder, timeout=600, check=False).returncode == 0
    except (OSError, subprocess.TimeoutExpired) as error:
        sys.stderr.write(f"{' '.join(command)}: {error}\n")
        return False


def main() -> None:
    """Install what is missing and may be installed."""
    wanted = [package for command, package in {"node": "nodejs", "npm": "npm"}.items() if not shutil.which(command)]
    if (wanted or not browser_here()) and os.geteuid() == 0 and shutil.which("apt-get"):
        install = ("apt-get", "install", "--yes", "--quiet=2", "--no-install-recommends")
        _run("apt-get", "update", "--quiet=2")
        if wanted:
            _run(*install, *wanted)
        for browser in BROWSERS:
            if not browser_here():
                _run(*install, browser)
    if shutil.which("npm") and not node_is_ready() and _run("npm", "ci", "--no-audit", "--no-fund", folder=WEB):
        INSTALLED.touch()
    if not (browser_here() and node_is_ready()):
        sys.stderr.write("node or chromium is not here; the tests of the page that need them are skipped and counted\n")


if __name__ == "__main__":
    main()
