"""The traced steps of a window: the tables of their trace, and what each module and operator takes in one of them.

Modules and operators have the median over the traced steps, so a call that the system interrupted changes nothing.
torch.profiler slows the host, so the host's times are scaled to what forward and backward of a typical step take.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import fields, replace
from typing import Any

from lightning_flops.analysis.names import with_those_below
from lightning_flops.analysis.rates import ratio
from lightning_flops.analysis.timing import build_timing, timed_steps
from lightning_flops.records import TracedStepRecord, WindowRecord
from lightning_flops.schema.step import ModuleTimes
from lightning_flops.schema.tables import ModuleRow, ModuleTable
from lightning_flops.schema.trace import PartFilling, TracedStep

_US_PER_SEC = 1e6
_FAR = 2.0  # traced and typical steps whose forward or backward differ by more than so many times are not compared
_LEAST_STEPS = 4  # fewer traced steps say nothing of their spread
_NAMED = 4
# Standard error of a median by that of a mean. The deviation of a few steps is about the width of their middle half,
# which one that something held up does not widen; of many it is less.
_OF_A_MEDIAN = math.sqrt(math.pi / 2)


def build_traced_step(window: WindowRecord) -> TracedStep | None:
    """The traced step of *window*: of several, the last that can be compared with the counted one; None if none was.

    Raises:
        LightningFlopsError: the trace cannot be read.
    """

    def is_like_counted(record: TracedStepRecord) -> bool:
        return not window.variable and set(record.signatures) == {window.counted_steps[0].signature}

    if not window.traces:
        return None
    from lightning_flops import trace as traces
    from lightning_flops.analysis.trace_report import analyze_trace

    context = window.context
    best = next(filter(is_like_counted, reversed(window.traces)), window.traces[-1])
    trace = traces.load_trace(best.path)
    tables = replace(analyze_trace(trace), rank=context.rank, source="(this run)")
    of_steps = [
        table for step in range(len(traces.steps_of(trace))) if (table := traces.module_table(trace, step)) is not None
    ]
    if len(of_steps) > 1:
        tables = replace(tables, modules=_medians(of_steps))
    counted = frozenset(cell.operator for cell in window.flops.cells if cell.flops)
    filling: dict[str, PartFilling] | None = traces.step_filling(trace, counted=counted)
    if context.device_type != "cpu" and not trace.has_device:
        # The host only launches the device's work: its time is neither the modules' nor the step's.
        tables, filling = replace(tables, modules=None), None
    if context.world_size == 1:
        # Some frameworks run their collectives all the same: a rank alone waits for none.
        tables = replace(tables, overlap=None)
    counted_elements = statistics.fmean(step.signature.elements for step in window.counted_steps)
    forward_scale, backward_scale, is_apart = _scales(
        tables.modules,
        window,
        work=counted_elements / statistics.fmean(one.elements for one in best.signatures),  # 1 if like the counted one
    )
    return TracedStep(
        index=best.index,
        like_counted=is_like_counted(best),
        files=(),
        tables=tables,
        own_forward_sec=None,
        parts=traces.step_parts(trace),
        filling=filling,
        steps=len(tables.step_times.steps),
        forward_scale=forward_scale,
        backward_scale=backward_scale,
        is_apart=is_apart,
        collectives=() if context.world_size == 1 else traces.collective_calls(trace),
    )


def _scales(table: ModuleTable | None, window: WindowRecord, *, work: float) -> tuple[float, float, bool]:
    """Factors of times in forward and backward, and whether these are far from a typical step's.

    Times of the device are scaled to the counted steps' *work*, which is 1 for traced steps like them; so are the
    host's where no step was timed. The medians of what a phase consists of add up to less than the phase where the
    system interrupts each step somewhere else.
    """
    timing = build_timing(timed_steps(window)[0], mixed_phases=window.mixed_phases, trains=window.context.trains)
    if timing is None or table is None or table.clock == "device":
        return work, work, False
    backward_us = table.unattributed_backward_us + table.gradient_accumulation_us
    inside_us = (
        math.fsum((*(row.own_forward_us for row in table.rows), table.unattributed_forward_us)),
        math.fsum((*(row.own_backward_us for row in table.rows), backward_us)),
    )
    timed = (timing.seconds_of("forward", typical=True), timing.seconds_of("backward", typical=True))
    if timed == (None, None):  # the two are not separated
        timed, inside_us = (timing.seconds_of("forward", "backward", typical=True),) * 2, (sum(inside_us),) * 2
    scales = [ratio(part=one, whole=us / _US_PER_SEC) or 1.0 for one, us in zip(timed, inside_us, strict=True)]
    return scales[0], scales[1], any(not 1 / _FAR <= one <= _FAR for one in scales)


def _medians(tables: Sequence[ModuleTable]) -> ModuleTable:
    """One step's table: the median over *tables* of each figure."""

    def medians(of_steps: Sequence[Any], names: Iterable[str]) -> dict[str, Any]:
        found = {}
        for name in names:
            values = [getattr(one, name) for one in of_steps]
            of_values = statistics.median_low if isinstance(values[0], int) else statistics.median
            found[name] = None if None in values else of_values(values)
        return found

    def error(of_steps: Sequence[ModuleRow]) -> float | None:
        own = [one.own_forward_us + one.own_backward_us for one in of_steps]
        if len(own) < _LEAST_STEPS:
            return None
        low, _, high = statistics.quantiles(own, n=4, method="inclusive")
        return _OF_A_MEDIAN * (high - low) / math.sqrt(len(own))

    rows = tuple(
        replace(of_steps[0], own_error_us=error(of_steps), **medians(of_steps, _OF_A_ROW))
        for of_steps in zip(*(one.rows for one in tables), strict=True)
    )
    if tables[0].clock == "host":  # there every moment is one module's, so a module has its own and what is below it
        forward = with_those_below({row.name: row.own_forward_us for row in rows}, 0.0)
        backward = with_those_below({row.name: row.own_backward_us for row in rows}, 0.0)
        rows = tuple(replace(row, forward_us=forward[row.name], backward_us=backward[row.name]) for row in rows)
    return replace(tables[0], steps=1, rows=rows, **medians(tables, _OF_A_TABLE))


_OF_A_ROW = tuple(one.name for one in fields(ModuleRow) if one.name not in ("name", "own_error_us"))
_OF_A_TABLE = tuple(one.name for one in fields(ModuleTable) if one.name.endswith("_us"))


def module_times(traced: TracedStep) -> dict[str, ModuleTimes]:
    """Times of each module in one step, by qualified name, without rates; empty without times."""
    own, table = traced.own_forward_sec or {}, traced.tables and traced.tables.modules
    if not table:
        untold: dict[str, Any] = {"clock": "hooks", "backward_sec": None, "own_backward_sec": None}
        return {
            name: ModuleTimes(forward_sec=sec, own_forward_sec=own.get(name, 0.0), **untold)
            for name, sec in with_those_below(own, 0.0).items()
        }
    forward, backward = traced.forward_scale / _US_PER_SEC, traced.backward_scale / _US_PER_SEC
    return {
        row.name: ModuleTimes(
            clock=table.clock,
            forward_sec=row.forward_us * forward,
            own_forward_sec=row.own_forward_us * forward,
            # None: the steps have no backward, instead of one of 0 s.
            backward_sec=row.backward_us * backward if table.backward_us else None,
            own_backward_sec=row.own_backward_us * backward if table.backward_us else None,
        )
        for row in table.rows
    }
