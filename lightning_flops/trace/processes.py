"""Files in which the traces of several processes were merged: each process by itself.

Their numbers begin again in each process, so that nothing but a process joins them. Kernels stand under the number of
their device. A tool that merges writes the rank in front of a process, ``[TP00] 1234``, and then kernels have the same
in front; else they belong to the process in which most of their launches can be: calls of the same number, earlier.
"""

from __future__ import annotations

import numpy as np

from lightning_flops.trace.columns import Trace
from lightning_flops.trace.intervals import Ints, numbered
from lightning_flops.trace.names import Kind
from lightning_flops.trace.structure import launch_numbers


def by_process(trace: Trace) -> list[Trace]:
    """Each process of *trace* that called operators, with the device events that it launched; mostly the one it has."""
    names, process = numbered(trace.processes)
    of_row = process[trace.lane]
    hosts = np.unique(of_row[trace.kind == Kind.OPERATOR]).tolist()
    if len(hosts) < 2:
        return [trace]
    home = {host: host for host in hosts} | _homes(trace, of_row, hosts, names)
    # What a process without operators recorded, such as a monitor's, is in none of them.
    owner = np.array([home.get(one, -1) for one in range(len(names))], dtype=np.int64)
    lost = int((trace.on_device & (owner[of_row] < 0)).sum())
    notes = [f"The file has {len(hosts):,} processes that called operators: each stands by itself."]
    if lost:
        notes.append(
            f"Left out: {lost:,} kernels, copies and memsets of which the process that launched them is unclear."
        )
    mine, in_memory = owner[of_row], owner[process[trace.memory["lane"]]] if trace.memory else None
    return [
        trace.only(
            mine == host,
            source=f"{trace.source} (process {names[host]})",
            rank=None,
            memory={name: column[in_memory == host] for name, column in trace.memory.items()},
            notes=(*trace.notes, *notes),
        )
        for host in hosts
    ]


def _homes(trace: Trace, process: Ints, hosts: list[int], names: list[str]) -> dict[int, int]:
    """For each process on a device the one of *hosts* that launched it, as far as that is known."""
    labels = [name[: name.find("]") + 1] if name.startswith("[") else "" for name in names]
    devices, home = np.unique(process[trace.on_device]).tolist(), dict[int, int]()
    alike = {one: [host for host in hosts if labels[host] == labels[one]] for one in devices}
    left = {one: _able(trace, process, alike[one], one) for one in devices}
    while sure := [device for device, able in left.items() if len(able) == 1]:
        (home[sure[0]],) = left.pop(sure[0])
        if len(devices) == len(hosts):  # each has one of its own
            left = {device: able - {home[sure[0]]} for device, able in left.items()}
    return home


def _able(trace: Trace, process: Ints, hosts: list[int], device: int) -> set[int]:
    """Those of the *hosts* which can have launched most of what ran under the number of a *device*."""
    number, fits = launch_numbers(trace), dict[int, int]()
    for host in hosts:
        calls = trace.by_start((process == host) & (trace.kind == Kind.RUNTIME) & (number >= 0))
        numbers, first = np.unique(number[calls], return_index=True)
        events = np.flatnonzero((process == device) & trace.on_device & np.isin(number, numbers))
        earliest = calls[first[np.searchsorted(numbers, number[events])]]
        fits[host] = int((trace.start_ns[earliest] <= trace.start_ns[events]).sum())
    return {host for host in hosts if fits[host] == max(fits.values())}
