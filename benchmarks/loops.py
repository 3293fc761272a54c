"""Loops as people write them, each beside its own account of its steps.

``make bench-loops`` runs each in a process of its own, profiled. The loop itself has a clock at its fetches, counts
what it handled, and works out its models' FLOPs by hand. What it would not call training it leaves out: an evaluation,
a checkpoint, the way from one epoch to the next. 16 steps are timed, as by default half of them by parts and half as a
whole, and how long a step is is of the latter. Held to that are, over the same steps: samples, micro-steps, FLOPs and
the number of steps exactly; seconds of a step and samples/s within 5% (or 0.2 ms) of what its clock says in this run
and in two without the profiler, before and after it, or between these: on a CPU the profiler's own work is in no step
that it reports, and in this run it is in those of the loop's clock; and a run of a loop is at times slower than the
next by more than a tenth. The wait for data, which is timed by parts, is held to these runs alike, within 5% or 0.5 ms,
what is outside of steps within 5% or 3 ms. Samples/s of the run leave out what the profiler slowed down: they are no
less than those of all steps, and no more than those of the timed ones, of all after them, or of all without the
profiler, within 5%. Where nobody can know what a batch is, n/a with its reason is right, and a figure that is not the
loop's is wrong.

``python -m benchmarks.loops --part 1/3``, then ``2/3`` and ``3/3``, write the page in three parts.
"""

from __future__ import annotations

import contextlib
import json
import logging
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from lightning_flops import Profile
from lightning_flops.schema.profile import ThroughputSummary

from .loops_account import Account, Figure, Step, figures
from .loops_lightning import lightning
from .loops_own import LOOPS, Loop
from .loops_program import UNDER_RUN as UNDER_RUN
from .machine import RESULTS, ROOT
from .page import described, table, write_page
from .runner import Answer, answer_of, start

logger = logging.getLogger("benchmarks.loops")

RECORDS = ROOT / ".cache/bench_loops.json"
"""Rows of the parts before, of which the first begins anew."""
_TIMEOUT_SEC = 100.0


def account_of(loop: Loop, account: Account) -> tuple[list[Step], Profile | None, ThroughputSummary | None]:
    """The steps of *loop* by its own *account*, and what is said of it, which is nothing without the profiler."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        loop.train(account)
    return account.steps, getattr(account.run, "profile", None), getattr(account.run, "throughput", None)


def judged(loop: Loop) -> Answer:
    """The figures of *loop*, which runs profiled between two runs without the profiler, each in its own process."""
    accounts = Account(alone=True, settings={}), Account(), Account(alone=True, settings={})
    answers = [answer_of(partial(account_of, loop, one), timeout_sec=_TIMEOUT_SEC) for one in accounts]
    if failed := [one for one in answers if one.value is None]:
        return failed[0]
    before, profiled, after = answers
    steps, profile, throughput = profiled.value
    bare = [one.value[0] for one in (before, after)]
    return replace(profiled, value=figures(steps, profile, throughput, loop.allowed, times=True, bare=bare))


def _text(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.2f}".rstrip("0").rstrip(".") if value < 1000 else f"{value:,.0f}"
    if isinstance(value, tuple):
        return " + ".join(f"{one:,}" for one in value)
    return f"{value:,}" if isinstance(value, int) else "n/a" if value is None else str(value)


def _cell(figure: Figure | None) -> str:
    if figure is None:
        return "–"
    own, said = _text(figure.own), _text(figure.said)
    return said if figure.right else f"**{said}**, not {own}"


def row(name: str, answer: Answer) -> list[str]:
    """The cells of one loop."""
    found: dict[str, Figure] = {one.name: one for one in answer.value or ()}
    wrong = [one.name for one in found.values() if not one.right]
    verdict = answer.words or (f"**wrong**: {', '.join(wrong)}" if wrong else "right")
    return [name, *(_cell(found.get(column)) for column in COLUMNS), verdict]


COLUMNS = (
    "samples", "micro-steps", "steps of the run", "step ms", "samples/s", "samples/s of the run", "data wait ms",
    "outside ms", "FLOPs", "FLOPs of the run",
)  # fmt: skip


def page(rows: Sequence[Sequence[str]], packages: Iterable[str]) -> list[str]:
    """The lines of the page."""
    right = sum(one[-1] == "right" for one in rows)
    return [
        *described(__doc__, *packages),
        f"**{right} of {len(rows)} loops are right.** A cell has what is said, in bold where the loop differs.",
        "FLOPs are forward + backward + recomputed + the optimizer's, of the counted step.",
        "",
        *table(["loop", *(f">{one}" for one in COLUMNS), "verdict"], rows),
    ]


def main() -> None:
    """Run the loops that the command line asks for, and write the page of these and of what earlier runs have kept."""
    options = start(__file__, __doc__, RESULTS / "loops.md", only=list(LOOPS), part="1/1", records=str(RECORDS))
    number, parts = map(int, options.part.split("/"))
    lightning()  # once, not in each loop's process
    records = Path(options.records)
    records.parent.mkdir(parents=True, exist_ok=True)
    kept: dict[str, list[str]] = json.loads(records.read_text()) if records.exists() and number > 1 else {}
    for name in options.only[number - 1 :: parts]:
        kept[name] = row(name, judged(LOOPS[name]))
        records.write_text(json.dumps(kept))
        logger.info(" | ".join(kept[name]))
    rows = [kept[name] for name in LOOPS if name in kept]
    write_page(options.output, page(rows, ("torch", "lightning", "transformers", "accelerate", "trl", "deepspeed")))


if __name__ == "__main__":
    main()
