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
from lightning_flops.trace.columns import Trace, TraceFormatError
from lightning_flops.trace.read import load_trace
from tests.analysis.trace_events import RANKS, RESNET, operator, span, trace


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


def test_events_of_other_tools_are_left_out_and_said() -> None:
    other, mm = "Left out: events of categories that are not torch.profiler's", operator("aten::mm", 0, 1)
    loaded = trace(mm, span("blink", "paint", 0, 5), span("v8", "gc", 1, 5))
    assert (len(loaded), loaded.notes) == (1, (f"{other} ('blink', 'v8'): 2.",))
    notes = trace(mm, {"ph": "X", "name": "MatMul", "pid": 8, "tid": 3, "ts": 9, "dur": 2}).notes
    assert notes == (f"{other} ('none'): 1.",)


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
    "no events": (b'{"traceEvents": []}', "it has no events"),
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


@pytest.mark.parametrize("nested", [{"a": [{"b": 1}, {"c": 2}]}, {"a": '"}, {"'}, {"a": "}],"}])
def test_braces_within_an_event_do_not_end_it(nested: dict[str, Any], tmp_path: Path) -> None:
    events = [operator("aten::mm", at, 1, **nested) for at in range(40)]
    for text in (json.dumps(events), json.dumps({"traceEvents": events, "traceName": nested})):
        (tmp_path / "trace.json").write_text(text)
        assert len(load_trace(tmp_path / "trace.json")) == 40


# ---- damaged traces: each gives a report or one line and status 2, in bounded time and memory

# fmt: off
HOSTILE = (
    "\x1b[2J\x1b]0;owned\x07", "name\nFORGED: 1 TFLOPS", "name\rFORGED", "\u202egnp.exe", "\u2066x\u2069", "\x00",
    "\x9b31m", "a\u2028FORGED", "\x7f", "\ud800", "\ufeff", "\t" * 3, "%s%n{0}{name}", "|`*_<script>", "ü" * 300, "",
)
# fmt: on
"""Names that write to a terminal, forge lines, turn text around, or are no text at all."""


def unsafe_in(text: str) -> list[str]:
    """Lines of *text* that hold what a terminal obeys, or that a name forges."""
    return [line for line in text.split("\n") if not line.isprintable() or line.lstrip().startswith("FORGED")]


def mutated(draw: random.Random, data: bytes) -> bytes:
    """*data* with a few things done to it: cut off, left out, repeated, flipped, put between, or random."""
    for _ in range(draw.randint(1, 4)):
        start = draw.randrange(len(data) + 1)
        end = draw.choice([len(data), *(min(len(data), start + size) for size in (0, 1, 2, 8, 100, 5000))])
        old = data[start:end]
        new = draw.choice(
            [
                b"",
                old[:5000] * draw.choice([2, 3, 51]),
                bytes(byte ^ 1 << draw.randrange(8) for byte in old[:5000]),
                draw.randbytes(min(len(old), 5000)),
                draw.choice(_PIECES),
            ]
        )
        data = data[:start] + new + data[end:]
    return data


# fmt: off
_PIECES = (
    b"9" * 5_000, b"[" * 100_000, b'{"a":' * 50_000, b"null", b"NaN", b"-Infinity", b"1e999",
    b'"' + b"x" * 1_000_000 + b'"', b"[]," * 200_000, b"\x00" * 100, b"\xff\xfe", b"\\ud800", b"\xef\xbb\xbf",
    b'"ph":"X",',
)
# fmt: on
_TREES: tuple[Any, ...] = (None, True, -1, 0, 1e308, -1e308, 2**70, "x", "1", "-1", [], {}, [[]], {"a": 1}, *HOSTILE)


def mutated_tree(draw: random.Random, tree: Any) -> Any:
    """JSON with values replaced, left out or repeated at a few random places."""
    for _ in range(draw.randint(1, 6)):
        parent: Any = tree
        for _ in range(draw.randint(0, 5)):
            children = list(parent.values() if isinstance(parent, dict) else parent)
            inner = [child for child in children if isinstance(child, (dict, list)) and child]
            if not inner:
                break
            parent = draw.choice(inner)
        if not parent:
            continue
        key = draw.choice(list(parent) if isinstance(parent, dict) else range(len(parent)))
        match draw.randrange(4):
            case 0:
                del parent[key]
            case 1 if isinstance(parent, list):
                parent.extend([parent[key]] * draw.choice([1, 3, 200]))
            case 2 if isinstance(parent, dict):
                parent[draw.choice(HOSTILE)] = parent.pop(key)
            case _:
                parent[key] = draw.choice(_TREES)
    return tree


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
