from __future__ import annotations

import concurrent.futures
import dataclasses
import gzip
import io
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_flops.analysis.trace import events as events_module
from lightning_flops.analysis.trace import load_trace, reading
from lightning_flops.analysis.trace.columns import LaunchShape, Trace, TraceFormatError
from lightning_flops.analysis.trace.decoding import fast_decoder
from lightning_flops.analysis.trace.events import TraceBuilder
from lightning_flops.analysis.trace.json_stream import VALUE_LIMIT, StreamError, event_batches
from lightning_flops.errors import LightningFlopsError
from tests.analysis.trace_events import kernel, launch, memory, operator, scope, span, trace, trace_from_events

RANK_0 = Path(__file__).parents[1] / "data" / "traces" / "two_ranks_known_answers.rank0.pt.trace.json"

JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**53), 2**53)
    | st.text(max_size=8)
    | st.sampled_from(["}, {", "},", '"']),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)
EVENTS = st.lists(st.dictionaries(st.text(max_size=4), JSON, max_size=4), max_size=12)


def columns(loaded: Trace) -> dict[str, Any]:
    """Everything of a trace but where it came from, for comparisons."""
    named = (
        "name",
        "kind",
        "lane",
        "start_ns",
        "duration_ns",
        "correlation",
        "external_id",
        "device",
        "stream",
        "bytes",
    )
    return {name: getattr(loaded, name).tolist() for name in named} | {"names": loaded.names, "lanes": loaded.lanes}


def streamed(
    text: bytes, loads: Callable[[str], Any] | None, block_bytes: int, value_limit: int = VALUE_LIMIT
) -> tuple[list[Any], dict[str, Any]]:
    metadata: dict[str, Any] = {}
    batches = event_batches(
        io.BytesIO(text),
        metadata,
        keys=("before", "after"),
        loads=loads,
        block_bytes=block_bytes,
        value_limit=value_limit,
    )
    return [event for batch in batches for event in batch], metadata


@settings(deadline=None)  # a busy machine is slow, not wrong
@given(events=EVENTS, before=JSON, after=JSON, block_bytes=st.integers(1, 80), indent=st.sampled_from([None, 2]))
def test_a_stream_gives_what_the_whole_text_holds(
    events: list[Any], before: Any, after: Any, block_bytes: int, indent: int | None
) -> None:
    whole = {"before": before, "traceEvents": events, "after": after}
    text = json.dumps(whole, indent=indent, ensure_ascii=False).encode("utf-8", errors="surrogatepass")
    for loads in (None, json.loads):
        assert streamed(text, loads, block_bytes) == (events, {"before": before, "after": after})


@settings(deadline=None)  # a busy machine is slow, not wrong
@given(events=EVENTS, block_bytes=st.integers(1, 80))
def test_a_bare_list_of_events_is_a_trace_too(events: list[Any], block_bytes: int) -> None:
    text = json.dumps(events).encode()
    for loads in (None, json.loads):
        assert streamed(text, loads, block_bytes) == (events, {})


@settings(deadline=None)  # a busy machine is slow, not wrong
@given(events=EVENTS, kept=st.floats(0, 1), block_bytes=st.integers(1, 80))
def test_a_text_cut_off_anywhere_is_an_error(events: list[Any], kept: float, block_bytes: int) -> None:
    text = json.dumps({"traceEvents": events, "traceName": "x"}).encode()
    for loads in (None, json.loads):
        with pytest.raises(StreamError):
            streamed(text[: int(kept * (len(text) - 1))], loads, block_bytes)


def test_json_decoders_give_equal_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    fast = load_trace(RANK_0)
    monkeypatch.setattr(reading, "fast_decoder", lambda: None)
    assert columns(load_trace(RANK_0)) == columns(fast)


