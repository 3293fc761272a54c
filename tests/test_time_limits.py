"""How long a test may take: what pyproject.toml says of all, or what stands at the test."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.forks import REPOSITORY


@pytest.mark.parametrize(("limit_sec", "ended"), [(60, False), (1, True)])
def test_a_test_may_take_as_long_as_it_says_and_no_longer(tmp_path: Path, limit_sec: float, ended: bool) -> None:
    """Nothing interrupts it: faulthandler alone can end it, which ends any other test after two seconds here."""
    (tmp_path / "test_long.py").write_text(
        "import signal\nimport time\nimport pytest\n"
        f"@pytest.mark.timeout({limit_sec})\n"
        "def test_long():\n"
        "    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGALRM])\n"
        f"    time.sleep({60 if ended else 3})\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "pytest_timeout", "-p", "tests.conftest", "-p", "no:cacheprovider",
         "-o", "timeout=1", "-o", "faulthandler_timeout=2", "-o", "faulthandler_exit_on_timeout=true",
         "-c", os.devnull, "--rootdir", str(tmp_path), str(tmp_path)],
        cwd=REPOSITORY,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip
    assert ("1 passed" in done.stdout) != ended, done.stdout + done.stderr
    assert ("Timeout (0:00:02" in done.stderr) == ended
