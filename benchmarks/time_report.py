"""The report on time, to which each benchmark of time writes its own section."""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import date
from pathlib import Path

from .machine import code_in_words, machine_in_words, versions

RESULT = Path(__file__).resolve().parent / "results" / "time.md"

_PACKAGES = ("torch", "lightning", "deepspeed", "transformers")

_HEAD = """# What times come to, and what timing costs

Each section is written by a benchmark of its own, which says where and when it ran. Again: `make bench-time`.
"""


def write_section(path: Path, name: str, lines: Sequence[str], *, head: str = _HEAD) -> None:
    """Put *lines* in place of the section *name* of the report at *path*, or at its end if it has none.

    Args:
        path: the report; it is made if there is none.
        name: tells the section from others; it stands in the report where nobody sees it.
        lines: a heading and what belongs under it; where and when it ran is added.
        head: what a new report begins with.
    """
    begin, end = f"<!-- {name} -->", f"<!-- end of {name} -->"
    ran = f"*{date.today()}, {code_in_words()}. {machine_in_words()}; up to {os.getloadavg()[0]:.1f} processes were "
    ran += (
        f"running or waiting on it. {', '.join(f'{each} {version}' for each, version in versions(_PACKAGES).items())}.*"
    )
    section = "\n".join([begin, "", *lines, ran, "", end])
    text = path.read_text() if path.exists() else head
    before, found, rest = text.partition(begin)
    if found:
        _, _, after = rest.partition(end)
        text = before + section + after
    else:
        text = f"{text.rstrip()}\n\n{section}\n"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
