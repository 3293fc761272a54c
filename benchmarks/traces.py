"""How fast traces are read and analyzed, in how much memory, and beside HolisticTraceAnalysis over the same file.

``make bench-traces`` writes synthetic traces in torch's format to a temporary folder: steps of nested operators with
kernels that they launch. Each reading is a process of its own. Times are seconds of the processor, so that what else
runs on the machine changes them little; readings take turns, and the least of each is taken: all else only adds to it.
Memory is the most over what the process had before. HolisticTraceAnalysis makes four tables (temporal, kernels, idle
time, launches), this project all of them.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from .machine import RESULTS
from .page import described, met, table, write_page
from .runner import start

OPERATORS_IN_STEP = 20_000
LARGE_SEC, LARGE_BYTES = 12.0, 1e9
"""Most that a trace of one gigabyte may take, of one core and of memory over what the process had before."""
TIMES_FASTER = 15.0  # Than HolisticTraceAnalysis, at least

_OURS = """
import json, resource, sys, time
from lightning_flops.analysis.trace_report import analyze_trace
from lightning_flops.trace.read import load_trace
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
before, begun = peak(), time.process_time()
trace = load_trace(sys.argv[1])
loaded, read_sec = peak(), time.process_time() - begun
begun = time.process_time()
report = analyze_trace(trace)
print(json.dumps([len(trace), loaded - before, peak() - before, read_sec, time.process_time() - begun]))
"""

_HTA = """
import json, logging, sys, time, warnings
warnings.filterwarnings("ignore")
logging.disable(logging.CRITICAL)
from hta.trace_analysis import TraceAnalysis
begun = time.process_time()
analysis = TraceAnalysis(trace_files={0: sys.argv[1]}, include_last_profiler_step=True)
read_sec = time.process_time() - begun
begun = time.process_time()
analysis.get_temporal_breakdown(visualize=False)
analysis.get_gpu_kernel_breakdown(visualize=False)
analysis.get_idle_time_breakdown(visualize=False)
analysis.get_cuda_kernel_launch_stats(visualize=False)
print(json.dumps([read_sec, time.process_time() - begun]))
"""


def _event(category: str, name: str, ts: float, dur: float, **arguments: object) -> str:
    place = {"pid": 0, "tid": 7} if category == "kernel" else {"pid": 4242, "tid": 4242}
    event = {"ph": "X", "cat": category, "name": name, **place, "ts": ts, "dur": dur}
    return "  " + json.dumps({**event, "args": {key.replace("_", " "): value for key, value in arguments.items()}})


_KERNEL = {
    "queued": 0, "device": 0, "context": 1, "stream": 7, "registers_per_thread": 128, "shared_memory": 49152,
    "blocks_per_SM": 1.5, "warps_per_SM": 12, "grid": [160, 1, 1], "block": [256, 1, 1],
    "est._achieved_occupancy_%": 38,
}  # fmt: skip


def _step(number: int, begin_us: float) -> Iterator[str]:
    """Events of one step, a line each, 50 µs an operator that calls another, which launches a kernel."""
    first = number * OPERATORS_IN_STEP
    yield _event("user_annotation", f"ProfilerStep#{number}", begin_us, 50 * OPERATORS_IN_STEP, External_id=first)
    for place in range(OPERATORS_IN_STEP):
        # HolisticTraceAnalysis keeps numbers in the smallest type that the first of them fit.
        at, one = begin_us + 50 * place, 100_000 + first + place + 1
        outer, inner = {"External_id": 2 * one, "Record_function_id": 0}, {"External_id": 2 * one + 1}
        yield _event("cpu_op", "aten::linear", at + 1, 40.125, **outer, Sequence_number=one, Fwd_thread_id=0)
        yield _event("cpu_op", "aten::addmm", at + 5, 30.25, **inner, Record_function_id=0)
        yield _event("cuda_runtime", "cudaLaunchKernel", at + 10, 5.5, **inner, cbid=211, correlation=one)
        kernel = f"ampere_bf16_s16816gemm_{place % 200}"
        yield _event("kernel", kernel, at + 20, 25.75, **inner, **_KERNEL, correlation=one)


def write_trace(path: Path, size_bytes: int) -> None:
    """Steps until the file is as large as asked."""
    with path.open("w", encoding="utf-8") as file:
        file.write('{\n"schemaVersion": 1,\n"deviceProperties": [{"id": 0, "name": "A100", "numSms": 108}],\n')
        file.write('"distributedInfo": {"rank": 0, "world_size": 8},\n"traceEvents": [\n')
        number = 0
        while file.tell() < size_bytes:
            file.write(",\n" if number else "")
            file.write(",\n".join(_step(number, 1e6 * number)))
            number += 1
        file.write('\n],\n"traceName": "synthetic"\n}\n')


def run(program: str, *arguments: str, python: str = sys.executable) -> list[float]:
    """What *program* prints as JSON; nothing where a package that it needs is not installed."""
    done = subprocess.run([python, "-c", program, *arguments], capture_output=True, text=True, timeout=3600)
    if done.returncode and "ModuleNotFoundError" not in done.stderr:
        raise RuntimeError(done.stderr[-2000:])
    return list(json.loads(done.stdout.splitlines()[-1])) if done.stdout else []


def least(readings: Sequence[Sequence[float]], *columns: int) -> float:
    """The least sum of *columns* of any of *readings*."""
    return min(sum(reading[column] for column in columns) for reading in readings)


def large_section(path: Path, rounds: int) -> list[str]:
    """One large file."""
    size = path.stat().st_size
    readings = [run(_OURS, str(path)) for _ in range(rounds)]
    read, analyzed, seconds = least(readings, 3), least(readings, 4), least(readings, 3, 4)
    peak, events = max(reading[2] for reading in readings), readings[0][0]
    holds = met(seconds <= LARGE_SEC * size / 1e9 and peak <= LARGE_BYTES * size / 1e9)
    row = f"{events:,}|{read:.1f}|{analyzed:.1f}|{seconds:.1f}|{seconds / events * 1e6:.2f}|{peak / 1e6:,.0f}|{holds}"
    columns = [">events", ">read, s", ">analyzed, s", ">together, s", ">µs an event", ">peak, MB", "goal"]
    title = f"## A synthetic trace of {size / 1e9:.2f} GB, {rounds} readings; goal: 12 s and 1 GB a gigabyte"
    return [title, "", *table(columns, [row.split("|")])]


def rival_section(path: Path, python: str, rounds: int) -> list[str]:
    """HolisticTraceAnalysis over the same file."""
    readings = [(run(_OURS, str(path))[-2:], run(_HTA, str(path), python=python)) for _ in range(rounds)]
    if not readings[0][1]:
        return ["## Beside HolisticTraceAnalysis", "", "It is not installed."]
    ours, theirs = ([least(parts, 0), least(parts, 1), least(parts, 0, 1)] for parts in zip(*readings, strict=True))
    times, size = theirs[-1] / ours[-1], path.stat().st_size / 1e6
    verdict = f"{times:.1f}: {met(times >= TIMES_FASTER)}"
    tools = (("lightning-flops", ours, None), ("HolisticTraceAnalysis 0.5.0", theirs, verdict))
    rows = [[name, *(f"{one:.2f}" for one in seconds), cell] for name, seconds, cell in tools]
    title = f"## Beside HolisticTraceAnalysis: {size:,.0f} MB; goal: {TIMES_FASTER:.0f} times as fast"
    return [title, "", *table(["", ">read, s", ">tables, s", ">together, s", "times"], rows)]


def main() -> None:
    """Writes the files, reads them, writes the sections."""
    options = start(__file__, __doc__, RESULTS / "traces.md", bytes=1_000_000_000, rounds=5, hta=sys.executable)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        write_trace(path, options.bytes)
        lines = [*described(__doc__), *large_section(path, options.rounds)]
        write_trace(path, options.bytes // 10)
        lines += ["", *rival_section(path, options.hta, options.rounds)]
    write_page(options.output, lines)


if __name__ == "__main__":
    main()
