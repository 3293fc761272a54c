"""What TensorBoard's own pages show of a window, without our tab: pictures, and charts that group our scalars."""

from __future__ import annotations

import importlib
import mmap
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from lightning_flops.report.pictures import Picture

Charts = Mapping[str, Mapping[str, Sequence[str]]]
"""The page Custom Scalars: charts by their titles, below the titles of their groups; each shows several tags."""

_RGB: Final = 3
_LAYOUT: Final = b"custom_scalars__config__"
"""The tag under which TensorBoard keeps the charts of a run. It shows the last one alone."""

_MOST_BYTES: Final = 64 * 1024 * 1024
"""Of event files that are searched for charts of the user's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnPages:
    """One window on TensorBoard's own pages."""

    pictures: Callable[[], Mapping[str, Picture]]
    """Draws them, by tag: called only where somebody takes them."""
    charts: Charts
    """Written once into a folder of event files, and never over charts that are there already: the user's own."""

    def write_to(self, writer: Any, *, step: int) -> None:
        """Write them with *writer*, torch's ``SummaryWriter``."""
        records = importlib.import_module("tensorboard.compat.proto.summary_pb2")
        images = [
            records.Summary.Value(
                tag=tag,
                image=records.Summary.Image(
                    encoded_image_string=one.png, width=one.width, height=one.height, colorspace=_RGB
                ),
            )
            for tag, one in self.pictures().items()
        ]
        if images:
            writer.file_writer.add_summary(records.Summary(value=images), step)
        writer.flush()
        if self.charts and _has_no_charts(writer.log_dir):
            writer.add_custom_scalars(
                {
                    group: {title: ["Multiline", [_pattern(tag) for tag in tags]] for title, tags in charts.items()}
                    for group, charts in self.charts.items()
                }
            )


def _pattern(tag: str) -> str:
    """A regular expression for *tag* of every loop of a run, also below what a logger puts before it (``train/``).

    The tags of other loops than the first have the loop's word before their last part: ``flops_profiler/predict/mfu``.
    """
    group, _, name = tag.rpartition("/")
    return f"(.*[/-])?{re.escape(group)}/([^/]+/)?{re.escape(name)}$"


def _has_no_charts(folder: object) -> bool:
    """Whether the event files in *folder* can be read here, and have no charts."""
    if not isinstance(folder, str) or not os.path.isdir(folder):
        return False
    try:
        files = [one.path for one in os.scandir(folder) if one.is_file() and "tfevents" in one.name]
        sizes = {path: os.path.getsize(path) for path in files}
        if sum(sizes.values()) > _MOST_BYTES:
            return False
        return not any(size and _contains(path, _LAYOUT) for path, size in sizes.items())
    except (OSError, ValueError):  # not to be read, or gone or emptied meanwhile
        return False


def _contains(path: str, word: bytes) -> bool:
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        return content.find(word) >= 0
