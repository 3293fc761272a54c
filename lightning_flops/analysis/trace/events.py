"""Events of a trace, one by one, into columns."""

from __future__ import annotations

import reprlib
from array import array
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from lightning_flops.analysis.trace.columns import (
    CollectiveArguments,
    Lane,
    LaunchShape,
    MemoryEvents,
    Trace,
    TraceFormatError,
)
from lightning_flops.analysis.trace.head import devices_of, place_in_run
from lightning_flops.analysis.trace.names import ELEMENT_BYTES, KIND_OF_CATEGORY, Kind, is_scope_written_as_operator
from lightning_flops.analysis.trace.values import LARGEST_INTEGER, bytes_of, int32, int64, whole
from lightning_flops.records import RecordedInputs

TEXTS_LIMIT_BYTES = 64 << 20
"""Most bytes of all distinct names, threads and process groups of a trace; some 100 KB is usual."""

_LONGEST_NS = 2**62
"""Sums of a time and a length stay below the largest integer of a column; 146 years."""

_BYTES_OF_A_LANE = 400
_CATEGORIES_NAMED = 5
_NOTHING: Mapping[str, Any] = {}
_Number = TypeVar("_Number", np.int32, np.int64, np.float64)


class TraceBuilder:
    """Columns that grow by one batch of events after another.

    Args:
        source: what messages call the file.
    """

    def __init__(self, source: str) -> None:
        self.source = source
        self.seen = 0
        self.clamped = 0
        self.foreign: dict[str, int] = {}
        self.names: dict[str, int] = {}
        self.groups: dict[str, str] = {}
        self.texts_bytes = 0
        self.scopes: set[int] = set()
        self.lanes: dict[tuple[Any, Any], int] = {}
        self.lane_texts: dict[Lane, int] = {}
        self.name, self.lane = array("i"), array("i")
        self.kind = array("b")
        self.start, self.duration = array("q"), array("q")
        self.correlation, self.external_id, self.sequence = array("q"), array("q"), array("q")
        self.forward_thread = array("q")
        self.device_row, self.device, self.stream, self.bytes = array("q"), array("i"), array("q"), array("q")
        self.blocks, self.occupancy = array("d"), array("d")
        self.collectives: dict[int, CollectiveArguments] = {}
        self.inputs, self.input_numbers = array("i"), dict[str, int]()
        self.recorded: list[RecordedInputs] = []
        self.stack, self.stacks = array("i"), dict[str, int]()
        self.launch_shape, self.launch_shapes = array("i"), dict[LaunchShape, int]()
        self.memory = tuple(array("q") for _ in range(8))

    def add(self, events: list[Any]) -> None:
        """Append what *events* say; an event of another tool is counted and left out."""
        begin = self.seen
        try:
            for event in events:
                phase = event.get("ph")
                if phase == "X":
                    self._add_span(event)
                elif phase == "i" and event.get("name") == "[memory]":
                    self._add_memory(event)
                self.seen += 1
        except TraceFormatError:
            raise
        except (AttributeError, KeyError, TypeError, ValueError, OverflowError) as error:
            what = f"{type(error).__name__}: {_cut(str(error))}"
            raise TraceFormatError(
                f"{self.source}: event {self.seen} (counted from 0) is no event of torch.profiler ({what}): "
                f"{_shown_event(events[self.seen - begin])}"
            ) from error

    def _keep(self, text_bytes: int) -> None:
        """Count so many more bytes that stay in memory beside the columns."""
        self.texts_bytes += text_bytes
        if self.texts_bytes > TEXTS_LIMIT_BYTES:
            raise TraceFormatError(
                f"{self.source}: event {self.seen} (counted from 0): with it the trace's distinct names, threads and "
                f"process groups take more than {TEXTS_LIMIT_BYTES:,} bytes"
            )

    def _add_span(self, event: dict[str, Any]) -> None:
        category = event.get("cat", "")
        kind = KIND_OF_CATEGORY.get(category)
        if kind is None and (kind := KIND_OF_CATEGORY.get(category.lower())) is None:
            if category != "Trace":
                if category not in self.foreign:
                    self._keep(_bytes_of_text(category))
                self.foreign[category] = self.foreign.get(category, 0) + 1
            return
        name = event["name"]
        arguments = event.get("args") or _NOTHING
        index = self.names.get(name)
        if index is None:
            if not isinstance(name, str):
                raise TypeError("name must be a text")
            self._keep(_bytes_of_text(name))
            index = self.names[name] = len(self.names)
            if is_scope_written_as_operator(name):
                self.scopes.add(index)
        if kind is Kind.OPERATOR and index in self.scopes:
            kind = Kind.ANNOTATION
        # Traces give microseconds with three decimals: whole nanoseconds, which are exact to add up.
        start = round(event["ts"] * 1000)
        duration = round(event.get("dur", 0) * 1000)
        if not -_LONGEST_NS < start < _LONGEST_NS > duration:
            raise OverflowError("no time that a clock shows")
        if duration < 0:
            duration = 0
            self.clamped += 1
        self.name.append(index)
        self.kind.append(kind)
        self.lane.append(self._lane_index(event))
        self.start.append(start)
        self.duration.append(duration)
        find = arguments.get
        self.correlation.append(_integer(find("correlation")))
        external_id = find("External id")
        self.external_id.append(_integer(find("external id") if external_id is None else external_id))
        self.sequence.append(_integer(find("Sequence number")))
        self.forward_thread.append(_integer(find("Fwd thread id")))
        has_inputs = kind in (Kind.OPERATOR, Kind.ANNOTATION) and "Input Dims" in arguments
        self.inputs.append(self._inputs(arguments) if has_inputs else -1)
        stack = find("Call stack")
        if stack and stack not in self.stacks:
            self._keep(_bytes_of_text(stack))
        self.stack.append(self.stacks.setdefault(stack, len(self.stacks)) if stack else -1)
        if kind >= Kind.KERNEL:
            shape = LaunchShape(
                grid=_triple(find("grid")),
                block=_triple(find("block")),
                registers=whole(find("registers per thread")),
                shared_memory=whole(find("shared memory")),
            )
            self.launch_shape.append(self.launch_shapes.setdefault(shape, len(self.launch_shapes)))
            self.device_row.append(len(self.name) - 1)
            self.device.append(_integer(find("device", event.get("pid"))))
            self.stream.append(_integer(find("stream")))
            self.bytes.append(_integer(find("bytes")))
            self.blocks.append(_number(find("blocks per SM")))
            self.occupancy.append(_number(find("est. achieved occupancy %")))
        if "Collective name" in arguments:
            self.collectives[len(self.name) - 1] = self._collective(arguments)
        elif kind is Kind.ANNOTATION and "Input Dims" in arguments:
            self.collectives[len(self.name) - 1] = CollectiveArguments(
                bytes=bytes_of(arguments["Input Dims"], arguments.get("Input type") or ())
            )

    def _add_memory(self, event: dict[str, Any]) -> None:
        arguments = event["args"]
        values = (
            self._lane_index(event),
            round(event["ts"] * 1000),
            int(arguments["Bytes"]),
            int(arguments.get("Device Type", 0)),
            int(arguments.get("Device Id", -1)),
            _integer(arguments.get("Addr")),
            _integer(arguments.get("Total Allocated")),
            _integer(arguments.get("Total Reserved")),
        )
        for column, value in zip(self.memory, values, strict=True):
            column.append(value)

    def _inputs(self, arguments: Mapping[str, Any]) -> int:
        """Number of the arguments of a call: equal ones are kept once."""
        keys = ("Input Dims", "Input type", "Concrete Inputs", "Input Strides")
        dims, types, concrete, strides = map(arguments.get, keys)
        key = repr((dims, types, concrete, strides))
        index = self.input_numbers.get(key)
        if index is None:
            self._keep(8 * len(key))
            index = self.input_numbers[key] = len(self.recorded)
            self.recorded.append(RecordedInputs(dims=dims or (), types=types or (), concrete=concrete, strides=strides))
        return index

    def _lane_index(self, event: dict[str, Any]) -> int:
        key = (event.get("pid"), event.get("tid"))
        index = self.lanes.get(key)
        if index is None:
            # Old traces write a thread as a number in one event and as a text in the next.
            lane = Lane(process=str(key[0]), thread=str(key[1]))
            # The key, the lane and their texts, which the columns hold as numbers.
            self._keep(_BYTES_OF_A_LANE + 2 * (_bytes_of_text(lane.process) + _bytes_of_text(lane.thread)))
            index = self.lanes[key] = self.lane_texts.setdefault(lane, len(self.lane_texts))
        return index

    def _collective(self, arguments: Mapping[str, Any]) -> CollectiveArguments:
        element_bytes = ELEMENT_BYTES.get(str(arguments.get("dtype", "")).lower())
        elements = [whole(arguments.get(key)) for key in ("In msg nelems", "Out msg nelems")]
        known = [count for count in elements if count is not None]
        # Groups of one name may have other members on other ranks, and groups of the same members another name.
        group = [str(arguments[key]) for key in ("Process Group Name", "Process Group Ranks") if arguments.get(key)]
        return CollectiveArguments(
            name=self._once(str(arguments["Collective name"])),
            # The larger side, as communication benchmarks give it: what all_gather yields and reduce_scatter takes.
            bytes=max(known) * element_bytes if known and element_bytes is not None else None,
            group=self._once(" ".join(group)) if group else None,
            group_size=whole(arguments.get("Group size")),
            source=whole(arguments.get("Src Rank")),
            destination=whole(arguments.get("Dst Rank")),
        )

    def _once(self, text: str) -> str:
        """The one copy of *text*: thousands of calls name the same group, and the name may list thousands of ranks."""
        if text not in self.groups:
            self._keep(_bytes_of_text(text))
        return self.groups.setdefault(text, text)

    def trace(self, metadata: Mapping[str, Any]) -> Trace:
        """The finished trace."""
        kinds = np.frombuffer(self.kind, dtype=np.int8) if self.kind else np.zeros(0, dtype=np.int8)
        if not (kinds > Kind.PYTHON).any():
            raise TraceFormatError(f"{self.source}: {self._why_nothing()}")
        return Trace(
            source=self.source,
            names=tuple(self.names),
            lanes=tuple(self.lane_texts),
            name=int32(self.name),
            kind=kinds,
            lane=int32(self.lane),
            start_ns=int64(self.start),
            duration_ns=int64(self.duration),
            correlation=int64(self.correlation),
            external_id=int64(self.external_id),
            sequence=int64(self.sequence),
            forward_thread=int64(self.forward_thread),
            device=self._on_device_rows(self.device, -1, np.int32),
            stream=self._on_device_rows(self.stream, -1, np.int64),
            blocks_per_sm=self._on_device_rows(self.blocks, np.nan, np.float64),
            occupancy_percent=self._on_device_rows(self.occupancy, np.nan, np.float64),
            bytes=self._on_device_rows(self.bytes, -1, np.int64),
            inputs=int32(self.inputs),
            recorded_inputs=tuple(self.recorded),
            stack=int32(self.stack),
            stacks=tuple(self.stacks),
            launch_shape=self._on_device_rows(self.launch_shape, -1, np.int32),
            launch_shapes=tuple(self.launch_shapes),
            collectives=self.collectives,
            memory=self._memory_events(),
            devices=devices_of(metadata.get("deviceProperties")),
            **place_in_run(metadata),
            metadata=metadata,
            notes=self._notes(),
        )

    def _on_device_rows(self, values: array[Any], elsewhere: float, dtype: type[_Number]) -> npt.NDArray[_Number]:
        """A whole column of *values*, which only device events have."""
        column = np.full(len(self.name), elsewhere, dtype=dtype)
        if values:
            column[int64(self.device_row)] = np.frombuffer(values, dtype=dtype)
        return column

    def _memory_events(self) -> MemoryEvents | None:
        if not self.memory[0]:
            return None
        lane, time, size, device_type, device, address, allocated, reserved = map(int64, self.memory)
        return MemoryEvents(
            lane=lane.astype(np.int32),
            time_ns=time,
            bytes=size,
            device_type=device_type.astype(np.int32),
            device=device.astype(np.int32),
            address=address,
            total_allocated=allocated,
            total_reserved=reserved,
        )

    def _why_nothing(self) -> str:
        if not self.seen:
            return "the trace holds no events"
        found = _categories(sorted(self.foreign, key=self.foreign.__getitem__, reverse=True))
        return (
            f"none of its {self.seen} events is an operator, a scope, a runtime call or a kernel of torch.profiler"
            + (f"; its categories are {found}" if found else "")
        )

    def _notes(self) -> tuple[str, ...]:
        notes = []
        if self.foreign:
            names = _categories(sorted(self.foreign))
            notes.append(
                f"Left out: events of categories that are not torch.profiler's ({names}): {sum(self.foreign.values())}."
            )
        if self.clamped:
            notes.append(f"Taken as of no length: events of negative length: {self.clamped}.")
        return tuple(notes)


