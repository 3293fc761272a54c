"""What is known before a step runs, as documents: the memory that it needs, and the plan of one rank of a job."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import astuple

from lightning_flops.records import OUTSIDE
from lightning_flops.report.document import CALLS, Column, Item, Section, Table, at, field, share
from lightning_flops.schema.plan import LargestBatch, MemoryReport, ModuleMemory, Plan, PlannedRun
from lightning_flops.units import NOT_AVAILABLE, duration, percent, plain, plural, si

_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")
_MOST_ROWS = 12
_ABOUT_PREDICTED = (
    "Of tensors, in two eager steps on fake ones, as the optimizer's states are made in the first. CUDA's context, "
    "workspaces of cuBLAS, NCCL's buffers and fragmentation come on top."
)


def predicted_section(report: MemoryReport) -> Section:
    """The peak, what is held then, which modules keep it, and what would fit."""
    items = [*peak_tables(report), *_checkpointed(report), *report.notes, _ABOUT_PREDICTED]
    return Section("Predicted memory", f"{headline(report)}.", items)


def peak_tables(report: MemoryReport) -> Iterator[Item]:
    """What is held at the peak by kind, the modules that keep most, and the largest batch that fits."""
    shares = share("share", lambda row: row[1] / report.peak_bytes if report.peak_bytes else None)
    kinds = [field("at the peak", "0", str), Column("", at("1"), unit="B"), shares]
    yield Table([*report.at_peak.items()], kinds, whole=True)
    kept = [Column("kept for backward", at("2"), unit="B"), Column("at the peak", at("3"), unit="B")]
    columns = [field("module", "0", str), field("modules", "1"), *kept]
    yield Table(_by_pattern(report.modules)[:_MOST_ROWS], columns, whole=True)
    if report.largest is not None:
        yield _largest_words(report, report.largest)


def headline(report: MemoryReport) -> str:
    """When the peak is, and how high."""
    of = "" if report.available_bytes is None else f" of {si(report.available_bytes, 'B')}"
    size = "" if report.batch_size is None else f" with a batch of {plain(report.batch_size)}"
    part, operator = report.when.part or "code between the parts", report.when.operator.removesuffix(".default")
    where = "the optimizer's step" if part == "optimizer" else f"the {part} of {_name(report.when.module)}"
    return f"Peak {si(report.peak_bytes, 'B')}{of}{size}, in {where}{f' ({operator})' if operator else ''}"


def _checkpointed(report: MemoryReport) -> Iterator[str]:
    if (saved := report.checkpointed) is not None:
        number = len(saved.names)
        yield (
            f"With a checkpoint around each of the {plain(number)} {plural('block', number)} "
            f"{_pattern(saved.names[0])}: {si(saved.peak_bytes, 'B')} "
            f"({percent(saved.peak_bytes / report.peak_bytes - 1)}), for {si(saved.recompute_flops, 'FLOPs')} more "
            f"({percent(saved.recompute_flops / saved.model_flops if saved.model_flops else None)} of the step's)."
        )


def _largest_words(report: MemoryReport, largest: LargestBatch) -> str:
    """The largest batch that fits, and the line that the peak follows near it."""
    size, peak, more = largest.size, largest.peak_bytes, largest.bytes_per_sample
    words = (
        f"Largest batch in {si(report.available_bytes, 'B')}: {plain(size) if size else 'none, not one sample fits'}"
    )
    words = words if peak is None else f"{words}, with a peak of {si(peak, 'B')}"
    if peak is None or more is None:
        return f"{words}."
    return f"{words}, near which peak = {si(peak - more * size, 'B')} + {si(more, 'B')} × batch."


def _by_pattern(modules: Sequence[ModuleMemory]) -> list[tuple[str, int, int, int]]:
    """Equal modules of repeated blocks as one row: name, how many, bytes kept, bytes at the peak; the largest first.

    Of a module without modules inside the last number stays: the layers of a list are not alike.
    """
    rows = defaultdict[str, list[ModuleMemory]](list)
    around = {one.name.rpartition(".")[0] for one in modules}
    for one in modules:
        above, dot, last = one.name.rpartition(".")
        rows[_pattern(one.name) if one.name in around else _pattern(above) + dot + last].append(one)
    summed = [
        (
            _name(name if len(some) > 1 else some[0].name),
            len(some),
            sum(one.kept_bytes for one in some),
            sum(one.peak_bytes for one in some),
        )
        for name, some in rows.items()
    ]
    return sorted(summed, key=lambda row: (-row[2], -row[3]))


def _pattern(name: str) -> str:
    return _NUMBER.sub("*", name)


def _name(module: str) -> str:
    return "code outside of the model" if module == OUTSIDE else module or "the root"


def plan_section(plan: Plan) -> Section:
    """What one rank computes, holds and sends in a step, and the floor of the step."""
    sizes = " x ".join(f"{name} {size}" for name, size in plan.mesh.items())
    batch = "".join(f", {name} {plain(size)}" for name, size in plan.at.items())
    bound = " (lower bound)" if plan.lower_bound else ""
    phases = {name: getattr(plan.flops, name) for name in ("forward", "backward", "recompute", "optimizer")}
    counts = {f"{name} FLOPs": plain(flops) + bound for name, flops in phases.items() if flops or name != "optimizer"}
    columns = [
        field("collective", "kind", str),
        Column("along", at("dim"), str, left=True),
        field("ranks", "size"),
        CALLS,
        Column("bytes", at("bytes"), plain),
        Column("floor", at("floor_sec"), duration),
    ]
    stages = {f"FLOPs of stage {place}": plain(sum(astuple(one))) for place, one in enumerate(plan.stages)}
    items: list[Item] = [
        counts
        | {"peak memory of its tensors": _held_words(plan.memory)}
        | {"parameters of this rank": plain(plan.local_params), "parameters of the model": plain(plan.params)},
        stages | ({} if plan.bubble is None else {"bubble of the pipeline": percent(plan.bubble)}),
        Table(plan.collectives, columns, whole=True) if plan.collectives else "No collectives.",
        _floor(plan),
        {f"{plain(one.steps)} steps at {one.at}": _run_words(one) for one in plan.runs},
        *plan.notes,
    ]
    about = f"One step of rank {plan.rank} of the mesh {sizes}{batch}, counted without the job. A floor is no forecast."
    return Section("Plan", about, items)


def _held_words(memory: MemoryReport | None) -> str:
    """The peak, and its largest kinds."""
    if memory is None:
        return f"{NOT_AVAILABLE} (not all storages are seen)"
    kinds = ", ".join(f"{kind} {si(size, 'B')}" for kind, size in list(memory.at_peak.items())[:3])
    return f"{si(memory.peak_bytes, 'B')} ({kinds})"


def _floor(plan: Plan) -> dict[str, str]:
    peaks = ", ".join(f"{si(peak, 'FLOP/s')} in {dtype}" for dtype, peak in plan.peaks_flops_per_sec.items())
    why = plan.unavailable.get("floor_sec") or plan.unavailable.get("communication_sec")
    floors = {
        label: f"{NOT_AVAILABLE} ({plan.unavailable.get(name) or why})" if seconds is None else duration(seconds)
        for label, name in _FLOORS.items()
        for seconds in (getattr(plan, name),)
    }
    return {
        "device": plan.device or NOT_AVAILABLE,
        "its peak": peaks or NOT_AVAILABLE,
        "its memory": si(plan.memory_bytes_per_sec, "B/s"),
        **floors,
        "MFU at most": percent(plan.mfu_at_most),
    }


_FLOORS = {
    "floor of the arithmetic": "arithmetic_sec",
    "floor of the operators": "operators_sec",
    "floor of the communication": "communication_sec",
    "floor of the step, communication hidden": "floor_sec",
    "floor of the step, nothing hidden": "exposed_floor_sec",
}


def _run_words(run: PlannedRun) -> str:
    price = "" if run.price is None else f", price {plain(run.price)}"
    return f"{plain(run.hours)} hours, {plain(run.device_hours)} device hours{price}"
