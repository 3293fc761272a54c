from __future__ import annotations

import gzip
import io
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_flops.analysis.trace import Trace, TraceFormatError, load_trace, loading, trace_from_events
from lightning_flops.analysis.trace.json_stream import StreamError, event_batches, fast_decoder
from lightning_flops.errors import LightningFlopsError
from tests.analysis.trace_events import kernel, launch, memory, operator, scope, span, trace

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


def streamed(text: bytes, loads: Callable[[str], Any] | None, block_bytes: int) -> tuple[list[Any], dict[str, Any]]:
    metadata: dict[str, Any] = {}
    batches = event_batches(io.BytesIO(text), metadata, loads=loads, block_bytes=block_bytes)
    return [event for batch in batches for event in batch], metadata


@settings(deadline=None)  # a busy machine is slow, not wrong
@given(events=EVENTS, before=JSON, after=JSON, block_bytes=st.integers(1, 80), indent=st.sampled_from([None, 2]))
def test_a_stream_gives_what_the_whole_text_holds(
    events: list[Any], before: Any, after: Any, block_bytes: int, indent: int | None
) -> None:
    whole = {"before": before, "traceEvents": events, "after": after}
    text = json.dumps(whole, indent=indent, ensure_ascii=False).encode("utf-8", errors="surrogatepass")
    for loads in (None, json.loads, fast_decoder()):
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
    monkeypatch.setattr(loading, "fast_decoder", lambda: None)
    assert columns(load_trace(RANK_0)) == columns(fast)


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
    "no time": (b'[{"ph": "X", "cat": "cpu_op", "name": "aten::mm"}]', "KeyError: 'ts'"),
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
        monkeypatch.setattr(loading, "fast_decoder", lambda: None)
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
