"""What a measurement was taken on, in words: the processor, the versions, the code."""

from __future__ import annotations

import os
import platform
import re
import subprocess
from collections.abc import Sequence
from datetime import date
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
MEASURED_FOLDERS = ("lightning_flops", "benchmarks", "tests/corpus", "constraints.txt", "pyproject.toml")
"""What a result depends on; a change in it that is not committed is reported with the result."""


def machine_in_words() -> str:
    """Processor, number of cores that this process may use, and operating system; no host name."""
    described = Path("/proc/cpuinfo")
    named = re.findall(r"^model name\s*:\s*(.+)", described.read_text(), re.MULTILINE) if described.exists() else []
    model = next(iter(named), platform.processor() or platform.machine())
    return f"{model} ({platform.machine()}), {usable_cores()} cores, {platform.system()}"


def usable_cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def versions(packages: Sequence[str]) -> dict[str, str]:
    """The installed version of each package, ``not installed`` where there is none, and Python's."""
    found = {"python": platform.python_version()}
    for package in packages:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = "not installed"
    return found


def code_in_words() -> str:
    """The commit that was measured, and whether files that the result depends on differed from it."""
    try:
        commit = _git("rev-parse", "--short=12", "HEAD")
        changed = _git("status", "--porcelain", "--", *MEASURED_FOLDERS)
    except (OSError, subprocess.CalledProcessError):
        return "unknown commit"
    # The results themselves are written after the run, so they never count as a change.
    real = [line for line in changed.splitlines() if "benchmarks/results/" not in line]
    return f"commit {commit}" + (f" with {len(real)} uncommitted changes" if real else "")


def ran_in_words(packages: Sequence[str], *, code: str = "") -> str:
    """When, on which code and machine, and with which versions something ran: a line of a page."""
    found = ", ".join(f"{name} {version}" for name, version in versions(packages).items())
    load = f"up to {os.getloadavg()[0]:.1f} processes were running or waiting on it"
    return f"*{date.today()}, {code or code_in_words()}. {machine_in_words()}; {load}. {found}.*"


ONE_THREAD = {
    **dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "TORCHINDUCTOR_COMPILE_THREADS", "HF_HUB_OFFLINE"), "1"),
    **{"TOKENIZERS_PARALLELISM": "false", "DS_ACCELERATOR": "cpu", "DS_BUILD_OPS": "0"},
    # Large blocks that are mapped and unmapped at every step cost more, and less evenly, than a small counter does.
    **dict.fromkeys(("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_"), "4294967296"),
}
"""Environment under which everything computes on one thread and memory is not handed back between steps."""


def _git(*arguments: str) -> str:
    command = ["git", *arguments]
    return subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True, timeout=30).stdout.strip()
