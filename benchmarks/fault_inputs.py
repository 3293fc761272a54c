"""Hostile input: settings, trace files, ranks' records and saved profiles that are not written in good faith."""

from __future__ import annotations

import contextlib
import gzip
import io
import json
import math
import random
import re
import resource
import tempfile
import unicodedata
import zlib
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from torch import nn

from lightning_flops import FlopsProfilerCallback, ProfilerConfig
from lightning_flops.analysis.rank_record import make_rank_record, pack, unpack
from lightning_flops.cli import main as command
from lightning_flops.errors import ConfigError, ProfileFormatError
from lightning_flops.schema.profile import Profile

from .faults import Fault, Trial
from .machine import ROOT
from .runner import Answer, answer_of

FILE_SEC = 60.0  # A mutated file is refused or read within this time
MEMORY_FACTOR, MEMORY_BASE = 60, 200 << 20
"""Bytes that reading may take: so many times the file's, inflated, and so many."""

_INFLATED = 40 << 20  # Bytes that fit into a record when they are all the same, and that should need no memory

TRACES = ROOT / "tests" / "data" / "traces"
A_PROFILE = ROOT / "tests" / "golden" / "json" / "mlp.json"
# fmt: off
HOSTILE = (
    "\x1b[2J\x1b]0;owned\x07", "name\nFORGED: 1 TFLOPS", "name\rFORGED", "\u202egnp.exe", "\u2066x\u2069", "\x00",
    "\x9b31m", "a\u2028FORGED", "\x7f", "\ud800", "\ufeff", "\t" * 3, "%s%n{0}{name}", "|`*_<script>", "ü" * 300, "",
)
# fmt: on
"""Names that write to a terminal, forge lines, turn text around, or are no text at all."""

_SHOWS = {"Cc", "Cf", "Cs", "Zl", "Zp"}


def unsafe_in(text: str) -> str:
    """What *text* holds that a terminal obeys, or that forges a line; empty if nothing."""
    obeyed = sorted({character for character in text if unicodedata.category(character) in _SHOWS} - {"\n"})
    if obeyed:
        return "control characters shown as they are: " + " ".join(f"U+{ord(character):04X}" for character in obeyed)
    forged = re.search(r"^\s*FORGED", text, flags=re.MULTILINE)
    return "a name forges a line" if forged else ""


# ---- settings


class _Odd:
    """Nothing that anybody means by a setting."""

    def __repr__(self) -> str:
        return "<odd>"


def _value(draw: random.Random, depth: int = 0) -> Any:
    plain: list[Callable[[], Any]] = [
        lambda: draw.choice([None, True, False, 0, 1, -1, 2, 20, 2**63, -(2**70), 10**400, 10**5_000]),
        lambda: draw.choice([0.0, -0.0, 0.5, 1e308, -1.5, math.nan, math.inf, -math.inf]),
        lambda: draw.choice([*HOSTILE, "1", "full", "half", "out.txt", "a/b", "..", "auto", " "]),
        lambda: draw.choice([np.int64(3), np.float32(2.5), np.bool_(True), np.array([1, 2]), np.array(3)]),
        lambda: draw.choice([torch.tensor(3), torch.ones(2), torch.float32, nn.Linear]),
        lambda: draw.choice([b"1", bytearray(b"x"), Path("x"), 1j, range(3), len, _Odd(), Ellipsis, int, object()]),
    ]
    nested: list[Callable[[], Any]] = [
        lambda: [_value(draw, depth + 1) for _ in range(draw.randint(0, 4))],
        lambda: tuple(_value(draw, depth + 1) for _ in range(draw.randint(0, 3))),
        lambda: {_key(draw): _value(draw, depth + 1) for _ in range(draw.randint(0, 3))},
        lambda: {draw.choice(["wait", "warmup", "active", "repeat"]): _value(draw, depth + 1)},
        lambda: {draw.choice(["data_wait", "mfu", "bfloat16", "straggler"]): _value(draw, depth + 1)},
        lambda: _deep(draw.choice([50, 5_000])),
    ]
    return draw.choice(plain + (nested if depth < 3 else []))()


def _deep(levels: int) -> Any:
    value: Any = []
    for _ in range(levels):
        value = [value]
    return value


