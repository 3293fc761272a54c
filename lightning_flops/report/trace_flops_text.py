"""FLOPs of a trace as text: by step, operator and kernel."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_flops.analysis.devices import why_no_peak
from lightning_flops.report import layout
from lightning_flops.report.trace_cells import NAME_CHARS, OPERATOR_CHARS, us
from lightning_flops.report.trace_view import View
from lightning_flops.schema.trace_flops import (
    JobFlops,
    JobStepFlops,
    KernelFlops,
    OperatorFlops,
    TracedModuleFlops,
    TracedStepFlops,
    TraceFlops,
)
from lightning_flops.units import percent, plain, si

_AT_LEAST = ">="


def flops_lines(flops: TraceFlops | None, view: View) -> list[str]:
    """A section of a trace's report; empty without FLOPs."""
    if flops is None:
        return []
    return [
        "",
        view.title("FLOPs"),
        *view.paragraph(
            "From the shapes in the trace, by the counter's formulas: matrix products, convolutions, attention, "
            "recurrent layers; a multiply-add is two. MFU is forward + backward over what the device could do at its "
            "dense peak in the step's wall time, HFU what the kernels executed, recomputation included."
        ),
        *_device(flops, view),
        "",
        *_steps(flops.steps, view),
        *_operators(flops, view),
        *_kernels(flops, view),
        *_uncounted(flops, view),
    ]


def _device(flops: TraceFlops, view: View) -> list[str]:
    if not flops.devices:
        return view.line("peak", "n/a (no device is in the trace)")
    if flops.device is None:
        return view.line("peak", "n/a (no device of one known name ran the kernels)")
    count = f"{flops.devices} x " if flops.devices > 1 else ""
    dtypes = sorted({row.dtype for row in flops.operators})
    unknown = [dtype for dtype in dtypes if dtype not in flops.peaks]
    lines = view.line("device", f"{count}{flops.device}")
    for dtype, peak in flops.peaks.items():
        lines += view.line(f"dense peak in {dtype}", si(peak, "FLOP/s"))
    for dtype in unknown:
        lines += view.line(f"dense peak in {dtype}", f"n/a ({why_no_peak(flops.device, dtype)})")
    bandwidth = flops.memory_bytes_per_sec
    return lines + view.line("memory bandwidth", "n/a" if bandwidth is None else si(bandwidth, "B/s"))


def job_flops_lines(flops: JobFlops | None, view: View) -> list[str]:
    """FLOPs of all ranks together; empty without ranks."""
    if flops is None:
        return []
    explanation = (
        "Of all ranks together. The wall time is the mean of theirs; MFU and HFU are over what all devices could do."
    )
    if flops.reason is not None:
        return ["", *view.line("FLOPs of all ranks", f"n/a ({flops.reason})")]
    return [*view.section("FLOPs of the job", explanation), *_steps(flops.steps, view)]


def _steps(steps: Sequence[TracedStepFlops | JobStepFlops], view: View) -> list[str]:
    head = ["", "wall", "forward", "backward", "recompute", "optimizer", "FLOP/s", "MFU", "HFU"]
    shown = view.first(steps, total=lambda step: step.wall_us, flops=lambda step: step.hardware, rate=_rate)
    return [*view.table(head, [_step(step) for step in shown]), *view.more(steps)]


def _step(step: TracedStepFlops | JobStepFlops) -> list[str]:
    mark = f"{_AT_LEAST} " if step.lower_bound else ""
    return [
        "whole trace" if step.step is None else f"step {step.step}",
        us(step.wall_us),
        *(f"{mark}{si(part)}" for part in (step.forward, step.backward, step.recompute, step.optimizer)),
        f"{mark}{si(_rate(step))}",
        *(value if value == "n/a" else f"{mark}{value}" for value in (percent(step.mfu), percent(step.hfu))),
    ]


def _rate(step: TracedStepFlops | JobStepFlops) -> float | None:
    return step.hardware / step.wall_us * 1e6 if step.wall_us else None


