"""Events of a trace into columns, a batch at a time: no value is handled by itself unless it is a rare one."""

from __future__ import annotations

import reprlib
from array import array
from collections.abc import Mapping, Sequence
from itertools import compress
from typing import Any

import numpy as np
import numpy.typing as npt

from lightning_flops.analysis.trace.columns import (
    CollectiveArguments,
    MemoryEvents,
    Trace,
    TraceFormatError,
)
from lightning_flops.analysis.trace.decoding import ABSENT, event_of
from lightning_flops.analysis.trace.event_names import (
    ELEMENT_BYTES,
    Kind,
    host_collective,
    is_scope_written_as_operator,
)
from lightning_flops.analysis.trace.event_values import bytes_of, launch_shape, text_of, value_of, whole
from lightning_flops.analysis.trace.growing import (
    Column,
    finite,
    fractions,
    integers,
    nanoseconds,
    packed,
    small_integers,
    spread,
    times,
    whole_column,
)
from lightning_flops.analysis.trace.head import devices_of, place_in_run
from lightning_flops.analysis.trace.interning import FOREIGN, Details, Kinds, Lanes, Numbers, bytes_of_text
from lightning_flops.records import RecordedInputs

TEXTS_LIMIT_BYTES = 64 << 20
"""Most bytes of all distinct names, threads and process groups of a trace; some 100 KB is usual."""

DETAILS_LIMIT_BYTES = 64 << 20
"""Most bytes of all distinct shapes and call stacks of a trace. What comes beyond it is left out, with a note."""

_CATEGORIES_NAMED = 5
_ABSENT_BYTES = packed("q", [ABSENT])
_Found = list[tuple[Column, bytes]]
"""What a batch adds: a column and its new values."""


def _mask(*kinds: int) -> bytes:
    """For ``bytes.translate``: 1 for each of *kinds*, 0 for all others."""
    return bytes(kind in kinds for kind in range(256))


_ON_HOST = _mask(Kind.OPERATOR, Kind.ANNOTATION)
_RUNTIME = _mask(Kind.RUNTIME)
_ON_DEVICE = _mask(*(kind for kind in Kind if kind >= Kind.KERNEL))
_COMMUNICATES = _mask(Kind.ANNOTATION, *(kind for kind in Kind if kind >= Kind.KERNEL))
_OF_TORCH = _mask(*Kind)
_OF_OTHERS = _mask(FOREIGN)


