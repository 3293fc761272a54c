"""A sink that keeps what it is given."""

from __future__ import annotations

from collections.abc import Mapping


class MemorySink:
    """Keeps scalars and texts by tag and step.

    Args:
        has_board: it is like TensorBoard's, which takes texts.
    """

    takes_scalars = True

    def __init__(self, *, has_board: bool = True) -> None:
        self.has_board = has_board
        self.scalars: dict[str, dict[int, float]] = {}
        self.texts: dict[str, dict[int, str]] = {}
        self.files: list[str] = []

    def write_scalars(self, scalars: Mapping[str, float], *, step: int) -> None:
        for tag, value in scalars.items():
            self.scalars.setdefault(tag, {})[step] = value

    def write_text(self, tag: str, text: str, *, step: int) -> bool:
        if self.has_board:
            self.texts.setdefault(tag, {})[step] = text
        return self.has_board

    def keep_file(self, path: str) -> None:
        self.files.append(path)
