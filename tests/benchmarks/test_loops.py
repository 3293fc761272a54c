"""What is said of loops as people write them is what each says of itself: samples, steps and FLOPs, exactly."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.loops import account_of
from benchmarks.loops_account import Account, Allowed, Step, figures
from benchmarks.loops_own import LOOPS


@pytest.mark.parametrize("name", [name for name, loop in LOOPS.items() if loop.quick])
@pytest.mark.filterwarnings("ignore")
def test_a_loop_is_what_it_says_of_itself(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    caplog.set_level(logging.ERROR, logger="lightning.pytorch")  # which the fixture puts back
    wrong = [one for one in account_of(LOOPS[name], quick=True) if not one.right]
    assert wrong == []


def test_an_account_that_differs_is_seen() -> None:
    account = Account(quick=True)
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