class TraceBuilder:
    """Columns that grow by one batch of events after another.

    Args:
        source: what messages call the file.
    """

    def __init__(self, source: str) -> None:
        self.source = source
        self.seen = 0
        self._clamped = 0
        self.foreign: dict[str, int] = {}
        self._texts_bytes = self._details_bytes = 0
        self._kinds = Kinds(self._keep)
        self._names: Numbers[str] = Numbers(self._admit_name)
        self._lanes = Lanes(self._keep)
        self._groups: dict[str, str] = {}
        self._rows = 0
        self._name: Column = bytearray()
        self._lane: Column = bytearray()
        self._kind: Column = bytearray()
        self._start_us: Column = bytearray()
        self._duration_us: Column = bytearray()
        # Of operators and scopes:
        self._external_id: Column = bytearray()
        self._sequence: Column = bytearray()
        self._forward_thread: Column = bytearray()
        self._inputs: Column = bytearray()
        self._stack: Column = bytearray()
        self._input_texts: Details[tuple[bytes, ...]] = Details(self._has_room)
        self._stack_texts: Details[bytes] = Details(self._has_room)
        # Of runtime calls:
        self._launch_correlation: Column = bytearray()
        # Of device events:
        self._correlation: Column = bytearray()
        self._device_external_id: Column = bytearray()
        self._device: Column = bytearray()
        self._stream: Column = bytearray()
        self._bytes: Column = bytearray()
        self._blocks: Column = bytearray()
        self._occupancy: Column = bytearray()
        self._launch_shape: Column = bytearray()
        self._launch_texts: Details[tuple[Any, ...]] = Details(self._has_room)
        self._collectives: dict[int, CollectiveArguments] = {}
        # Of allocations: lane, time, bytes, kind of device, device, address, bytes allocated and reserved.
        self._memory: tuple[Column, ...] = tuple(bytearray() for _ in range(8))

    def add(self, events: Sequence[Any]) -> None:
        """Append what *events* say; an event of another tool is counted and left out.

        Args:
            events: as ``decoding`` makes them, or as dicts.

        Raises:
            TraceFormatError: one of them is no event of torch.profiler, or the texts become too many; the message says
                which. Nothing of *events* can be relied on then.
        """
        try:
            if events and type(events[0]) is dict:
                self._append([event_of(event) if type(event) is dict else event for event in events])
            else:
                self._append(events)
            self.seen += len(events)
        except (AttributeError, KeyError, TypeError, ValueError, OverflowError, RecursionError):
            for event in events:  # to say which it is
                self._append_alone(event)

    def _append_alone(self, event: Any) -> None:
        try:
            self._append([event_of(event) if type(event) is dict else event])
        except TraceFormatError as error:
            raise TraceFormatError(f"{self.source}: event {self.seen} (counted from 0): {error}") from error
        except (AttributeError, KeyError, TypeError, ValueError, OverflowError, RecursionError) as error:
            what = f"{type(error).__name__}: {_cut(str(error))}"
            raise TraceFormatError(
                f"{self.source}: event {self.seen} (counted from 0) is no event of torch.profiler ({what}): "
                f"{_shown_event(event)}"
            ) from error
        self.seen += 1

    def _keep(self, text_bytes: int) -> None:
        """Count so many more bytes that stay in memory beside the columns."""
        if self._texts_bytes + text_bytes > TEXTS_LIMIT_BYTES:
            raise TraceFormatError(
                "with it the trace's distinct names, threads and process groups take more than "
                f"{TEXTS_LIMIT_BYTES:,} bytes"
            )
        self._texts_bytes += text_bytes

    def _admit_name(self, name: str) -> None:
        if not isinstance(name, str):
            raise TypeError("name must be a text")
        self._keep(bytes_of_text(name))

    def _has_room(self, texts: bytes | tuple[Any, ...]) -> bool:
        parts = (texts,) if isinstance(texts, bytes) else texts
        # Decoded, a text is some ten times as large.
        size = 200 + 10 * sum(len(part) for part in parts if isinstance(part, bytes))
        if self._details_bytes + size > DETAILS_LIMIT_BYTES:
            return False
        self._details_bytes += size
        return True

    def _append(self, events: Sequence[Any]) -> None:
        spans = [event for event in events if event.ph == "X"]
        found: _Found = []
        if len(spans) < len(events):
            found += self._memory_columns([event for event in events if event.ph == "i" and event.name == "[memory]"])
        kinds = bytes(list(map(self._kinds.__getitem__, [span.cat for span in spans])))
        if FOREIGN in kinds:
            for span in compress(spans, kinds.translate(_OF_OTHERS)):
                if span.cat != "Trace":  # around the whole of old traces
                    self.foreign[span.cat] = self.foreign.get(span.cat, 0) + 1
            spans = list(compress(spans, kinds.translate(_OF_TORCH)))
            kinds = kinds.translate(None, bytes([FOREIGN]))
        found += self._span_columns(spans, kinds)
        for column, values in found:
            column += values
        self._kind += kinds
        self._rows += len(kinds)

    def _span_columns(self, spans: list[Any], kinds: bytes) -> _Found:
        arguments = [span.args for span in spans]
        found: _Found = [
            (self._name, packed("i", list(map(self._names.__getitem__, [span.name for span in spans])))),
            (self._lane, self._lane_numbers(spans)),
            *zip(
                (self._start_us, self._duration_us),
                times([span.ts for span in spans], [span.dur for span in spans]),
                strict=True,
            ),
        ]
        found += self._host_columns(list(compress(arguments, kinds.translate(_ON_HOST))))
        launches = compress(arguments, kinds.translate(_RUNTIME))
        found.append((self._launch_correlation, integers([one.correlation for one in launches])))
        on_device = list(compress(arguments, kinds.translate(_ON_DEVICE)))
        if on_device:
            found += self._device_columns(on_device, spans, kinds)
        communicate = on_device
        if Kind.ANNOTATION in kinds:
            communicate = list(compress(arguments, kinds.translate(_COMMUNICATES)))
        collectives = [one.collective for one in communicate]
        if collectives.count(None) < len(collectives):
            for place in compress(range(len(spans)), kinds.translate(_COMMUNICATES)):
                if arguments[place].collective is not None:
                    self._collectives[self._rows + place] = self._collective(arguments[place])
        return found

    def _host_columns(self, arguments: list[Any]) -> _Found:
        found: _Found = [
            (self._external_id, _external_ids(arguments)),
            (self._sequence, integers([one.sequence for one in arguments])),
            (self._forward_thread, integers([one.forward_thread for one in arguments])),
        ]
        sizes = [one.input_sizes for one in arguments]
        if _is_written(sizes):
            texts = [sizes, [one.input_types for one in arguments], [one.concrete_inputs for one in arguments]]
            texts.append([one.input_strides for one in arguments])
            keys = zip(*(map(bytes, column) for column in texts), strict=True)
            numbers = packed("i", [self._input_texts[key] if key[0] else ABSENT for key in keys])
        else:
            numbers = packed("i", [ABSENT]) * len(arguments)
        found.append((self._inputs, numbers))
        stacks = [one.call_stack for one in arguments]
        if _is_written(stacks):
            numbers = packed("i", [self._stack_texts[key] if key else ABSENT for key in map(bytes, stacks)])
        else:
            numbers = packed("i", [ABSENT]) * len(arguments)
        found.append((self._stack, numbers))
        return found

    def _device_columns(self, arguments: list[Any], spans: list[Any], kinds: bytes) -> _Found:
        devices = [one.device for one in arguments]
        if None in devices:
            mine = compress(spans, kinds.translate(_ON_DEVICE))
            devices = [span.pid if device is None else device for span, device in zip(mine, devices, strict=True)]
        shapes = zip(
            map(bytes, [one.grid for one in arguments]),
            map(bytes, [one.block for one in arguments]),
            [one.registers for one in arguments],
            [one.shared_memory for one in arguments],
            strict=True,
        )
        return [
            (self._correlation, integers([one.correlation for one in arguments])),
            (self._device_external_id, _external_ids(arguments)),
            (self._device, small_integers(devices)),
            (self._stream, integers([one.stream for one in arguments])),
            (self._bytes, integers([one.copied_bytes for one in arguments])),
            (self._blocks, fractions([one.blocks_per_sm for one in arguments])),
            (self._occupancy, fractions([one.occupancy_percent for one in arguments])),
            (self._launch_shape, packed("i", list(map(self._launch_texts.__getitem__, shapes)))),
        ]

    def _memory_columns(self, events: list[Any]) -> _Found:
        arguments = [event.args for event in events]
        values = (
            self._lane_numbers(events),
            *times([event.ts for event in events]),
            array("q", [int(one.allocated_bytes) for one in arguments]).tobytes(),
            array("q", [int(one.device_type) for one in arguments]).tobytes(),
            array("q", [int(one.device_index) for one in arguments]).tobytes(),
            integers([one.address for one in arguments]),
            integers([one.total_allocated for one in arguments]),
            integers([one.total_reserved for one in arguments]),
        )
        return list(zip(self._memory, values, strict=True))

    def _lane_numbers(self, events: list[Any]) -> bytes:
        places = zip([one.pid for one in events], [one.tid for one in events], strict=True)
        return packed("i", list(map(self._lanes.__getitem__, places)))

    def _collective(self, arguments: Any) -> CollectiveArguments:
        element_bytes = ELEMENT_BYTES.get(str(arguments.dtype).lower())
        known = [count for count in map(whole, (arguments.in_elements, arguments.out_elements)) if count is not None]
        # Groups of one name may have other members on other ranks, and groups of the same members another name.
        group = [str(part) for part in (arguments.group_name, arguments.group_ranks) if part]
        return CollectiveArguments(
            name=self._once(str(arguments.collective)),
            # The larger side, as communication benchmarks give it: what all_gather yields and reduce_scatter takes.
            bytes=max(known) * element_bytes if known and element_bytes is not None else None,
            group=self._once(" ".join(group)) if group else None,
            group_size=whole(arguments.group_size),
            source=whole(arguments.source),
            destination=whole(arguments.destination),
        )

    def _once(self, text: str) -> str:
        """The one copy of *text*: thousands of calls name the same group, and the name may list thousands of ranks."""
        if text not in self._groups:
            self._keep(bytes_of_text(text))
        return self._groups.setdefault(text, text)

    def trace(self, metadata: Mapping[str, Any]) -> Trace:
        """The finished trace; the builder is used up."""
        names = tuple(self._names)
        name, kind = whole_column(self._name, np.int32), whole_column(self._kind, np.int8)
        size = len(kind)
        host = np.flatnonzero((kind == Kind.OPERATOR) | (kind == Kind.ANNOTATION))
        runtime, device = np.flatnonzero(kind == Kind.RUNTIME), np.flatnonzero(kind >= Kind.KERNEL)
        scopes = np.array([is_scope_written_as_operator(text) for text in names], dtype=bool)
        kind = np.where((kind == Kind.OPERATOR) & scopes[name], np.int8(Kind.ANNOTATION), kind) if names else kind
        if not (kind > Kind.PYTHON).any():
            raise TraceFormatError(f"{self.source}: {self._why_nothing()}")
        duration_ns = nanoseconds(self._duration_us)
        self._clamped = int((duration_ns < 0).sum())
        recorded, inputs = self._recorded_inputs(), spread(size, host, self._inputs, np.int32)
        stacks = tuple(text_of(text) for text in self._stack_texts)
        return Trace(
            source=self.source,
            names=names,
            lanes=tuple(self._lanes.lanes),
            name=name,
            kind=kind,
            lane=whole_column(self._lane, np.int32),
            start_ns=nanoseconds(self._start_us),
            duration_ns=np.maximum(duration_ns, 0, out=duration_ns),
            correlation=spread(size, runtime, self._launch_correlation, np.int64, device, self._correlation),
            external_id=spread(size, host, self._external_id, np.int64, device, self._device_external_id),
            sequence=spread(size, host, self._sequence, np.int64),
            forward_thread=spread(size, host, self._forward_thread, np.int64),
            device=spread(size, device, self._device, np.int32),
            stream=spread(size, device, self._stream, np.int64),
            blocks_per_sm=finite(spread(size, device, self._blocks, np.float64, elsewhere=np.nan)),
            occupancy_percent=finite(spread(size, device, self._occupancy, np.float64, elsewhere=np.nan)),
            bytes=spread(size, device, self._bytes, np.int64),
            inputs=inputs,
            recorded_inputs=recorded,
            stack=spread(size, host, self._stack, np.int32),
            stacks=stacks,
            launch_shape=spread(size, device, self._launch_shape, np.int32),
            launch_shapes=tuple(launch_shape(*texts) for texts in self._launch_texts),
            collectives=self._collectives | self._host_collectives(kind, name, inputs, recorded),
            memory=self._memory_events(),
            devices=devices_of(metadata.get("deviceProperties")),
            **place_in_run(metadata),
            metadata=metadata,
            notes=self._notes(),
        )

    def _recorded_inputs(self) -> tuple[RecordedInputs, ...]:
        values = ([value_of(text) for text in texts] for texts in self._input_texts)
        return tuple(
            RecordedInputs(
                dims=sizes, types=types if isinstance(types, list) else (), concrete=concrete, strides=strides
            )
            for sizes, types, concrete, strides in values
        )

    def _host_collectives(
        self,
        kind: npt.NDArray[np.int8],
        name: npt.NDArray[np.int32],
        inputs: npt.NDArray[np.int32],
        recorded: tuple[RecordedInputs, ...],
    ) -> dict[int, CollectiveArguments]:
        """What scopes on the host that communicate send: they say it as any operator does."""
        communicates = np.array([host_collective(text) is not None for text in self._names], dtype=bool)
        rows = np.flatnonzero((kind == Kind.ANNOTATION) & communicates[name] & (inputs >= 0)).tolist()
        sizes: dict[int, CollectiveArguments] = {}
        for number in set(inputs[rows].tolist()):
            sizes[number] = CollectiveArguments(bytes=bytes_of(recorded[number].dims, recorded[number].types))
        return {row: sizes[int(inputs[row])] for row in rows if row not in self._collectives}

    def _memory_events(self) -> MemoryEvents | None:
        if not self._memory[0]:
            return None
        lane, moments, *others = self._memory
        size, device_type, device, address, allocated, reserved = (whole_column(column, np.int64) for column in others)
        return MemoryEvents(
            lane=whole_column(lane, np.int32),
            time_ns=nanoseconds(moments),
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
        if self._clamped:
            notes.append(f"Taken as of no length: events of negative length: {self._clamped}.")
        for what, texts in (
            ("shapes of operators", self._input_texts),
            ("call stacks of operators", self._stack_texts),
            ("shapes of launches", self._launch_texts),
        ):
            if texts.left_out:
                notes.append(
                    f"Left out: {what}, of which the file has more different ones than are kept "
                    f"({DETAILS_LIMIT_BYTES:,} bytes), of events: {texts.left_out}."
                )
        return tuple(notes)


def _external_ids(arguments: list[Any]) -> bytes:
    numbers = integers([one.external_id for one in arguments])
    if _ABSENT_BYTES in numbers:  # as older traces write it
        older = integers([one.old_external_id for one in arguments])
        first, second = (np.frombuffer(one, dtype=np.int64) for one in (numbers, older))
        numbers = np.where(first == ABSENT, second, first).tobytes()
    return numbers


def _is_written(texts: list[Any]) -> bool:
    """Whether any of *texts* stands in the file; those that do not are one object."""
    return bool(texts) and not (texts.count(texts[0]) == len(texts) and not bytes(texts[0]))


def _categories(names: Sequence[str]) -> str:
    shown = [_cut(repr(name)) for name in names[:_CATEGORIES_NAMED]]
    return ", ".join(shown) + (f" and {len(names) - len(shown)} more" if len(names) > len(shown) else "")


def _cut(text: str, *, chars: int = 80) -> str:
    return text if len(text) <= chars else text[: chars - 1] + "…"


def _shown_event(event: Any) -> str:
    """The beginning of *event*, which may be anything, however deeply nested."""
    if hasattr(event, "ph"):
        event = {name: getattr(event, name) for name in ("ph", "cat", "name", "ts", "dur", "pid", "tid")}
    shown = reprlib.Repr()
    shown.maxdict, shown.maxlevel, shown.maxstring = 12, 3, 60
    return _cut(shown.repr(event), chars=120)
