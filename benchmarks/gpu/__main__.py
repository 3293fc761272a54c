"""``python -m benchmarks.gpu``: see the package."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from datetime import date
from importlib import import_module
from pathlib import Path

from ..machine import RESULTS, ROOT
from ..page import table, write_page
from .checks import Here, Part, Row, Verdict, run_part

PARTS = (
    # Number, name, module (and what of it), seconds after which it is ended on a GPU, and what earlier parts have left
    # over: together nine minutes.
    (0, "The machine", "device:FACTS", 30),
    (1, "Counts", "counts", 95),
    (2, "Times", "times", 85),
    (3, "The run does not notice", "unnoticed", 70),
    (4, "Trace", "trace", 45),
    (5, "MFU", "device:MFU", 45),
    (6, "Memory", "device:MEMORY", 45),
    (7, "NCCL", "ranks", 35),
    (8, "DeepSpeed's block", "deepspeed_block", 40),
    (9, "Compiled for speed", "counts:FOR_SPEED", 50),  # last: how long max-autotune tries kernels, nobody knows
)
_NO_GPU = "There is no CUDA device that torch can use: nothing was looked at. On a CPU: --device cpu --small"
_CPU_IS_SLOWER = 8  # Than a GPU, at what is left of the work there; others may use the machine


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the parts, prints the page; on a GPU keeps it. Returns 0 if every claim holds, 2 without a device."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=sys.modules[str(__package__)].__doc__)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--small", action="store_true", help="sizes of a test")
    parser.add_argument("--parts", type=int, nargs="*", help="some of them alone; then nothing is kept")
    parser.add_argument("--output", type=Path, help="folder of gpu.md; then it is kept on any device")
    options = parser.parse_args(arguments)
    _quiet_environment()
    whole = options.device == "cuda" and not options.small and options.parts is None
    output = options.output or (RESULTS if whole else None)
    parts: list[Part] = []
    with tempfile.TemporaryDirectory(prefix="lightning_flops-gpu-", ignore_cleanup_errors=True) as folder:
        here = Here(device_type=options.device, small=options.small, folder=Path(folder), output=output)
        for part in _seen(here, options.parts):  # kept after each, so that what was seen is kept whatever happens next
            parts.append(part)
            if here.on_gpu and part.number == 0 and not any(row.claim == "multiprocessors" for row in part.rows):
                print(f"{_NO_GPU}\n{part.broken}")
                return 2
            if output is not None:
                write_page(output / "gpu.md", page(parts, date=str(date.today())))
    print("\n".join(page(parts, date=str(date.today()))))
    return 0 if parts and all(part.holds for part in parts) else 1


def _seen(here: Here, chosen: Sequence[int] | None) -> Iterator[Part]:
    spare_sec, parts = 0.0, [part for part in PARTS if chosen is None or part[0] in chosen]
    for _, _, module, _ in () if here.on_gpu else parts:
        with suppress(Exception):  # fails in its own part; a part's process is forked, and then has the imports
            import_module(f"{__package__}.{module.partition(':')[0]}")
    for number, name, module, seconds in parts:
        limit_sec = seconds * (1 if here.on_gpu else _CPU_IS_SLOWER) + spare_sec
        part = run_part(number, name, f"{__package__}.{module}", limit_sec, here)
        spare_sec = max(0.0, limit_sec - part.seconds)
        yield part


def _quiet_environment() -> None:
    """What a part's process reads as it begins."""
    # Without the first, matrix products are not deterministic.
    quiet = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    os.environ.update({**quiet, "KINETO_LOG_LEVEL": "5", **os.environ})
    # Where it is a part of the path alone, processes that a part starts must find it, too.
    paths = [str(ROOT), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(paths))


# ---- the page

_WORST: tuple[Verdict, ...] = ("failed", "missed", "met", "reported", "n/a")


def page(parts: Sequence[Part], *, date: str) -> list[str]:
    """A table for each part, and the notes of what raised."""
    found = Counter(row.verdict for part in parts for row in part.rows)
    counts = ", ".join(f"{found[verdict]} {verdict}" for verdict in ("met", "missed", "failed", "reported", "n/a"))
    broken = ", ".join(str(part.number) for part in parts if part.broken)
    ended = f"; broken off: part {broken}" if broken else ""
    lines = ["# What is claimed of CUDA, seen on a GPU", "", "Written by `make gpu` (`python -m benchmarks.gpu`)."]
    lines += ["", f"{date}. **{counts} in {sum(part.seconds for part in parts):.0f} s{ended}.**"]
    for part in parts:
        state = min((row.verdict for row in part.rows), key=_WORST.index, default="n/a")
        lines += ["", f"## {part.number}. {part.name}", ""]
        lines += [f"{part.seconds:.0f} s, {'broken off' if part.broken else state}."]
        if part.rows:
            lines += ["", *table(["claim", "seen", "held to", ""], map(_cells, part.rows))]
        notes = {row.claim: row.note for row in part.rows if row.verdict == "failed"}
        notes |= {part.name: part.broken} if part.broken else {}
        for claim, note in notes.items():
            lines += ["", f"{claim}:", "", "```text", note.strip(), "```"]
    return lines


def _cells(row: Row) -> list[str]:
    seen = f"{row.seen} ({row.note})" if row.note and row.verdict in ("n/a", "reported") else row.seen
    return [row.claim, seen, row.limit, f"**{row.verdict}**" if row.verdict in ("missed", "failed") else row.verdict]


if __name__ == "__main__":
    raise SystemExit(main())
