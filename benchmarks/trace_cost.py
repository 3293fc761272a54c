"""What the traced step costs, what it explains, and whether it gives known costs back.

``make bench-time`` runs this with the other benchmarks of time; ``python -m benchmarks.trace_cost`` runs it alone.

A step is timed with and without the tracer in every round, in a new random order, by the processor time of the process
(everything runs on one thread, so what else the machine does is not in it); ratios are taken within a round. Starting
and stopping the profiler lie outside of the traced step and are listed apart. Known costs are those of
``autograd.Function``s whose backward works until a clock says that it has taken so long.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from statistics import median
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from lightning_flops.instrument.tracing.step_tracer import StepTracer
from lightning_flops.records import StepSignature
from lightning_flops.trace import analyze_trace, load_trace
from lightning_flops.trace.modules import module_table

from .machine import RESULTS, ran_in_words
from .page import TIME_HEAD, met, table, write_section
from .ratios import Target, difference, median_with_interval, ratio
from .runner import in_rounds, start
from .workloads import Workload, tiny_operators

PLAIN, AGAIN, TRACED = "plain", "plain again", "traced"
SIGNATURE = StepSignature(batches=(), forwards=1, backwards=1, updates=1)
BERT_COST, TINY_COST = Target(limit=1.05, unit="× plain"), Target(limit=2.0, unit="× plain")
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


def _timed(run: Callable[[], Any]) -> tuple[float, Any]:
    begun = time.process_time()
    result = run()
    return time.process_time() - begun, result


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """One step; but for its seconds, of a traced one."""

    seconds: float
    events: int = 0
    start_sec: float = 0.0
    stop_sec: float = 0.0
    """With writing torch's file."""
    modules_sec: float = 0.0
    """To read the file and make the table of modules."""
    tables_sec: float = 0.0
    """To read the file and make every table."""
    lost: tuple[float, float] = (0.0, 0.0)
    """Percent of forward and of backward that no module or other named part has."""


class Loop:
    """A training step in parts that a tracer may mark."""

    def __init__(self, workload: Workload) -> None:
        self._workload = workload
        self._optimizer = torch.optim.AdamW(workload.model.parameters(), lr=1e-4)

    def step(self, tracer: StepTracer | None = None) -> None:
        """Forward, backward, optimizer."""
        losses: list[Any] = []
        parts: dict[str, Callable[[], Any]] = {
            "forward": lambda: losses.append(self._workload.loss()),
            "backward": lambda: losses[0].backward(),
            "optimizer": self._optimizer.step,
        }
        for part, run in parts.items():
            if tracer is None:
                run()
            else:
                tracer.enter(part)
                run()
                tracer.leave()
        self._optimizer.zero_grad(set_to_none=True)

    def plain(self) -> Reading:
        """A step that is not traced."""
        return Reading(seconds=_timed(self.step)[0])

    def traced(self) -> Reading:
        """A step that is."""
        tracer = StepTracer(self._workload.model, device=torch.device("cpu"))
        tracer.warm_up()
        self.step()  # the warm-up step, marks up
        start_sec, _ = _timed(lambda: tracer.start(0))
        seconds, _ = _timed(lambda: self.step(tracer))
        stop_sec, _ = _timed(lambda: tracer.stop(SIGNATURE))
        record = tracer.record
        assert record is not None, tracer.lost
        load_sec, trace = _timed(lambda: load_trace(record.path))
        modules_sec, modules = _timed(lambda: module_table(trace))
        tables_sec, _ = _timed(lambda: analyze_trace(trace))
        return Reading(
            seconds=seconds,
            events=len(trace),
            start_sec=start_sec,
            stop_sec=stop_sec,
            modules_sec=load_sec + modules_sec,
            tables_sec=load_sec + tables_sec,
            lost=(
                100 * modules.unattributed_forward_us / modules.forward_us,
                100 * modules.unattributed_backward_us / modules.backward_us,
            ),
        )


# ---- blocks of known cost


class _Busy(torch.autograd.Function):
    """Passes its input on, and works for so long in the backward."""

    @staticmethod
    def forward(ctx: Any, inputs: torch.Tensor, block: _BusyBlock) -> torch.Tensor:
        ctx.block = block
        return inputs.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        begun = time.perf_counter()
        while (taken := time.perf_counter() - begun) < ctx.block.seconds:
            pass
        ctx.block.taken = taken  # on a busy machine it may be longer
        return gradients[0], None


class _BusyBlock(nn.Module):
    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds
        self.taken = 0.0

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return _Busy.apply(inputs, self)  # type: ignore[no-untyped-call,no-any-return]


class _KnownBlocks(nn.Module):
    """Blocks of known cost behind a layer each, run plain or under a checkpoint."""

    def __init__(self, reentrant: bool | None) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), _BusyBlock(seconds)) for seconds in KNOWN_SEC)
        self.reentrant = reentrant

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            plain = self.reentrant is None
            inputs = block(inputs) if plain else checkpoint(block, inputs, use_reentrant=self.reentrant)
        return inputs


