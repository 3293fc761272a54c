"""The plan of one rank as a document."""

from __future__ import annotations

from dataclasses import astuple

from lightning_flops.report.document import CALLS, Column, Item, Section, Table, at, field
from lightning_flops.schema.memory import MemoryReport
from lightning_flops.schema.plan import Plan, PlannedRun
from lightning_flops.units import NOT_AVAILABLE, duration, percent, plain, si


def plan_section(plan: Plan) -> Section:
    """What one rank computes, holds and sends in a step, and the floor of the step."""
    sizes = " x ".join(f"{name} {size}" for name, size in plan.mesh.items())
    sizes += "".join(f", {name} {plain(size)}" for name, size in plan.at.items())
    bound = " (lower bound)" if plan.lower_bound else ""
    phases = {name: getattr(plan.flops, name) for name in ("forward", "backward", "recompute", "optimizer")}
    items: list[Item] = [
        {f"{name} FLOPs": plain(flops) + bound for name, flops in phases.items() if flops or name != "optimizer"}
        | {"peak memory of its tensors": held_words(plan.memory)}
        | {"parameters of this rank": plain(plan.local_params), "parameters of the model": plain(plan.params)}
    ]
    if plan.bubble is not None:
        items.append(
            {f"FLOPs of stage {place}": plain(sum(astuple(one))) for place, one in enumerate(plan.stages)}
            | {"bubble of the pipeline": percent(plan.bubble)}
        )
    if plan.collectives:
        columns = [
            field("collective", "kind", str),
            Column("along", at("dim"), str, left=True),
            field("ranks", "size"),
            CALLS,
            Column("bytes", at("bytes"), plain),
            Column("floor", at("floor_sec"), duration),
        ]
        items.append(Table(plan.collectives, columns, whole=True))
    else:
        items.append("No collectives.")
    items.append(_floor(plan))
    if plan.run is not None:
        items.append(_run(plan.run))
    items.extend(plan.notes)
    about = f"One step of rank {plan.rank} of the mesh {sizes}, counted without the job. A floor is no forecast."
    return Section("Plan", about, items)


def held_words(memory: MemoryReport | None) -> str:
    """The peak, and its largest kinds."""
    if memory is None:
        return f"{NOT_AVAILABLE} (FSDP gathers parameters unseen)"
    kinds = ", ".join(f"{kind} {si(size, 'B')}" for kind, size in list(memory.at_peak.items())[:3])
    return f"{si(memory.peak_bytes, 'B')} ({kinds})"


def _floor(plan: Plan) -> dict[str, str]:
    peaks = ", ".join(f"{si(peak, 'FLOP/s')} in {dtype}" for dtype, peak in plan.peaks_flops_per_sec.items())
    reasons = plan.unavailable

    def shown(name: str, seconds: float | None) -> str:
        why = reasons.get(name) or (reasons.get("floor_sec") or reasons.get("communication_sec"))
        return duration(seconds) if seconds is not None else f"{NOT_AVAILABLE} ({why})"

    return {
        "device": plan.device or NOT_AVAILABLE,
        "its peak": peaks or NOT_AVAILABLE,
        "its memory": si(plan.memory_bytes_per_sec, "B/s"),
        "floor of the arithmetic": shown("arithmetic_sec", plan.arithmetic_sec),
        "floor of the operators": shown("operators_sec", plan.operators_sec),
        "floor of the communication": shown("communication_sec", plan.communication_sec),
        "floor of the step, communication hidden": shown("floor_sec", plan.floor_sec),
        "floor of the step, nothing hidden": shown("exposed_floor_sec", plan.exposed_floor_sec),
        "MFU at most": percent(plan.mfu_at_most),
    }


def _run(run: PlannedRun) -> dict[str, str]:
    rows = {
        "at the floor": (run.floor_hours, run.floor_device_hours, run.floor_price),
        "at 40% of the peak": (run.hours_at_40_percent, run.device_hours_at_40_percent, run.price_at_40_percent),
    }
    return {
        f"{plain(run.steps)} steps {where}": f"{plain(hours)} hours, {plain(of_devices)} device hours"
        + ("" if price is None else f", price {plain(price)}")
        for where, (hours, of_devices, price) in rows.items()
    }
