"""Two processes of a gloo group exchange what they measured: one dies, or their group does, and no rank hangs."""

from __future__ import annotations

import functools
import json
import tempfile
from pathlib import Path
from typing import Any

import pytest

from tests.ranks import run_ranks
from tests.ranks.exchange_me import STEP

PROGRAM = ("-W", "ignore", "-m", "tests.ranks.exchange_me")
FORWARD = 600_000_000
"""FLOPs of rank 0's forward."""


@functools.cache
def exchanged() -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        run_ranks([*PROGRAM, folder], ranks=2, folder=Path(folder), timeout_sec=200.0)
        return [json.loads(Path(folder, f"rank{rank}.json").read_text()) for rank in range(2)]


def test_a_rank_whose_group_has_gone_is_named_with_the_reason() -> None:
    first, second = (results["the_group_is_gone"] for results in exchanged())
    absences = {"1": "torch.distributed has no process group"}
    assert (first, second) == ([{"step": STEP, "absences": absences, "forward": FORWARD}], [])


def test_ranks_whose_group_was_made_anew_find_each_other_in_its_store() -> None:
    first, second = (results["the_group_is_made_anew"] for results in exchanged())
    # Rank 1 has half of the samples of rank 0.
    assert (first, second) == ([{"step": STEP, "absences": {}, "forward": FORWARD + FORWARD // 2}], [])


@pytest.mark.parametrize("victim", [0, 1])
def test_the_other_rank_ends_when_one_dies(victim: int, tmp_path: Path) -> None:
    """Rank 0 has the store, so that its death takes the store from rank 1."""
    run_ranks(
        [*PROGRAM, str(tmp_path), "kill", str(victim)],
        ranks=2,
        folder=tmp_path,
        timeout_sec=100.0,
        ends_with={victim: -9},
    )
    (left,) = (json.loads(path.read_text()) for path in tmp_path.glob("rank*.json"))
    absences = {"1": "no answer within 0.3 s, when training ended"}
    assert left["killed"] == ([] if victim == 0 else [{"step": STEP, "absences": absences, "forward": FORWARD}])
