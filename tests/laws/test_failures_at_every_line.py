"""An error of ours, or the user's Ctrl-C, at any line of ours within a step: training goes on, and nothing is left.

For each line that a step reaches, in its first time, its last and another one: the step is bit-identical, at most one
warning is said, and nothing of ours is on torch, on Python or on the user's objects. A Ctrl-C goes on to the user.

What is excepted, and why, stands in ``benchmarks.fault_lines``: lines on which nothing can fail, and those on which the
user's own function is called. ``count_flops`` may raise an error of ours before its block begins, and then nothing in
the block has run: without us it has no answer.

To hold another training to it, write it into ``RUNS`` there, and its name here.
"""

from __future__ import annotations

import secrets
from pathlib import Path

import pytest

from benchmarks.fault_lines import HANDS_OVER, PACKAGE, lines_that_cannot_fail
from tests.forks import LIGHTNING, TORCH, run_fork
from tests.ranks import DEEPSPEED, DEEPSPEED_ON_CPU, EVERYTHING

REPOSITORY = Path(__file__).resolve().parents[2]
RUNS = {
    "lightning": 50,
    "lightning-manual": 0,
    "profile_training": 25,
    "profile_training-break": 15,
    "deepspeed": 20,
    "transformers": 0,
    "count_flops": 45,
    "FlopsProfiler": 30,
    "run": 15,
}
"""The trainings, with the lines of each that are drawn where not all are tried: 200 together.

A line costs two to three times as much in the first four that draw any as in the others.
"""
_IMPORTS = {"lightning": LIGHTNING, "lightning-manual": LIGHTNING, "deepspeed": DEEPSPEED, "transformers": EVERYTHING}
"""What each finds imported, if it needs more than torch: a trial is a fork, which costs the more the more is there."""


def faults_of(run: str, *options: str) -> str:
    """What a sweep in a process of its own says, which forks one for each trial; empty where it finds no fault."""
    done = run_fork(
        ["-m", "benchmarks.fault_lines", run, *options],
        imports=_IMPORTS.get(run, TORCH),
        folder=REPOSITORY,
        timeout_sec=36000.0,
        environment=DEEPSPEED_ON_CPU,
    )
    assert "lines of ours run" in done.stdout, done.stderr  # it began at all
    return "" if done.returncode == 0 else done.stdout


@pytest.mark.parametrize(("run", "lines"), [(run, lines) for run, lines in RUNS.items() if lines])
@pytest.mark.timeout(600)
def test_a_failure_at_a_line_that_is_drawn_leaves_training_alone(run: str, lines: int) -> None:
    seed = secrets.randbelow(1 << 32)
    assert faults_of(run, "--lines", str(lines), "--seed", str(seed)) == ""


@pytest.mark.slow
@pytest.mark.parametrize("run", RUNS)
@pytest.mark.timeout(36000)
def test_a_failure_at_any_line_leaves_training_alone(run: str) -> None:
    assert faults_of(run) == ""


def test_the_lines_that_are_excepted_are_there() -> None:
    for file, lines in HANDS_OVER.items():
        stripped = [line.strip() for line in (PACKAGE / file).read_text().splitlines()]
        assert [line for line in lines if line not in stripped] == []


def test_lines_on_which_nothing_can_fail_are_told_from_those_on_which_something_can(tmp_path: Path) -> None:
    file = tmp_path / "some.py"
    file.write_text(
        "def f(x, y=None):\n"
        "    z = x\n"  # 2
        "    try:\n"  # 3
        "        z = x.y\n"
        "        x.y = z\n"
        "    except Exception:\n"
        "        pass\n"  # 7
        "    if z is None:\n"  # 8
        "        return y\n"  # 9
        "    if z == y or not f(x):\n"
        "        return z.y\n"
        "    while z:\n"
        "        z = z()\n"
        "    return\n"  # 14
        "def g(x):\n"
        "    try:\n"  # 16
        "        x = next(x)\n"
        "    except StopIteration:\n"  # 18
        "        return x\n"  # 19
        "    except x.y:\n"
        "        return x.y\n"
        "    except KeyError:\n"  # 22
        "        raise\n"  # 23
        "    except ValueError as x:\n"  # 24
        "        raise x.y\n"
        "    if x is None or not z:\n"  # 26
        "        z = x or y.z\n"
    )
    # 6 is ``except Exception:``
    assert lines_that_cannot_fail(str(file)) == {2, 3, 6, 7, 8, 9, 14, 16, 18, 19, 22, 23, 24, 26}
