"""Two processes of a gloo group exchange what they measured: one dies, and the other does not hang."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.ranks import run_ranks


@pytest.mark.parametrize("victim", [0, 1])
def test_the_other_rank_ends_when_one_dies(victim: int, tmp_path: Path) -> None:
    """Rank 0 has the store, so that its death takes the store from rank 1."""
    program = ["-W", "ignore", "-m", "tests.ranks.exchange_me", str(tmp_path), str(victim)]
    run_ranks(program, ranks=2, folder=tmp_path, timeout_sec=100.0, ends_with={victim: -9})
    (left,) = (json.loads(path.read_text()) for path in tmp_path.glob("rank*.json"))
    assert left == ([] if victim == 0 else [[1, "no answer within 0.3 s, when training ended"]])
