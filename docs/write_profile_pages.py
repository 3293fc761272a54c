"""Writes docs/profile.schema.json and docs/profile.md: the shape and the meaning of every file of numbers.

Both follow from the dataclasses that make the files: shapes from their annotations, meanings from the texts at their
fields. ``tests/test_profile_pages.py`` fails while a page is not what this program writes.

    make docs-profile
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import Any, get_args, get_type_hints

import griffe
from pydantic import BaseModel, ConfigDict
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue
from pydantic_core.core_schema import IsInstanceSchema

from docs.comment_meanings import CommentMeanings
from lightning_flops.schema.codec import Json
from lightning_flops.schema.comparison import Comparison
from lightning_flops.schema.plan import MemoryReport
from lightning_flops.schema.profile import Profile, ThroughputSummary
from lightning_flops.schema.trace import TracesReport

FOLDER = Path(__file__).parent
SCHEMA = FOLDER / "profile.schema.json"
PAGE = FOLDER / "profile.md"

FILES: Mapping[type[Json], str] = {
    Profile: "`profile.json`, `Profile.to_json()`",
    ThroughputSummary: "`throughput.json`, `ThroughputSummary.to_json()`",
    TracesReport: "`lightning-flops trace --json`",
    Comparison: "`lightning-flops compare --json`, `Comparison.to_json()`",
    MemoryReport: "`lightning-flops memory --json`, `MemoryPrediction.to_json()`, and the profile of a run (`tensors`)",
}
"""What is written as JSON: the file or command."""

UNITS = {
    "_flops_per_sec": "FLOP/s",
    "_bytes_per_sec": "bytes/s",
    "samples_per_sec": "samples/s",
    "tokens_per_sec": "tokens/s",
    "batches_per_sec": "batches/s",
    "_sec": "s",
    "_us": "µs",
    "_ns": "ns",
    "_bytes": "bytes",
    "bytes_read": "bytes",
    "bytes_written": "bytes",
    "_flops": "FLOPs",
    "flops": "FLOPs",
}
"""Units by how a field's name ends; the first that fits."""

FLOP_RECORDS = ("StepFlops", "PhaseFlops")
BYTE_RECORDS = ("PhaseBytes",)
SECOND_RECORDS = ("PhaseSeconds",)
"""Records all of whose numbers have one unit, which their name says."""


class _Schema(GenerateJsonSchema):
    def is_instance_schema(self, schema: IsInstanceSchema) -> JsonSchemaValue:
        """Compact columns of 64-bit integers are lists in JSON."""
        assert schema["cls"].__name__ == "array", schema["cls"]
        return {"type": "array", "items": {"type": "integer"}}


class _Files(BaseModel):
    model_config = ConfigDict(arbitrary_types_allowed=True)

    profile: Profile
    throughput: ThroughputSummary
    traces: TracesReport
    comparison: Comparison


def json_schema() -> dict[str, Any]:
    """JSON Schema 2020-12 of all these files; one of them is ``#/$defs/Profile`` and so on."""
    definitions = _Files.model_json_schema(mode="serialization", schema_generator=_Schema)["$defs"]
    records = {record.__name__: record for record in all_records()}
    assert definitions.keys() == records.keys(), definitions.keys() ^ records.keys()
    for name, definition in definitions.items():
        definition["description"] = _first_paragraph(records[name])
        definition["additionalProperties"] = False
        definition["required"] = list(definition["properties"])  # also what has a default: a file has every field
        meanings = field_meanings(records[name])
        for field, shape in definition["properties"].items():
            shape.pop("title", None)
            if meanings[field]:
                shape["description"] = meanings[field]
    for record in FILES:
        definitions[record.__name__]["properties"]["schema_version"]["const"] = _version(record)
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "What lightning_flops writes as JSON",
        "oneOf": [{"$ref": f"#/$defs/{record.__name__}"} for record in FILES],
        "$defs": dict(sorted(definitions.items())),
    }


def all_records() -> list[type]:
    """Every dataclass in the files, each where it is first met."""
    found: dict[type, None] = {}
    waiting: list[type] = list(FILES)
    while waiting:
        record = waiting.pop(0)
        if record in found:
            continue
        found[record] = None
        hints = get_type_hints(record)
        waiting += [each for field in fields(record) for each in _records_in(hints[field.name])]
    return list(found)


def _records_in(hint: Any) -> Iterator[type]:
    if is_dataclass(hint):
        assert isinstance(hint, type)
        yield hint
    for argument in get_args(hint):
        yield from _records_in(argument)


@cache
def _package() -> griffe.Object | griffe.Alias:
    """The package's classes, with what each field means."""
    extensions = griffe.Extensions(CommentMeanings())
    return griffe.load("lightning_flops", search_paths=[FOLDER.parent], allow_inspection=False, extensions=extensions)