ANY = st.none() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=6)
ARGUMENTS = st.dictionaries(
    st.sampled_from(
        "External id/external id/Sequence number/Fwd thread id/correlation/device/stream/bytes/blocks per SM/grid/"
        "block/est. achieved occupancy %/Input Dims/Input type/Call stack/Collective name/dtype/In msg nelems/"
        "Group size/Process Group Name/Src Rank/other".split("/")
    ),
    ANY | st.lists(ANY, max_size=3),
    max_size=8,
)
PROFILED = st.fixed_dictionaries(
    {
        "ph": st.just("X"),
        "cat": st.sampled_from(["cpu_op", "Kernel", "cuda_runtime", "user_annotation", "python_function", "blink"]),
        "name": st.text(max_size=8),
        "pid": st.integers(0, 3) | st.sampled_from(["0", "Spans"]),
        "tid": st.integers(0, 3) | st.text(max_size=2),
        "ts": st.integers(0, 2**50) | st.floats(0, 2**42),
    },
    optional={"dur": st.integers(-5, 1000) | st.floats(0, 1000), "args": ARGUMENTS, "id": JSON},
)


@settings(deadline=None)
@given(events=st.lists(PROFILED, min_size=1, max_size=12))
def test_msgspec_and_the_standard_library_make_equal_columns(events: list[dict[str, Any]]) -> None:
    decode = fast_decoder()
    assert decode is not None
    events = [operator("aten::mm", 0, 1), *events]  # one of torch.profiler's, so that there is a trace
    typed, plain = TraceBuilder("x"), TraceBuilder("x")
    said: list[str | dict[str, Any]] = []
    for columns_of, batch in ((typed, decode(json.dumps(events))), (plain, events)):
        try:
            columns_of.add(batch)
            said.append(everything(columns_of.trace({})))
        except TraceFormatError as error:
            said.append(str(error).partition("): ")[0])
    assert said[0] == said[1]


def everything(loaded: Trace) -> dict[str, Any]:
    """All columns, and what they point to."""
    found: dict[str, Any] = {}
    for one in dataclasses.fields(loaded):
        value = getattr(loaded, one.name)
        found[one.name] = repr(value.tolist()) if isinstance(value, np.ndarray) else value
    found["recorded_inputs"] = [(one.dims, one.types, one.concrete) for one in loaded.recorded_inputs]
    return found


def test_shapes_stacks_and_launches_are_kept_once_each() -> None:
    shapes: dict[str, Any] = {"Input Dims": [[2, 3], [3, 4]], "Input type": ["float", "float"]}
    first: dict[str, Any] = {"Call stack": 'net.py(7): "f"'}
    second: dict[str, Any] = {"Call stack": "train.py(1): <module>"}
    grid: dict[str, Any] = {"grid": [8, 1, 1], "block": [128, 1, 1], "registers per thread": 32, "shared memory": 0}
    loaded = trace(
        operator("aten::mm", 0, 1, **shapes, **first),
        launch(1, 0),
        kernel(1, 1, 1, **grid),
        operator("aten::add", 2, 1, **second),
        operator("aten::mm", 3, 1, **shapes, **first),
        kernel(2, 4, 1, **grid, stream=8),
        kernel(3, 5, 1),
    )
    assert loaded.inputs.tolist() == [0, -1, -1, -1, 0, -1, -1]
    (only,) = loaded.recorded_inputs
    assert (only.dims, only.types, only.concrete, only.strides) == ([[2, 3], [3, 4]], ["float", "float"], None, None)
    assert loaded.stack.tolist() == [0, -1, -1, 1, 0, -1, -1]
    assert loaded.stacks == ('net.py(7): "f"', "train.py(1): <module>")
    assert loaded.launch_shape.tolist() == [-1, -1, 0, -1, -1, 0, 1]
    assert loaded.launch_shapes == (
        LaunchShape(grid=(8, 1, 1), block=(128, 1, 1), registers=32, shared_memory=0),
        LaunchShape(),
    )


def test_more_different_stacks_than_are_kept_are_left_out_and_said(monkeypatch: pytest.MonkeyPatch) -> None:
    # Each counts 200 and ten times its JSON text, which has two quotes: 300 for eight characters.
    monkeypatch.setattr(events_module, "DETAILS_LIMIT_BYTES", 700)
    stacks: list[dict[str, Any]] = [{"Call stack": f"{file}.py(1):"} for file in "abca"]
    loaded = trace(*(operator("aten::mm", at, 1, **one) for at, one in enumerate(stacks)))
    assert loaded.stack.tolist() == [0, 1, -1, 0]
    assert loaded.notes == (
        "Left out: call stacks of operators, of which the file has more different ones than are kept (700 bytes), of "
        "events: 1.",
    )


