"""Makes TensorBoard's event files, and what its tab "FLOPs" shows: one window of a run in a file of its own."""

from __future__ import annotations

import importlib
import io
import secrets
from typing import Any, Final

from lightning_flops import host_clock

PLUGIN: Final = "lightning_flops"  # name of the tab's data in event files, and of its addresses in TensorBoard's server


def tab_events(*, tag: str, figures: bytes, packed: bytes, step: int) -> bytes:
    """The content of an event file; an ImportError without TensorBoard.

    The *tag* is of this window alone: TensorBoard keeps only some steps of a tag, and all tags. *figures* are JSON of
    a few of the window's, which TensorBoard knows without reading the profile: *packed*, JSON compressed by gzip.
    """
    # The training thread may import the same at this moment, for its writer: two orders of import would deadlock.
    torchs = importlib.import_module("torch.utils.tensorboard.summary")
    plugin = torchs.SummaryMetadata.PluginData(plugin_name=PLUGIN, content=figures)
    metadata = torchs.SummaryMetadata(plugin_data=plugin, data_class="DATA_CLASS_TENSOR")
    tensor = torchs.TensorProto(dtype="DT_STRING", string_val=[packed])
    summary = torchs.Summary(value=[torchs.Summary.Value(tag=tag, metadata=metadata, tensor=tensor)])
    file = io.BytesIO()
    _records(file).write(event(step=step, summary=summary))
    return file.getvalue()


def new_event_file(folder: str) -> Any:
    """A new file in *folder*, a path or a URL that TensorBoard opens: its ``write`` takes what ``event`` returns."""
    files = importlib.import_module("tensorboard.compat").tf.io.gfile
    files.makedirs(folder)
    return _records(files.GFile(f"{folder.rstrip('/')}/{event_file_name(0)}", "wb"))


def event(**content: Any) -> bytes:
    """One event of an event file, which happens now."""
    kind = importlib.import_module("tensorboard.compat.proto.event_pb2").Event
    return bytes(kind(wall_time=host_clock.wall_sec(), **content).SerializeToString())


def _records(file: Any) -> Any:
    """What writes events to *file*; the first says what the others are."""
    writer = importlib.import_module("tensorboard.summary.writer.record_writer").RecordWriter(file)
    writer.write(event(file_version="brain.Event:2"))
    return writer


def event_file_name(number: int) -> str:
    """A name that no other program uses: TensorBoard reads a folder's event files in the order of their names."""
    return f"events.out.tfevents.{int(host_clock.wall_sec()):010d}.{number:06d}.{secrets.token_hex(4)}"
