"""Tables of a trace: devices, kernels, copies, idle times, scopes, operators, steps, collectives, memory over time."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from operator import itemgetter
from typing import Any

import numpy as np

from lightning_flops.schema import tables as schema
from lightning_flops.schema.comparison import TableName
from lightning_flops.schema.tables import MemoryRow, OperatorRow, Row
from lightning_flops.schema.trace import CollectiveCalls
from lightning_flops.trace.columns import (
    Kind,
    Trace,
    collective_of,
    is_users_scope,
    may_use_tensor_cores,
    once,
    scope_of_collective,
    uses_tensor_cores,
)
from lightning_flops.trace.intervals import (
    NS_PER_US,
    Groups,
    Ints,
    Lanes,
    counted_once,
    covered_within,
    durations_of,
    group_by,
    levels,
    longest_first,
    numbered,
    ratio,
    split_by,
    sums_by,
    table,
)
from lightning_flops.trace.modules import called_from
from lightning_flops.trace.steps import launched_ns, phases_of, steps_of
from lightning_flops.trace.structure import enclosing, launch_ns_of, links_of, nearest, nest, without_inner

# Communication from one rank to another; what is above a kernel of such a name may say that it is a collective.
_POINT_TO_POINT = ("send", "recv", "recvAnysource", "sendrecv", "coalesced")


_LONG_GROUP = 40  # characters


def device_metrics(trace: Trace) -> tuple[schema.DeviceMetrics, ...] | None:
    """Utilization, SM efficiency, occupancy and blocks per SM of each device; None without a device."""
    steps, spans, found = steps_of(trace), steps_of(trace).spans, list[schema.DeviceMetrics]()
    for device, here in split_by(trace.device, np.flatnonzero(trace.on_device)):
        rows = here[trace.kind[here] == Kind.KERNEL]
        blocks, busy, entry = trace.blocks_per_sm[rows], trace.merged(rows), trace.described(device)
        moments, level = levels(trace.start_ns[rows], trace.end_ns[rows], np.nan_to_num(blocks))
        load = float((level[:-1] * covered_within(spans, moments[:-1], moments[1:])).sum())
        within = rows[(trace.end_ns[rows] > steps.start_ns[0]) & (trace.start_ns[rows] < steps.end_ns[-1])]
        lengths, together = trace.duration_ns[within], group_by(trace.kind[within])
        found.append(
            schema.DeviceMetrics(
                device=device,
                name=entry.name if entry else None,
                sm_count=entry.sm_count if entry else None,
                utilization=ratio(int(covered_within(busy, *spans).sum()), spans.total) or 0.0,
                sm_efficiency=None if not len(rows) or np.isnan(blocks).any() else ratio(load, spans.total),
                occupancy_percent=next(iter(together.means(trace.occupancy_percent[within], lengths)), None),
                blocks_per_sm=next(iter(together.means(trace.blocks_per_sm[within], lengths)), None),
            )
        )
    return tuple(found) or None


def kernel_tables(trace: Trace) -> tuple[tuple[schema.KernelRow, ...], schema.KernelSummary] | tuple[None, None]:
    """Every kernel by name, the longest together first, and all of them together; None without a device."""
    if not trace.has_device:
        return None, None
    rows = np.flatnonzero(trace.kind == Kind.KERNEL)
    lengths, groups, computes = trace.duration_ns[rows], group_by(trace.name[rows]), ~trace.is_collective[rows]
    names, whole_ns = trace.texts(groups.keys[0]), int(lengths.sum())
    short = lengths < schema.SHORT_KERNEL_LIMIT_US * NS_PER_US
    operators = links_of(trace).operator_of_launch[rows]
    eligible = (operators >= 0) & trace.where(may_use_tensor_cores, Kind.OPERATOR)[operators]
    kernels = table(
        schema.KernelRow,
        longest_first("device"),
        name=names,
        calls=groups.calls,
        device=groups.durations(lengths, whole_ns=whole_ns),
        operator=[trace.name_of(row) if row >= 0 else "" for row in _launchers(trace, rows, operators)],
        tensor_cores=map(uses_tensor_cores, names),
        tensor_cores_eligible=groups.reduced(np.logical_or, eligible),
        collective=groups.reduced(np.logical_or, ~computes),
        blocks_per_sm=groups.means(trace.blocks_per_sm[rows], lengths),
        occupancy_percent=groups.means(trace.occupancy_percent[rows], lengths),
    )
    computed_ns = int(lengths[computes].sum()) if trace.names_tell_tensor_cores else 0
    on_cores = trace.where(uses_tensor_cores, Kind.KERNEL)[rows]
    return kernels, schema.KernelSummary(
        calls=len(rows),
        total_us=whole_ns / NS_PER_US,
        tensor_core_ratio=ratio(int(lengths[on_cores & computes].sum()), computed_ns),
        tensor_core_eligible_ratio=ratio(int(lengths[eligible & computes].sum()), computed_ns),
        short_calls_ratio=ratio(int(short.sum()), len(rows)),
        short_time_ratio=ratio(int(lengths[short].sum()), whole_ns),
    )


def _launchers(trace: Trace, rows: Ints, operators: Ints) -> Iterator[int]:
    """For each name of kernels the row of an operator whose name launched most of their time, or -1."""
    groups = group_by(trace.name[rows], np.where(operators >= 0, trace.name[operators], -1))
    spent = group_by(groups.keys[0]).parts(np.array(groups.sums(trace.duration_ns[rows]), dtype=np.int64))
    firsts = group_by(groups.keys[0]).parts(operators[groups.order[groups.firsts]])
    yield from (int(first[np.argmax(most)]) for first, most in zip(firsts, spent, strict=True))


def transfer_table(trace: Trace) -> tuple[Row, ...] | None:
    """Copies and memsets by kind, the longest first; None without a device."""
    if not trace.has_device:
        return None
    rows = np.flatnonzero((trace.kind == Kind.MEMCPY) | (trace.kind == Kind.MEMSET))
    groups = group_by(trace.name[rows])
    launch, host_ns = links_of(trace).launch, steps_of(trace).host_ns
    calls = [group_by(launch[here]).keys[0] for here in groups.parts(rows)]
    host = [durations_of(trace.duration_ns[here[here >= 0]], whole_ns=host_ns) for here in calls]
    return table(
        Row,
        longest_first("device"),
        name=trace.texts(groups.keys[0]),
        calls=groups.calls,
        bytes=groups.sums_known(trace.bytes[rows]),
        host=host,
        device=groups.durations(trace.duration_ns[rows], whole_ns=trace.device_work_ns),
    )


def idle_times(trace: Trace) -> tuple[schema.IdleTime, ...] | None:
    """Idle time of each device, over the whole trace; None without a device."""
    found = list[schema.IdleTime]()
    for device, rows in split_by(trace.device, trace.device_rows):
        reached = np.maximum.accumulate(trace.end_ns[rows])[:-1]
        gaps, launched = np.maximum(trace.start_ns[rows[1:]] - reached, 0), links_of(trace).launch[rows[1:]] >= 0
        late = launched & (launch_ns_of(trace)[rows[1:]] > reached)
        short = launched & ~late & (gaps < schema.KERNEL_GAP_LIMIT_US * NS_PER_US)
        causes = {"host_wait_us": late, "kernel_gap_us": short, "other_us": ~late & ~short}
        times = {name: int(gaps[chosen].sum()) / NS_PER_US for name, chosen in causes.items()}
        found += [schema.IdleTime(device=device, busy_us=trace.merged(rows).total / NS_PER_US, **times)]
    return tuple(found) or None


def user_scope_table(trace: Trace) -> tuple[Row, ...]:
    """The user's own scopes by name, the longest first."""
    rows = np.flatnonzero(trace.where(is_users_scope, Kind.ANNOTATION))
    groups = group_by(trace.name[rows])
    begins = counted_once(groups.number, trace.start_ns[rows], trace.end_ns[rows])
    launched = launched_ns(trace, begins, trace.end_ns[rows])
    on_device = {"device": groups.durations(launched, whole_ns=trace.device_work_ns)} if trace.has_device else {}
    return table(
        Row,
        longest_first("host"),
        name=trace.texts(groups.keys[0]),
        calls=groups.calls,
        host=groups.durations(trace.duration_ns[rows], whole_ns=steps_of(trace).host_ns),
        **on_device,
    )


