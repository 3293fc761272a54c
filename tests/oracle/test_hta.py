"""The tables of a trace beside those of HolisticTraceAnalysis, which shares no code with this project.

``make test-hta`` installs that package in an environment of its own; without it there is nothing to compare with.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from lightning_flops.schema.tables import Row
from lightning_flops.trace.columns import Trace
from lightning_flops.trace.read import load_trace
from lightning_flops.trace.steps import overlap
from lightning_flops.trace.tables import idle_times, kernel_tables, transfer_table
from tests.analysis.trace_events import RANKS, RESNET, Event, kernel, launch, on_device, operator, step

hta = pytest.importorskip("hta.trace_analysis", reason="make test-hta installs HolisticTraceAnalysis")
pytestmark = pytest.mark.filterwarnings("ignore")  # of that package and pandas

DRAWN = 12


@dataclass(frozen=True)
class Job:
    """The traces of some ranks, read by both."""

    traces: tuple[Trace, ...]
    theirs: Any


def job(*paths: Path) -> Job:
    files = {rank: str(path) for rank, path in enumerate(paths)}
    return Job(tuple(map(load_trace, paths)), hta.TraceAnalysis(trace_files=files, include_last_profiler_step=True))


def drawn_events(seed: int) -> list[Event]:
    """Three steps of kernels, copies and a collective on four streams, launched by one thread, whole microseconds."""
    draw = random.Random(seed)
    host, free = 0, dict.fromkeys((7, 8, 20, 21), 0)
    events: list[Event] = []
    correlation = 100_000  # that package keeps other numbers in the type that these ask for
    for number in range(1, 4):
        began = host
        for _ in range(draw.randrange(5, 40)):
            host += draw.choice((1, 2, 5, 40, 200))
            correlation += 1
            call = draw.randrange(1, 10)
            events += [operator("aten::mm", host, call + 2), launch(correlation, host + 1, call)]
            stream = draw.choice(tuple(free))
            # Behind what the stream has before it, at once or after a pause on either side of HTA's limit.
            start = max(host + draw.randrange(2, 12), free[stream] + draw.choice((0, 1, 29, 30, 31, 60)))
            length = draw.randrange(1, 300)
            free[stream] = start + length
            if stream == 20:
                events.append(kernel(correlation, start, length, name="ncclDevKernel_AllReduce_Sum", stream=20))
            elif stream == 21:
                copy = "Memcpy HtoD (Pinned -> Device)"
                events.append(on_device("gpu_memcpy", correlation, start, length, name=copy, stream=21))
            else:
                events.append(kernel(correlation, start, length, name=f"gemm_{stream}", stream=stream))
            host += call + 2
        host += 3
        events.append(step(number, began, host - began))
        host += 1
    return events


@pytest.fixture(scope="module", params=["resnet", "two ranks", *(f"drawn {seed}" for seed in range(DRAWN))])
def both(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Job:
    if request.param == "resnet":
        return job(RESNET)
    if request.param == "two ranks":
        return job(*RANKS)
    path = tmp_path_factory.mktemp("drawn") / "drawn.pt.trace.json"
    seed = int(request.param.split()[1])
    document = {"schemaVersion": 1, "distributedInfo": {"rank": 0}, "traceEvents": drawn_events(seed)}
    path.write_text(json.dumps(document))
    return job(path)


def test_time_in_which_the_device_does_nothing(both: Job) -> None:
    table = both.theirs.get_temporal_breakdown(visualize=False)
    for rank, trace in enumerate(both.traces):
        (theirs,) = table[table["rank"] == rank].to_dict("records")
        (ours,) = idle_times(trace) or ()
        assert ours.host_wait_us + ours.kernel_gap_us + ours.other_us == theirs["idle_time(us)"]
        assert ours.busy_us == theirs["compute_time(us)"] + theirs["non_compute_time(us)"]


def test_share_of_communication_that_computation_hides(both: Job) -> None:
    table = both.theirs.get_comm_comp_overlap(visualize=False)
    for rank, trace in enumerate(both.traces):
        (theirs,) = table.loc[table["rank"] == rank, "comp_comm_overlap_pctg"]
        ours = overlap(trace).overlap_ratio
        if ours is None:
            assert theirs != theirs  # not a number: it divides by no communication
        else:
            assert round(100 * ours, 2) == theirs


def test_calls_and_time_of_every_kernel_and_copy(both: Job) -> None:
    _, table = both.theirs.get_gpu_kernel_breakdown(visualize=False, duration_ratio=1.0, num_kernels=10_000)
    for rank, trace in enumerate(both.traces):
        theirs = {
            row["name"]: (row["sum (us)"], row["max (us)"], row["min (us)"], row["mean (us)"])
            for row in table[table["rank"] == rank].to_dict("records")
        }
        rows: list[Row] = [*(kernel_tables(trace)[0] or ()), *(transfer_table(trace) or ())]
        ours = {row.name: row.device for row in rows if row.device is not None}
        assert {name: (row.total_us, row.max_us, row.min_us) for name, row in ours.items()} == {
            name: row[:3] for name, row in theirs.items()
        }
        for name, row in ours.items():
            assert row.mean_us == pytest.approx(theirs[name][3], rel=1e-12)
