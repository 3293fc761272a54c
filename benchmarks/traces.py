"""How fast traces are read and analyzed, in how much memory, and beside HolisticTraceAnalysis over the same file.

``make bench-traces`` writes synthetic traces in torch's format to a temporary folder: steps of nested operators with
kernels that they launch. Each reading is a process of its own. Times are of the processor, so that what else runs
on the machine changes them little; readings take turns, and the least of each is taken: all else only adds to it.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from .time_report import write_section

logger = logging.getLogger("benchmarks.traces")

MODULE = "benchmarks.traces"
RESULT = Path(__file__).resolve().parent / "results" / "traces.md"
OPERATORS_IN_STEP = 20_000
LARGE_SEC, LARGE_BYTES = 12.0, 1e9
"""Most that a trace of one gigabyte may take, of one core and of memory over what the process had before."""
TIMES_FASTER = 15.0
"""Than HolisticTraceAnalysis, at least."""
SIDE_BY_SIDE = 1.2
"""Two processes take at most so many times half of what one does."""

_HEAD = """# How fast traces are read

What `lightning-flops trace` does with a file: reading it, and every table. Again: `make bench-traces`.
"""

_OURS = """
import json, resource, sys, time
from lightning_flops.trace import analyze_trace, load_trace
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

_RANKS = """
import json, multiprocessing, resource, sys, time
from lightning_flops.trace.many import analyze_files
def used():
    uses = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(use.ru_utime + use.ru_stime for use in uses)
before, begun = used(), time.perf_counter()
analyze_files(sys.argv[2:], processes=int(sys.argv[1]))
elapsed = time.perf_counter() - begun
for child in multiprocessing.active_children():
    child.join()
print(json.dumps([used() - before, elapsed]))
"""

_DECODERS = {
    "json of the standard library": "import json; decode = json.loads",
    "orjson": "import orjson; decode = orjson.loads",
    "simdjson (each event as a dict)": (
        "import simdjson; parser = simdjson.Parser(); decode = lambda text: parser.parse(text).as_list()"
    ),
    "ijson (yajl2_c)": (
        "import ijson.backends.yajl2_c as ijson; decode = lambda text: list(ijson.items(text, 'item', use_float=True))"
    ),
    "msgspec, to dicts": "import msgspec; decode = msgspec.json.decode",
    "msgspec, to the fields that are needed": (
        "from lightning_flops.trace.read import DECODER; decode = DECODER.decode"
    ),
}

_DECODING = """
import json, sys, time
{setup}
text = open(sys.argv[1], "rb").read(4_000_000)
begin = text.index(b"[", text.index(b"traceEvents"))
text = text[begin : text.rindex(b"}},") + 1] + b"]"
best = 1e9
for _ in range(5):
    begun = time.process_time()
    events = len(decode(text))
    best = min(best, time.process_time() - begun)
print(json.dumps([len(text) / best, best / events]))
"""


def _step(number: int, begin_us: float) -> Iterator[str]:
    """Events of one step, a line each, 50 µs an operator that calls another, which launches a kernel."""
    first = number * OPERATORS_IN_STEP
    length = 50 * OPERATORS_IN_STEP
    common = '"pid": 4242, "tid": 4242'
    yield (
        f'  {{"ph": "X", "cat": "user_annotation", "name": "ProfilerStep#{number}", {common}, "ts": {begin_us}, '
        f'"dur": {length}, "args": {{"External id": {first}}}}}'
    )
    for place in range(OPERATORS_IN_STEP):
        # HolisticTraceAnalysis keeps numbers in the smallest type that the first of them fit.
        at, one = begin_us + 50 * place, 100_000 + first + place + 1
        yield (
            f'  {{"ph": "X", "cat": "cpu_op", "name": "aten::linear", {common}, "ts": {at + 1}, "dur": 40.125, "args": '
            f'{{"External id": {2 * one}, "Record function id": 0, "Sequence number": {one}, "Fwd thread id": 0}}}}'
        )
        yield (
            f'  {{"ph": "X", "cat": "cpu_op", "name": "aten::addmm", {common}, "ts": {at + 5}, "dur": 30.25, "args": '
            f'{{"External id": {2 * one + 1}, "Record function id": 0}}}}'
        )
        yield (
            f'  {{"ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", {common}, "ts": {at + 10}, "dur": 5.5, '
            f'"args": {{"External id": {2 * one + 1}, "cbid": 211, "correlation": {one}}}}}'
        )
        yield (
            f'  {{"ph": "X", "cat": "kernel", "name": "ampere_bf16_s16816gemm_{place % 200}", "pid": 0, "tid": 7, '
            f'"ts": {at + 20}, "dur": 25.75, "args": {{"External id": {2 * one + 1}, "queued": 0, "device": 0, '
            f'"context": 1, "stream": 7, "correlation": {one}, "registers per thread": 128, "shared memory": 49152, '
            f'"blocks per SM": 1.5, "warps per SM": 12, "grid": [160, 1, 1], "block": [256, 1, 1], '
            f'"est. achieved occupancy %": 38}}}}'
        )