def test_times_near_the_limits_of_a_double_are_whole_nanoseconds() -> None:
    # 1,623,142,623,460,111 µs, as torch 1.9 wrote the calendar's time: its nanoseconds do not fit a double.
    loaded = trace(operator("aten::mm", 1623142623460111, 7), operator("aten::mm", 1623142623460111.25, 0.5))
    assert loaded.start_ns.tolist() == [1623142623460111000, 1623142623460111250]
    assert loaded.duration_ns.tolist() == [7000, 500]


def test_gzipped_and_remote_files_hold_the_same_trace(tmp_path: Path) -> None:
    plain = columns(load_trace(RANK_0))
    # The name does not tell: the first bytes do.
    zipped = tmp_path / "trace.json"
    zipped.write_bytes(gzip.compress(RANK_0.read_bytes()))
    assert columns(load_trace(zipped)) == plain
    with fsspec.open("memory://traces/rank0.json.gz", "wb") as file:
        file.write(zipped.read_bytes())
    assert columns(load_trace("memory://traces/rank0.json.gz")) == plain


def test_head_of_a_file_says_devices_and_ranks() -> None:
    loaded = load_trace(str(RANK_0))
    assert (loaded.rank, loaded.world_size, loaded.backend) == (0, 2, "nccl")
    assert [device.index for device in loaded.devices] == [0, 1]
    first = loaded.devices[0]
    assert (first.name, first.sm_count, first.compute_capability) == ("NVIDIA H100 80GB HBM3", 132, (9, 0))
    # What stands behind the events is read too.
    assert loaded.metadata["baseTimeNanoseconds"] == 1790857026000000000


def test_times_are_exact_to_the_nanosecond() -> None:
    loaded = trace(operator("aten::mm", 4384131301788.006, 1393.281))
    assert loaded.start_ns.tolist() == [4384131301788006]
    assert loaded.duration_ns.tolist() == [1393281]


def test_a_thread_written_as_number_and_as_text_is_one_lane() -> None:
    number = operator("aten::mm", 0, 1, thread=7)
    text = operator("aten::mm", 2, 1)
    text["tid"] = "7"
    loaded = trace(number, text, memory(3, 8, thread=7))
    assert len(loaded.lanes) == 1


def test_flows_marks_and_names_are_no_events() -> None:
    flow = {"ph": "s", "id": 1, "pid": 1, "tid": 1, "ts": 0, "cat": "ac2g", "name": "ac2g"}
    name = {"ph": "M", "name": "process_name", "pid": 1, "tid": 0, "ts": 0, "args": {"name": "python"}}
    assert len(trace(flow, name, operator("aten::mm", 0, 1))) == 1


def test_events_of_other_tools_are_left_out_and_said() -> None:
    loaded = trace(operator("aten::mm", 0, 1), span("blink", "paint", 0, 5), span("v8", "gc", 1, 5))
    assert len(loaded) == 1
    assert loaded.notes == ("Left out: events of categories that are not torch.profiler's ('blink', 'v8'): 2.",)


def test_an_event_of_negative_length_has_none_and_is_said() -> None:
    loaded = trace(operator("aten::mm", 5, -3))
    assert loaded.duration_ns.tolist() == [0]
    assert loaded.notes == ("Taken as of no length: events of negative length: 1.",)