def memory_table(trace: Trace) -> tuple[MemoryRow, ...] | None:
    """Bytes by operator, and outside of any, on each device; None when they were not recorded."""
    memory, links, found = trace.memory, links_of(trace), list[MemoryRow]()
    if not memory:
        return None
    owner = enclosing(trace, links.operators, links.parent, memory["lane"], memory["time_ns"])
    # The last of each stands for what is outside of any operator, which is -1.
    names, name_of = (*trace.names, None), np.append(trace.name, len(trace.names))
    outer = np.append(times_of(trace).rows, len(trace))
    for device, here in split_by(memory["device"], np.arange(len(owner))):
        sizes = memory["size"][here]
        amounts = (sizes, np.maximum(sizes, 0), np.ones_like(sizes))
        own = [sums_by(owner[here], values, len(name_of)) for values in amounts]
        whole = [with_callees(trace, values) for values in own]
        whole[2][:-1] = np.minimum(whole[2][:-1], 1)
        own = [sums_by(name_of, values, len(names)) for values in own]
        whole = [sums_by(name_of[outer], values[outer], len(names)) for values in whole]
        places = np.flatnonzero(whole[2])
        found += table(
            MemoryRow,
            name=[names[place] for place in places.tolist()],
            device=[device] * len(places),
            calls=whole[2][places].tolist(),
            size_increase_bytes=whole[0][places].tolist(),
            self_size_increase_bytes=own[0][places].tolist(),
            allocation_bytes=whole[1][places].tolist(),
            self_allocation_bytes=own[1][places].tolist(),
        )
    return tuple(sorted(found, key=lambda row: (row.device < 0, row.device, -row.self_allocation_bytes, str(row.name))))