def write_trace(path: Path, size_bytes: int, *, rank: int = 0) -> None:
    """Steps until the file is as large as asked."""
    with path.open("w", encoding="utf-8") as file:
        file.write('{\n"schemaVersion": 1,\n"deviceProperties": [{"id": 0, "name": "A100", "numSms": 108}],\n')
        file.write(f'"distributedInfo": {{"rank": {rank}, "world_size": 8}},\n"traceEvents": [\n')
        number = 0
        while file.tell() < size_bytes:
            file.write(",\n" if number else "")
            file.write(",\n".join(_step(number, 1e6 * number)))
            number += 1
        file.write('\n],\n"traceName": "synthetic"\n}\n')


def run(program: str, *arguments: str, python: str = sys.executable) -> list[float] | None:
    """What *program* prints as JSON; None where a package that it needs is not installed."""
    return ended(begin(program, *arguments, python=python))


def begin(program: str, *arguments: str, python: str = sys.executable) -> subprocess.Popen[str]:
    """*program* running, in a process of its own."""
    command = [python, "-c", program, *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def ended(process: subprocess.Popen[str]) -> list[float] | None:
    """As ``run``, of a program that is running."""
    printed, complaint = process.communicate(timeout=3600)
    if process.returncode and "ModuleNotFoundError" in complaint:
        return None
    if process.returncode:
        raise RuntimeError(complaint[-2000:])
    found: list[float] = json.loads(printed.splitlines()[-1])
    return found


def least(readings: Sequence[Sequence[float]], *columns: int) -> float:
    """The least sum of *columns* of any of *readings*."""
    return min(sum(reading[column] for column in columns) for reading in readings)


def verdict(holds: bool) -> str:
    """For a table."""
    return "met" if holds else "**missed**"


def large_section(path: Path, rounds: int) -> list[str]:
    """One large file."""
    size = path.stat().st_size
    readings = [found for _ in range(rounds) if (found := run(_OURS, str(path)))]
    seconds, peak = least(readings, 3, 4), max(reading[2] for reading in readings)
    met = verdict(seconds <= LARGE_SEC * size / 1e9 and peak <= LARGE_BYTES * size / 1e9)
    row = (
        f"| {int(readings[0][0]):,} | {least(readings, 3):.1f} | {least(readings, 4):.1f} | {seconds:.1f} | "
        f"{seconds / readings[0][0] * 1e6:.2f} | {peak / 1e6:,.0f} | {met} |"
    )
    logger.info(row)
    return [
        "## A large trace",
        "",
        f"A synthetic trace of {size / 1e9:.2f} GB. Seconds of one core, the least of {rounds} readings; memory is the "
        f"most over what the process had before. Goal: {LARGE_SEC:.0f} s and {LARGE_BYTES / 1e9:.1f} GB a gigabyte.",
        "",
        "| events | read, s | analyzed, s | together, s | µs an event | peak, MB | goal |",
        "|---:|---:|---:|---:|---:|---:|---|",
        row,
        "",
    ]


def decoder_section(path: Path) -> list[str]:
    """What decoders take for the same piece of text."""
    rows = []
    for name, setup in _DECODERS.items():
        found = run(_DECODING.format(setup=setup), str(path))
        cells = "not installed | " if found is None else f"{found[0] / 1e6:,.0f} | {found[1] * 1e6:.2f}"
        rows.append(f"| {name} | {cells} |")
        logger.info(rows[-1])
    return [
        "## Decoders",
        "",
        "A piece of the same text, 4 MB, the least of five times. ijson alone needs no piece of text that it can take "
        "whole; all others read a file block by block only because blocks are cut where an event ends.",
        "",
        "| decoder | MB/s | µs an event |",
        "|---|---:|---:|",
        *rows,
        "",
    ]


def rival_section(path: Path, python: str, rounds: int) -> list[str]:
    """HolisticTraceAnalysis over the same file."""
    ours, theirs = [], []
    for _ in range(rounds):
        ours.append(run(_OURS, str(path), "fast"))
        theirs.append(run(_HTA, str(path), python=python))
    mine, others = [one for one in ours if one], [one for one in theirs if one]
    if not others:
        return ["## Beside HolisticTraceAnalysis", "", "It is not installed.", ""]
    theirs_sec = least(others, 0, 1)
    times = theirs_sec / least(mine, 3, 4)
    return [
        "## Beside HolisticTraceAnalysis",
        "",
        f"A synthetic trace of {path.stat().st_size / 1e6:,.0f} MB, in turns, seconds of the processor, the least of "
        f"{rounds}. It makes four tables (temporal, kernels, idle time, launches), this project all of them. "
        f"Goal: {TIMES_FASTER:.0f} times as fast.",
        "",
        "| | read, s | tables, s | together, s | times |",
        "|---|---:|---:|---:|---|",
        f"| lightning-flops | {least(mine, 3):.2f} | {least(mine, 4):.2f} | {least(mine, 3, 4):.2f} | |",
        f"| HolisticTraceAnalysis 0.5.0 | {least(others, 0):.2f} | {least(others, 1):.2f} | {theirs_sec:.2f} | "
        f"{times:.1f}: {verdict(times >= TIMES_FASTER)} |",
        "",
    ]


def ranks_section(folder: Path, size: int, rounds: int) -> list[str]:
    """Eight files by one process, by two that know nothing of each other, and by two of one command."""
    files = []
    for rank in range(8):
        file = folder / f"rank{rank}.json"
        write_trace(file, size, rank=rank)
        files.append(str(file))
    one, apart, two = [], [], []
    for _ in range(rounds):
        one.append(run(_RANKS, "1", *files))
        halves = [ended(process) for process in [begin(_RANKS, "1", *files[:4]), begin(_RANKS, "1", *files[4:])]]
        apart.append([sum(half[0] for half in halves if half), max(half[1] for half in halves if half)])
        two.append(run(_RANKS, "2", *files))
    length = os.path.getsize(files[0])
    for name in files:
        os.unlink(name)
    return [
        "## Eight ranks on two cores",
        "",
        f"Eight files of {length / 1e6:,.0f} MB, the least of {rounds} readings, which take turns. Two processes that "
        "are given four files each and know nothing of each other are what this machine can do: they share its caches "
        "and memory, and nothing of this project. Elapsed is the time until the report is there. Goal: "
        f"{SIDE_BY_SIDE} times half of what one process takes.",
        "",
        "| | of the processor, s | of the one process's | elapsed, s | of half of the one process's |",
        "|---|---:|---:|---:|---|",
        *ranks_rows(*([each for each in readings if each] for readings in (one, apart, two))),
        "",
    ]


def ranks_rows(
    one: Sequence[Sequence[float]], apart: Sequence[Sequence[float]], two: Sequence[Sequence[float]]
) -> list[str]:
    """The rows of the table; each reading is seconds of the processor and seconds that elapsed."""
    used, half = least(one, 0), least(one, 1) / 2
    rows = [f"| one process | {used:.1f} | | {2 * half:.1f} | |"]
    for what, readings in (("two that share nothing", apart), ("two of one command", two)):
        share, elapsed = least(readings, 0) / used, least(readings, 1) / half
        met = f": {verdict(elapsed <= SIDE_BY_SIDE)}" if readings is two else ""
        rows.append(
            f"| {what} | {least(readings, 0):.1f} | {share:.2f} | {least(readings, 1):.1f} | {elapsed:.2f}{met} |"
        )
    return rows


def main(arguments: Sequence[str] | None = None) -> None:
    """Write the files, read them, and write the sections."""
    parser = argparse.ArgumentParser(prog=f"python -m {MODULE}", description=__doc__)
    parser.add_argument("--bytes", type=int, default=1_000_000_000, help="size of the large trace")
    parser.add_argument("--rounds", type=int, default=5, help="of each reading")
    parser.add_argument("--hta", default=sys.executable, metavar="PYTHON", help="one that has HolisticTraceAnalysis")
    parser.add_argument("--output", type=Path, default=RESULT, help="the report whose sections are written")
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        write_trace(path, options.bytes)
        sections = {"large trace": large_section(path, options.rounds), "decoders": decoder_section(path)}
        write_trace(path, options.bytes // 10)
        sections["rival"] = rival_section(path, options.hta, options.rounds)
        path.unlink()
        sections["ranks"] = ranks_section(Path(folder), options.bytes // 10, max(1, options.rounds // 2))
    for name, lines in sections.items():
        write_section(options.output, name, lines, head=_HEAD)


if __name__ == "__main__":
    main()
