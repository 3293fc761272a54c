"""What the traced step costs, what it explains, and whether it gives known costs back.

``make bench-time`` runs this with the other benchmarks of time; ``python -m benchmarks.trace_cost`` runs it alone.

A step is timed with and without the tracer in every round, in a new random order, by the processor time of the process
(everything runs on one thread, so what else the machine does is not in it); ratios are taken within a round. Starting
and stopping the profiler lie outside of the traced step and are listed apart. Known costs are those of
``autograd.Function``s whose backward works until a clock says that it has taken so long.
"""

from __future__ import annotations

import argparse
import gc
import logging
import random
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from lightning_flops.instrument.tracing.step_tracer import StepTracer
from lightning_flops.records import StepSignature, TracedStepRecord
from lightning_flops.schema.trace_steps import ModuleTable
from lightning_flops.trace import analyze_trace, load_trace
from lightning_flops.trace.modules import module_table

from .machine import restart_in_one_thread_environment
from .ratios import Estimate, Target, median_with_interval, ratio
from .time_report import RESULT, write_section
from .workloads import Workload, tiny_operators

logger = logging.getLogger("benchmarks.trace_cost")

MODULE = "benchmarks.trace_cost"
PLAIN, AGAIN, TRACED = "plain", "plain again", "traced"
SIGNATURE = StepSignature(batches=(), forwards=1, backwards=1, updates=1)
BERT_COST = Target(limit=1.05, unit="× plain")
TINY_COST = Target(limit=2.0, unit="× plain")
ANALYSIS = Target(limit=5.0, unit="µs an event")
LOST_FORWARD, LOST_BACKWARD = Target(limit=2.0, unit="%"), Target(limit=3.0, unit="%")
KNOWN_SEC = (0.030, 0.003)
TOLERANCE_SHARE, TOLERANCE_SEC = 0.05, 0.0003


def bert_base() -> Workload:
    """12 layers of 768 and a masked-token head, one sample of 64 tokens."""
    transformers = import_module("transformers")
    torch.manual_seed(0)
    model: nn.Module = transformers.BertForMaskedLM(transformers.BertConfig()).train()
    tokens = torch.randint(0, 30000, (1, 64))
    return Workload(model=model, kwargs={"input_ids": tokens, "labels": tokens})


@dataclass(slots=True)
class Readings:
    """Of one workload, a value for each round."""

    seconds: dict[str, list[float]] = field(default_factory=lambda: {PLAIN: [], AGAIN: [], TRACED: []})
    start_sec: list[float] = field(default_factory=list)
    stop_sec: list[float] = field(default_factory=list)
    load_sec: list[float] = field(default_factory=list)
    modules_sec: list[float] = field(default_factory=list)
    tables_sec: list[float] = field(default_factory=list)
    lost_forward: list[float] = field(default_factory=list)
    lost_backward: list[float] = field(default_factory=list)
    events: int = 0


class _Loop:
    """A training step in parts that a tracer may mark."""

    def __init__(self, workload: Workload) -> None:
        """Makes the optimizer."""
        self.workload = workload
        self.optimizer = torch.optim.AdamW(workload.model.parameters(), lr=1e-4)

    def step(self, tracer: StepTracer | None) -> None:
        """Forward, backward, optimizer."""
        first: list[torch.Tensor] = []

        def forward() -> None:
            outputs = self.workload.model(*self.workload.args, **self.workload.kwargs)
            loss = outputs if isinstance(outputs, torch.Tensor) else outputs[0]
            first.append(loss.sum())

        def backward() -> None:
            first[0].backward()  # type: ignore[no-untyped-call]

        for part, run in (("forward", forward), ("backward", backward), ("optimizer", self.optimizer.step)):
            if tracer is not None:
                tracer.enter(part)
            run()
            if tracer is not None:
                tracer.leave()
        self.optimizer.zero_grad(set_to_none=True)


def _timed(run: Callable[[], Any]) -> tuple[float, Any]:
    begun = time.process_time()
    result = run()
    return time.process_time() - begun, result


def measure(workload: Workload, *, rounds: int, generator: random.Random) -> Readings:
    """Plain and traced steps of *workload* in turn."""
    loop, readings = _Loop(workload), Readings()
    for number in range(rounds + 2):
        arms = [PLAIN, AGAIN, TRACED]
        generator.shuffle(arms)
        gc.collect()
        for arm in arms:
            kept = number >= 2  # two rounds warm up
            if arm != TRACED:
                seconds, _ = _timed(lambda: loop.step(None))
            else:
                seconds = _traced_step(loop, readings, kept=kept)
            if kept:
                readings.seconds[arm].append(seconds)
        logger.info("round %d of %d", number - 1, rounds)
    return readings