def _key(draw: random.Random) -> Any:
    names = list(ProfilerConfig.__dataclass_fields__)
    odd = [1, None, (1, 2), b"trace", "", "profile-step", "Trace", "profile_step ", *HOSTILE]
    return draw.choice(names) if draw.random() < 0.9 else draw.choice(odd)


def try_settings(draw: random.Random) -> list[Fault]:
    """Random settings given in a random way: they are taken, or refused by a ConfigError that names the setting."""
    block = {_key(draw): _value(draw) for _ in range(draw.randint(1, 4))}
    known = {key: value for key, value in block.items() if key in ProfilerConfig.__dataclass_fields__}
    strings = {key: value for key, value in block.items() if isinstance(key, str)}
    ways: dict[str, Callable[[], Any]] = {
        "ProfilerConfig": lambda: ProfilerConfig(**known),
        "FlopsProfilerCallback": lambda: FlopsProfilerCallback(**strings),
        "from_block": lambda: ProfilerConfig.from_block(block),
        "from_deepspeed_config": lambda: FlopsProfilerCallback.from_deepspeed_config({"flops_profiler": block}),
    }
    way = draw.choice([*ways, "a file"])
    if way != "a file":
        return _judge_settings(way, ways[way], block)
    fields = {"enabled": True, "profile_step": 5, "output_file": "out.txt", "detailed": False, "top_modules": 3}
    text = mutated(draw, json.dumps({"train_batch_size": 8, "flops_profiler": fields}, indent=2).encode())
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "ds_config.json")
        path.write_bytes(text)
        return _judge_settings(way, lambda: ProfilerConfig.from_deepspeed_config(path), [path])


def _judge_settings(way: str, take: Callable[[], Any], given: Iterable[Any]) -> list[Fault]:
    try:
        taken = take()
        config = taken if isinstance(taken, ProfilerConfig) else taken.config
        config.next_profile_step(steps_done=3), config.thresholds, repr(config)  # what it is used for
        return []
    except ConfigError as error:
        words = str(error)
    except Exception as error:
        return [Fault("another error than ConfigError", way, f"{type(error).__name__}: {error}")]
    says_rule = (" must " in words and ", got " in words) or " is not a setting" in words
    wrong = {
        "the message names nothing that was given": not any(str(key) in words for key in (*given, "flops_profiler")),
        # Of a file it is enough to say what is wrong in it.
        "the message does not say rule and value": not says_rule and way != "a file",
        "the message shows control characters of the value": bool(unsafe_in(words)),
    }
    return [Fault(kind, way, words[:300]) for kind, holds in wrong.items() if holds]


# ---- bytes


def mutated(draw: random.Random, data: bytes) -> bytes:
    """*data* with a few things done to it."""
    for _ in range(draw.randint(1, 4)):
        start = draw.randrange(len(data) + 1)
        end = min(len(data), start + draw.choice([1, 2, 8, 100, 5000]))
        match draw.randrange(7):
            case 0:
                data = data[:start]
            case 1:
                data = data[:start] + data[end:]
            case 2:
                data = data[:start] + draw.randbytes(end - start) + data[end:]
            case 3:
                data = data[:end] + data[start:end] * draw.choice([1, 2, 50]) + data[end:]
            case 4 if start < len(data):
                data = data[:start] + bytes([data[start] ^ 1 << draw.randrange(8)]) + data[start + 1 :]
            case 5:
                data = data[:start] + draw.choice(_PIECES) + data[start:]
            case _:
                data = data[:start] + draw.choice(_PIECES) + data[end:]
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


# ---- files, each read in a process of its own


def _tried(function: Callable[[], Any], *, seconds: float) -> Answer:
    """What *function* returned, or the type and words of what it raised, and the bytes that memory has grown by."""

    def measure() -> tuple[Any, str, str, int]:
        before, value, raised, words = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, None, "", ""
        try:
            value = function()
        except Exception as error:
            raised, words = type(error).__name__, str(error)[:300]
        return value, raised, words, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) << 10

    return answer_of(measure, timeout_sec=seconds)


def _command_on(arguments: list[str]) -> tuple[int, str, str]:
    """The command line's exit code, and what it prints."""
    shown, said = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(shown), contextlib.redirect_stderr(said):
        code = command(arguments)
    return code, shown.getvalue()[:2_000_000], said.getvalue()[:100_000]