def test_a_name_with_unescaped_control_characters_is_read(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    text = json.dumps({"traceEvents": [operator("aten::mm?", 0, 1), operator("aten::add", 1, 1)]})
    path.write_text(text.replace("mm?", "mm\t"), encoding="utf-8")
    assert load_trace(path).names == ("aten::mm\t", "aten::add")


def test_columns_hold_what_events_say() -> None:
    figures: dict[str, Any] = {"blocks per SM": 0.5, "est. achieved occupancy %": 25}
    loaded = trace(
        operator("aten::mm", 0, 5, **{"External id": 3, "Sequence number": 4, "Fwd thread id": 1}),
        launch(9, 1, 2),
        kernel(9, 4, 6, **figures),
        memory(2, 64, device=0),
    )
    assert loaded.external_id.tolist() == [3, -1, -1]
    assert loaded.sequence.tolist() == [4, -1, -1]
    assert loaded.forward_thread.tolist() == [1, -1, -1]
    assert loaded.correlation.tolist() == [-1, 9, 9]
    assert loaded.device.tolist() == [-1, -1, 0]
    assert loaded.blocks_per_sm.tolist()[2] == 0.5
    assert loaded.occupancy_percent.tolist()[2] == 25
    assert loaded.memory is not None
    assert (loaded.memory.bytes.tolist(), loaded.memory.device_type.tolist()) == ([64], [1])


GOOD = json.dumps({"traceEvents": [operator("aten::mm", 0, 1)]}).encode()

BAD: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "the file is empty"),
    "blank": (b"  \n ", "the file is empty"),
    "text": (b"hello", "a trace begins with { or [, not with 'h'"),
    "cut off": (GOOD[:-20], "the file ends in the middle"),
    "cut off in the head": (b'{"schemaVersion": 1, "dev', "the file ends in the middle"),
    "cut off gzip": (gzip.compress(GOOD * 1)[:-12], "the gzip data is damaged or cut off"),
    "damaged gzip": (gzip.compress(GOOD)[:20] + b"\0" * 20, "the gzip data is damaged or cut off"),
    "no comma": (GOOD.replace(b', "cat"', b' "cat"'), "not valid JSON after"),
    "two values": (GOOD + b"{}", "nothing may follow the end of the trace"),
    "other object": (b'{"name": "profile", "nodes": []}', 'a JSON object without a list "traceEvents"'),
    "events no list": (b'{"traceEvents": {"a": 1}}', 'a JSON object without a list "traceEvents"'),
    "a number": (b"17", "a trace begins with { or [, not with '1'"),
    "no events": (b'{"traceEvents": []}', "the trace holds no events"),
    "events no objects": (b'{"traceEvents": [1, 2]}', "event 0 (counted from 0) is no event of torch.profiler"),
    "no time": (b'[{"ph": "X", "cat": "cpu_op", "name": "aten::mm"}]', "ValueError: it has no time"),
    "time no number": (b'[{"ph": "X", "cat": "cpu_op", "name": "a", "ts": "x"}]', "is no event of torch.profiler"),
    "of a browser": (
        b'[{"ph": "X", "cat": "blink", "name": "paint", "ts": 1, "dur": 2, "pid": 1, "tid": 1}]',
        "none of its 1 events is an operator, a scope, a runtime call or a kernel of torch.profiler; its categories "
        "are 'blink'",
    ),
}