def with_callees(trace: Trace, own: Ints) -> Ints:
    """For each row of an operator, its *own* and that of all it called, directly or not."""
    total = own.copy()
    for rows in reversed(links_of(trace).levels[1:]):
        np.add.at(total, links_of(trace).parent[rows], total[rows])
    return total


class OperatorTimes:
    """The times of every operator, with and without what it called; a column over all rows of the trace for each."""

    def __init__(self, trace: Trace) -> None:
        links, of_operator = links_of(trace), links_of(trace).operator_of_launch
        inner = np.flatnonzero(links.parent >= 0)
        outer = links.parent[inner]
        # As in torch's own tables, ``aten::sum`` that only passes other arguments on to ``aten::sum`` is one call.
        inner = inner[(trace.name[inner] == trace.name[outer]) & (np.bincount(outer, minlength=1)[outer] == 1)]
        is_call = trace.kind == Kind.OPERATOR
        is_call[inner] = False
        self.rows, owner = np.flatnonzero(is_call), nearest(links.parent, is_call)
        operators, by_call = links.operators, owner[links.operators]
        self.host, own = trace.duration_ns, without_inner(trace, links.parent)[operators]
        # Callees that overlap by rounding would make up more than there is.
        self.host_self = np.minimum(sums_by(by_call, own, len(trace)), self.host)
        rows = np.flatnonzero(of_operator >= 0)
        launched = sums_by(of_operator[rows], trace.duration_ns[rows], len(trace))
        self.device, self.device_self = with_callees(trace, launched), sums_by(by_call, launched[operators], len(trace))


times_of = once(OperatorTimes)


def operator_table(trace: Trace) -> tuple[OperatorRow, ...]:
    """Every operator by name, the longest self time first (the device's if there is one)."""
    rows, places = times_of(trace).rows, called_from(trace)
    groups = group_by(trace.name[rows])
    return _operators(trace, rows, groups, called_from=[places.get(name, "") for name in groups.keys[0].tolist()])


def children_table(trace: Trace) -> tuple[schema.ChildRow, ...]:
    """What each operator called and launched itself, by name."""
    times, links = times_of(trace), links_of(trace)
    owner = np.append(nearest(links.parent, np.isin(np.arange(len(trace)), times.rows)), -1)
    whole = trace.name[times.rows].astype(np.int64)
    host_ns, device_ns = (sums_by(whole, of[times.rows], len(trace.names)) for of in (times.host, times.device))
    rows = np.concatenate([times.rows, trace.device_rows])
    above = owner[np.concatenate([links.parent[times.rows], links.operator_of_launch[trace.device_rows]])]
    rows, above = rows[above >= 0], above[above >= 0]
    groups = group_by(trace.name[above], trace.on_device[rows].astype(np.int8), trace.name[rows])
    parents, launched, children = groups.keys
    host = groups.durations(times.host[rows], whole_ns=host_ns[parents])
    spent_ns = np.where(trace.on_device, trace.duration_ns, times.device)[rows]
    return table(
        schema.ChildRow,
        longest_first("device", "host"),
        name=trace.texts(children),
        operator=trace.texts(parents),
        calls=groups.calls,
        host=[None if one else durations for one, durations in zip(launched.tolist(), host, strict=True)],
        device=groups.durations(spent_ns, whole_ns=device_ns[parents]) if trace.has_device else [None] * len(host),
    )


