"""Autograd runs a device's backward on a thread of its own, which numbers its nodes anew."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.ranks import REPOSITORY

#: Where Python's own programs are, such as the ninja that torch builds extensions with.
PATH = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"


needs_a_compiler = pytest.mark.skipif(
    shutil.which(os.environ.get("CXX", "c++")) is None or shutil.which("ninja", path=PATH) is None,
    reason="needs a C++ compiler and ninja",
)


@needs_a_compiler
def test_what_runs_on_a_devices_thread_counts_as_on_a_cpu() -> None:
    program = [sys.executable, "-m", "tests.measure.counting.device_of_host_memory"]
    environment = {**os.environ, "PATH": PATH, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(program, capture_output=True, text=True, env=environment, cwd=REPOSITORY, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    answer = json.loads(done.stdout.splitlines()[-1])
    counts = answer["counts"]
    assert answer["on_its_thread"]
    assert {name: on_device for name, (_, on_device) in counts.items()} == {
        name: on_cpu for name, (on_cpu, _) in counts.items()
    }
    # By hand: 3 rows, 6 to 6 features; two products in a backward; a checkpoint repeats all but what ends it.
    product = 3 * 2 * 3 * 6 * 6
    dense, reentrant = (counts[name][1]["flops"] for name in ("dense", "reentrant"))
    assert (dense["2 forward"], dense["2 backward"], dense["0 backward"]) == (product, 2 * product, 2 * product)
    assert [reentrant[f"1.parts.2 {phase}"] for phase in ("forward", "recompute", "backward")] == [
        product,
        product,
        2 * product,
    ]
