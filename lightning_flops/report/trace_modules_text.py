"""Modules of a trace as text: time and FLOPs."""

from __future__ import annotations

from lightning_flops.report.trace_cells import place, short, us
from lightning_flops.report.trace_flops_text import module_flops_cells, module_flops_head
from lightning_flops.report.trace_view import View
from lightning_flops.schema.trace import TraceReport
from lightning_flops.units import plain


def module_lines(report: TraceReport, view: View) -> list[str]:
    """Forward and backward of each module."""
    modules = report.modules
    if modules is None:
        return []
    where = "on the device" if modules.clock == "device" else "on the host"
    lines = view.section(
        "Modules",
        f"Time {where}, all steps together; self: without the modules inside. The backward includes what it repeats of "
        "the forward. Gradient accumulation is of the whole model and has its own line.",
    )
    for label, time_us in (
        ("forward", modules.forward_us),
        ("  of it unattributed", modules.unattributed_forward_us),
        ("backward", modules.backward_us),
        ("  of it gradient accumulation", modules.gradient_accumulation_us),
        ("  of it communication", modules.backward_communication_us),
        ("  of it operators outside of autograd's nodes", modules.backward_outside_nodes_us),
        ("  of it unattributed", modules.unattributed_backward_us),
        ("optimizer", modules.optimizer_us),
    ):
        lines += view.line(label, us(time_us))
    flops = {} if report.flops is None else {row.name: row for row in report.flops.modules or ()}
    longest = view.first(
        sorted(modules.rows, key=lambda row: -(row.own_forward_us + row.own_backward_us)),
        name=lambda row: row.name,
        calls=lambda row: row.calls,
        total=lambda row: row.forward_us + row.backward_us,
        self=lambda row: row.own_forward_us + row.own_backward_us,
        flops=lambda row: flops[row.name].forward + flops[row.name].backward if row.name in flops else 0,
        rate=lambda row: flops[row.name].flops_per_sec if row.name in flops else 0,
    )
    with_source = any(row.source is not None for row in modules.rows)
    rows = [
        [
            short(row.name or "(root)"),
            plain(row.calls),
            *map(us, (row.own_forward_us, row.forward_us, row.own_backward_us, row.backward_us)),
            *([] if row.forward_kernels is None else [plain(row.forward_kernels), plain(row.backward_kernels)]),
            *module_flops_cells(report.flops, row.name),
            *([place(row.source)] if with_source else []),
        ]
        for row in longest
    ]
    head = ["module", "calls", "fwd self", "fwd total", "bwd self", "bwd total"]
    head += ["fwd kernels", "bwd kernels"] if modules.clock == "device" else []
    head += module_flops_head(report.flops)
    head += ["forward is in"] if with_source else []
    return [*lines, "", *view.table(head, rows), *view.more(modules.rows)]
