"""A logger that keeps what it is given."""

from __future__ import annotations

from collections.abc import Mapping

from lightning_flops.sinks.services import Services


class MemorySink(Services):
    """Keeps scalars and texts by tag and step.

    Args:
        has_board: it is like TensorBoard's, which takes texts.
    """

    def __init__(self, *, has_board: bool = True) -> None:
        super().__init__(())
        self._has_board = has_board
        self.scalars: dict[str, dict[int, float]] = {}
        self.texts: dict[str, dict[int, str]] = {}
        self.files: list[str] = []

    @property
    def has_board(self) -> bool:
        return self._has_board

    def write_scalars(self, scalars: Mapping[str, float], *, step: int) -> None:
        for tag, value in scalars.items():
            self.scalars.setdefault(tag, {})[step] = value

    def write_text(self, tag: str, text: str, *, step: int) -> bool:
        if self._has_board:
            self.texts.setdefault(tag, {})[step] = text
        return self._has_board

    def keep_file(self, path: str) -> None:
        self.files.append(path)