def operators_by_shape(trace: Trace, flops: Mapping[tuple[str, str], schema.Flops]) -> tuple[OperatorRow, ...]:
    """Every operator by the sizes of its inputs, which *flops* are by, too, as far as they were recorded."""
    rows = times_of(trace).rows
    rows = rows[trace.inputs[rows] >= 0]
    keys, groups = by_shape(trace, rows)
    return _operators(trace, rows, groups, inputs=[sizes for _, sizes in keys], flops=map(flops.get, keys))


def by_shape(trace: Trace, rows: Ints) -> tuple[list[tuple[str, str]], Groups]:
    """*rows* of operators whose inputs were recorded, by name and sizes of inputs; and these of each group."""
    texts = (", ".join(str(one) for one in recorded.dims if one) for recorded in trace.recorded_inputs)
    sizes, number = numbered(texts)
    groups = group_by(trace.name[rows], number[trace.inputs[rows]])
    names, places = groups.keys
    return [*zip(trace.texts(names), [sizes[place] for place in places.tolist()], strict=True)], groups


def _operators(trace: Trace, rows: Ints, groups: Groups, **more: Iterable[Any]) -> tuple[OperatorRow, ...]:
    times, columns = times_of(trace), dict[str, Any](more)
    names = trace.texts(groups.keys[0])
    for clock, whole, own in (("host", times.host, times.host_self), ("device", times.device, times.device_self)):
        for name, values in ((clock, whole), (f"{clock}_self", own)):
            known = clock == "host" or trace.has_device
            of_calls = groups.durations(values[rows], whole_ns=int(own[rows].sum()))
            columns[name] = of_calls if known else [None] * len(names)
    return table(
        OperatorRow,
        longest_first("device_self", "host_self"),
        name=names,
        calls=groups.calls,
        **columns,
    )


StepSums = Mapping[TableName, Mapping[str, Ints]]  # of each table by name nanoseconds and calls, a column for each step


def step_sums(trace: Trace) -> StepSums:
    """What each kernel, operator (without callees) and collective took in each step in which it was launched."""
    times, (collectives, _, number, names) = times_of(trace), find_collectives(trace)

    def sums(of: Sequence[str], name: Lanes, rows: Ints, spent_ns: Ints) -> dict[str, Ints]:
        step = steps_of(trace).of(launch_ns_of(trace)[rows])
        inside = np.flatnonzero(step >= 0)
        used, which = np.unique(name[inside], return_inverse=True)
        found = np.zeros((len(used), 2, len(steps_of(trace))), dtype=np.int64)
        np.add.at(found[:, 0], (which, step[inside]), spent_ns[rows[inside]])
        np.add.at(found[:, 1], (which, step[inside]), 1)
        return dict(zip([of[one] for one in used.tolist()], found, strict=True))

    return {
        "kernels": sums(trace.names, trace.name[trace.device_rows], trace.device_rows, trace.duration_ns),
        "operators": sums(trace.names, trace.name[times.rows], times.rows, times.host_self),
        "collectives": sums(names, number, collectives, trace.duration_ns),
    }


@once
def find_collectives(trace: Trace) -> tuple[Ints, Ints, Ints, list[str]]:
    """The collectives of *trace*, each by what it is: NCCL runs many of them as kernels that send and receive.

    Their rows by start; for each the row that has its arguments, its own or that of an operator above it, or -1; the
    index of its name; and the names.

    The name is that of the arguments of the kernel, or of the operator above it; else of torch's scope around the
    launch, ``nccl:all_to_all``; else of the operator, ``c10d::alltoall_base_``; else what the kernel's name says.
    """
    rows, links = trace.by_start(trace.is_collective), links_of(trace)
    if not len(rows):
        return rows, rows, rows, []
    says, is_c10d = trace.collective >= 0, trace.where(lambda name: name.startswith("c10d::"), Kind.OPERATOR)
    around, above = np.append(links.parent, -1), links.operator_of_launch[rows]
    said = np.where(says[rows], rows, nearest(around, np.append(says & (trace.kind == Kind.OPERATOR), False))[above])
    starter = nearest(around, np.append(is_c10d, False))[above]
    scopes, outer, _ = nest(trace, np.flatnonzero(trace.where(scope_of_collective, Kind.ANNOTATION)))
    launch = links.launch[rows]
    scope = np.where(launch >= 0, enclosing(trace, scopes, outer, trace.lane[launch], trace.start_ns[launch]), -1)

    def name(row: int, said: int, scope: int, starter: int) -> str:
        if said >= 0:
            return str(trace.collectives[trace.collective[said]].name)
        if scope >= 0:
            return scope_of_collective(trace.name_of(scope)) or ""
        of_operator = trace.name_of(starter).removeprefix("c10d::").strip("_") if starter >= 0 else ""
        return of_operator or collective_of(trace.name_of(row))

    names, number = numbered(map(name, *(one.tolist() for one in (rows, said, scope, starter))))
    return rows, said, number, names


