"""What whoever hands out a report can ask of a sink."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol


class ScalarSink(Protocol):
    """Takes numbers by tag."""

    def write_scalars(self, scalars: Mapping[str, float], *, step: int) -> None:
        """Write every scalar at *step* of the run's own x-axis."""


class TextSink(Protocol):
    """Takes texts by tag."""

    def write_text(self, tag: str, text: str, *, step: int) -> bool:
        """Write *text* at *step* of the run's own x-axis.

        Returns:
            Whether it was written anywhere.
        """


class ArtifactSink(Protocol):
    """Keeps files with a run, such as a logging service does."""

    def keep_file(self, path: str) -> None:
        """Keep the file at *path*, a local path or a URL, if it can be kept."""


class Sink(ScalarSink, TextSink, Protocol):
    """Takes both."""
