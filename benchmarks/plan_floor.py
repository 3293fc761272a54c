"""The floor of a plan beside the step that it is the floor of.

``make bench-plan`` writes this. The peaks are what ``lightning-flops peak`` measures of one thread, before and after
the programs, the greater of both; the floor is what ``plan_job`` makes of them for a job of one rank, and the step is
the fastest of some that ran on one thread. A floor is no forecast: *step ÷ floor* says how much longer it took.

*Without memory* is the floor of the arithmetic alone: tensors of these programs fit into the processor's caches, so
that the floor of the operators, by the bandwidth of a copy in memory, may be above a step.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from lightning_flops import LightningFlopsError, plan_job
from lightning_flops.measure.peaks import measure

from .machine import RESULTS, code_in_words
from .memory_programs import MOMENTUM, SGD, Program, WithLoss, programs, rows
from .page import described, table, write_page
from .runner import start

logger = logging.getLogger("benchmarks.plan_floor")

STEPS, LARGE = 5, "large products"
LEFT_OUT = ("4 accumulated", "autocast", "bfloat16", "classes alone")  # no step of a plan, or of another dtype


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One program."""

    name: str
    arithmetic_sec: float
    floor_sec: float
    step_sec: float


def large(width: int, layers: int) -> nn.Module:
    """Products and little else."""
    return WithLoss(nn.Sequential(*(nn.Linear(width, width) for _ in range(layers))), width)


def planned() -> Iterator[Program]:
    """The programs of the benchmark of memory whose step a plan has, and some whose time is in large products."""
    for width, layers in ((1024, 4), (1536, 3)):
        batch = partial(rows, width)
        make, name = partial(large, width, layers), f"{LARGE}, {width:,}"
        yield Program(name=name, model=make, batch=batch, optimizer=SGD, size=width)
        yield Program(name=f"{name}, momentum", model=make, batch=batch, optimizer=MOMENTUM, size=width)
    yield from (one for one in programs() if not any(words in one.name for words in LEFT_OUT))


def step_sec(program: Program) -> float:
    """Seconds of the fastest step."""
    model, batch = program.model(), program.batch(program.size)
    optimizer, found = program.optimizer(model), list[float]()
    for _ in range(1 + STEPS):
        began = time.perf_counter()
        model(*batch).backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(time.perf_counter() - began)
    return min(found)


def row_of(program: Program, step: float, peak: float, bandwidth: float) -> Row:
    """The floors of a program whose step took so long."""

    def make(mesh: object) -> Any:
        model = program.model()
        return model, program.batch(program.size), program.optimizer(model)

    plan = plan_job(make, {"dp": 1}, peak_flops_per_sec=peak, memory_bytes_per_sec=bandwidth)
    if plan.arithmetic_sec is None or plan.floor_sec is None:
        raise LightningFlopsError(str(plan.unavailable))
    return Row(name=program.name, arithmetic_sec=plan.arithmetic_sec, floor_sec=plan.floor_sec, step_sec=step)


def page_lines(found: list[Row], left_out: list[str], peak: float, bandwidth: float) -> list[str]:
    """The table, and what it amounts to."""
    cells = [
        [
            row.name,
            f"{1e3 * row.arithmetic_sec:.2f}",
            f"{1e3 * row.floor_sec:.2f}",
            f"{1e3 * row.step_sec:.2f}",
            f"{row.step_sec / row.arithmetic_sec:.2f}",
            f"{row.step_sec / row.floor_sec:.2f}",
        ]
        for row in found
    ]
    head = ["program", ">without memory, ms", ">floor, ms", ">step, ms", ">step ÷ arithmetic", ">step ÷ floor"]
    products = [row for row in found if row.name.startswith(LARGE)]
    return [
        f"Peak {peak / 1e9:.1f} GFLOP/s in float32, copy {bandwidth / 1e9:.1f} GB/s.",
        "",
        *table(head, cells),
        f"""
Of {len(found)} programs the floor of the arithmetic is below the step on
{sum(row.arithmetic_sec < row.step_sec for row in found)}, and the floor on
{sum(row.floor_sec < row.step_sec for row in found)}. Of {len(products)} programs of large products the step is within
twice the floor on {sum(row.step_sec < 2 * row.floor_sec for row in products)}.
{f"Not planned: {'; '.join(left_out)}." if left_out else ""}
""",
    ]


def main() -> None:
    """Measures, writes the report."""
    options = start(__file__, __doc__, RESULTS / "plan_floor.md", only="")
    code, device = code_in_words(), torch.device("cpu")
    wanted = [program for program in planned() if options.only in program.name]
    before = measure(device)
    steps = [step_sec(program) for program in wanted]
    measured = [before, measure(device)]
    peak, bandwidth = max(products["float32"] for products, _ in measured), max(copy for _, copy in measured)
    found, left_out = list[Row](), list[str]()
    for program, step in zip(wanted, steps, strict=True):
        try:
            found.append(row_of(program, step, peak, bandwidth))
        except LightningFlopsError as error:
            left_out.append(f"{program.name} ({str(error)[:80]})")
    lines = page_lines(found, left_out, peak, bandwidth)
    logger.info("%s", "\n".join(lines))
    if not options.only:
        write_page(options.output, [*described(__doc__, "torch", code=code), *lines])


if __name__ == "__main__":
    main()