def _operators(flops: TraceFlops, view: View) -> list[str]:
    if not flops.operators:
        return []
    shown = view.first(
        flops.operators,
        name=lambda row: row.operator,
        calls=lambda row: row.calls,
        total=lambda row: row.time_us,
        flops=lambda row: row.forward + row.backward + row.recompute + row.optimizer,
        rate=lambda row: row.flops_per_sec,
        bytes=lambda row: row.bytes,
    )
    rows = [_operator(row) for row in shown]
    head = ["operator", "dtype", "calls", "FLOPs", "backward", "time", "FLOP/s", "of peak", "FLOP/byte", "attainable"]
    table = view.table(head, rows, least_width=6, left=(0, 1))
    return ["", *table, *view.more(flops.operators)]


def _operator(row: OperatorFlops) -> list[str]:
    return [
        layout.shortened_inside(row.operator, chars=OPERATOR_CHARS),
        row.dtype,
        plain(row.calls),
        si(row.forward + row.backward + row.recompute + row.optimizer),
        si(row.backward + row.recompute),
        us(row.time_us),
        si(row.flops_per_sec),
        percent(row.peak_share),
        plain(row.flops_per_byte),
        si(row.attainable_flops_per_sec),
    ]


def _kernels(flops: TraceFlops, view: View) -> list[str]:
    if not flops.kernels:
        return []
    shown = view.first(
        flops.kernels,
        name=lambda row: row.name,
        calls=lambda row: row.calls,
        total=lambda row: row.time_us,
        flops=lambda row: row.flops + row.shared_flops,
        rate=lambda row: row.flops_per_sec,
    )
    names = layout.shortened_apart([row.name for row in shown], chars=NAME_CHARS)
    rows = [_kernel(row, name) for row, name in zip(shown, names, strict=True)]
    lines = ["", *view.table(["kernel", "calls", "time", "FLOPs", "FLOP/s", "of peak"], rows)]
    lines += view.more(flops.kernels)
    if any(row.shared_flops for row in flops.kernels):
        lines += view.paragraph(
            "~: an operator's FLOPs, divided by time among the kernels in it that multiply, is an estimate."
        )
    shares = [row.peak_share for row in flops.kernels] + [row.peak_share for row in flops.operators]
    if any(share is not None and share > 1 for share in shares):
        lines += view.paragraph(
            "Above 100%: algorithms such as Winograd's multiply less than the formula of a convolution says."
        )
    return lines


def _kernel(row: KernelFlops, name: str) -> list[str]:
    about = "~" if row.shared_flops else ""
    return [
        name,
        plain(row.calls),
        us(row.time_us),
        f"{about}{si(row.flops + row.shared_flops)}",
        f"{about}{si(row.flops_per_sec)}",
        percent(row.peak_share) if row.peak_share is None else f"{about}{percent(row.peak_share)}",
    ]


def _uncounted(flops: TraceFlops, view: View) -> list[str]:
    if not flops.uncounted:
        return []
    rows = [
        [layout.shortened_inside(row.name, chars=OPERATOR_CHARS), plain(row.calls), row.reason]
        for row in view.first(flops.uncounted, name=lambda row: row.name, calls=lambda row: row.calls)
    ]
    lines = ["", *view.paragraph(f"Not counted, so that figures with {_AT_LEAST} are lower bounds:")]
    lines += view.table(["", "calls", "why"], rows, left=(0, 2))
    return [*lines, *view.more(flops.uncounted)]


def module_flops_head(flops: TraceFlops | None) -> list[str]:
    """Columns that a table of modules has where the modules' FLOPs are known."""
    return [] if flops is None or flops.modules is None else ["FLOPs", "FLOP/s", "of peak"]


def module_flops_cells(flops: TraceFlops | None, name: str) -> list[str]:
    """What these columns have for the module *name*."""
    if flops is None or flops.modules is None:
        return []
    row: TracedModuleFlops | None = next((one for one in flops.modules if one.name == name), None)
    if row is None:
        return ["0", "", ""]
    return [si(row.forward + row.backward + row.recompute), si(row.flops_per_sec), percent(row.peak_share)]
