"""Memory as text: what each phase holds, what it is for, and who allocates it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from lightning_flops.records import MemoryRecord
from lightning_flops.report.layout import line, paragraph, shortened, table, title
from lightning_flops.report.trace_view import WHOLE, View
from lightning_flops.schema.trace import TracedStep
from lightning_flops.schema.trace_events import MemoryRow, ModuleMemoryRow
from lightning_flops.units import NOT_AVAILABLE, bytes_by_dtype, plain, si

_NAMES = {"forward": "fwd", "backward": "bwd", "optimizer": "optimizer"}
_NAME_CHARS = 56
_NO_GRADIENTS = "on no parameter, as under ZeRO"
_NO_STATES = "not where torch's optimizers keep them"
_SIZES = ("size increase", "self", "allocation", "self")


def operator_memory_table(rows: Sequence[MemoryRow], view: View = WHOLE) -> list[str]:
    """What operators allocated and freed, in bytes."""
    cells = [
        [
            "(outside operators)" if row.name is None else shortened(row.name, chars=_NAME_CHARS),
            _where(row),
            plain(row.calls),
            *_sizes(row),
        ]
        for row in rows
    ]
    return view.table(["operator", "where", "calls", *_SIZES], cells, least_width=6, left=(0, 1))


def module_memory_table(rows: Sequence[ModuleMemoryRow], view: View = WHOLE) -> list[str]:
    """What modules allocated and freed, in bytes."""
    cells = [
        [
            f"({row.part})" if row.name is None else shortened(row.name or "(root)", chars=_NAME_CHARS),
            "" if row.name is None else _NAMES[row.part],
            _where(row),
            *_sizes(row),
        ]
        for row in rows
    ]
    return view.table(["module", "", "where", *_SIZES], cells, least_width=3, left=(0, 1, 2))


def _where(row: MemoryRow | ModuleMemoryRow) -> str:
    return row.device_type if row.device < 0 else f"{row.device_type} {row.device}"


def _sizes(row: MemoryRow | ModuleMemoryRow) -> tuple[str, ...]:
    increase, own_increase = plain(row.size_increase_bytes), plain(row.self_size_increase_bytes)
    return increase, own_increase, plain(row.allocation_bytes), plain(row.self_allocation_bytes)


def memory_lines(
    memory: MemoryRecord | None,
    traced: TracedStep | None,
    *,
    trains: bool = True,
    parameter_bytes: Mapping[str, int] | None = None,
) -> list[str]:
    """A section of the report; empty if memory was not looked at.

    Args:
        memory: what was looked at in the counted step.
        traced: the traced step, whose allocations tell what resident memory does not.
        trains: the run trains; if not, gradients and states of optimizers are none of its own.
        parameter_bytes: of the whole model's parameters, by dtype.
    """
    if memory is None:
        return []
    on_device = memory.kind == "allocated"
    head = ["", f"{memory.kind} at its end"]
    rows = [[_NAMES[phase.name], si(phase.current_bytes, "B")] for phase in memory.phases]
    if on_device:
        head += ["peak in it", "reserved at its end", "peak in it"]
        for row, phase in zip(rows, memory.phases, strict=True):
            row.append(_peak(phase.peak_bytes, before=memory.run_peak_bytes))
            row.append(si(phase.reserved_bytes, "B"))
            row.append(_peak(phase.reserved_peak_bytes, before=memory.run_reserved_peak_bytes))
        about = (
            "Bytes on the device, as its caching allocator counts them. It keeps one peak, which is not reset here: a "
            "phase that reached a new peak shows it; any other phase stayed at or below the earlier peak."
        )
    else:
        about = "Bytes of this process on the host, all of it."
    lines = [
        title(f"Memory of this rank in the counted {'step' if trains else 'batch'}"),
        *paragraph(about),
        *table(head, rows),
        line(f"peak {memory.kind}, of this process so far", si(memory.run_peak_bytes, "B")),
    ]
    if on_device:
        lines.append(line("peak reserved, of this process so far", si(memory.run_reserved_peak_bytes, "B")))
    lines += [
        line("parameters on this rank", si(memory.parameter_bytes, "B")),
        *([line("parameters of the model", bytes_by_dtype(parameter_bytes))] if parameter_bytes else []),
        line("buffers", si(memory.buffer_bytes, "B")),
    ]
    if not trains:
        return lines
    return [
        *lines,
        line("gradients", _or_why_not(memory.gradient_bytes, _NO_GRADIENTS)),
        line("optimizer states", _or_why_not(memory.optimizer_bytes, _NO_STATES)),
        line(
            "activations that a forward keeps, with its outputs",
            si(memory.kept_by_forward_bytes, "B") if on_device else _kept_on_host(traced),
        ),
    ]


def _or_why_not(value: int | None, reason: str) -> str:
    return f"{NOT_AVAILABLE} ({reason})" if value is None else si(value, "B")


def _kept_on_host(traced: TracedStep | None) -> str:
    tables = None if traced is None else traced.tables
    if tables is not None and tables.modules is not None:
        calls = next((row.calls for row in tables.modules.rows if not row.name), 0)
        for row in tables.module_memory or ():
            if (row.name, row.part, row.device) == ("", "forward", -1) and calls:
                return f"{si(row.size_increase_bytes / calls, 'B')} (of the traced step)"
    return f"{NOT_AVAILABLE} (set profile_memory to know it)"


def _peak(value: int | None, *, before: int | None) -> str:
    """The peak that a phase reached, or the earlier peak that it did not exceed."""
    if value is not None:
        return si(value, "B")
    return NOT_AVAILABLE if before is None else f"<= {si(before, 'B')}"
