"""Events of a trace, written by hand: times in microseconds from the trace's beginning. And files of known answers."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from lightning_flops.records import MODULE_MARK, PHASE_MARK
from lightning_flops.trace.columns import Trace
from lightning_flops.trace.read import DECODER, Columns

Event = dict[str, Any]

A100: Mapping[str, Any] = {
    "id": 0, "name": "NVIDIA A100-SXM4-80GB", "computeMajor": 8, "computeMinor": 0, "numSms": 108,
    "maxThreadsPerMultiprocessor": 2048, "sharedMemPerMultiprocessor": 164 << 10,
}  # fmt: skip
"""As it stands in a file's ``deviceProperties``: 19.5 TFLOP/s in float32, 2.039 TB/s."""


def trace_from_events(
    events: Iterable[Event], *, metadata: Mapping[str, Any] | None = None, source: str = "(events)"
) -> Trace:
    """The trace of *events*, which are as in a file, with what stands beside them there."""
    columns = Columns(source)
    columns.add(DECODER.decode(msgspec.json.encode(list(events))))
    return columns.trace(metadata or {})


def span(category: str, name: str, start: float, length: float, *, thread: int = 1, **arguments: Any) -> Event:
    """Any event of the host."""
    return {
        "ph": "X", "cat": category, "name": name, "pid": 1, "tid": thread, "ts": start, "dur": length, "args": arguments
    }  # fmt: skip


operator = partial(span, "cpu_op")
scope = partial(span, "user_annotation")
call = partial(span, "python_function")


def step(number: int, start: float, length: float) -> Event:
    """The profiler's mark of a step."""
    return scope(f"ProfilerStep#{number}", start, length)


def data_loader(start: float, length: float) -> Event:
    """A wait for the next batch."""
    return scope("enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__", start, length)


def launch(correlation: int, start: float, length: float = 1, *, thread: int = 1) -> Event:
    """A call that launches the device event of the same number."""
    return span("cuda_runtime", "cudaLaunchKernel", start, length, thread=thread, correlation=correlation)


def launched(
    number: int, at: float, start: float, length: float, *, thread: int = 1, **more: Any
) -> tuple[Event, Event]:
    """A launch at *at*, and the kernel that it launches."""
    return launch(number, at, thread=thread), kernel(number, start, length, **more)


def on_device(
    category: str, correlation: int, start: float, length: float, *, name: str, stream: int = 7, device: int = 0,
    **more: Any,
) -> Event:  # fmt: skip
    """A kernel, copy or memset."""
    arguments = {**more, "device": device, "stream": stream, "correlation": correlation}
    return span(category, name, start, length, thread=stream, **arguments) | {"pid": device}


def kernel(correlation: int, start: float, length: float, *, name: str = "gemm", **more: Any) -> Event:
    """A kernel."""
    return on_device("kernel", correlation, start, length, name=name, **more)


def shapes(*dims: Any, dtype: str = "float", types: list[str] | None = None) -> dict[str, Any]:
    """The inputs of an operator as ``record_shapes=True`` has them; one without dims has no type."""
    return {
        "Input Dims": list(dims), "Input type": types or [dtype if one else "" for one in dims],
        "Concrete Inputs": [""] * len(dims),
    }  # fmt: skip


def product(number: int, start: float, *, rows: int, kernel_us: float = 10) -> tuple[Event, ...]:
    """A product of [rows, 10] and [10, 10] in float32, 200 FLOPs a row, and its kernel."""
    inputs = shapes([rows, 10], [10, 10]) | {"Input Strides": [[10, 1], [10, 1]]}
    return operator("aten::mm", start, 5, **inputs), launch(number, start + 1), kernel(number, start + 10, kernel_us)


def module(name: str, start: float, length: float, *, thread: int = 1) -> Event:
    """The mark around a module's forward: an operator, in a trace of torch's own writing."""
    return operator(MODULE_MARK + (name or "(root)"), start, length, thread=thread)


def phase(part: str, start: float, length: float) -> Event:
    """The mark around a part of a step."""
    return operator(PHASE_MARK + part, start, length)


def made(sequence: int, start: float, length: float = 1, *, name: str = "aten::addmm", thread: int = 1) -> Event:
    """A forward operator that makes the node of this number."""
    return operator(name, start, length, thread=thread, **{"Sequence number": sequence, "Fwd thread id": 0})


def node(
    sequence: int, start: float, length: float, *, name: str = "AddmmBackward0", thread: int = 1, made_on: int = 1
) -> Event:
    """Autograd runs the node of this number."""
    arguments = {"Sequence number": sequence, "Fwd thread id": made_on}
    return operator(f"autograd::engine::evaluate_function: {name}", start, length, thread=thread, **arguments)


def accumulation(start: float, length: float, *, thread: int = 1) -> Event:
    """Autograd adds a gradient to a parameter's."""
    name = "autograd::engine::evaluate_function: torch::autograd::AccumulateGrad"
    return operator(name, start, length, thread=thread)


def memory(start: float, size: int, *, device: int | None = None, total: int | None = None, **more: int) -> Event:
    """An allocation, or a free of a negative *size*, after which *total* is allocated; without a device on the host."""
    more |= {} if total is None else {"Total Allocated": total}
    where = {"Device Type": 0, "Device Id": -1} if device is None else {"Device Type": 1, "Device Id": device}
    event = span("cpu_instant_event", "[memory]", start, 0, Bytes=size, **where, **more)
    return event | {"ph": "i", "s": "t"}


def trace(*events: Event, **metadata: Any) -> Trace:
    """The trace of *events*."""
    return trace_from_events(events, metadata=metadata)


# ---- files whose answers are known, and copies of them in which a kernel takes longer

TRACES = Path(__file__).parents[1] / "data" / "traces"
RESNET = TRACES / "resnet50_num_workers_0.pt.trace.json.gz"
RANKS = [TRACES / f"two_ranks_known_answers.rank{rank}.pt.trace.json" for rank in (0, 1)]

_ON_DEVICE = ("kernel", "memcpy", "memset", "gpu_memcpy", "gpu_memset")


def slowed(source: Path, target: Path, *, kernel: str, times: int) -> None:
    """Copy a trace of one stream, gzipped, with every run of *kernel* so many times as long; what follows waits."""
    content = source.read_bytes()
    trace = json.loads(gzip.decompress(content) if source.suffix == ".gz" else content)
    events = [event for event in trace["traceEvents"] if event.get("cat", "").lower() in _ON_DEVICE]
    free = float("-inf")
    for event in sorted(events, key=lambda event: event["ts"]):
        event["ts"] = max(event["ts"], free)
        event["dur"] *= times if event["name"].startswith(kernel) else 1
        free = event["ts"] + event["dur"]
    target.write_bytes(gzip.compress(json.dumps(trace).encode(), compresslevel=1))
