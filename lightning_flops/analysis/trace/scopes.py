"""Named scopes, copies and memsets, each kind of event as a whole, and how busy processors were."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import numpy as np
import numpy.typing as npt

from lightning_flops.analysis.trace.columns import NONE, Trace
from lightning_flops.analysis.trace.durations import NS_PER_US, durations_of, group_by, ratio
from lightning_flops.analysis.trace.event_names import Kind, is_data_loader, is_users_scope, step_number
from lightning_flops.analysis.trace.intervals import Intervals, Ints, distinct, merge, shared_ns
from lightning_flops.analysis.trace.phases import sums_between
from lightning_flops.analysis.trace_marks import METADATA_KEY
from lightning_flops.schema.trace_events import TransferRow, UserScopeRow
from lightning_flops.schema.trace_steps import DeviceSummary, DeviceUse, OverviewRow


def user_scope_table(trace: Trace) -> tuple[UserScopeRow, ...] | None:
    """The user's own scopes by name, the longest first; None when there are none."""
    rows = np.flatnonzero((trace.kind == Kind.ANNOTATION) & trace.names_where(is_users_scope))
    if not len(rows):
        return None
    launched = _launched_in_scopes(trace, rows)
    groups = group_by(trace.name[rows].astype(np.int64))
    host = groups.durations(trace.duration_ns[rows], whole_ns=_host_steps_ns(trace))
    device = groups.durations(launched, whole_ns=_device_work_ns(trace))
    table = [
        UserScopeRow(
            name=trace.names[name], calls=calls, host=host[index], device=device[index] if trace.has_device else None
        )
        for index, (name, calls) in enumerate(zip(groups.keys.tolist(), groups.calls().tolist(), strict=True))
    ]
    return tuple(sorted(table, key=lambda row: (-row.host.total_us, row.name)))


def transfer_table(trace: Trace) -> tuple[TransferRow, ...] | None:
    """Copies and memsets by kind, the longest first; None without a device."""
    if not trace.has_device:
        return None
    rows = np.flatnonzero((trace.kind == Kind.MEMCPY) | (trace.kind == Kind.MEMSET))
    table = []
    for name in distinct(trace.name[rows]).tolist():
        here = rows[trace.name[rows] == name]
        calls = trace.links.launch[here]
        device = durations_of(trace.duration_ns[here], whole_ns=_device_work_ns(trace))
        sizes = trace.bytes[here]
        assert device is not None  # a name that is there has a row
        table.append(
            TransferRow(
                name=trace.names[name],
                calls=len(here),
                bytes=int(sizes.sum()) if (sizes != NONE).all() else None,
                host=durations_of(trace.duration_ns[distinct(calls[calls >= 0])], whole_ns=_host_steps_ns(trace)),
                device=device,
            )
        )
    return tuple(sorted(table, key=lambda row: (-row.device.total_us, row.name)))


def overview(trace: Trace) -> tuple[OverviewRow, ...]:
    """Each kind of event inside the steps: how many there are, and the time they cover together."""
    kind, links, phases = trace.kind, trace.links, trace.phases
    annotation, operator = kind == Kind.ANNOTATION, kind == Kind.OPERATOR
    found: list[OverviewRow | None] = [
        _of_rows(trace, "profiler step", annotation & trace.names_where(lambda n: step_number(n) is not None)),
        _of_rows(trace, "data loader", annotation & trace.names_where(is_data_loader)),
    ]
    for name, spans in (("forward", phases.forward), ("backward", phases.backward), ("optimizer", phases.optimizer)):
        if spans is not None:
            found.append(_row(trace, name, "host", len(spans.starts), spans.merged()))
    found += [
        _of_rows(trace, "user scope", annotation & trace.names_where(is_users_scope)),
        _of_rows(trace, "operator", operator & (links.parent < 0)),
        _of_rows(trace, "inner operator", operator & (links.parent >= 0)),
        _of_rows(trace, "runtime call", kind == Kind.RUNTIME),
        _of_rows(trace, "host communication", trace.is_collective & ~trace.on_device),
        _of_rows(trace, "kernel", kind == Kind.KERNEL),
        _of_rows(trace, "memcpy", kind == Kind.MEMCPY),
        _of_rows(trace, "memset", kind == Kind.MEMSET),
        _of_rows(trace, "communication", trace.is_collective & trace.on_device),
    ]
    return tuple(row for row in found if row is not None)


