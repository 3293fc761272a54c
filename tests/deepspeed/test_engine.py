"""Engines of DeepSpeed: what belongs to a step, how a profiler gets on and off, ZeRO, failures of ours."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from lightning_flops import Profile
from lightning_flops.report.text import figures
from tests.deepspeed.launching import FORWARD, INSTALLED, ON_ONE, launch
from tests.deepspeed.scenario import each, holds
from tests.forks import REPOSITORY, TORCH, run_fork
from tests.ranks import DEEPSPEED, DEEPSPEED_ON_CPU, run_ranks

needs_deepspeed = pytest.mark.skipif(not INSTALLED, reason="needs deepspeed")


@needs_deepspeed
@each(ON_ONE)
def test_on_one_rank(name: str) -> None:
    holds(launch(ON_ONE, ranks=1)(name))


@needs_deepspeed
@each("scenarios_zero")
@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_on_several_ranks(name: str, ranks: int) -> None:
    holds(launch("scenarios_zero", ranks=ranks)(name))


@needs_deepspeed
@each("scenarios_blocks")
def test_blocks_of_every_kind(name: str) -> None:
    holds(launch("scenarios_blocks", ranks=1)(name))


@needs_deepspeed
@pytest.mark.skipif(importlib.util.find_spec("accelerate") is None, reason="needs accelerate")
@each("scenarios_accelerate")
def test_engines_that_accelerate_made(name: str) -> None:
    holds(launch("scenarios_accelerate", ranks=1)(name))


@needs_deepspeed
def test_a_program_that_ends_in_a_window_reports_what_there_is(tmp_path: Path) -> None:
    (printed,) = run_ranks(
        ["-W", "ignore", "-m", "tests.deepspeed.ends_in_its_window"],
        ranks=1,
        folder=tmp_path,
        timeout_sec=100,
        environment=DEEPSPEED_ON_CPU,
        imports=DEEPSPEED,
    )
    assert printed.count("Profile Summary at step 2:") == 1
    assert "2 of the 20 steps asked for were timed" in " ".join(printed.split())
    assert printed.count("nothing was profiled: profile_step is 100, and this run ended after 3 step(s)") == 1
    # In the folder of ours, since no monitor is on; of the engine that profiled nothing there is no file.
    files = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*.json"))
    assert files == ["lightning_flops/profile.json"]
    profile = Profile.from_json((tmp_path / files[0]).read_text(encoding="utf-8"))
    words = figures(profile)
    assert printed.count(f"FLOPs of step 2: {words}. Page: lightning_flops/profile.html\n") == 1
    assert (profile.counted_steps, profile.timed_steps, profile.flops.forward) == ((2,), (5, 6), FORWARD)


def test_without_deepspeed_the_import_says_what_to_install() -> None:
    program = "import sys; sys.modules['deepspeed'] = None; import lightning_flops.deepspeed"
    ended = run_fork(["-c", program], imports=TORCH, folder=REPOSITORY)
    assert (
        "ImportError: lightning_flops.deepspeed needs DeepSpeed: pip install '.[deepspeed]' in a clone" in ended.stderr
    )