def _bytes_of_text(text: str) -> int:
    """About what *text* takes as the key of a dict; a character is at most 4 bytes."""
    return 100 + (1 if text.isascii() else 4) * len(text)


def _categories(names: Sequence[str]) -> str:
    shown = [_cut(repr(name)) for name in names[:_CATEGORIES_NAMED]]
    return ", ".join(shown) + (f" and {len(names) - len(shown)} more" if len(names) > len(shown) else "")


def _cut(text: str, *, chars: int = 80) -> str:
    return text if len(text) <= chars else text[: chars - 1] + "…"


def _shown_event(event: Any) -> str:
    """The beginning of *event*, which may be anything, however deeply nested."""
    shown = reprlib.Repr()
    shown.maxdict, shown.maxlevel, shown.maxstring = 12, 3, 60
    return _cut(shown.repr(event), chars=120)


def _integer(value: Any) -> int:
    """An integer argument; -1 if the event does not have it, if it reads "N/A", or if it needs more than 64 bits."""
    if value is None:
        return -1
    if type(value) is not int:
        try:
            value = int(value)
        except (TypeError, ValueError, OverflowError):
            return -1
    number: int = value
    return number if -LARGEST_INTEGER <= number <= LARGEST_INTEGER else -1


def _triple(value: Any) -> tuple[int, int, int] | None:
    """Three integers; None for anything else."""
    if not isinstance(value, list) or len(value) != 3 or not all(type(one) is int for one in value):
        return None
    return value[0], value[1], value[2]


def _number(value: Any) -> float:
    """A float argument; NaN if the event does not have it, or if it is not finite."""
    if value is None:
        return np.nan
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        return np.nan
    return number if np.isfinite(number) else np.nan
