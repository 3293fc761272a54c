"""A kept trace: the lines that torch wrote, with the marks as annotations and what is known of their modules."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from lightning_flops.sinks.trace_file import keep_trace
from lightning_flops.trace.counters import CounterTrack

ARGS = {"forward FLOPs of a step": 12, "forward FLOP/s": 3.5}


def event(name: str, args: str, category: str = "cpu_op") -> str:
    """One event as torch writes it; *args* is what follows the brace that opens them."""
    return f"""  {{
    "ph": "X", "cat": "{category}", "name": "{name}", "pid": 1, "tid": 2,
    "ts": 10.5, "dur": 4,
    "args": {{{args}
  }},
"""


def kept(tmp_path: Path, events: str, module_args: Mapping[str, Mapping[str, int | float]]) -> tuple[str, list[Any]]:
    """The text of the kept file, and its events."""
    whole = f'{{\n  "schemaVersion": 1,\n  "traceEvents": [\n{events.rstrip().rstrip(",")}\n  ]\n}}\n'
    (tmp_path / "from.json").write_text(whole, encoding="utf-8")
    path = keep_trace(str(tmp_path / "from.json"), str(tmp_path / "to"), rank=0, step=7, module_args=module_args)
    assert path == f"{tmp_path}/to/rank0_step7.pt.trace.json"
    text = Path(path).read_text(encoding="utf-8")
    return text, json.loads(text)["traceEvents"]


@pytest.mark.parametrize(
    ("args", "before"),
    [
        ('\n      "External id": 3,"Ev Idx": 4\n    }', {"External id": 3, "Ev Idx": 4}),
        ("\n    }", {}),
        ("}", {}),
        ('"External id": 3}', {"External id": 3}),
    ],
)
def test_a_module_says_what_is_known_of_it_beside_what_torch_wrote(
    args: str, before: dict[str, int], tmp_path: Path
) -> None:
    _, (first, second) = kept(
        tmp_path, event("module: fc1", args) + event("module: fc10", args), {"fc1": ARGS, "gone": ARGS}
    )
    assert first["args"] == {**ARGS, **before} and first["cat"] == "user_annotation"
    assert second["args"] == before and second["cat"] == "user_annotation"


@pytest.mark.parametrize("name", ["", "a.\N{GREEK SMALL LETTER ALPHA}", 'a"b', "a\\\\b"])
def test_names_are_found_as_torch_writes_them(name: str, tmp_path: Path) -> None:
    written = json.dumps(name or "(root)", ensure_ascii=False)[1:-1]
    _, (only,) = kept(tmp_path, event(f"module: {written}", '\n      "External id": 3\n    }'), {name: ARGS})
    assert only["args"] == {**ARGS, "External id": 3}


def test_other_lines_stay_as_they_are(tmp_path: Path) -> None:
    others = (
        event("aten::mm", '\n      "External id": 3\n    }')
        + event("my module: fc1", "\n    }", "user_annotation")
        + '  {\n    "ph": "s", "id": 3, "pid": 1, "tid": 2, "ts": 10, "cat": "ac2g", "name": "ac2g"\n  },\n'
    )
    plain, _ = kept(tmp_path, others, {})
    (tmp_path / "to").joinpath("rank0_step7.pt.trace.json").unlink()
    assert kept(tmp_path, others, {"fc1": ARGS})[0] == plain
    assert plain.count("cpu_op") == 1


def test_a_mark_without_args_gives_them_to_nobody(tmp_path: Path) -> None:
    bare = '  {\n    "ph": "X", "cat": "cpu_op", "name": "module: fc1", "ts": 1, "dur": 2\n  },\n'
    _, (_, other) = kept(tmp_path, bare + event("aten::mm", '\n      "External id": 3\n    }'), {"fc1": ARGS})
    assert other["args"] == {"External id": 3}


MEMORY = CounterTrack(name="memory allocated, host", unit="bytes", times_ns=(10_001, 2_000_000_500), values=(7, 0))
RATE = CounterTrack(name="FLOP/s by operator", unit="FLOP/s", times_ns=(10_000,), values=(1.23456789e12,))


def test_counters_are_events_of_their_own_and_change_no_other(tmp_path: Path) -> None:
    events = event("module: fc1", '\n      "External id": 3\n    }') + event("aten::mm", "\n    }")
    plain, others = kept(tmp_path, events, {"fc1": ARGS})
    path = keep_trace(
        str(tmp_path / "from.json"), str(tmp_path / "to"), rank=0, step=8, module_args={"fc1": ARGS},
        counters=[MEMORY, RATE], process=12,
    )  # fmt: skip
    text = Path(path).read_text(encoding="utf-8")
    found = json.loads(text)["traceEvents"]
    assert found[:-3] == others  # where they were: some readers know events by their places
    assert found[-3:] == [
        {"ph": "C", "name": "lightning_flops: memory allocated, host", "pid": 12, "ts": 10.001, "args": {"bytes": 7}},
        {
            "ph": "C",
            "name": "lightning_flops: memory allocated, host",
            "pid": 12,
            "ts": 2000000.5,
            "args": {"bytes": 0},
        },
        {"ph": "C", "name": "lightning_flops: FLOP/s by operator", "pid": 12, "ts": 10, "args": {"FLOP/s": 1.23457e12}},
    ]
    lines = [line for line in text.splitlines() if '"ph": "C"' not in line]
    assert [line for line in lines if line != ","] == plain.splitlines()
    # What other readers take for work of torch has a length and a category.
    assert not any({"dur", "cat", "tid"} & set(one) for one in found[-3:])
