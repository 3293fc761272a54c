"""What whoever hands out a report can ask of a sink."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from lightning_flops.sinks.event_files import BoardRecord


class ScalarSink(Protocol):
    """Takes numbers by tag."""

    @property
    def takes_scalars(self) -> bool:
        """Whether there is anybody behind it who gets them."""

    def write_scalars(self, scalars: Mapping[str, float], *, step: int) -> None:
        """Write every scalar at *step* of the run's own x-axis."""


class TextSink(Protocol):
    """Takes texts by tag."""

    def write_text(self, tag: str, text: str, *, step: int) -> bool:
        """Write *text* at *step* of the run's own x-axis.

        Returns:
            Whether it was written anywhere.
        """


class PageSink(Protocol):
    """Takes what shows a whole profile."""

    def keep_file(self, path: str) -> None:
        """Keep the page at *path*, a local path or a URL, with the run, if the sink can keep files."""

    def write_record(self, record: BoardRecord, *, step: int) -> None:
        """Write *record* into TensorBoard's event files, if the sink has a writer of them."""


class Sink(ScalarSink, TextSink, PageSink, Protocol):
    """Takes all of them."""
