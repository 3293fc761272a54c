"""Writes into TensorBoard's event files what its tab "FLOPs" shows: one window of a run, under a tag of its own."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any, Final

PLUGIN: Final = "lightning_flops"
"""The name that the tab's data has in event files, and its addresses in TensorBoard's server."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TabWindow:
    """One window as the tab reads it."""

    tag: str
    """Of this window alone: TensorBoard keeps only some steps of a tag, and all tags."""
    figures: bytes
    """A few figures of it, JSON: what TensorBoard knows without reading the profile."""
    packed: bytes
    """The profile, JSON compressed by gzip."""

    def write_to(self, writer: Any, *, step: int) -> None:
        """Write it with *writer*, torch's ``SummaryWriter``."""
        # TensorBoard is there where its writer is; nothing here needs it otherwise.
        records = importlib.import_module("tensorboard.compat.proto.summary_pb2")
        tensors = importlib.import_module("tensorboard.compat.proto.tensor_pb2")
        types = importlib.import_module("tensorboard.compat.proto.types_pb2")
        metadata = records.SummaryMetadata(
            plugin_data=records.SummaryMetadata.PluginData(plugin_name=PLUGIN, content=self.figures),
            data_class=records.DATA_CLASS_TENSOR,
        )
        tensor = tensors.TensorProto(dtype=types.DT_STRING, string_val=[self.packed])
        value = records.Summary.Value(tag=self.tag, metadata=metadata, tensor=tensor)
        writer.file_writer.add_summary(records.Summary(value=[value]), step)