def collective_table(trace: Trace) -> tuple[Row, ...]:
    """Collectives by name, the longest first."""
    rows, said, number, names = find_collectives(trace)
    groups, lengths, clock = group_by(number), trace.duration_ns[rows], "device" if trace.has_device else "host"
    return table(
        Row,
        longest_first("device", "host"),
        name=names,
        calls=groups.calls,
        bytes=groups.sums_known(np.where(said >= 0, trace.bytes[said], -1)),
        **{clock: groups.durations(lengths, whole_ns=int(lengths.sum()))},
    )


def collective_calls(trace: Trace) -> tuple[CollectiveCalls, ...]:
    """The collectives of *trace*, grouped by name, process group and the step in which they were started."""
    steps, (rows, said, number, names) = steps_of(trace), find_collectives(trace)
    step = steps.of(launch_ns_of(trace)[rows])
    if steps.marked:
        rows, said, number, step = (column[step >= 0] for column in (rows, said, number, step))
    else:
        step = np.full(len(rows), -1)
    everyone = [*(trace.only_group or ())]
    said_of = (one.group or str(everyone or "") for one in trace.collectives)
    groups_of = [*map(_short_group, said_of)]
    what = np.where(said >= 0, trace.collective[said], -1)  # the last one says nothing
    keys, place = numbered(
        (names[one], None if names[one] in _POINT_TO_POINT else groups_of[index], at)
        for one, index, at in zip(number.tolist(), what.tolist(), step.tolist(), strict=True)
    )
    groups, lengths = group_by(place), trace.duration_ns[rows]
    return table(
        CollectiveCalls,
        name=[name for name, _, _ in keys],
        group=[group for _, group, _ in keys],
        group_size=[trace.collectives[one[0]].group_size or len(everyone) or None for one in groups.parts(what)],
        step=[(*steps.numbers, None)[at] for _, _, at in keys],
        calls=groups.calls,
        bytes=groups.sums_known(np.where(said >= 0, trace.bytes[said], -1)),
        total_ns=groups.sums(lengths),
        latency_ns=[array("q", one.tolist()) for one in groups.parts(lengths)],
    )


def _short_group(group: str) -> str | None:
    # A report of thousands of ranks has thousands of these: a long text is called by its digest.
    digest = hashlib.blake2b(group.encode(errors="surrogatepass"), digest_size=8).hexdigest()
    return digest if len(group) > _LONG_GROUP else group or None


def memory_curves(trace: Trace) -> tuple[schema.MemoryCurve, ...] | None:
    """The curve of each device whose allocations were recorded; None where none were."""
    if not (memory := trace.memory):
        return None
    begin, curves = int(trace.start_ns.min()), list[schema.MemoryCurve]()
    of_phases = (
        (name, (start - begin) / NS_PER_US, (end - begin) / NS_PER_US)
        for name, phase in phases_of(trace).items()
        for start, end in zip(phase.own.starts.tolist(), phase.own.ends.tolist(), strict=True)
    )
    spans = tuple(sorted(of_phases, key=itemgetter(1)))
    for device, rows in split_by(memory["device"], np.argsort(memory["time_ns"], kind="stable")):
        times_us, total = (memory["time_ns"][rows] - begin) / NS_PER_US, memory["total_allocated"][rows]
        absolute = bool((total >= 0).all())
        allocated = total if absolute else np.cumsum(memory["size"][rows])
        # Of each of at most 500 stretches its begin and the most in it.
        firsts, peak = group_by(np.linspace(0, len(rows) - 1, 500, dtype=np.int64)).keys[0], int(allocated.argmax())
        curves.append(
            schema.MemoryCurve(
                device=device,
                absolute=absolute,
                peak_bytes=int(allocated[peak]),
                peak_us=float(times_us[peak]),
                peak_phase=next((name for name, start, end in spans if start <= times_us[peak] < end), None),
                phases=spans if len(spans) <= 500 else (),  # a picture has no room for more
                points=tuple(
                    zip(times_us[firsts].tolist(), np.maximum.reduceat(allocated, firsts).tolist(), strict=True)
                ),
            )
        )
    return tuple(sorted(curves, key=lambda one: (one.device < 0, one.device)))
