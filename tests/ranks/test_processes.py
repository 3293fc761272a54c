"""Two processes of a gloo group exchange what they measured; nothing of that is a collective, and nobody hangs."""

from __future__ import annotations

import functools
import json
import tempfile
from pathlib import Path
from typing import Any

import pytest

from tests.ranks import run_ranks
from tests.ranks.exchange_me import STEP

FORWARD = 600_000_000
"""FLOPs of rank 0's forward; rank 1 has half a batch."""

BARRIERS = {"one_says_nothing": 2}
"""Collectives of a scenario that are not one; all are the scenario's own."""


@functools.cache
def exchanged() -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        run_ranks(
            ["-W", "ignore", "-m", "tests.ranks.exchange_me", folder], ranks=2, folder=Path(folder), timeout_sec=200.0
        )
        return [json.loads(Path(folder, f"rank{rank}.json").read_text()) for rank in range(2)]


def reported(scenario: str) -> dict[str, Any]:
    first, second = (results[scenario] for results in exchanged())
    assert second["reports"] == []
    (report,) = first["reports"]
    assert report["step"] == STEP
    assert isinstance(report, dict)
    return report


@pytest.mark.parametrize("scenario", ["both_measure", "the_others_window_closes_later"])
def test_both_ranks_are_in_the_report_of_rank_0(scenario: str) -> None:
    assert reported(scenario) == {"step": STEP, "absences": {}, "forward": FORWARD + FORWARD // 2}


@pytest.mark.parametrize(
    ("scenario", "reason"),
    [
        ("one_says_nothing", "no answer within 0.3 s"),
        ("one_fails", "its profiler failed: RuntimeError: no"),
        ("one_has_other_settings", f"it last profiled step {STEP + 1}"),
        ("the_group_is_gone", "torch.distributed has no process group"),
        ("the_group_is_made_anew", "no answer within 0.3 s, when training ended"),
    ],
)
def test_a_rank_that_is_missing_is_named_with_the_reason(scenario: str, reason: str) -> None:
    assert reported(scenario) == {"step": STEP, "absences": {"1": reason}, "forward": FORWARD}


def test_no_collective_is_ours_the_group_works_and_its_store_is_as_before() -> None:
    for results in exchanged():
        for scenario, result in results.items():
            if scenario.startswith("the_group"):
                continue
            assert result["collectives"] == BARRIERS.get(scenario, 1), scenario
            assert (result["sum"], result["left"]) == (1 + 2, []), scenario


def test_nobody_hangs() -> None:
    assert all(result["seconds"] < 30.0 for results in exchanged() for result in results.values())


@pytest.mark.parametrize("victim", [0, 1])
def test_the_other_rank_ends_when_one_dies(victim: int, tmp_path: Path) -> None:
    """Rank 0 has the store, so that its death takes the store from rank 1."""
    run_ranks(
        ["-W", "ignore", "-m", "tests.ranks.exchange_me", str(tmp_path), "kill", str(victim)],
        ranks=2,
        folder=tmp_path,
        timeout_sec=100.0,
        ends_with={victim: -9},
    )
    (left,) = (json.loads(path.read_text()) for path in tmp_path.glob("rank*.json"))
    absences = {"1": "no answer within 0.3 s, when training ended"}
    assert left["killed"] == ([] if victim == 0 else [{"step": STEP, "absences": absences, "forward": FORWARD}])
