"""What is known of every step of 500, for each model that is counted by hand, under each door.

``make bench-every-step`` runs this and writes ``benchmarks/results/every_step.md``; ``--doors`` and ``--models`` take
some of them, and print their table.

Every batch has random sizes. A step's truth is worked out by hand, and counted by itself, which must be the same. Each
door runs in a process of its own.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path

import torch

from tests.every_step import DOORS, STEPS, Cell, run, what_must_hold
from tests.models_by_hand import MODELS, model_named

from .machine import ROOT, code_in_words, machine_in_words, one_thread_environment, versions

logger = logging.getLogger("benchmarks.every_step")

MODULE = "benchmarks.every_step"
RESULT = Path(__file__).resolve().parent / "results" / "every_step.md"
AS_IT_IS = "plain loop"
"""The door under which the limit of the time is left as it is, too."""

_PACKAGES = ("torch", "lightning", "deepspeed", "transformers")

_HEAD = f"""# Every step's FLOPs, model by model and door by door

{STEPS} steps in each row, each on a batch of random sizes: samples and tokens, pixels in both directions for ViT, two
lengths for T5, frames for the Conformer. A step's truth is worked out by hand from the sizes of the model's layers, and
counted by itself on another model of its kind; both are the same for every step. A step is *wrong* if any bucket of
what the run says of it (forward, backward, recompute, optimizer, what causal attention skips) differs from that by one
FLOP. Losses and weights of every run are those of the same training without the profiler, to the last bit.

*Counted* are steps in which the counter ran: those of the window, and those outside of it (at most 64). *Predicted*
are those that a law of the sizes gives, or that have sizes which were counted. Model FLOPs are read every ten steps, or
less often where no logger takes them: these figures are n/a until the law is found, and where a step among them has a
size beyond those counted until then. Of a step that is predicted *by half*, model FLOPs are known, and what kernels
execute is not.

Again: `make bench-every-step`.
"""


def report(cells: Sequence[Cell], as_it_is: Sequence[Cell], *, code: str) -> str:
    """The whole page."""
    lines = [_HEAD]
    if cells:
        lines += [
            "## What can be known",
            "",
            "Counting outside of the window may take as much time as it likes here: in a run of some seconds half a "
            "percent is no step.",
            "",
            *_table(cells),
            "",
        ]
    if as_it_is:
        lines += [
            f"## The same under the {AS_IT_IS} with the limit of the time as it is",
            "",
            "At most 0.5% of the run's wall time is spent in steps that are counted outside of the window. What a run "
            "of some seconds cannot afford to count is n/a; `benchmarks/results/time.md` has longer runs.",
            "",
            *_table(as_it_is),
            "",
        ]
    ran = f"*{date.today()}, {code}. {machine_in_words()}. "
    return "\n".join(
        [*lines, ran + ", ".join(f"{each} {version}" for each, version in versions(_PACKAGES).items()) + ".*", ""]
    )


def _table(cells: Sequence[Cell]) -> list[str]:
    lines = [
        "| model | door | in the window | outside | predicted | n/a | **wrong** | logged figures n/a | time of those "
        "outside | law |",
        "|---|---|---:|---:|---:|---:|---:|---:|---:|---|",
    ]
    for cell in cells:
        predicted = f"{cell.predicted}" + (f", {cell.model_alone} by half" if cell.model_alone else "")
        columns = (
            cell.model,
            cell.door,
            cell.counted - cell.outside,
            cell.outside,
            predicted,
            cell.unknown,
            cell.wrong + cell.readings_wrong,
            f"{cell.readings_unknown} of {cell.readings}",
            f"{100 * cell.outside_sec / cell.seconds:.2f}%",
            "yes" if cell.law else f"no: {cell.why_no_law}",
        )
        lines.append(f"| {' | '.join(map(str, columns))} |")
    return lines


def run_door(door: str, models: Sequence[str], *, share: float | None) -> list[Cell]:
    """The cells of one door, in this process."""
    if door == "DeepSpeed":
        _begin_process_group()
    cells = []
    for name in models:
        model = model_named(name)
        with tempfile.TemporaryDirectory() as folder:
            cell = run(model, door, Path(folder), share=share)
        broken = what_must_hold(cell, model) if share is not None else []
        logger.info("%s, %s: %s", name, door, "; ".join(broken) or "all holds")
        cells.append(cell)
    return cells


def _begin_process_group() -> None:
    import deepspeed

    # Its operators for shared memory would be compiled first, for a minute; gloo does without.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    deepspeed.init_distributed(dist_backend="gloo", verbose=False)


@dataclass(frozen=True, slots=True)
class Ran:
    """What the runs under one door came to."""

    code: str
    """The commit that ran."""
    cells: list[Cell]


def in_a_process(door: str, models: Sequence[str], *, limited: bool, work: Path) -> Ran:
    """The same, in a process of its own; what it came to is kept below *work*, and taken from there if it is there."""
    found = work / f"{door}{' limited' if limited else ''}.json"
    if not found.exists():
        limit = ["--limited"] if limited else []
        command = [sys.executable, "-W", "ignore", "-m", MODULE, "--doors", door, "--models", *models, *limit]
        environment = {**os.environ, **one_thread_environment(), "CUDA_VISIBLE_DEVICES": ""}
        subprocess.run([*command, "--json", str(found)], cwd=ROOT, check=True, env=environment)
    kept = json.loads(found.read_text())
    return Ran(kept["code"], [Cell(**one) for one in kept["cells"]])


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs everything, writes the results, and returns 0; 1 if a promise was broken."""
    names = [model.name for model in MODELS]
    parser = argparse.ArgumentParser(prog=f"python -m {MODULE}", description=__doc__)
    parser.add_argument("--doors", nargs="+", choices=list(DOORS), help="only these; prints their table")
    parser.add_argument("--models", nargs="+", choices=names, metavar="MODEL", help="only these; prints their table")
    parser.add_argument("--limited", action="store_true", help="with one door: leave the limit of the time as it is")
    parser.add_argument("--json", type=Path, help="run the one door in this process, and write what it came to here")
    parser.add_argument("--work", type=Path, help="keeps what each door came to, to go on there; all by one commit")
    parser.add_argument("--output", type=Path, default=RESULT)
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    logging.getLogger("lightning_flops").setLevel(logging.ERROR)
    doors, models = options.doors or list(DOORS), options.models or names
    if options.json is not None:
        torch.set_num_threads(1)
        (door,) = doors
        cells = run_door(door, models, share=None if options.limited else 1.0)
        kept = {"code": code_in_words(), "cells": [cell.as_json() for cell in cells]}
        options.json.write_text(json.dumps(kept))
        return 0
    with tempfile.TemporaryDirectory() as folder:
        work = options.work or Path(folder)
        by_door = {door: in_a_process(door, models, limited=False, work=work) for door in doors}
        as_it_is = in_a_process(AS_IT_IS, models, limited=True, work=work) if AS_IT_IS in doors else Ran("", [])
    cells = [by_door[door].cells[place] for place in range(len(models)) for door in doors]
    codes = dict.fromkeys(one.code for one in (*by_door.values(), as_it_is) if one.code)
    page = report(cells, as_it_is.cells, code="; ".join(codes))
    if options.doors or options.models:
        print(page)
    else:
        options.output.write_text(page)
        logger.info("wrote %s", options.output)
    wrong = any(cell.wrong or cell.readings_wrong for cell in as_it_is.cells)
    return int(wrong or any(what_must_hold(cell, model_named(cell.model)) for cell in cells))


if __name__ == "__main__":
    raise SystemExit(main())
