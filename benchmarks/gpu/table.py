"""A report as text for the console, and as the page that is kept."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator

from .results import Part, Report, Row, worst

_CLAIM_CHARS = 68


def console(report: Report) -> str:
    """Every row, a line each; what raised is below, whole."""
    lines = [f"{what}: {value}" for what, value in report.machine.items()]
    for part in report.parts:
        lines += ["", f"{part.number}. {part.name}  [{part.seconds:.0f} s, {_state(part)}]"]
        lines += [_line(row) for row in part.rows]
        if part.broken:
            lines.append(f"   broken   {part.broken.strip().splitlines()[-1]}")
    notes = [note for part in report.parts for note in _notes(part)]
    lines += ["", *notes, *([""] if notes else []), summary(report)]
    return "\n".join(lines) + "\n"


def summary(report: Report) -> str:
    """One line: how many claims hold."""
    counts = ", ".join(f"{report.count(verdict)} {verdict}" for verdict in ("met", "missed", "failed", "told", "n/a"))
    broken = [str(part.number) for part in report.parts if part.broken]
    ended = f"; broken off: part {', '.join(broken)}" if broken else ""
    seconds = sum(part.seconds for part in report.parts)
    return f"{counts} in {seconds:.0f} s{ended}"


def markdown(report: Report, *, date: str) -> str:
    """The page: what it ran on, a table for each part, and the notes."""
    lines = [
        "# What is claimed of CUDA, seen on a GPU",
        "",
        "Written by `make gpu` (`python -m benchmarks.gpu`).",
        "",
        f"{date}. " + " · ".join(f"{what}: {value}" for what, value in report.machine.items()),
        "",
        f"**{summary(report)}.**",
    ]
    for part in report.parts:
        lines += ["", f"## {part.number}. {part.name}", "", f"{part.seconds:.0f} s, {_state(part)}."]
        if part.rows:
            lines += ["", "| claim | seen | held to | |", "|---|---|---|---|"]
            lines += [
                f"| {_cell(row.claim)} | {_cell(_seen(row))} | {_cell(row.limit)} | {_mark(row)} |" for row in part.rows
            ]
        notes = list(_notes(part))
        if notes:
            lines += ["", "```text", *notes, "```"]
    return "\n".join(lines) + "\n"


def _state(part: Part) -> str:
    return "broken off" if part.broken else worst(part.rows)


def _line(row: Row) -> str:
    limit = f"  [{row.limit}]" if row.limit else ""
    claim = textwrap.shorten(row.claim, _CLAIM_CHARS, placeholder=" …")
    return f"   {row.verdict:<7}  {claim:<{_CLAIM_CHARS}}  {_seen(row)}{limit}"


def _seen(row: Row) -> str:
    return f"{row.seen} ({row.note})" if row.note and row.verdict in ("n/a", "told") else row.seen


def _mark(row: Row) -> str:
    return f"**{row.verdict}**" if row.verdict in ("missed", "failed") else row.verdict


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def _notes(part: Part) -> Iterator[str]:
    for row in part.rows:
        if row.verdict == "failed":
            yield f"{part.number}. {row.claim}:"
            yield from row.note.rstrip().splitlines()
    if part.broken:
        yield f"{part.number}. {part.name}:"
        yield from part.broken.rstrip().splitlines()
