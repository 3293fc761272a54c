"""``python -m benchmarks.gpu``: see the package."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import date
from importlib import import_module
from pathlib import Path

from ..machine import ROOT
from .here import Here
from .processes import Plan, run_part
from .results import Report, Row
from .table import console, markdown

RESULTS = ROOT / "benchmarks" / "results"

PARTS = (
    # Number, name, module, seconds after which it is ended on a GPU, and what earlier parts have left over: together
    # nine minutes.
    (0, "The machine", "machine_facts", 30),
    (1, "Counts", "counts", 150),
    (2, "Times", "times", 80),
    (3, "The run does not notice", "unnoticed", 85),
    (4, "Trace", "trace", 50),
    (5, "MFU", "mfu", 45),
    (6, "Memory", "memory", 25),
    (7, "NCCL", "ranks", 45),
    (8, "The trace command", "trace_command", 30),
)

_NO_GPU = """
There is no CUDA device that torch can use: nothing was looked at. On a CPU: --device cpu --small
"""

_CPU_IS_SLOWER = 8
"""Than a GPU, at what is left of the work there; others may use the machine."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the parts, prints the table; on a GPU keeps it. Returns 0 if every claim holds, 2 without a device."""
    options = _options(arguments)
    _quiet_environment()
    with tempfile.TemporaryDirectory(prefix="lightning_flops-gpu-", ignore_cleanup_errors=True) as folder:
        here = Here(device_type=options.device, small=options.small, folder=Path(folder))
        chosen = [part for part in PARTS if options.parts is None or part[0] in options.parts]
        whole = here.on_gpu and not here.small and options.parts is None
        output = options.output or (RESULTS if whole else None)
        report = Report(device=options.device, small=options.small)
        for report in _reports(here, chosen):  # after each part, so that what was seen is kept whatever happens next
            if _has_no_gpu(report):
                print(console(report) + _NO_GPU)
                return 2
            if output is not None:
                _keep(report, output)
    print(console(report))
    if output is not None:
        print(f"wrote {output / 'gpu.md'} and gpu.json")
    return 0 if report.holds else 1


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    about = import_module(str(__package__)).__doc__
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=about)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--small", action="store_true", help="sizes of a test")
    parser.add_argument("--parts", type=int, nargs="*", help="some of them alone; then nothing is kept")
    parser.add_argument("--output", type=Path, help="folder of gpu.md and gpu.json; then they are kept on any device")
    return parser.parse_args(arguments)


def _reports(here: Here, chosen: Sequence[tuple[int, str, str, int]]) -> Iterator[Report]:
    """The report so far, after each part."""
    if not here.on_gpu:
        _import_once([module for _, _, module, _ in chosen])
    report, spare_sec = Report(device=here.device_type, small=here.small), 0.0
    for number, name, module, limit_sec in chosen:
        limit = limit_sec * (1 if here.on_gpu else _CPU_IS_SLOWER) + spare_sec
        plan = Plan(number=number, name=name, module=f"{__package__}.{module}", limit_sec=limit)
        part = run_part(plan, here, tell=_say)
        spare_sec = max(0.0, limit - part.seconds)
        machine = {row.claim: row.seen for row in part.rows} if number == 0 else report.machine
        report = replace(report, machine=machine, parts=(*report.parts, part))
        yield report


def _has_no_gpu(report: Report) -> bool:
    """Whether the first part looked for a GPU and found none."""
    first = report.parts[0]
    found = any(row.claim == "device" and row.verdict == "told" for row in first.rows)
    return report.device == "cuda" and first.number == 0 and not found


def _keep(report: Report, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "gpu.md").write_text(markdown(report, date=str(date.today())))
    (folder / "gpu.json").write_text(report.to_json())


def _say(row: Row) -> None:
    print(f"  {row.verdict:<7} {row.claim}: {row.seen}", file=sys.stderr, flush=True)


def _quiet_environment() -> None:
    """What a part's process reads as it begins."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # without it matrix products are not deterministic
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("KINETO_LOG_LEVEL", "5")
    # Where it is a part of the path alone, processes that a part starts must find it, too.
    paths = [str(ROOT), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(paths))


def _import_once(modules: Sequence[str]) -> None:
    """Before the parts' processes are forked: each has the imports then. One that fails fails in its own part."""
    for module in modules:
        try:
            import_module(f"{__package__}.{module}")
        except Exception as error:
            print(f"{module}: {error}", file=sys.stderr)


if __name__ == "__main__":
    raise SystemExit(main())
