"""Adds the books of all threads up to one record."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from lightning_flops.instrument.counting.operator_facts import Operator, dtype_name
from lightning_flops.instrument.counting.thread_state import ThreadState
from lightning_flops.records import FlopPhase, FlopRecord, OperatorCell, PhaseFlops, UncountedOperator

_Key = tuple[str, FlopPhase, str, str]  # module, phase, operator, dtype


@dataclass(slots=True)
class _Sum:
    calls: int = 0
    flops: int = 0
    skipped: int = 0
    without_backward: int = 0
    hidden_grad_flops: int = 0
    read: int = 0
    written: int = 0


def merge_records(threads: Collection[ThreadState], notes: Iterable[str]) -> FlopRecord:
    """One record of what all threads did.

    Args:
        threads: their books.
        notes: sentences for the record.
    """
    sums: dict[_Key, _Sum] = {}
    calls: dict[str, int] = {}
    listed: dict[str, list[int]] = {}
    listed_modules: dict[str, set[str]] = {}
    for state in threads:
        _add_cells(sums, state)
        for name, count in list(state.calls.items()):
            calls[name] = calls.get(name, 0) + count
        for (operator, module), (count, elements, heavy) in list(state.listed.items()):
            entry = listed.setdefault(operator, [0, 0, 0])
            entry[0] += count
            entry[1] += elements
            entry[2] |= heavy
            listed_modules.setdefault(operator, set()).add(module)
    uncounted = {
        operator: UncountedOperator(
            calls=count, modules=tuple(sorted(listed_modules[operator])), output_elements=elements, heavy=bool(heavy)
        )
        for operator, (count, elements, heavy) in sorted(listed.items())
    }
    cells = tuple(
        OperatorCell(
            module=module,
            phase=phase,
            operator=operator,
            dtype=dtype,
            calls=entry.calls,
            flops=entry.flops,
            causal_skipped=entry.skipped,
            without_backward=_without_backward(sums, (module, phase, operator, dtype)),
            bytes_read=entry.read,
            bytes_written=entry.written,
        )
        for (module, phase, operator, dtype), entry in sorted(sums.items())
    )
    return FlopRecord(
        cells=cells,
        module_calls=dict(sorted(calls.items())),
        uncounted=uncounted,
        notes=(*notes, *_estimates(threads)),
    )


def _estimates(threads: Iterable[ThreadState]) -> list[str]:
    """Sentences that name the operators whose FLOPs are estimates, and where those come from."""
    sources: dict[str, str] = {}
    for state in threads:
        for table in list(state.tables.values()):
            for key, cell in list(table.items()):
                operator = key if isinstance(key, Operator) else key[0]
                if cell.flops and operator.entry.estimate:
                    sources[operator.name] = operator.entry.estimate
    return [f"The FLOPs of {name} are an estimate: {source}." for name, source in sorted(sources.items())]


def total_flops(threads: Iterable[ThreadState]) -> PhaseFlops:
    """FLOPs by phase of what all threads did: what ``merge_records`` adds up to, without the books in between."""
    sums = {"forward": 0, "backward": 0, "recompute": 0, "optimizer": 0}
    for state in threads:
        for table in list(state.tables.values()):
            for cell in list(table.values()):
                sums[table.phase] += cell.flops
                sums["recompute"] += cell.repeated
    return PhaseFlops(**sums)


def _add_cells(sums: dict[_Key, _Sum], state: ThreadState) -> None:
    for table in list(state.tables.values()):
        for key, cell in list(table.items()):
            operator = key if isinstance(key, Operator) else key[0]
            dtype = "" if cell.dtype is None else dtype_name(cell.dtype)
            entry = sums.setdefault((table.module, table.phase, operator.name, dtype), _Sum())
            entry.calls += cell.calls
            entry.flops += cell.flops
            entry.skipped += cell.skipped
            entry.without_backward += cell.without_backward
            entry.hidden_grad_flops += cell.hidden_grad_flops
            entry.read += cell.read
            entry.written += cell.written
            if cell.repeated:
                # What a fused backward repeats runs in the same kernel: the bytes stay with the backward.
                repeated = sums.setdefault((table.module, "recompute", operator.name, dtype), _Sum())
                repeated.flops += cell.repeated
                repeated.skipped += cell.repeated_skipped


def _without_backward(sums: Mapping[_Key, _Sum], key: _Key) -> int:
    """Forward FLOPs from which no backward can follow.

    Inside an ``autograd.Function`` grad is off, so tensors do not say whether a backward follows. But only one such
    function runs whole modules: reentrant checkpointing. It repeats them with grad on, and the repetition knows. If a
    checkpoint in another one is repeated more than once, the innermost repetition decides.
    """
    module, phase, operator, dtype = key
    entry = sums[key]
    if phase != "forward":
        return 0
    repeated = sums.get((module, "recompute", operator, dtype))
    knowing = 0 if repeated is None else repeated.flops - repeated.hidden_grad_flops
    if not entry.hidden_grad_flops or repeated is None or knowing <= 0:
        return entry.without_backward
    return entry.without_backward + entry.hidden_grad_flops * repeated.without_backward // knowing