def device_summary(trace: Trace) -> DeviceSummary:
    """How busy the host's and the device's processors were.

    CPU times come from the object ``lightning_flops`` at the top of the file, if it is there, with the seconds
    ``process_cpu_sec``, ``elapsed_sec``, ``system_busy_sec`` and ``system_idle_sec``.
    """
    rows = trace.kind > Kind.PYTHON
    elapsed_ns = int(trace.end_ns[rows].max()) - int(trace.start_ns[rows].min())
    written = trace.metadata.get(METADATA_KEY)
    written = written if isinstance(written, dict) else {}
    busy, idle = _seconds(written, "system_busy_sec"), _seconds(written, "system_idle_sec")
    process, process_elapsed = _seconds(written, "process_cpu_sec"), _seconds(written, "elapsed_sec")
    kernels = trace.kind == Kind.KERNEL
    return DeviceSummary(
        elapsed_us=elapsed_ns / NS_PER_US,
        cpu_process_ratio=None if process is None or not process_elapsed else process / process_elapsed,
        cpu_system_ratio=None if busy is None or idle is None or not busy + idle else busy / (busy + idle),
        devices=tuple(
            DeviceUse(device=device, utilization=trace.merged(kernels & (trace.device == device)).total / elapsed_ns)
            for device in distinct(trace.device[kernels]).tolist()
        )
        if trace.has_device and elapsed_ns
        else None,
    )


def _of_rows(trace: Trace, name: str, rows: npt.NDArray[np.bool_]) -> OverviewRow | None:
    spans = trace.steps.spans
    if not len(spans.starts):
        return None
    indices = np.flatnonzero(rows)
    starts, ends = trace.start_ns[indices], trace.end_ns[indices]
    inside = (starts < spans.ends[-1]) & (ends > spans.starts[0])
    if not inside.all():
        indices, starts, ends = indices[inside], starts[inside], ends[inside]
    side: Literal["host", "device"] = "device" if trace.on_device[indices].any() else "host"
    return _row(trace, name, side, len(indices), merge(starts, ends)) if len(indices) else None


def _row(trace: Trace, name: str, side: Literal["host", "device"], calls: int, covered: Intervals) -> OverviewRow:
    time_ns = shared_ns(covered, trace.steps.spans)
    return OverviewRow(
        kind=name, side=side, calls=calls, time_us=time_ns / NS_PER_US, ratio=ratio(time_ns, trace.steps.total_ns)
    )


def _launched_in_scopes(trace: Trace, rows: Ints) -> Ints:
    launched = trace.device_rows
    calls = trace.links.launch[launched]
    launched, calls = launched[calls >= 0], calls[calls >= 0]
    order = np.argsort(trace.start_ns[calls], kind="stable")
    launched, calls = launched[order], calls[order]
    total = np.zeros(len(rows), dtype=np.int64)
    for lane in distinct(trace.lane[calls]).tolist():
        here = trace.lane[calls] == lane
        open_to = np.flatnonzero((trace.lane[rows] == lane) | bool(trace.links.backward_lanes[lane]))
        total[open_to] += sums_between(
            trace.start_ns[calls[here]],
            trace.duration_ns[launched[here]],
            trace.start_ns[rows[open_to]],
            trace.end_ns[rows[open_to]],
        )
    return total


def _host_steps_ns(trace: Trace) -> int:
    return int((trace.steps.host_end_ns - trace.steps.host_start_ns).sum())


def _device_work_ns(trace: Trace) -> int:
    return int(trace.duration_ns[trace.device_rows].sum())


def _seconds(written: Mapping[str, object], key: str) -> float | None:
    value = written.get(key)
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None