def field_meanings(record: type) -> dict[str, str]:
    """What each field of *record* means, on one line; empty where its source does not say."""
    members: dict[str, Any] = {}
    for base in reversed(record.__mro__):
        if is_dataclass(base):
            members |= _package()[f"{base.__module__}.{base.__qualname__}".partition(".")[2]].members
    docstrings = {field.name: members[field.name].docstring for field in fields(record)}
    return {name: "" if text is None else _one_line(text.value) for name, text in docstrings.items()}


def _version(record: type) -> Any:
    return next(field.default for field in fields(record) if field.name == "schema_version")


def _first_paragraph(record: type) -> str:
    return _one_line(inspect.cleandoc(record.__doc__ or "").split("\n\n")[0])


def _one_line(text: str) -> str:
    return " ".join(text.split())


def unit_of(record: type, field: str, hint: Any) -> str:
    """The unit of a number; empty for what is no number, or a plain count or ratio."""
    kinds = {int, float} & {hint, *_leaves(hint)}
    if not kinds:
        return ""
    for records, unit in ((FLOP_RECORDS, "FLOPs"), (BYTE_RECORDS, "bytes"), (SECOND_RECORDS, "s")):
        if record.__name__ in records:
            return unit
    return next((unit for ending, unit in UNITS.items() if field.endswith(ending)), "")


def _leaves(hint: Any) -> Iterator[Any]:
    for argument in get_args(hint):
        yield argument
        yield from _leaves(argument)


def _type_words(hint: Any) -> str:
    """*hint* in JSON's words: ``integer or null``, ``list of ModuleProfile``."""
    if is_dataclass(hint):
        assert isinstance(hint, type)
        return f"[{hint.__name__}](#{hint.__name__.lower()})"
    name = getattr(hint, "__name__", str(hint))
    arguments = get_args(hint)
    if type(None) in arguments:
        others = [_type_words(one) for one in arguments if one is not type(None)]
        return " or ".join([*others, "null"])
    if name == "Literal":
        return ", ".join(f'`"{one}"`' for one in arguments)
    if name == "tuple":
        return f"list of {_type_words(arguments[0])}"
    if name == "Mapping":
        return f"object of {_type_words(arguments[1])}"
    return {"int": "integer", "float": "number", "str": "text", "bool": "true or false", "array": "list of integer"}[
        name
    ]


def page() -> str:
    """docs/profile.md."""
    lines = [
        "# Every number, and what it means",
        "",
        "`callback.profile` is a `Profile`, `callback.throughput` a `ThroughputSummary`; both are frozen, and",
        "`profile.json` and `throughput.json` hold every field of theirs under the same name. What could not be",
        "measured is `null` (`None`), never a guess; `Profile.unavailable` says why a rate is. FLOPs are exact",
        "integers, a multiply-add is two. This page is written by `docs/write_profile_pages.py`;",
        "[profile.schema.json](profile.schema.json) is the same as JSON Schema (2020-12).",
        "",
        "A file is read back by `Profile.from_json(text)` and `ThroughputSummary.from_json(text)`. For scripts that",
        "want the headline alone, `Profile.summary()` is a flat dict of `global_step_sec`, `samples_per_sec`,",
        "`tokens_per_sec`, `mfu`, `hfu`, `forward_flops`, `backward_flops`, `hardware_flops`, `data_wait_ratio`,",
        "`cpu_time_sec`, `params` and `advice` (potential saving as a share of the step, by rule). In a notebook a",
        "profile, a summary and the counts of `count_flops` show themselves as text.",
    ]
    for record in all_records():
        lines += ["", f"## {record.__name__}", "", _escaped(_first_paragraph(record))]
        if issubclass(record, Json):
            lines += ["", f"In {FILES[record]}; `schema_version` {_version(record)}."]
        lines += ["", "| field | type | unit | meaning |", "|---|---|---|---|"]
        hints, meanings = get_type_hints(record), field_meanings(record)
        for field in fields(record):
            hint = hints[field.name]
            cells = (f"`{field.name}`", _type_words(hint), unit_of(record, field.name, hint), meanings[field.name])
            lines.append("".join(f"| {_escaped(cell)} " if cell else "| " for cell in cells) + "|")
    return "\n".join(lines) + "\n"


def _escaped(text: str) -> str:
    # Docstrings have two backticks where Markdown has one.
    return re.sub(r"``([^`]+)``", r"`\1`", text).replace("|", r"\|")


def main() -> None:
    """Write both pages."""
    SCHEMA.write_text(json.dumps(json_schema(), indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    PAGE.write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main()
