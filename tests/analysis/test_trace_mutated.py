"""Damaged traces: each gives a report or one line and status 2, in bounded time and memory."""

from __future__ import annotations

import gzip
import json
import random
import resource
import sys
import time
from functools import cache
from pathlib import Path

import pytest

from benchmarks.fault_inputs import mutated, mutated_tree, unsafe_in
from lightning_flops.cli import main
from tests.analysis.trace_files import RANKS, RESNET

SECONDS = 20.0
"""Of the processor, for one file of at most some megabytes."""
GROWN_BYTES = 400 << 20
"""Of this process, by a hundred files together."""


@cache
def real_traces() -> tuple[bytes, ...]:
    """Two small traces whole, and the first events of a real one, with all that stands beside them."""
    ranks = [file.read_bytes() for file in RANKS]
    with gzip.open(RESNET) as file:
        resnet = json.load(file)
    steps = resnet | {"traceEvents": [*resnet["traceEvents"][:600], *resnet["traceEvents"][-300:]]}
    return (*ranks, json.dumps(steps).encode())


def damaged(draw: random.Random) -> bytes:
    """A real trace with something done to its bytes, its values, or to what it is packed in."""
    text = draw.choice(real_traces())
    how = draw.randrange(4)
    if how == 0:
        return json.dumps(mutated_tree(draw, json.loads(text))).encode("utf-8", "surrogatepass")
    if how == 1:
        return mutated(draw, gzip.compress(text, 1))
    if how == 2:
        return gzip.compress(mutated(draw, text), 1)
    return mutated(draw, text)


def test_a_damaged_trace_gives_a_report_or_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "damaged.pt.trace.json"
    path.write_bytes(real_traces()[0])
    assert main(["trace", str(path)]) == 0
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    read = refused = 0
    for seed in range(60):
        draw = random.Random(seed)
        path.write_bytes(damaged(draw))
        capsys.readouterr()
        begun = time.process_time()
        status = main(["trace", *draw.choice(([], ["--json"], ["--rows", "0"])), str(path)])
        assert time.process_time() - begun < SECONDS, seed
        shown, said = capsys.readouterr()
        assert (status, bool(shown), said.count("\n")) in ((0, True, 0), (2, False, 1)), (seed, said[:300])
        assert status == 0 or f"{path}: " in said, seed
        assert not unsafe_in(said), seed
        assert shown.startswith("{") or not unsafe_in(shown), seed
        read, refused = read + (status == 0), refused + (status == 2)
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown * (1 if sys.platform == "darwin" else 1024) < GROWN_BYTES
    # Both happen, so that the test could fail.
    assert read > 5
    assert refused > 5