def _traced_step(loop: _Loop, readings: Readings, *, kept: bool) -> float:
    tracer = StepTracer(loop.workload.model, device=torch.device("cpu"))
    tracer.warm_up()
    loop.step(None)  # the warm-up step, marks up
    start_sec, _ = _timed(lambda: tracer.start(0))
    seconds, _ = _timed(lambda: loop.step(tracer))
    stop_sec, _ = _timed(lambda: tracer.stop(SIGNATURE))
    record = tracer.record
    assert record is not None, tracer.lost
    load_sec, trace = _timed(lambda: load_trace(record.path))
    modules_sec, table = _timed(lambda: module_table(trace))
    tables_sec, _ = _timed(lambda: analyze_trace(trace))
    assert table is not None
    if kept:
        readings.events = len(trace)
        readings.start_sec.append(start_sec)
        readings.stop_sec.append(stop_sec)
        readings.load_sec.append(load_sec)
        readings.modules_sec.append(modules_sec)
        readings.tables_sec.append(tables_sec)
        readings.lost_forward.append(100 * table.unattributed_forward_us / table.forward_us)
        readings.lost_backward.append(100 * table.unattributed_backward_us / table.backward_us)
    return seconds


class Busy(torch.autograd.Function):
    """Passes its input on, and works for so long in the backward."""

    @staticmethod
    def forward(ctx: Any, inputs: torch.Tensor, block: BusyBlock) -> torch.Tensor:
        """Keeps *block*."""
        ctx.block = block
        return inputs.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        """Works until the clock says so, and writes down how long that was: on a busy machine it may be longer."""
        begun = time.perf_counter()
        while (spent := time.perf_counter() - begun) < ctx.block.seconds:
            pass
        ctx.block.spent = spent
        return gradients[0], None


class BusyBlock(nn.Module):
    """A block whose backward takes so long."""

    def __init__(self, seconds: float) -> None:
        """Keeps *seconds*."""
        super().__init__()
        self.seconds = seconds
        self.spent = 0.0

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """The input."""
        return Busy.apply(inputs, self)  # type: ignore[no-untyped-call,no-any-return]


class KnownBlocks(nn.Module):
    """Blocks of known cost behind a layer each, run plain or under a checkpoint."""

    def __init__(self, *, reentrant: bool | None) -> None:
        """Makes the blocks."""
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), BusyBlock(seconds)) for seconds in KNOWN_SEC)
        self.reentrant = reentrant

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """One block after the other."""
        for block in self.blocks:
            if self.reentrant is None:
                inputs = block(inputs)
            else:
                inputs = checkpoint(block, inputs, use_reentrant=self.reentrant)
        return inputs


def known_costs(*, reentrant: bool | None, repeats: int) -> list[list[tuple[float, float]]]:
    """For each block of known cost its own seconds and those that the trace gives it, a pair for each repeat."""
    model = KnownBlocks(reentrant=reentrant)
    workload = Workload(model=model, args=(torch.ones(4, 8, requires_grad=True),))
    loop = _Loop(workload)
    busy = {name: block for name, block in model.named_modules() if isinstance(block, BusyBlock)}
    found: list[list[tuple[float, float]]] = [[] for _ in busy]
    for _ in range(repeats):
        tracer = StepTracer(workload.model, device=torch.device("cpu"))
        tracer.warm_up()
        tracer.start(0)
        loop.step(tracer)
        tracer.stop(SIGNATURE)
        rows = {row.name: row for row in _table(tracer.record).rows}
        for (name, block), values in zip(busy.items(), found, strict=True):
            values.append((block.spent, rows[name].own_backward_us / 1e6))
    return found


def _table(record: TracedStepRecord | None) -> ModuleTable:
    assert record is not None
    table = module_table(load_trace(record.path))
    assert table is not None
    return table


def file_costs(workload: Workload) -> tuple[int, float, float]:
    """Events of a traced step, and the µs an event that torch takes to write its file and we to read it."""
    loop = _Loop(workload)
    tracer = StepTracer(workload.model, device=torch.device("cpu"))
    tracer.warm_up()
    loop.step(None)
    tracer.start(0)
    loop.step(tracer)
    spent: list[float] = []
    export = tracer._export

    def timed_export(profiler: Any) -> str:
        seconds, path = _timed(lambda: export(profiler))
        spent.append(seconds)
        return str(path)

    tracer._export = timed_export  # type: ignore[method-assign]
    tracer.stop(SIGNATURE)
    record = tracer.record
    assert record is not None, tracer.lost
    events = len(load_trace(record.path))
    read_sec, _ = _timed(lambda: load_trace(record.path))
    return events, 1e6 * spent[0] / events, 1e6 * read_sec / events


def _cost_row(name: str, readings: Readings, target: Target) -> str:
    seconds = readings.seconds
    traced, again = ratio(seconds[TRACED], seconds[PLAIN]), ratio(seconds[AGAIN], seconds[PLAIN])
    plain = 1e3 * median(seconds[PLAIN])
    edges = f"{1e3 * median(readings.start_sec):.1f} | {1e3 * median(readings.stop_sec):.1f}"
    return (
        f"| {name} | {plain:.1f} | {traced.text(3)} | {again.text(3)} | {readings.events:,} | {edges} | "
        f"{target.verdict(traced)} |"
    )


