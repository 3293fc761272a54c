"""What is said of ranks that fail or hang."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.ranks import run_ranks

HANGS = """
import os, time
def waits_for_the_other_rank():
    print("waits" if os.environ["RANK"] == "1" else "fails", flush=True)
    time.sleep(60.0 if os.environ["RANK"] == "1" else 0.0)
waits_for_the_other_rank()
os._exit(int(os.environ["RANK"] == "0") * 3)
"""


def test_a_rank_that_hangs_says_where(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=r"exit statuses \[3, -9\]") as raised:
        run_ranks(["-c", HANGS], ranks=2, folder=tmp_path, timeout_sec=60.0, imports=("json",))
    first, second = str(raised.value).split("----- rank 1")
    assert "fails" in first and "waits_for_the_other_rank" not in first
    assert 'File "<string>", line 5 in waits_for_the_other_rank' in second
