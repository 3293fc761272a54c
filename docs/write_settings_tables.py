"""Writes the tables of settings in docs/settings.md: what the fields of ``ProfilerConfig`` say.

``tests/test_profile_pages.py`` fails while a table is not what this program writes.

    make docs-profile
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import asdict, is_dataclass
from pathlib import Path

from lightning_flops.config import OF_DEEPSPEED, SETTINGS, ProfilerConfig

PAGE = Path(__file__).parent / "settings.md"

_HEAD = "| key | default | what it does |\n|---|---|---|\n"
_TABLE = re.compile(re.escape(_HEAD) + r"(?:\|.*\n)*")


def page(text: str) -> str:
    """*text* of the page with both of its tables written anew: DeepSpeed's settings, then ours."""
    deepspeeds = list(OF_DEEPSPEED)
    tables = [table(deepspeeds), table(name for name in SETTINGS if name not in deepspeeds)]
    assert len(_TABLE.findall(text)) == len(tables), "the page has a table of DeepSpeed's settings and one of ours"
    return _TABLE.sub(lambda _: tables.pop(0), text)


def table(names: Iterable[str]) -> str:
    """One row for each setting, as a block of JSON has it."""
    return _HEAD + "".join(f"| `{name}` | `{_default(name)}` | {_help(name)} |\n" for name in names)


def _default(name: str) -> str:
    """What a block means that does not name the setting."""
    value = getattr(ProfilerConfig.from_block({}), name)
    return json.dumps(asdict(value) if is_dataclass(value) and not isinstance(value, type) else value)


def _help(name: str) -> str:
    return re.sub(r"\bNone\b", "`null`", SETTINGS[name].help.replace("``", "`"))


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
