"""What is said of loops as people write them is what each says of itself: samples, steps, FLOPs, counted seconds."""

from __future__ import annotations

import logging
import math
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.loops import account_of
from benchmarks.loops_account import SETTINGS, Account, Allowed, Step, figures
from benchmarks.loops_own import LOOPS
from tests.fake_clock import FakeNow

# Their steps have phases, which two stamps alone would not show; or steps differ, as LBFGS's number of closures.
NONE_AS_A_WHOLE = {
    "DQN with a target network", "GradCache", "LBFGS", "actor and critic, no loader",
    "crops of a student and a teacher", "rollouts in evaluation mode", "teacher after the student", "teacher first",
    "teacher not given",
}  # fmt: skip


# By parts alone; as by default, half of them as a whole, and more unhooked if they are short.
@pytest.mark.parametrize(("timing_steps", "short_sec"), [(8, 0.0), (16, 0.0), (16, math.inf)])
@pytest.mark.parametrize("name", [name for name, loop in LOOPS.items() if loop.quick])
@pytest.mark.filterwarnings("ignore")
def test_a_loop_is_what_it_says_of_itself(
    name: str,
    timing_steps: int,
    short_sec: float,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    now: FakeNow,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("lightning_flops.measure.recorder._SHORT_SEC", short_sec)
    caplog.set_level(logging.ERROR, logger="lightning.pytorch")  # which the fixture puts back
    account = Account(now=now, sleep=now.sleep, settings={**SETTINGS, "timing_steps": timing_steps})
    steps, profile, throughput = account_of(LOOPS[name], account)
    assert profile is not None
    assert profile.timing is not None
    assert profile.timing.whole_steps == (8 if timing_steps == 16 and name not in NONE_AS_A_WHOLE else 0)
    found = figures(steps, profile, throughput, LOOPS[name].allowed, times=True)
    assert [one for one in found if not one.right] == []
    seconds = [one for one in found if one.name in ("step ms", "samples/s", "data wait ms", "outside ms")]
    assert [one for one in seconds if one.said is not None and one.said != pytest.approx(one.own)] == []


def test_an_account_that_differs_is_seen(now: FakeNow) -> None:
    account = Account(now=now, sleep=now.sleep)
    LOOPS["plain"].train(account)
    profile, throughput = account.run.profile, account.run.throughput

    def wrong(steps: list[Step]) -> set[str]:
        found = figures(steps, profile, throughput, Allowed(), times=False)
        return {one.name for one in found if not one.right}

    assert wrong(account.steps) == set()
    assert wrong(account.steps[:-1]) == {"steps of the run", "FLOPs of the run"}
    for field, name in ("samples", "samples"), ("micro_steps", "micro-steps"):
        assert wrong([replace(one, **{field: getattr(one, field) * 2}) for one in account.steps]) == {name}
    for phase in ("forward", "backward"):
        assert wrong([replace(one, **{phase: 1}) for one in account.steps]) == {"FLOPs", "FLOPs of the run"}
    assert figures(account.steps, None, None, Allowed(), times=False)[0].right is False


def test_a_step_is_what_the_clock_says_with_the_profiler_or_without_it_of_what_all_have_in_it(now: FakeNow) -> None:
    """Seconds. In each step of the loop's clock are 32 of a rollout, which was said to be outside of steps."""
    account = Account(now=now, sleep=now.sleep)
    LOOPS["plain"].train(account)
    profile, timing = account.run.profile, account.run.profile.timing
    outside = {"validation": 32.0 * (timing.timed_steps + timing.whole_steps)}

    def is_right(said_sec: float, *clocks_sec: float) -> bool:
        of_steps = replace(timing.global_step, steps_sec=(said_sec,) * len(timing.global_step.steps_sec))
        told = replace(profile, timing=replace(timing, global_step=of_steps, excluded_sec=outside))
        own, *bare = [
            [replace(one, seconds=32.0 + seconds, undecided=32.0) for one in account.steps] for seconds in clocks_sec
        ]
        found = figures(own, told, account.run.throughput, Allowed(), times=True, bare=bare)
        return next(one.right for one in found if one.name == "step ms")

    # What is said; the loop's clock with the profiler, which takes 2, and in the runs without it.
    assert is_right(8.0, 10.0, 8.0)
    assert is_right(8.0, 10.0, 9.0, 8.0)
    assert not is_right(7.0, 10.0, 8.0)
    assert not is_right(11.0, 10.0, 8.0)
    assert not is_right(9.0, 10.0)
