"""What whoever hands out a report can ask of a sink."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol


class TextSink(Protocol):
    """Takes texts by tag."""

    def write_text(self, tag: str, text: str, *, step: int) -> bool:
        """Write *text* at *step* of the run's own x-axis.

        Returns:
            Whether it was written anywhere.
        """


class Sink(TextSink, Protocol):
    """Takes numbers, texts and pages."""

    @property
    def takes_scalars(self) -> bool:
        """Whether there is anybody behind it who gets them."""

    @property
    def has_board(self) -> bool:
        """Whether TensorBoard is behind it, as far as that can be said without opening anything."""

    def write_scalars(self, scalars: Mapping[str, float], *, step: int) -> None:
        """Write every scalar at *step* of the run's own x-axis."""

    def keep_file(self, path: str) -> None:
        """Keep the page at *path*, a local path or a URL, with the run, if the sink can keep files."""
