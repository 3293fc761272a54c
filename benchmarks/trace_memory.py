"""Memory and time that reading and analysing a large trace file takes, with orjson and without.

``python -m benchmarks.trace_memory`` writes a synthetic trace of one gigabyte in torch's format to a temporary folder:
steps of nested operators with the kernels that they launch. Each reading is a process of its own, whose peak resident
memory is taken less what it had before it opened the file.
"""

from __future__ import annotations

import argparse
import json
import logging
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from .time_report import RESULT, write_section

logger = logging.getLogger("benchmarks.trace_memory")

MODULE = "benchmarks.trace_memory"
OPERATORS_IN_STEP = 20_000
_WORKER = """
import json, resource, sys, time
from lightning_flops.analysis.trace import analyze_trace, load_trace
decoder = json.loads if sys.argv[2] == "json" else None
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
before, begun = peak(), time.process_time()
trace = load_trace(sys.argv[1], decoder=decoder)
loaded, read_sec = peak(), time.process_time() - begun
begun = time.process_time()
report = analyze_trace(trace)
print(json.dumps([len(trace), loaded - before, peak() - before, read_sec, time.process_time() - begun]))
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
        at, one = begin_us + 50 * place, first + place + 1
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


def write_trace(path: Path, size_bytes: int) -> None:
    """Steps until the file is as large as asked."""
    with path.open("w", encoding="utf-8") as file:
        file.write('{\n"schemaVersion": 1,\n"deviceProperties": [{"id": 0, "name": "A100", "numSms": 108}],\n')
        file.write('"traceEvents": [\n')
        number = 0
        while file.tell() < size_bytes:
            file.write(",\n" if number else "")
            file.write(",\n".join(_step(number, 1e6 * number)))
            number += 1
        file.write('\n],\n"traceName": "synthetic"\n}\n')


def _read(path: Path, decoder: str) -> list[float]:
    run = subprocess.run(
        [sys.executable, "-c", _WORKER, str(path), decoder], check=True, capture_output=True, text=True, timeout=1800
    )
    found: list[float] = json.loads(run.stdout)
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    """Write the file, read it both ways, and write the section."""
    parser = argparse.ArgumentParser(prog=f"python -m {MODULE}", description=__doc__)
    parser.add_argument("--bytes", type=int, default=1_000_000_000, help="size of the trace")
    parser.add_argument("--output", type=Path, default=RESULT, help="the report whose section is written")
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "large.pt.trace.json"
        begun = time.perf_counter()
        write_trace(path, options.bytes)
        size = path.stat().st_size
        logger.info("wrote %.0f MB in %.0f s", size / 1e6, time.perf_counter() - begun)
        for name, decoder in (("orjson", "orjson"), ("standard library", "json")):
            events, loaded, peak, read_sec, analyse_sec = _read(path, decoder)
            rows.append(
                f"| {name} | {int(events):,} | {loaded / 1e6:,.0f} | {peak / 1e6:,.0f} | {peak / size:.2f} | "
                f"{read_sec:.0f} | {analyse_sec:.0f} |"
            )
            logger.info(rows[-1])
    lines = [
        "## A large trace file",
        "",
        f"A synthetic trace of {size / 1e9:.2f} GB, read and analysed by what `lightning-flops trace` runs, each way "
        "in a process of its own. Memory is the peak over what the process had before.",
        "",
        "| decoder | events | read, peak MB | analysed, peak MB | peak / file | read, s | analysed, s |",
        "|---|---|---|---|---|---|---|",
        *rows,
        "",
    ]
    write_section(options.output, "large trace", lines)


if __name__ == "__main__":
    main()