@pytest.mark.parametrize("case", BAD)
@pytest.mark.parametrize("decoder", ["fast", "standard"])
def test_a_bad_file_is_named_with_what_is_wrong(
    case: str, decoder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if decoder == "standard":
        monkeypatch.setattr(reading, "fast_decoder", lambda: None)
    content, words = BAD[case]
    path = tmp_path / "bad.json"
    path.write_bytes(content)
    with pytest.raises(TraceFormatError) as caught:
        load_trace(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert words in str(caught.value)
    assert isinstance(caught.value, LightningFlopsError)


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("{folder}/missing.json", "cannot be read: No such file or directory"),
        ("{folder}", "cannot be read: Is a directory"),
        ("nosuch://bucket/trace.json", "cannot be opened"),
        ("memory://traces/missing.json", "cannot be read: FileNotFoundError"),
    ],
)
def test_a_file_that_cannot_be_opened_is_named(path: str, words: str, tmp_path: Path) -> None:
    path = path.format(folder=tmp_path)
    with pytest.raises(TraceFormatError) as caught:
        load_trace(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert words in str(caught.value)


def test_events_in_memory_make_the_same_trace_as_their_file() -> None:
    whole = json.loads(RANK_0.read_text())
    from_memory = trace_from_events(whole["traceEvents"], metadata=whole)
    assert columns(from_memory) == columns(load_trace(RANK_0))


def test_an_argument_that_is_not_available_is_none() -> None:
    unknown: dict[str, Any] = {"blocks per SM": "N/A", "est. achieved occupancy %": float("inf"), "bytes": "N/A"}
    loaded = trace(kernel(1, 0, 1, **unknown))
    assert loaded.bytes.tolist() == [-1]
    assert [value != value for value in (*loaded.blocks_per_sm.tolist(), *loaded.occupancy_percent.tolist())] == [
        True
    ] * 2


def test_what_a_remote_file_system_raises_names_the_file(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise RuntimeError("token expired")

    monkeypatch.setattr(fsspec, "open", refuse)
    with pytest.raises(TraceFormatError, match=r"memory://a\.json: cannot be read: RuntimeError: token expired"):
        load_trace("memory://a.json")


def test_a_scope_that_old_traces_call_an_operator_is_a_scope() -> None:
    loaded = trace(span("Operator", "ProfilerStep#3", 0, 9), span("Operator", "aten::mm", 1, 2))
    assert loaded.steps.numbers == (3,)
    assert loaded.links.operators.tolist() == [1]
    assert trace(scope("ProfilerStep#3", 0, 9)).kind.tolist() == [loaded.kind.tolist()[0]]


# ---- files that mean harm: bounded, and read right or named


OPERATOR = json.dumps(operator("aten::mm", 0, 1))
PIECE = "x" * (1 << 20)

_MEASURED = """
import json, resource, sys
from lightning_flops.analysis.trace import load_trace
from lightning_flops.analysis.trace.columns import TraceFormatError
try:
    import msgspec
except ImportError:
    pass
decoder = json.loads if sys.argv[2] == "standard" else None
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
try:
    found = str(len(load_trace(sys.argv[1], decoder=decoder)))
except TraceFormatError as error:
    found = str(error)
grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
print(json.dumps([found, grown * (1 if sys.platform == "darwin" else 1024)]))
"""


def read_in_a_child(path: Path, decoder: str = "fast") -> tuple[str, int]:
    """How many events the file holds, or what is said of it; and the bytes by which the process grew meanwhile."""
    done = subprocess.run(
        [sys.executable, "-c", _MEASURED, str(path), decoder], capture_output=True, text=True, check=True, timeout=300
    )
    found, grown = json.loads(done.stdout)
    return found, grown


def write_parts(path: Path, *parts: str) -> Path:
    with gzip.open(path, "wt", compresslevel=1) if path.suffix == ".gz" else path.open("w") as file:
        for part in parts:
            file.write(part)
    return path


A_FEW_BLOCKS = 64_000_000
"""Bytes: what is read at once, decoded by the worst of its kind."""

HARMFUL: dict[str, tuple[str, list[str], str, int]] = {
    # a file's name, its parts, what is said of it, and most bytes that it may cost
    "a long text beside the events": (
        "text.json.gz",
        ['{"a": "', *[PIECE] * 100, f'", "traceEvents": [{OPERATOR}]}}'],
        "1",
        A_FEW_BLOCKS,
    ),
    "a long text in an event": (
        "text.json.gz",
        [f'{{"traceEvents": [{OPERATOR}, {{"a": "', *[PIECE] * 100, '"}]}'],
        "a value is longer than 4,194,304 characters",
        A_FEW_BLOCKS,
    ),
    "a long key": (
        "key.json.gz",
        ['{"', *[PIECE] * 100, f'": 0, "traceEvents": [{OPERATOR}]}}'],
        "a value is longer than 4,194,304 characters",
        A_FEW_BLOCKS,
    ),
    "lists beside the events": (
        "lists.json",
        ['{"a": [', "[]," * 5_000_000, f'[]], "traceEvents": [{OPERATOR}]}}'],
        "1",
        A_FEW_BLOCKS,
    ),
    "keys beside the events": (
        "keys.json",
        ["{", '"a": [{}],' * 100_000, f'"traceEvents": [{OPERATOR}]}}'],
        "1",
        A_FEW_BLOCKS,
    ),
    "nothing but space": (
        "space.json.gz",
        [f'{{"traceEvents": [{OPERATOR}', *[" " * len(PIECE)] * 100, "]}"],
        "1",
        A_FEW_BLOCKS,
    ),
    "events of nothing": ("empty.json", ['{"traceEvents": [', "{}," * 1_000_000, f"{OPERATOR}]}}"], "1", 80_000_000),
    "names": (
        "names.json.gz",
        [
            f'{{"traceEvents": [{OPERATOR}',
            *[f',{{"ph": "X", "cat": "cpu_op", "ts": 0, "name": "{index}{PIECE}"}}' for index in range(70)],
            "]}",
        ],
        "event 64 (counted from 0): with it the trace's distinct names, threads and process groups take more than "
        "67,108,864 bytes",
        # The names, and a block.
        67_108_864 + A_FEW_BLOCKS,
    ),
    # 4 MB of dicts of one key: the worst that JSON can come to in memory.
    "a dict of dicts": (
        "dicts.json",
        [f'{{"traceEvents": [{OPERATOR}, {{"a": [', '{"":0},' * 599_000, f"0]}}, {OPERATOR}]}}"],
        "2",
        200_000_000,
    ),
}


@pytest.mark.parametrize("case", HARMFUL)
def test_a_file_of_any_size_costs_a_few_blocks_besides_its_events(case: str, tmp_path: Path) -> None:
    name, parts, expected, most = HARMFUL[case]
    path = write_parts(tmp_path / name, *parts)
    found, grown = read_in_a_child(path, "standard" if len(case) % 2 else "fast")  # each for some, which take seconds
    assert expected == found or (len(expected) > 1 and f"{path}: " in found and expected in found)
    assert grown < most


DEEP = "[" * 100_000 + "]" * 100_000
LONG_NUMBER = "9" * 5_000


def test_nobody_minds_what_stands_beside_the_events(tmp_path: Path) -> None:
    beside = {
        "deep": DEEP,
        "deep dicts": '{"a":' * 50_000 + "0" + "}" * 50_000,
        "number": LONG_NUMBER,
        "fraction": "0." + "1" * 5_000_000,
        "no number": "NaN",
        "endless": "-Infinity",
        "half a character": '"\\ud800"',
        "quotes": json.dumps('\\"]}' * 400_000),
        "backslashes": '"' + "\\\\" * 1_100_001 + '"',
        "brackets in texts": json.dumps(["]", "}}", '"]', "\\"] * 200_000),
        "twice": '1, "twice": {}',
    }
    for name, value in beside.items():
        text = f'{{"{name}": {value}, "traceEvents": [{OPERATOR}], "behind": {value}}}'
        path = write_parts(tmp_path / "beside.json", text)
        for decoder in (None, json.loads):
            assert len(load_trace(path, decoder=decoder)) == 1, name


EVENT_WITH = '{{"ph": "X", "cat": "cpu_op", "name": "a", "ts": {ts}, "dur": 1, "pid": 1, "tid": 1, "args": {args}}}'

HOSTILE_EVENTS: dict[str, tuple[str, str]] = {
    "deep": (EVENT_WITH.format(ts=0, args=DEEP), "values are nested too deeply"),
    "just not too deep": ("[" * 400 + "]" * 400, "is no event of torch.profiler (AttributeError"),
    "long number": (EVENT_WITH.format(ts=LONG_NUMBER, args="{}"), "a whole number has too many digits"),
    "late": (EVENT_WITH.format(ts=10**300, args="{}"), "is no event of torch.profiler (OverflowError"),
    "never": (EVENT_WITH.format(ts="NaN", args="{}"), "is no event of torch.profiler (ValueError"),
    "endless": (EVENT_WITH.format(ts="Infinity", args="{}"), "is no event of torch.profiler (OverflowError"),
    "a text that writes to the terminal": ('"\x1b[2J\\u202e"', "'\\x1b[2J\\u202e'"),
    "a list of names": ('{"ph": "X", "cat": ["cpu_op"]}', "is no event of torch.profiler (TypeError"),
}


@pytest.mark.parametrize("case", HOSTILE_EVENTS)
@pytest.mark.parametrize("decoder", [None, json.loads], ids=["fast", "standard"])
def test_an_event_that_means_harm_is_named(case: str, decoder: Callable[[str], Any] | None, tmp_path: Path) -> None:
    event, words = HOSTILE_EVENTS[case]
    path = write_parts(tmp_path / "hostile.json", f'{{"traceEvents": [{OPERATOR}, {event}, {OPERATOR}]}}')
    with pytest.raises(TraceFormatError) as caught:
        load_trace(path, decoder=decoder)
    assert str(caught.value).startswith(f"{path}: ")
    assert words in str(caught.value)
    assert len(str(caught.value)) < len(str(path)) + 350
    assert "\x1b" not in str(caught.value)


@pytest.mark.parametrize("decoder", [None, json.loads], ids=["fast", "standard"])
def test_arguments_that_nobody_can_use_are_none(decoder: Callable[[str], Any] | None, tmp_path: Path) -> None:
    arguments = {"correlation": 10**30, "External id": 2**64 - 1, "Sequence number": -(10**300), "Fwd thread id": 2**63}
    path = write_parts(tmp_path / "large.json", json.dumps([operator("aten::mm", 0, 1, **arguments)]))
    loaded = load_trace(path, decoder=decoder)
    found = (loaded.correlation, loaded.external_id, loaded.sequence, loaded.forward_thread)
    assert [column.tolist() for column in found] == [[-1]] * 4


def test_the_list_of_events_stands_once(tmp_path: Path) -> None:
    path = write_parts(tmp_path / "twice.json", f'{{"traceEvents": [{OPERATOR}], "traceEvents": [{OPERATOR}]}}')
    with pytest.raises(TraceFormatError, match='"traceEvents" stands here a second time'):
        load_trace(path)


def test_a_world_that_no_machine_holds_is_not_known(tmp_path: Path) -> None:
    info = {"rank": 0, "world_size": 2**40, "pg_config": [{"ranks": []}] * 1000}
    path = write_parts(
        tmp_path / "world.json", f'{{"distributedInfo": {json.dumps(info)}, "traceEvents": [{OPERATOR}]}}'
    )
    loaded = load_trace(path)
    assert (loaded.rank, loaded.world_size) == (0, None)
    assert loaded.only_group is None


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "utf-16-be", "utf-32-le"])
def test_encodings_that_json_may_have_are_read(encoding: str, tmp_path: Path) -> None:
    path = tmp_path / "encoded.json"
    path.write_bytes(json.dumps({"traceEvents": [operator("größe", 0, 1)]}, ensure_ascii=False).encode(encoding))
    assert load_trace(path).names == ("größe",)


