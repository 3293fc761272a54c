"""A profile as two pictures, for viewers that show pictures: the parts of a step, and the modules that weigh most.

Drawn by Pillow, which TensorBoard brings along: importing this module raises ImportError where it is missing.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Final

from PIL import Image, ImageDraw, ImageFont

from lightning_flops.report.headline import opening
from lightning_flops.schema.answer import longest_modules
from lightning_flops.schema.profile import Profile
from lightning_flops.text.printable import printable
from lightning_flops.units import duration

_WIDTH: Final = 720
"""So that words can be read where TensorBoard shows the picture half as large."""
_EDGE: Final = 20
_INK, _PAPER, _FAINT = "#1a1d21", "#ffffff", "#eceff3"
_LINE: Final = 34
_BAR: Final = 72
_ROW: Final = 46
_MODULES: Final = 10

_COLOURS: Final[Mapping[str, str]] = {
    "data wait": "#d55e00",
    "transfer": "#e69f00",
    "forward": "#0072b2",
    "backward": "#56b4e9",
    "bubble": "#cc79a7",
    "optimizer": "#009e73",
}
"""Of a step's parts, as on the page: told apart with any colour vision. Other parts are grey."""

_GREY: Final = "#9aa2ad"


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """A picture in pixels."""

    width: int
    height: int
    png: bytes
    """The file's content; three channels."""


def draw_profile(profile: Profile, *, prefix: str) -> dict[str, Picture]:
    """The pictures of *profile* by their tags; one that has nothing to show is left out."""
    drawn = {"step": _step(profile), "modules": _modules(profile)}
    return {f"{prefix}/{name}": picture for name, picture in drawn.items() if picture is not None}


def _step(profile: Profile) -> Picture | None:
    """One bar, as long as the step, divided into its parts."""
    parts = profile.answer.parts
    whole = sum(seconds for _, seconds in parts)
    if not whole:
        return None
    words = [line for sentences in opening(profile) for line in _lines(printable(sentences))]
    top = _EDGE + len(words) * _LINE + 20
    sheet = _Sheet(top + _BAR + 28 + len(parts) * _LINE + _EDGE)
    sheet.lines(words)
    left, room = float(_EDGE), _WIDTH - 2 * _EDGE
    row = top + _BAR + 28
    for name, seconds in parts:
        colour, share = _COLOURS.get(name, _GREY), seconds / whole
        sheet.bar(left, top, room * share, _BAR, colour)
        left += room * share
        sheet.bar(_EDGE, row + 5, 22, 22, colour)
        sheet.text(_EDGE + 36, row, name)
        sheet.text(_WIDTH - _EDGE - 130, row, duration(seconds), from_right=True)
        sheet.text(_WIDTH - _EDGE, row, f"{100 * share:.1f}%", from_right=True)
        row += _LINE
    return sheet.picture()


def _modules(profile: Profile) -> Picture | None:
    """One bar for each of the modules that weigh most, without those inside them."""
    longest, of_what = longest_modules(profile, most=_MODULES)
    if not longest:
        return None
    title = _lines(
        {
            "traced step": "Modules that take most time, those inside them left out: share of the traced step",
            "forward": "Modules whose forwards take most time, those inside them left out: share of all forwards",
            "FLOPs": "Modules with most FLOPs, those inside them left out: share of all FLOPs",
        }[of_what]
    )
    top = _EDGE + len(title) * _LINE + 20
    sheet = _Sheet(top + len(longest) * _ROW + _EDGE - 10)
    sheet.lines(title)
    left, right = 360.0, _WIDTH - _EDGE - 90
    for at, one in enumerate(longest):
        row = top + at * _ROW
        sheet.text(left - 12, row + 3, sheet.ending(_label(one.name), room=left - 12 - _EDGE), from_right=True)
        sheet.bar(left, row, right - left, _ROW - 12, _FAINT)
        sheet.bar(left, row, (right - left) * one.share / longest[0].share, _ROW - 12, _COLOURS["forward"])
        sheet.text(_WIDTH - _EDGE, row + 3, f"{100 * one.share:.1f}%", from_right=True)
    return sheet.picture()


def _lines(words: str) -> list[str]:
    """*words* broken where a line is full."""
    font, lines = _font(), [""]
    for word in words.split():
        longer = f"{lines[-1]} {word}".strip()
        if font.getlength(longer) <= _WIDTH - 2 * _EDGE or not lines[-1]:
            lines[-1] = longer
        else:
            lines.append(word)
    return lines


@cache
def _font() -> Any:
    return ImageFont.load_default(24)


def _label(name: str) -> str:
    return printable(name) or "(root)"


class _Sheet:
    """A white sheet, with words and bars on it."""

    def __init__(self, height: int) -> None:
        self._image = Image.new("RGB", (_WIDTH, height), _PAPER)
        self._draw = ImageDraw.Draw(self._image)

    def lines(self, lines: Sequence[str]) -> None:
        """Words from the top edge down."""
        for at, line in enumerate(lines):
            self.text(_EDGE, _EDGE + at * _LINE, line)

    def text(self, left: float, top: float, words: str, *, from_right: bool = False) -> None:
        """*words*, which end at *left* if they are set *from_right*."""
        self._draw.text((left, top), words, fill=_INK, font=_font(), anchor="ra" if from_right else "la")

    def bar(self, left: float, top: float, width: float, height: float, colour: str) -> None:
        """A bar; a part that took any time is seen."""
        self._draw.rectangle((left, top, left + max(1.0, width) - 1, top + height - 1), fill=colour)

    def ending(self, words: str, *, room: float) -> str:
        """*words*, or as much of their end as there is room for: the end of a module's name says which it is."""
        if _font().getlength(words) <= room:
            return words
        kept = words
        while kept and _font().getlength(f"…{kept}") > room:
            kept = kept[1:]
        return f"…{kept[kept.find('.') + 1 :]}"

    def picture(self) -> Picture:
        """The sheet as a file."""
        content = io.BytesIO()
        self._image.save(content, "PNG")
        return Picture(width=self._image.width, height=self._image.height, png=content.getvalue())
