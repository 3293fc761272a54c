"""Trace files whose answers are known, and copies of them in which a kernel takes longer."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

TRACES = Path(__file__).parents[1] / "data" / "traces"
RESNET = TRACES / "resnet50_num_workers_0.pt.trace.json.gz"
RANKS = [TRACES / f"two_ranks_known_answers.rank{rank}.pt.trace.json" for rank in (0, 1)]

_ON_DEVICE = ("kernel", "memcpy", "memset", "gpu_memcpy", "gpu_memset")


def slowed(source: Path, target: Path, *, kernel: str, times: int) -> None:
    """Copy a trace of one stream, gzipped, with every run of *kernel* so many times as long; what follows waits."""
    content = source.read_bytes()
    trace = json.loads(gzip.decompress(content) if source.suffix == ".gz" else content)
    events = [event for event in trace["traceEvents"] if event.get("cat", "").lower() in _ON_DEVICE]
    free = float("-inf")
    for event in sorted(events, key=lambda event: event["ts"]):
        event["ts"] = max(event["ts"], free)
        event["dur"] *= times if event["name"].startswith(kernel) else 1
        free = event["ts"] + event["dur"]
    target.write_bytes(gzip.compress(json.dumps(trace).encode(), compresslevel=1))
