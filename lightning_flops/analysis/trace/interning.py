"""Texts of a trace as numbers, within the room that there is for them."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, TypeVar

from lightning_flops.analysis.trace.columns import Lane
from lightning_flops.analysis.trace.decoding import ABSENT
from lightning_flops.analysis.trace.event_names import KIND_OF_CATEGORY

FOREIGN = 255
"""The kind of events of another tool."""

_BYTES_OF_A_LANE = 400
_Key = TypeVar("_Key", bound=Hashable)


class Numbers(dict[_Key, int]):
    """A number for each different key, in order of first appearance.

    Args:
        admit: is given each new key, and raises if there may be no more.
    """

    def __init__(self, admit: Callable[[_Key], None]) -> None:
        super().__init__()
        self._admit = admit

    def __missing__(self, key: _Key) -> int:
        self._admit(key)
        self[key] = number = len(self)
        return number


class Details(dict[_Key, int]):
    """As ``Numbers``, but once *room* says that there is none, new keys have no number, and their uses are counted."""

    def __init__(self, room: Callable[[_Key], bool]) -> None:
        super().__init__()
        self._room = room
        self.left_out = 0

    def __missing__(self, key: _Key) -> int:
        if not self._room(key):
            self.left_out += 1
            return ABSENT
        self[key] = number = len(self)
        return number


class Lanes(dict[tuple[Any, Any], int]):
    """The number of a lane by process and thread as they are written."""

    def __init__(self, keep: Callable[[int], None]) -> None:
        super().__init__()
        self._keep = keep
        self.lanes: dict[Lane, int] = {}

    def __missing__(self, key: tuple[Any, Any]) -> int:
        # Old traces write a thread as a number in one event and as a text in the next.
        lane = Lane(process=str(key[0]), thread=str(key[1]))
        # The key, the lane and their texts, which the columns hold as numbers.
        self._keep(_BYTES_OF_A_LANE + 2 * (bytes_of_text(lane.process) + bytes_of_text(lane.thread)))
        self[key] = number = self.lanes.setdefault(lane, len(self.lanes))
        return number


class Kinds(dict[str, int]):
    """The kind of a category as it is written; ``FOREIGN`` for one of another tool."""

    def __init__(self, keep: Callable[[int], None]) -> None:
        super().__init__()
        self._keep = keep

    def __missing__(self, category: str) -> int:
        kind = KIND_OF_CATEGORY.get(category.lower())
        if kind is None:
            self._keep(bytes_of_text(category))
        self[category] = number = FOREIGN if kind is None else int(kind)
        return number


def bytes_of_text(text: str) -> int:
    """About what *text* takes as the key of a dict; a character is at most 4 bytes."""
    return 100 + (1 if text.isascii() else 4) * len(text)
