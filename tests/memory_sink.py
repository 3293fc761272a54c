"""A sink that keeps what it is given, for notebooks and tests."""

from __future__ import annotations

from collections.abc import Mapping

from lightning_flops.sinks.event_files import BoardRecord
from lightning_flops.sinks.tensorboard_pages import OwnPages
from lightning_flops.sinks.tensorboard_tab import TabWindow


class MemorySink:
    """Keeps scalars and texts by tag and step."""

    def __init__(self) -> None:
        self.scalars: dict[str, dict[int, float]] = {}
        """``{tag: {step: value}}``"""
        self.texts: dict[str, dict[int, str]] = {}
        """``{tag: {step: text}}``"""
        self.files: list[str] = []
        """Paths of pages."""
        self.windows: dict[str, TabWindow] = {}
        """By tag."""
        self.pages: list[OwnPages] = []
        """Of each window."""

    @property
    def takes_scalars(self) -> bool:
        """It does."""
        return True

    def write_scalars(self, scalars: Mapping[str, float], *, step: int) -> None:
        """Keep every scalar; one that is written again at the same step replaces the first."""
        for tag, value in scalars.items():
            self.scalars.setdefault(tag, {})[step] = value

    def keep_file(self, path: str) -> None:
        """Keep the path."""
        self.files.append(path)

    def write_record(self, record: BoardRecord, *, step: int) -> None:
        """Keep *record*; a window that is written again under the same tag replaces the first."""
        if isinstance(record, TabWindow):
            self.windows[record.tag] = record
        elif isinstance(record, OwnPages):
            self.pages.append(record)

    def write_text(self, tag: str, text: str, *, step: int) -> bool:
        """Keep *text*; one that is written again at the same step replaces the first."""
        self.texts.setdefault(tag, {})[step] = text
        return True
