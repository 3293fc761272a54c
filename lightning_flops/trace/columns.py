"""A trace in memory: one numpy column per property, a row per event, names and lanes stored once."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import numpy.typing as npt

from lightning_flops.errors import LightningFlopsError
from lightning_flops.trace import structure
from lightning_flops.trace.intervals import Floats, Intervals, Ints, Lanes, Mask, distinct, merge
from lightning_flops.trace.names import Kind, host_collective, is_collective_kernel, is_of_another_vendor
from lightning_flops.trace.recorded import RecordedInputs

if TYPE_CHECKING:
    from lightning_flops.trace.modules import Frames
    from lightning_flops.trace.steps import Phase, Steps
    from lightning_flops.trace.tables import OperatorTimes


class TraceFormatError(LightningFlopsError, ValueError):
    """A trace file cannot be read; the message names the file and what is wrong with it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveArguments:
    """What a communication event says about itself."""

    name: str | None = None
    bytes: int | None = None
    group: str | None = None
    """The group's name and the ranks that take part, as far as they are written."""
    group_size: int | None = None


class DeviceProperties(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    rename={
        "index": "id", "sm_count": "numSms", "major": "computeMajor", "minor": "computeMinor",
        "max_threads": "maxThreadsPerMultiprocessor", "registers": "regsPerMultiprocessor",
        "shared_memory": "sharedMemPerMultiprocessor",
    },
):  # fmt: skip
    """One accelerator of the machine, as the trace's head describes it; the last three are of one multiprocessor."""

    index: int
    name: str = ""
    sm_count: int | None = None
    major: int | None = None
    minor: int | None = None
    max_threads: int | None = None
    registers: int | None = None
    shared_memory: int | None = None

    @property
    def compute_capability(self) -> tuple[int, int] | None:
        """As the CUDA programming guide numbers them."""
        return None if self.major is None or self.minor is None else (self.major, self.minor)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MemoryEvents:
    """Allocations (positive bytes) and frees (negative), there when the trace was taken with ``profile_memory``."""

    lane: Ints
    time_ns: Ints
    bytes: Ints
    device: Ints
    """-1 for the host."""
    total_allocated: Ints
    """Bytes of the device that are allocated after the event, as the next are those held; -1 where not written."""
    total_reserved: Ints


