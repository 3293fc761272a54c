"""Memory as text: what each phase holds, and what it is for."""

from __future__ import annotations

from lightning_flops.records import MemoryRecord
from lightning_flops.report.layout import line, paragraph, table, title
from lightning_flops.units import NOT_AVAILABLE, si

_NAMES = {"forward": "fwd", "backward": "bwd", "optimizer": "optimizer"}


def memory_lines(memory: MemoryRecord | None) -> list[str]:
    """A section of the report; empty if nobody looked."""
    if memory is None:
        return []
    on_device = memory.kind == "allocated"
    head = ["", f"{memory.kind} at its end"]
    rows = [[_NAMES[phase.name], si(phase.current_bytes, "B")] for phase in memory.phases]
    if on_device:
        head += ["new peak in it", "reserved at its end", "new peak in it"]
        for row, phase in zip(rows, memory.phases, strict=True):
            row += [_peak(phase.peak_bytes), si(phase.reserved_bytes, "B"), _peak(phase.reserved_peak_bytes)]
        about = (
            "Bytes on the device, as its caching allocator books them. Nothing here resets the run's peak, so a phase "
            "that set no new one shows none."
        )
    else:
        about = "Bytes of this process on the host, all of it."
    lines = [
        title("Memory of this rank in the counted step"),
        *paragraph(about),
        *table(head, rows),
        line(f"peak {memory.kind}, of the run so far", si(memory.run_peak_bytes, "B")),
    ]
    if on_device:
        lines.append(line("peak reserved, of the run so far", si(memory.run_reserved_peak_bytes, "B")))
    return [
        *lines,
        line("parameters on this rank", si(memory.parameter_bytes, "B")),
        line("buffers", si(memory.buffer_bytes, "B")),
        line("gradients", si(memory.gradient_bytes, "B")),
        line("optimizer states", si(memory.optimizer_bytes, "B")),
        line(
            "activations that a forward keeps, with its outputs",
            si(memory.kept_by_forward_bytes, "B") if on_device else f"{NOT_AVAILABLE} (resident memory does not tell)",
        ),
    ]


def _peak(value: int | None) -> str:
    return "-" if value is None else si(value, "B")
