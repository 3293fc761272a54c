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

PACKAGES = {"node": "nodejs", "npm": "npm", "chromium": "chromium"}
LIMIT_SEC = 600.0


def missing() -> list[str]:
    """Commands that are not here."""
    return [command for command in PACKAGES if shutil.which(command) is None]


def node_is_ready() -> bool:
    """Whether ``web/`` can be built: node is here, and what package-lock.json names is installed."""
    if shutil.which("node") is None or shutil.which("npm") is None or not INSTALLED.is_file():
        return False
    return INSTALLED.stat().st_mtime >= (WEB / "package-lock.json").stat().st_mtime


def _run(*command: str, folder: Path | None = None) -> bool:
    try:
        return subprocess.run(command, cwd=folder, timeout=LIMIT_SEC, check=False).returncode == 0
    except (OSError, subprocess.TimeoutExpired) as error:
        sys.stderr.write(f"{' '.join(command)}: {error}\n")
        return False


def main() -> None:
    """Install what is missing and may be installed."""
    wanted = missing()
    if wanted and hasattr(os, "geteuid") and os.geteuid() == 0 and shutil.which("apt-get"):
        packages = [PACKAGES[command] for command in wanted]
        _run("apt-get", "update", "--quiet=2")
        _run("apt-get", "install", "--yes", "--quiet=2", "--no-install-recommends", *packages)
    if shutil.which("npm") and not node_is_ready() and _run("npm", "ci", "--no-audit", "--no-fund", folder=WEB):
        INSTALLED.touch()
    if left := missing():
        sys.stderr.write(f"not here: {', '.join(left)}; the tests of the page that need them are skipped and counted\n")


if __name__ == "__main__":
    main()
