"""A trace in memory: one numpy column per property, a row per event, names and lanes stored once."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from lightning_flops.analysis.trace import structure
from lightning_flops.analysis.trace.event_names import Kind, is_of_another_vendor
from lightning_flops.analysis.trace.intervals import Floats, Intervals, Ints, merge
from lightning_flops.errors import LightningFlopsError
from lightning_flops.records import RecordedInputs

if TYPE_CHECKING:
    from lightning_flops.analysis.trace import modules, phases

NONE = -1
"""What stands in an integer column where the trace has no value."""

_FEW_NAMES = 4
"""So many numbers of names are found faster by comparing than by looking up each row's."""


class TraceFormatError(LightningFlopsError, ValueError):
    """A trace file cannot be read; the message names the file and what is wrong with it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lane:
    """A row of the timeline: a thread of a process, or a stream of a device."""

    process: str
    thread: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveArguments:
    """What a communication event says about itself."""

    name: str | None = None
    bytes: int | None = None
    group: str | None = None
    """The group's name and the ranks that take part, as far as they are written."""
    group_size: int | None = None
    source: int | None = None
    """The rank that sent what this event received."""
    destination: int | None = None
    """The rank to which this event sends."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceProperties:
    """One accelerator of the machine, as the trace's head describes it."""

    index: int
    name: str
    sm_count: int | None
    memory_bytes: int | None
    compute_capability: tuple[int, int] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchShape:
    """How a kernel was launched; None where the trace does not say."""

    grid: tuple[int, int, int] | None = None
    """Blocks along each axis."""
    block: tuple[int, int, int] | None = None
    """Threads of a block along each axis."""
    registers: int | None = None
    """Of each thread."""
    shared_memory: int | None = None
    """Bytes of each block."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MemoryEvents:
    """Allocations (positive bytes) and frees (negative), there when the trace was taken with ``profile_memory``."""

    lane: npt.NDArray[np.int32]
    time_ns: Ints
    bytes: Ints
    device_type: npt.NDArray[np.int32]
    """PyTorch's number of the kind of device: 0 is the host, 1 CUDA."""
    device: npt.NDArray[np.int32]
    address: Ints
    """Where it lies; -1 where not written, as the next two."""
    total_allocated: Ints
    """Bytes of the device that are allocated after the event."""
    total_reserved: Ints
    """Bytes that the allocator then holds."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Trace:
    """All of a trace file that the tables need; a row of the columns is one event.

    Times are whole nanoseconds on the trace's own clock, so sums are exact. What several tables derive from the columns
    is computed once, when it is first needed.
    """

    source: str
    """The file it came from, for messages."""
    names: tuple[str, ...]
    lanes: tuple[Lane, ...]
    name: npt.NDArray[np.int32]
    """Index into ``names``."""
    kind: npt.NDArray[np.int8]
    """A ``Kind``."""
    lane: npt.NDArray[np.int32]
    """Index into ``lanes``."""
    start_ns: Ints
    duration_ns: Ints
    correlation: Ints
    """The same number on a device event and on the runtime call that launched it; -1 without."""
    external_id: Ints
    """The operator's number, repeated by the device events it launched; -1 without."""
    sequence: Ints
    """Autograd's sequence number of an operator; -1 without."""
    forward_thread: Ints
    """Above 0 on an operator that autograd runs for a backward."""
    device: npt.NDArray[np.int32]
    """Index of the device a device event ran on; -1 for host events."""
    stream: Ints
    blocks_per_sm: Floats
    """NaN where not written; as ``occupancy_percent``."""
    occupancy_percent: Floats
    bytes: Ints
    """Bytes that a copy or a memset moves; -1 without."""
    inputs: npt.NDArray[np.int32]
    """Index into ``recorded_inputs``; -1 where shapes were not recorded, and for all but operators and scopes."""
    recorded_inputs: tuple[RecordedInputs, ...]
    """Every different set of arguments once."""
    stack: npt.NDArray[np.int32]
    """Index into ``stacks``; -1 without."""
    stacks: tuple[str, ...]
    """Call stacks as the file has them, the innermost call first: ``net.py(7): forward;train.py(30): <module>``."""
    launch_shape: npt.NDArray[np.int32]
    """Index into ``launch_shapes``; -1 for all but kernels."""
    launch_shapes: tuple[LaunchShape, ...]
    collectives: Mapping[int, CollectiveArguments]
    """By row."""
    memory: MemoryEvents | None
    """None when no allocation was recorded."""
    devices: tuple[DeviceProperties, ...]
    rank: int | None = None
    world_size: int | None = None
    backend: str | None = None
    groups: tuple[tuple[int, ...], ...] | None = None
    """The ranks of each process group that this one is in; None where the trace does not say."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """The other keys at the top of the file."""
    notes: tuple[str, ...] = ()
    """What was left out or mended while reading, in sentences."""

    def __len__(self) -> int:
        """Events."""
        return len(self.start_ns)

    @cached_property
    def end_ns(self) -> Ints:
        """End of each event."""
        return self.start_ns + self.duration_ns

    @cached_property
    def on_device(self) -> npt.NDArray[np.bool_]:
        """Rows that are kernels, copies or memsets."""
        return self.kind >= Kind.KERNEL

    @cached_property
    def has_device(self) -> bool:
        """Whether anything ran on an accelerator; False for a CPU trace, whose device figures are all unknown."""
        return bool(self.on_device.any())

    @cached_property
    def names_tell_tensor_cores(self) -> bool:
        """Whether kernels have NVIDIA's names, which tell of tensor cores; those of AMD and Intel do not."""
        if any(is_of_another_vendor(device=one.name) for one in self.devices):
            return False
        calls = self.names_where(lambda name: is_of_another_vendor(runtime_call=name))
        return not (calls & (self.kind == Kind.RUNTIME)).any()

    @cached_property
    def device_rows(self) -> Ints:
        """Rows of kernels, copies and memsets, by start."""
        rows = np.flatnonzero(self.on_device)
        return rows[np.argsort(self.start_ns[rows], kind="stable")]

    @cached_property
    def is_collective(self) -> npt.NDArray[np.bool_]:
        """Rows that communicate with other ranks: collectives' kernels, and host scopes that communicate themselves."""
        return structure.collective_rows(self)

    @cached_property
    def only_group(self) -> tuple[int, ...] | None:
        """The ranks of the only process group there is, to which all communication belongs; None if it is not known.

        Groups of the same members, as frameworks make them, are one, and a group of this rank alone is none.
        """
        if self.groups is None:
            return None if self.world_size is None else tuple(range(self.world_size))
        groups = {group for group in self.groups if len(group) > 1}
        return groups.pop() if len(groups) == 1 else None

    @cached_property
    def links(self) -> structure.Links:
        """Who called and who launched whom."""
        return structure.link(self)

    @cached_property
    def frames(self) -> modules.Frames | None:
        """The modules, phases and autograd nodes in which operators ran; None where the trace shows no modules."""
        from lightning_flops.analysis.trace.modules import find_frames

        return find_frames(self)

    @cached_property
    def phases(self) -> phases.Phases:
        """The phases of training inside the steps."""
        from lightning_flops.analysis.trace.phases import find_phases

        return find_phases(self)

    @cached_property
    def steps(self) -> structure.Steps:
        """The steps of the trace, each up to the last device event that was launched in it."""
        return structure.find_steps(self)

    def merged(self, rows: npt.NDArray[np.bool_] | Ints) -> Intervals:
        """The moments that the given rows (a mask or indices) cover."""
        indices = np.flatnonzero(rows) if rows.dtype == np.bool_ else rows
        return merge(self.start_ns[indices], self.end_ns[indices])

    def names_where(self, holds: Callable[[str], bool]) -> npt.NDArray[np.bool_]:
        """Rows whose name *holds* accepts; it is called once for each name."""
        accepted = np.array([holds(name) for name in self.names], dtype=bool)
        numbers = np.flatnonzero(accepted).tolist()
        if len(numbers) > _FEW_NAMES:
            return accepted[self.name]
        found = np.zeros(len(self), dtype=bool)
        for number in numbers:
            found |= self.name == number
        return found
