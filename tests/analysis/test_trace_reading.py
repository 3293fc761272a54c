from __future__ import annotations

import gzip
import json
import random
import re
import resource
import sys
import time
from functools import cache
from pathlib import Path
from typing import Any

import fsspec
import pytest

from lightning_flops.cli import main
from lightning_flops.errors import LightningFlopsError
from lightning_flops.trace import load_trace
from lightning_flops.trace.columns import Trace, TraceFormatError
from tests.analysis.trace_events import operator, scope, span, trace
from tests.analysis.trace_files import RANKS, RESNET
from tests.mutations import mutated, mutated_tree, unsafe_in


def columns(loaded: Trace) -> dict[str, Any]:
    """Everything of a trace but where it came from, for comparisons."""
    named = "name kind lane start_ns duration_ns correlation external_id device bytes".split()
    return {name: getattr(loaded, name).tolist() for name in named} | {"names": loaded.names}


def test_gzipped_and_remote_files_hold_the_same_trace(tmp_path: Path) -> None:
    plain = columns(load_trace(RANKS[0]))
    # The name does not tell: the first bytes do.
    zipped = tmp_path / "trace.json"
    zipped.write_bytes(gzip.compress(RANKS[0].read_bytes()))
    assert columns(load_trace(zipped)) == plain
    with fsspec.open("memory://traces/rank0.json.gz", "wb") as file:
        file.write(zipped.read_bytes())
    assert columns(load_trace("memory://traces/rank0.json.gz")) == plain


def test_head_of_a_file_says_devices_and_ranks() -> None:
    loaded = load_trace(str(RANKS[0]))
    assert (loaded.rank, loaded.only_group) == (0, (0, 1))
    assert [device.index for device in loaded.devices] == [0, 1]
    first = loaded.devices[0]
    assert (first.name, first.sm_count, first.compute_capability) == ("NVIDIA H100 80GB HBM3", 132, (9, 0))


def test_events_of_other_tools_are_left_out_and_said() -> None:
    loaded = trace(operator("aten::mm", 0, 1), span("blink", "paint", 0, 5), span("v8", "gc", 1, 5))
    assert len(loaded) == 1
    assert loaded.notes == ("Left out: events of categories that are not torch.profiler's ('blink', 'v8'): 2.",)


NO_TIME = "an event has no time that a clock shows"
GOOD = json.dumps({"traceEvents": [operator("aten::mm", 0, 1)]}).encode()

BAD: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "the file is empty"),
    "text": (b"hello", "not valid JSON: "),
    "cut off": (GOOD[:-20], "the file ends in the middle"),
    "cut off in the head": (b'{"schemaVersion": 1, "dev', "the file ends in the middle"),
    "cut off behind an event": (GOOD[:-2], "the file ends in the middle"),
    "cut off gzip": (gzip.compress(GOOD * 1)[:-12], "the gzip data is damaged or cut off"),
    "no comma": (GOOD.replace(b', "cat"', b' "cat"'), "not valid JSON: "),
    "other object": (b'{"name": "profile", "nodes": []}', 'a JSON object without a list "traceEvents"'),
    "no events": (b'{"traceEvents": []}', "none of its 0 events is an operator"),
    "events no objects": (b'{"traceEvents": [1, 2]}', "an event is none of torch's"),
    "no time": (b'[{"ph": "X", "cat": "cpu_op", "name": "aten::mm"}]', NO_TIME),
    "time no number": (b'[{"ph": "X", "cat": "cpu_op", "name": "a", "ts": "x"}]', NO_TIME),
    "of a browser": (
        b'[{"ph": "X", "cat": "blink", "name": "paint", "ts": 1, "dur": 2, "pid": 1, "tid": 1}]',
        "none of its 1 events is an operator, a scope, a runtime call or a kernel of torch.profiler; others are",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_file_is_named_with_what_is_wrong(case: str, tmp_path: Path) -> None:
    (tmp_path / "bad.json").write_bytes(BAD[case][0])
    with pytest.raises(TraceFormatError, match=f"^{tmp_path}/bad.json: .*{re.escape(BAD[case][1])}") as caught:
        load_trace(tmp_path / "bad.json")
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
    with pytest.raises(TraceFormatError, match=f"^{path}: .*{words}"):
        load_trace(path)


def test_a_scope_that_old_traces_call_an_operator_is_a_scope() -> None:
    loaded = trace(span("Operator", "ProfilerStep#3", 0, 9), span("Operator", "aten::mm", 1, 2))
    assert loaded.steps.numbers == (3,)
    assert loaded.links.operators.tolist() == [1]
    assert trace(scope("ProfilerStep#3", 0, 9)).kind.tolist() == [loaded.kind.tolist()[0]]


@pytest.mark.parametrize("nested", [{"a": [{"b": 1}, {"c": 2}]}, {"a": '"}, {"'}, {"a": "}],"}])
def test_braces_within_an_event_do_not_end_it(nested: dict[str, Any], tmp_path: Path) -> None:
    events = [operator("aten::mm", at, 1, **nested) for at in range(40)]
    for text in (json.dumps(events), json.dumps({"traceEvents": events, "traceName": nested})):
        (tmp_path / "trace.json").write_text(text)
        assert len(load_trace(tmp_path / "trace.json")) == 40


# ---- damaged traces: each gives a report or one line and status 2, in bounded time and memory

SECONDS = 20.0  # of the processor, for one file of at most some megabytes
GROWN_BYTES = 400 << 20  # of this process, by a hundred files together


@cache
def real_traces() -> tuple[bytes, ...]:
    """Two small traces whole, and the first events of a real one, with all that stands beside them."""
    ranks = [file.read_bytes() for file in RANKS]
    with gzip.open(RESNET) as file:
        resnet = json.load(file)
    steps = resnet | {"traceEvents": [*resnet["traceEvents"][:600], *resnet["traceEvents"][-300:]]}
    return (*ranks, json.dumps(steps).encode())


def damaged(draw: random.Random) -> bytes:
    """A real trace with something done to its bytes, its values, or to what it is packed in."""
    text = draw.choice(real_traces())
    how = draw.randrange(4)
    if how == 0:
        return json.dumps(mutated_tree(draw, json.loads(text))).encode("utf-8", "surrogatepass")
    if how == 1:
        return mutated(draw, gzip.compress(text, 1))
    if how == 2:
        return gzip.compress(mutated(draw, text), 1)
    return mutated(draw, text)


def test_a_damaged_trace_gives_a_report_or_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "damaged.pt.trace.json"
    path.write_bytes(real_traces()[0])
    assert main(["trace", str(path)]) == 0
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    read = refused = 0
    for seed in range(60):
        draw = random.Random(seed)
        path.write_bytes(damaged(draw))
        capsys.readouterr()
        begun = time.process_time()
        status = main(["trace", *draw.choice(([], ["--json"], ["--rows", "0"])), str(path)])
        assert time.process_time() - begun < SECONDS, seed
        shown, said = capsys.readouterr()
        assert (status, bool(shown), said.count("\n")) in ((0, True, 0), (2, False, 1)), (seed, said[:300])
        assert status == 0 or f"{path}: " in said, seed
        assert not unsafe_in(said), seed
        assert shown.startswith("{") or not unsafe_in(shown), seed
        read, refused = read + (status == 0), refused + (status == 2)
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown * (1 if sys.platform == "darwin" else 1024) < GROWN_BYTES
    # Both happen, so that the test could fail.
    assert read > 5
    assert refused > 5