def test_a_gzip_of_several_members_is_read_as_one(tmp_path: Path) -> None:
    path = tmp_path / "members.json.gz"
    text = f'{{"traceEvents": [{OPERATOR}]}}'.encode()
    path.write_bytes(b"".join(gzip.compress(text[at : at + 10]) for at in range(0, len(text), 10)) + b"\0" * 100)
    assert len(load_trace(path)) == 1
    path.write_bytes(path.read_bytes() + b"no gzip")
    with pytest.raises(TraceFormatError, match="the gzip data is damaged or cut off"):
        load_trace(path)


def without_isal(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("igzip", "isal_zlib"):
        monkeypatch.setitem(sys.modules, f"isal.{name}", None)


@pytest.mark.parametrize("unpacker", ["isal", "zlib"])
def test_a_bomb_ends_at_a_stated_limit(unpacker: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if unpacker == "zlib":
        without_isal(monkeypatch)
    monkeypatch.setattr(reading, "_FREE_INFLATION_BYTES", 1 << 20)
    path = tmp_path / "bomb.json.gz"
    # Spaces of 4 MB take a thousandth of that.
    path.write_bytes(gzip.compress(f'{{"traceEvents": [{OPERATOR}{" " * (4 << 20)}]}}'.encode(), 9))
    with pytest.raises(TraceFormatError) as caught:
        load_trace(path)
    assert str(caught.value) == f"{path}: the gzip data holds more than 200 times its own bytes: it is no trace"
    monkeypatch.setattr(reading, "_FREE_INFLATION_BYTES", 4 << 20)
    assert len(load_trace(path)) == 1


@pytest.mark.parametrize("unpacker", ["isal", "zlib"])
def test_isal_and_zlib_say_the_same_of_damaged_files(
    unpacker: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if unpacker == "zlib":
        without_isal(monkeypatch)
    whole = gzip.compress(RANK_0.read_bytes())
    assert (reading._gzip_module() is gzip) == (unpacker == "zlib")
    for name, content in {
        "whole": whole,
        "cut": whole[:-5],
        "flipped": whole[:2000] + bytes([whole[2000] ^ 64]) + whole[2001:],
        "garbage behind": whole + b"x",
        "head alone": whole[:10],
        "two bytes": whole[:2],
        "another method": whole[:2] + b"\x07" + whole[3:],
    }.items():
        path = tmp_path / "file.gz"
        path.write_bytes(content)
        if name == "whole":
            assert len(load_trace(path)) == 48
            continue
        with pytest.raises(TraceFormatError, match=r"file.gz: (the gzip data is damaged or cut off|not valid JSON)"):
            load_trace(path)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no pipes with names")
@pytest.mark.parametrize("zipped", [False, True])
def test_a_pipe_is_read_once(zipped: bool, tmp_path: Path) -> None:
    path, content = tmp_path / "pipe", RANK_0.read_bytes()
    os.mkfifo(path)
    # A second opening would wait for another writer for ever, and a pipe cannot be wound back.
    with concurrent.futures.ThreadPoolExecutor() as pool:
        written = pool.submit(path.write_bytes, gzip.compress(content) if zipped else content)
        assert columns(load_trace(path)) == columns(load_trace(RANK_0))
        written.result()


BESIDE = st.dictionaries(st.sampled_from(["beside", "traceName", "}", '"', "\\", "a[b", ""]), JSON, max_size=4)


@settings(deadline=None)  # a busy machine is slow, not wrong
@given(events=EVENTS, passed=BESIDE, before=JSON, block_bytes=st.integers(1, 80), limit=st.integers(16, 400))
def test_a_stream_gives_what_json_gives_or_says_that_it_is_too_long(
    events: list[Any], passed: dict[str, Any], before: Any, block_bytes: int, limit: int
) -> None:
    text = json.dumps(passed | {"before": before, "traceEvents": events, "traceName": passed})
    whole = json.loads(text)
    values = [*events, before, *whole]  # what is asked for, and keys
    fits = all(len(json.dumps(value)) + block_bytes < limit for value in values)
    for loads in (None, json.loads):
        try:
            found = streamed(text.encode(), loads, block_bytes, limit)
        except StreamError as error:
            assert not fits
            assert "a value is longer than" in str(error)
        else:
            assert found == (whole["traceEvents"], {"before": whole["before"]})


def test_memory_while_reading_is_columns_and_a_few_blocks(tmp_path: Path) -> None:
    path = tmp_path / "large.json"
    events = 60_000
    padding = "x" * 700  # a stack of Python calls, say: of no use to any table
    with path.open("w") as file:
        file.write('{"traceEvents": [')
        for index in range(events):
            file.write(("," if index else "") + json.dumps(operator("aten::mm", index, 1, stack=f"{index}{padding}")))
        file.write("]}")
    program = (
        "import sys, tracemalloc\n"
        "from lightning_flops.analysis.trace import load_trace\n"
        "tracemalloc.start()\n"
        f"assert len(load_trace(sys.argv[1])) == {events}\n"
        "print(tracemalloc.get_traced_memory()[1])\n"
    )
    done = subprocess.run([sys.executable, "-c", program, str(path)], capture_output=True, text=True, check=True)
    # 49 MB of text; 4 MB of columns, which are copied once as they grow, and blocks of 1 MB with what is made of them.
    assert path.stat().st_size > 49_000_000
    assert int(done.stdout) < 24_000_000


def test_each_event_has_the_id_that_it_writes_in_either_way() -> None:
    old = operator("aten::mm", 0, 5, **{"external id": 7})
    new = operator("aten::mm", 10, 5, **{"External id": 5})
    assert trace(old, new, operator("aten::mm", 20, 5)).external_id.tolist() == [7, 5, -1]


def test_a_scope_may_say_which_collective_it_is() -> None:
    says: dict[str, Any] = {"Collective name": "allreduce", "In msg nelems": 4, "dtype": "Float"}
    found = trace(kernel(1, 0, 5), scope("gloo:all_reduce", 0, 5, **says), operator("aten::mm", 0, 5, **says))
    assert {row: (one.name, one.bytes) for row, one in found.collectives.items()} == {1: ("allreduce", 16)}


@pytest.mark.parametrize("when", [1e16, -1e16])
def test_no_event_is_longer_ago_or_later_than_a_clock_shows(when: float) -> None:
    with pytest.raises(TraceFormatError, match="no time that a clock shows"):
        trace(operator("aten::mm", 0, 5), operator("aten::mm", when, 5))


@pytest.mark.parametrize("wanted", ["", "b", "ad", "abcdef"])
def test_rows_are_found_by_any_number_of_names(wanted: str) -> None:
    found = trace(*(operator(name, 10 * place, 5) for place, name in enumerate("abcdefaabbdd")))
    assert found.names_where(lambda name: name in wanted).tolist() == [name in wanted for name in "abcdefaabbdd"]