@dataclass(frozen=True, kw_only=True, eq=False)
class Trace:
    """All of a trace file that the tables need; a row of the columns is one event.

    Times are whole nanoseconds on the trace's own clock, so sums are exact. -1 stands for an integer that an event does
    not have, NaN for a fraction. What several tables derive from the columns is computed once.
    """

    source: str
    """The file it came from, for messages."""
    names: tuple[str, ...]
    lanes: tuple[tuple[str, str], ...]
    """Process and thread, or device and stream."""
    name: npt.NDArray[np.int32]
    """Index into ``names``, as ``lane`` into ``lanes``."""
    kind: npt.NDArray[np.int8]
    lane: npt.NDArray[np.int32]
    start_ns: Ints
    duration_ns: Ints
    correlation: Ints
    """One number on a device event and on the runtime call that launched it."""
    external_id: Ints
    """The operator's number, repeated by the device events it launched."""
    sequence: Ints
    """Autograd's sequence number of an operator."""
    forward_thread: Ints
    """Above 0 on an operator that autograd runs for a backward."""
    device: Ints
    stream: Ints
    blocks_per_sm: Floats
    occupancy_percent: Floats
    bytes: Ints
    """Bytes that a copy or a memset moves."""
    inputs: npt.NDArray[np.int32]
    """Index into ``recorded_inputs``."""
    recorded_inputs: tuple[RecordedInputs, ...]
    collectives: Mapping[int, CollectiveArguments]
    """By row."""
    memory: MemoryEvents | None
    devices: tuple[DeviceProperties, ...]
    rank: int | None = None
    only_group: tuple[int, ...] | None = None
    """The ranks of the only process group there is, to which all communication belongs; None if it is not known."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """Other keys at the top of the file."""
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
    def on_device(self) -> Mask:
        """Rows that are kernels, copies or memsets."""
        return self.kind >= Kind.KERNEL

    @cached_property
    def has_device(self) -> bool:
        """Whether anything ran on an accelerator; False for a CPU trace, whose device figures are all unknown."""
        return bool(self.on_device.any())

    @cached_property
    def device_work_ns(self) -> int:
        """Lengths of all device events, added up."""
        return int(self.duration_ns[self.on_device].sum())

    @cached_property
    def device_rows(self) -> Ints:
        """Rows of kernels, copies and memsets, by start."""
        return self.by_start(self.on_device)

    @cached_property
    def launches(self) -> tuple[Ints, Ints]:
        """When each device event whose launch is known was launched, rising, and its row."""
        rows = self.device_rows[self.links.launch[self.device_rows] >= 0]
        moments = self.start_ns[self.links.launch[rows]]
        order = np.argsort(moments, kind="stable")
        return moments[order], rows[order]

    @cached_property
    def names_tell_tensor_cores(self) -> bool:
        """Whether kernels have NVIDIA's names, which show tensor cores; those of AMD and Intel do not."""
        if any(is_of_another_vendor(device=one.name) for one in self.devices):
            return False
        return not self.where(lambda name: is_of_another_vendor(runtime_call=name), Kind.RUNTIME).any()

    @cached_property
    def is_collective(self) -> Mask:
        """Rows that communicate with other ranks: collectives' kernels, and host scopes that communicate themselves."""
        found = self.where(is_collective_kernel, Kind.KERNEL)
        # A kernel that says which collective it is needs no known name.
        found[[row for row in self.collectives if self.kind[row] == Kind.KERNEL]] = True
        return found | self.where(host_collective, Kind.ANNOTATION, Kind.OPERATOR)

    @cached_property
    def links(self) -> structure.Links:
        """Who called and who launched whom."""
        return structure.link(self)

    @cached_property
    def operator_times(self) -> OperatorTimes:
        """The times of every operator, with and without what it called."""
        from lightning_flops.trace.tables import OperatorTimes

        return OperatorTimes(self)

    @cached_property
    def steps(self) -> Steps:
        """The steps of the trace, each up to the last device event that was launched in it."""
        from lightning_flops.trace.steps import find_steps

        return find_steps(self)

    @cached_property
    def phases(self) -> dict[str, Phase]:
        """When the phases of training ran in the steps."""
        from lightning_flops.trace.steps import find_phases

        return find_phases(self)

    @cached_property
    def frames(self) -> Frames | None:
        """The modules, phases and autograd nodes in which operators ran; None where the trace shows no modules."""
        from lightning_flops.trace.modules import find_frames

        return find_frames(self)

    def described(self, device: int) -> DeviceProperties | None:
        """What the head says of a device. AMD's numbers count processors too: where its devices are alike, of any."""
        alike = {(one.name, one.sm_count) for one in self.devices if is_of_another_vendor(device=one.name)}
        known = {one.index: one for one in self.devices}
        return known.get(device) or (self.devices[0] if len(alike) == 1 else None)

    @cached_property
    def used_device(self) -> DeviceProperties | None:
        """What ran the kernels; None where several kinds of devices did, or one that the head does not describe."""
        found = [self.described(index) for index in distinct(self.device[self.kind == Kind.KERNEL]).tolist()]
        kinds = {one and (one.name, one.compute_capability, one.sm_count) for one in found}
        return found[0] if len(kinds) == 1 else None

    def of(self, kind: Kind) -> Ints:
        """Rows of one kind."""
        return np.flatnonzero(self.kind == kind)

    def by_start(self, rows: Mask | Ints) -> Ints:
        """The given rows (a mask or indices) by start."""
        indices = _indices(rows)
        return indices[np.argsort(self.start_ns[indices], kind="stable")]

    def name_of(self, row: int) -> str:
        """The name of the event in *row*."""
        return self.names[int(self.name[row])]

    def texts(self, names: Lanes) -> list[str]:
        """The names with these numbers."""
        return [self.names[name] for name in names.tolist()]

    def merged(self, rows: Mask | Ints) -> Intervals:
        """The moments that the given rows (a mask or indices) cover."""
        indices = _indices(rows)
        return merge(self.start_ns[indices], self.end_ns[indices])

    def where(self, holds: Callable[[str], object], *kinds: Kind) -> Mask:
        """Rows of these *kinds* for whose name *holds* returns anything true; it is called once for each name."""
        rows = np.flatnonzero(np.isin(np.arange(len(Kind)), kinds)[self.kind])
        used = distinct(self.name[rows])
        accepted = np.zeros(len(self.names), dtype=bool)
        accepted[used] = [bool(holds(self.names[name])) for name in used.tolist()]
        found = np.zeros(len(self), dtype=bool)
        found[rows] = accepted[self.name[rows]]
        return found


def _indices(rows: Mask | Ints) -> Ints:
    return np.flatnonzero(rows) if rows.dtype == np.bool_ else rows.astype(np.int64, copy=False)