def _per_event(readings: Readings, seconds: Sequence[float]) -> Estimate:
    return median_with_interval([1e6 * each / readings.events for each in seconds])


def _analysis_rows(name: str, readings: Readings) -> list[str]:
    modules = [a + b for a, b in zip(readings.load_sec, readings.modules_sec, strict=True)]
    everything = [a + b for a, b in zip(readings.load_sec, readings.tables_sec, strict=True)]
    return [
        f"| {name}: {what} | {each.text(2)} | {ANALYSIS.verdict(each)} |"
        for what, each in (
            ("time of every module", _per_event(readings, modules)),
            ("every table, modules included", _per_event(readings, everything)),
        )
    ]


def _known_rows(repeats: int) -> list[str]:
    rows = []
    for how, reentrant in (("plain", None), ("reentrant checkpoint", True), ("non-reentrant checkpoint", False)):
        for pairs in known_costs(reentrant=reentrant, repeats=repeats):
            true_ms = 1e3 * median(true for true, _ in pairs)
            found = median_with_interval([1e3 * value for _, value in pairs])
            excess = [1e3 * (value - true) for true, value in pairs]
            limit = TOLERANCE_SHARE * true_ms + 1e3 * TOLERANCE_SEC
            met = "met" if abs(median(excess)) <= limit else "**missed**"
            rows.append(
                f"| {how} | {true_ms:.3f} | {found.text(3)} | {median_with_interval(excess).text(3)} | "
                f"{max(excess):.3f} | within {limit:.2f} ms: {met} |"
            )
    return rows


def report(bert: Readings, tiny: Readings, known: Sequence[str], file: tuple[int, float, float]) -> list[str]:
    """The section's lines."""
    lost_forward, lost_backward = median_with_interval(bert.lost_forward), median_with_interval(bert.lost_backward)
    return [
        "## The traced step",
        "",
        f"Processor time of one step under torch.profiler with marks around modules and phases, over the same step "
        f"without; medians of {len(bert.seconds[PLAIN])} and {len(tiny.seconds[PLAIN])} rounds with 95% intervals.",
        "",
        "| step | plain, ms | traced / plain | plain again / plain | events | start, ms | stop, ms | goal |",
        "|---|---|---|---|---|---|---|---|",
        _cost_row("BERT-base, 1 × 64 tokens", bert, BERT_COST),
        _cost_row("a thousand tiny operators", tiny, TINY_COST),
        "",
        "Analysis in memory, from the profiler's own events, in µs of processor time an event:",
        "",
        "| | µs an event | goal |",
        "|---|---|---|",
        *_analysis_rows("BERT-base", bert),
        *_analysis_rows("tiny operators", tiny),
        "",
        f"Where a device took part, events are read from torch's trace file: for BERT-base's {file[0]:,} events torch "
        f"takes {file[1]:.2f} µs an event to write it, and reading it takes {file[2]:.2f}.",
        "",
        "What of BERT-base's phases no module, gradient accumulation or other named part owns:",
        "",
        "| | % of the phase | goal |",
        "|---|---|---|",
        f"| forward | {lost_forward.text(3)} | {LOST_FORWARD.verdict(lost_forward)} |",
        f"| backward | {lost_backward.text(3)} | {LOST_BACKWARD.verdict(lost_backward)} |",
        "",
        "Blocks of known backward cost, by a clock of their own, and what the trace gives back (medians, ms):",
        "",
        "| run | true | found | found less true | most | goal: 5% + 0.3 ms |",
        "|---|---|---|---|---|---|",
        *known,
        "",
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure everything and write the section."""
    parser = argparse.ArgumentParser(prog=f"python -m {MODULE}", description=__doc__)
    parser.add_argument("--rounds", type=int, default=12, help="of BERT-base; of tiny operators five times as many")
    parser.add_argument("--repeats", type=int, default=25, help="of each known cost")
    parser.add_argument("--output", type=Path, default=RESULT, help="the report whose section is written")
    options = parser.parse_args(arguments)
    restart_in_one_thread_environment(MODULE)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    torch.set_num_threads(1)
    generator = random.Random(0)
    with tempfile.TemporaryDirectory() as folder:
        tempfile.tempdir = folder
        tiny = measure(tiny_operators(), rounds=5 * options.rounds, generator=generator)
        known = _known_rows(options.repeats)
        bert = measure(bert_base(), rounds=options.rounds, generator=generator)
        file = file_costs(bert_base())
        tempfile.tempdir = None
    write_section(options.output, "traced step", report(bert, tiny, known, file))


if __name__ == "__main__":
    main()