def try_trace(draw: random.Random) -> list[Fault]:
    """A mutated trace: a report, or one line that names the file, within bounds, and nothing a terminal obeys."""
    sources = [path for path in sorted(TRACES.glob("*.json*")) if path.stat().st_size < 100_000 or draw.random() < 0.2]
    source = draw.choice(sources)
    data, packed = source.read_bytes(), source.suffix == ".gz"
    inner = gzip.decompress(data) if packed else data
    how = draw.choice(["bytes", "tree", "file"])
    if how == "tree":
        inner = json.dumps(mutated_tree(draw, json.loads(inner))).encode("utf-8", "surrogatepass")
    elif how == "bytes":
        inner = mutated(draw, inner)
    packs = packed != (draw.random() < 0.2)
    written = gzip.compress(inner, 1) if packs else inner
    if how == "file":
        written = mutated(draw, written)
    flags = draw.choice([[], ["--json"], ["--rows", "0"]])
    where = f"a {'packed' if packs else 'plain'} file, mutated by {how}"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"mutated.pt.trace.json{'.gz' if packs else ''}"
        path.write_bytes(written)
        answer = _tried(partial(_command_on, ["trace", *flags, str(path)]), seconds=FILE_SEC)
    faults = _judged(answer, where, bound=MEMORY_BASE + MEMORY_FACTOR * max(len(inner), len(written)))
    if answer.words or answer.value[1]:
        return faults
    code, shown, said = answer.value[0]
    wrong = {
        "an exit code that stands for nothing": code not in (0, 2),
        "a traceback": "Traceback" in said,
        "the error does not name the file": code == 2 and path.name not in said,
        "the error is more than one line": code == 2 and said.count("\n") > 1,
    }
    faults += [Fault(kind, where, said[-300:]) for kind, holds in wrong.items() if holds]
    unsafe = filter(None, map(unsafe_in, (said,) if "--json" in flags else (shown, said)))
    return faults + [Fault(f"on the terminal: {one.partition(':')[0]}", where, one) for one in unsafe]


def try_record(draw: random.Random) -> list[Fault]:
    """A mutated record of a rank: it is read, or refused by an error of whoever reads it, within bounds."""
    data = pack(make_rank_record(Profile.from_json(A_PROFILE.read_text())))
    if draw.random() < 0.1:
        data = zlib.compress(b"\xdb\xff\xff\xff\xff" + b"x" * _INFLATED, 9)
    elif draw.random() < 0.5:
        data = zlib.compress(mutated(draw, zlib.decompress(data)))
    else:
        data = mutated(draw, data)
    errors = (zlib.error, msgspec.DecodeError, msgspec.ValidationError, UnicodeDecodeError)
    return _judged(_tried(lambda: bool(unpack(data)), seconds=10.0), "a rank's record", bound=_INFLATED, errors=errors)


def try_profile(draw: random.Random) -> list[Fault]:
    """A mutated profile.json: it is read, or refused by a ProfileFormatError, within bounds."""
    text = A_PROFILE.read_text()
    if draw.random() < 0.5:
        text = json.dumps(mutated_tree(draw, json.loads(text)))
    else:
        text = mutated(draw, text.encode()).decode("utf-8", "surrogateescape")
    bound = MEMORY_BASE + MEMORY_FACTOR * len(text.encode("utf-8", "surrogateescape"))
    answer = _tried(lambda: bool(Profile.from_json(text)), seconds=20.0)
    return _judged(answer, "a saved profile", bound=bound, errors=(ProfileFormatError,))


def _judged(answer: Answer, where: str, *, bound: int, errors: tuple[type[Exception], ...] = ()) -> list[Fault]:
    """What is wrong with how reading ended: with one of *errors* or without, and within *bound*."""
    if answer.words:
        return [Fault("no clean end", where, answer.words)]
    _, raised, words, grown = answer.value
    expected = [error.__name__ for error in errors]
    if raised and raised not in expected:
        return [Fault(f"another error than {', '.join(expected) or 'none'}", where, f"{raised}: {words}")]
    if grown > bound:
        return [Fault("more memory than the bound", where, f"{grown >> 20} MiB of {bound >> 20} MiB")]
    return []


TRIALS: dict[str, Trial] = {
    "settings": try_settings,
    "traces": try_trace,
    "records": try_record,
    "profiles": try_profile,
}
