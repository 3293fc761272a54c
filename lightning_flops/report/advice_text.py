"""Advice as text: what is at stake, what was measured, what to try and who says so."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from lightning_flops.report.layout import TITLE_WIDTH, WIDTH, cut, title, wrapped
from lightning_flops.schema.advice import Advice
from lightning_flops.text.printable import page
from lightning_flops.units import percent

NO_ADVICE = "Nothing that was measured is above its threshold."


def advice_lines(advice: Sequence[Advice], *, width: int | None = None) -> list[str]:
    """A section of the report: the largest share of the step first.

    Args:
        advice: by what is at stake.
        width: columns of the terminal; None for no limit.
    """
    width = WIDTH if width is None else min(width, WIDTH)
    lines = [title("Advice", width=min(width, TITLE_WIDTH))]
    if not advice:
        return [*lines, NO_ADVICE]
    for index, one in enumerate(advice, start=1):
        number = f"{index}. "
        stake = "" if one.stake is None else f" At stake: {percent(one.stake)} of the step."
        indent = " " * len(number)
        lines += wrapped(f"{one.evidence}{stake} {one.action}", width=width, first=number, rest=indent)
        rule = f"(Rule {one.rule}: {one.threshold}; {one.source}.)"
        lines += wrapped(rule, width=width, first=indent, rest=indent)
    return lines


def try_first(advice: Sequence[Advice], *, room: int, width: int) -> Iterator[str]:
    """*advice* without its rules, for the top of a report: in at most *room* lines, at least one for each.

    Args:
        advice: by what is at stake.
        room: lines.
        width: of a line.
    """
    if not advice:
        yield NO_ADVICE
        return
    for index, one in enumerate(advice):
        lines = _in_lines(
            one, first="Then: " if index else "Try first: ", most=room - (len(advice) - index - 1), width=width
        )
        room -= len(lines)
        yield from lines


def _in_lines(advice: Advice, *, first: str, most: int, width: int) -> list[str]:
    """What was measured and what to try; where there is room for one alone, what to try."""
    stake = "" if advice.stake is None else f" ({percent(advice.stake)} of the step at stake.)"
    lines: list[str] = []
    for text in (f"{advice.evidence} {advice.action}", f"{advice.action}{stake}"):
        lines = wrapped(text, width=width, first=first, rest="  ")
        if len(lines) <= most:
            return lines
    return cut(lines, most=max(1, most), width=width)


def render_advice_markdown(advice: Sequence[Advice]) -> str:
    """The advice as a Markdown list, for a viewer's text page."""
    if not advice:
        return f"{NO_ADVICE}\n"
    items = []
    for index, one in enumerate(advice, start=1):
        stake = "" if one.stake is None else f" At stake: {percent(one.stake)} of the step."
        items.append(
            f"{index}. {_as_it_is(one.evidence)}{stake} **{_as_it_is(one.action)}** "
            f"*(Rule {one.rule.replace('_', chr(92) + '_')}: {_as_it_is(one.threshold)}; {_as_it_is(one.source)}.)*"
        )
    return page(items)


def _as_it_is(text: str) -> str:
    """*text* as Markdown in which nothing is code, emphasis, a link, an image or a tag, whatever names are in it."""
    return re.sub(r"[\\`*\[]", r"\\\g<0>", text).replace("<", "&lt;")
