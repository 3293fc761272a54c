"""What the traced step costs, and what it explains.

``make bench-time`` runs this with the other benchmarks of time; ``python -m benchmarks.trace_cost`` runs it alone.

A step is timed under torch.profiler with marks around modules and phases, and without, in every round, in a new random
order, by the processor time of the process (everything runs on one thread, so what else the machine does is not in it);
ratios are taken within a round, medians have 95% intervals. Starting and stopping the profiler lie outside of the
traced step and are listed apart.
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

from lightning_flops.instrument.tracing.step_tracer import StepTracer
from lightning_flops.records import StepSignature
from lightning_flops.trace import analyze_trace, load_trace
from lightning_flops.trace.modules import module_table

from .machine import RESULTS
from .page import described, table, write_section
from .ratios import Target, median_with_interval, ratio
from .runner import in_rounds, start
from .workloads import Workload, tiny_operators

PLAIN, AGAIN, TRACED = "plain", "plain again", "traced"
SIGNATURE = StepSignature(batches=(), forwards=1, backwards=1, updates=1)
BERT_COST, TINY_COST = Target(limit=1.05, unit="× plain"), Target(limit=2.0, unit="× plain")
ANALYSIS = Target(limit=5.0, unit="µs an event")
LOST_FORWARD, LOST_BACKWARD = Target(limit=2.0, unit="%"), Target(limit=3.0, unit="%")


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
    stop_sec: float = 0.0  # with writing torch's file
    modules_sec: float = 0.0  # to read the file and make the table of modules
    tables_sec: float = 0.0  # to read the file and make every table
    lost: tuple[float, float] = (0.0, 0.0)  # percent of forward and of backward that no module or other named part has


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
        stop_sec, record = _timed(lambda: tracer.stop(SIGNATURE))
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
    options = start(__file__, __doc__, RESULTS / "time.md", arguments, rounds=12)
    names = {"BERT-base, 1 × 64 tokens": (bert_base, 1, BERT_COST)}
    names["a thousand tiny operators"] = (tiny_operators, 5, TINY_COST)
    with tempfile.TemporaryDirectory() as folder, patch.object(tempfile, "tempdir", folder):
        readings = {}
        for name, (make, times, _) in names.items():
            loop = Loop(make())
            arms = {PLAIN: loop.plain, AGAIN: loop.plain, TRACED: loop.traced}
            readings[name] = in_rounds(arms, times * options.rounds, warm_up=2)
    lost = [[one.lost[phase] for one in next(iter(readings.values()))[TRACED]] for phase in (0, 1)]
    forward, backward = (median_with_interval(each) for each in lost)
    lines = [
        *described(__doc__, "torch", "transformers", level="##"),
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
    ]
    write_section(options.output, "traced step", lines)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
