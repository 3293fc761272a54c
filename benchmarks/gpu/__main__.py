"""``python -m benchmarks.gpu``: see the package."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Sequence
from datetime import date
from importlib import import_module
from pathlib import Path

from ..machine import ROOT
from .results import Report, Row

RESULTS = ROOT / "benchmarks" / "results"

PARTS = (
    # number, name, module, seconds after which it is ended on a GPU; together under nine minutes
    (0, "The machine", "machine_facts", 30),
    (1, "Counts", "counts", 130),
    (2, "Times", "times", 80),
    (3, "The run does not notice", "unnoticed", 90),
    (4, "Trace", "trace", 50),
    (5, "MFU", "mfu", 50),
    (6, "Memory", "memory", 30),
    (7, "NCCL", "ranks", 60),
    (8, "The trace command", "trace_command", 20),
)

_CPU_IS_SLOWER = 8
"""Than a GPU, at what is left of the work there; others may use the machine."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the parts, prints the table; on a GPU writes it. Returns 0 if every claim holds."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=import_module(__package__).__doc__)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--small", action="store_true", help="sizes of a test")
    parser.add_argument("--parts", type=int, nargs="*", help="some of them alone; then nothing is kept")
    parser.add_argument("--output", type=Path, help="folder of gpu.md and gpu.json, on any device")
    options = parser.parse_args(arguments)
    _quiet_environment()
    from .here import Here
    from .processes import Plan, run_part
    from .table import console, markdown

    chosen = [part for part in PARTS if options.parts is None or part[0] in options.parts]
    report = Report(device=options.device, small=options.small)
    with tempfile.TemporaryDirectory(prefix="lightning_flops-gpu-", ignore_cleanup_errors=True) as folder:
        here = Here(device_type=options.device, small=options.small, folder=Path(folder))
        if not here.on_gpu:
            _import_once([module for _, _, module, _ in chosen])
        parts = []
        for number, name, module, limit_sec in chosen:
            limit = limit_sec * (1 if here.on_gpu else _CPU_IS_SLOWER)
            plan = Plan(number=number, name=name, module=f"{__package__}.{module}", limit_sec=limit)
            parts.append(run_part(plan, here, tell=_say))
        machine = {row.claim: row.seen for part in parts if part.number == 0 for row in part.rows}
        report = Report(device=options.device, small=options.small, machine=machine, parts=tuple(parts))
    print(console(report))
    whole = here.on_gpu and not options.small and options.parts is None and report.count("met")
    output = options.output or (RESULTS if whole else None)
    if output is not None:
        output.mkdir(parents=True, exist_ok=True)
        (output / "gpu.md").write_text(markdown(report, date=str(date.today())))
        (output / "gpu.json").write_text(report.to_json())
        print(f"wrote {output / 'gpu.md'} and gpu.json")
    return 0 if report.holds else 1


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
