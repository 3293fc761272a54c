"""Why a trace has no FLOPs, or FLOPs and no MFU: one sentence for every report of it."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_flops.analysis.devices import why_no_peak
from lightning_flops.schema.trace import TraceReport

NO_FLOPS = "FLOPs are n/a: "
"""What a note of a report begins with that says why it has none."""


def why_no_flops(reports: Sequence[TraceReport]) -> str | None:
    """Why one of *reports* has no FLOPs, without a full stop; None if all have them."""
    notes = [note for report in reports if report.flops is None for note in report.notes]
    found = next((note for note in notes if note.startswith(NO_FLOPS)), None)
    return None if found is None else found.removeprefix(NO_FLOPS).rstrip(".")


def why_no_mfu(reports: Sequence[TraceReport]) -> str | None:
    """Why the traces of one run do not give its MFU, without a full stop; None if they do, or if unknown."""
    flops = next((report.flops for report in reports if report.flops is not None), None)
    if flops is None:
        return why_no_flops(reports)
    if flops.device is None and not flops.peaks:
        return "no device of one known name ran the kernels" if flops.devices else "no device is in the trace"
    dtypes = sorted({row.dtype for row in flops.operators} - set(flops.peaks))
    return why_no_peak(flops.device or "", dtypes[0]) if dtypes else None
