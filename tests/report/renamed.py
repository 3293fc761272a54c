"""Reports in which every word from outside is another one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any

NAMES = {
    "ModuleProfile": "name type_name extra_repr alias_of",
    "OperatorProfile": "operator dtypes",
    "Profile": "notes uncounted",
    "RunContext": "framework framework_version torch_version device_name precision host strategy",
    "RanksProfile": "left_out",
    "Straggler": "module host",
    "KernelRow": "name",
    "OperatorRow": "name",
    "TraceReport": "source notes",
    "Advice": "fact threshold remedy source unless",
}
"""Which fields of which records hold words from outside."""


def renamed(record: Any, rename: Callable[[str], str], *, here: bool = False) -> Any:
    """*record* in which every word from outside is another one."""
    if isinstance(record, str):
        return rename(record) if here else record
    if isinstance(record, Mapping):
        return {renamed(key, rename, here=here): renamed(value, rename) for key, value in record.items()}
    if isinstance(record, tuple):
        return tuple(renamed(one, rename, here=here) for one in record)
    if is_dataclass(record):
        ours = NAMES.get(type(record).__name__, "").split()
        changes = {
            field.name: renamed(getattr(record, field.name), rename, here=field.name in ours)
            for field in fields(record)
            if field.init
        }
        return replace(record, **changes)  # type: ignore[type-var]
    return record


def with_suffix(*suffixes: str) -> Callable[[str], str]:
    """Ends each part of a dotted name with one of *suffixes*; numbers stay, which stand for places in a list."""

    def ended(part: str) -> str:
        return part if part.isdigit() or not part else part + suffixes[sum(part.encode()) % len(suffixes)]

    return lambda name: ".".join(map(ended, name.split(".")))