def _known_rows(how: str, reentrant: bool | None, repeats: int) -> Iterator[list[object]]:
    """For each block its own milliseconds and those that the trace gives it."""
    model = _KnownBlocks(reentrant)
    loop = Loop(Workload(model=model, args=(torch.ones(4, 8, requires_grad=True),)))
    busy = {name: block for name, block in model.named_modules() if isinstance(block, _BusyBlock)}
    true: dict[str, list[float]] = {name: [] for name in busy}
    found: dict[str, list[float]] = {name: [] for name in busy}
    for _ in range(repeats):
        tracer = StepTracer(model, device=torch.device("cpu"))
        tracer.warm_up()
        tracer.start(0)
        loop.step(tracer)
        tracer.stop(SIGNATURE)
        assert tracer.record is not None, tracer.lost
        modules = module_table(load_trace(tracer.record.path))
        assert modules is not None
        own_us = {row.name: row.own_backward_us for row in modules.rows}
        for name, block in busy.items():
            true[name].append(1e3 * block.taken)
            found[name].append(own_us[name] / 1e3)
    for name in busy:
        true_ms, excess = median(true[name]), difference(found[name], true[name])
        limit = TOLERANCE_SHARE * true_ms + 1e3 * TOLERANCE_SEC
        verdict = f"within {limit:.2f} ms: {met(abs(excess.value) <= limit)}"
        yield [how, f"{true_ms:.3f}", median_with_interval(found[name]).text(3), excess.text(3), verdict]


# ---- the report


def _cost_row(name: str, readings: dict[str, list[Reading]], target: Target) -> list[object]:
    seconds = {arm: [reading.seconds for reading in taken] for arm, taken in readings.items()}
    cost, again = ratio(seconds[TRACED], seconds[PLAIN]), ratio(seconds[AGAIN], seconds[PLAIN])
    traced = readings[TRACED]
    ends = [1e3 * median(one.start_sec for one in traced), 1e3 * median(one.stop_sec for one in traced)]
    plain = f"{1e3 * median(seconds[PLAIN]):.1f}"
    events = f"{traced[-1].events:,}"
    return [name, plain, cost.text(3), again.text(3), events, *(f"{end:.1f}" for end in ends), target.verdict(cost)]


def _analysis_rows(name: str, readings: dict[str, list[Reading]]) -> Iterator[list[object]]:
    for what, part in (("time of every module", "modules_sec"), ("every table, modules included", "tables_sec")):
        each = median_with_interval([1e6 * getattr(one, part) / one.events for one in readings[TRACED]])
        yield [f"{name}: {what}", each.text(2), ANALYSIS.verdict(each)]


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures, writes its section of the results, and returns 0."""
    options = start(__file__, __doc__, RESULTS / "time.md", arguments, rounds=12, repeats=25)
    names = {"BERT-base, 1 × 64 tokens": (bert_base, 1, BERT_COST)}
    names["a thousand tiny operators"] = (tiny_operators, 5, TINY_COST)
    with tempfile.TemporaryDirectory() as folder, patch.object(tempfile, "tempdir", folder):
        readings = {}
        for name, (make, times, _) in names.items():
            loop = Loop(make())
            arms = {PLAIN: loop.plain, AGAIN: loop.plain, TRACED: loop.traced}
            readings[name] = in_rounds(arms, times * options.rounds, warm_up=2)
        checkpoints = {"plain": None, "reentrant checkpoint": True, "non-reentrant checkpoint": False}
        known = [row for how, reentrant in checkpoints.items() for row in _known_rows(how, reentrant, options.repeats)]
    lost = [[one.lost[phase] for one in next(iter(readings.values()))[TRACED]] for phase in (0, 1)]
    forward, backward = (median_with_interval(each) for each in lost)
    lines = [
        f"""## The traced step

Processor time of one step under torch.profiler with marks around modules and phases, over the same step without;
medians of {options.rounds} and {5 * options.rounds} rounds with 95% intervals.
""",
        *table(
            ["step", "plain, ms", "traced / plain", "plain again / plain", "events", "start, ms", "stop, ms", "goal"],
            [_cost_row(name, readings[name], target) for name, (_, _, target) in names.items()],
        ),
        "\nAnalysis of torch's file, in µs of processor time an event:\n",
        *table(["", "µs an event", "goal"], [row for name in names for row in _analysis_rows(name, readings[name])]),
        "\nWhat of BERT-base's phases no module, gradient accumulation or other named part owns:\n",
        *table(
            ["", "% of the phase", "goal"],
            [
                ["forward", forward.text(3), LOST_FORWARD.verdict(forward)],
                ["backward", backward.text(3), LOST_BACKWARD.verdict(backward)],
            ],
        ),
        "\nBlocks of known backward cost, by a clock of their own, and what the trace gives back (medians, ms):\n",
        *table(["run", "true", "found", "found less true", "goal: 5% + 0.3 ms"], known),
        "",
        ran_in_words(("torch", "transformers")),
    ]
    write_section(options.output, "traced step", lines, head=TIME_HEAD)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
