"""Writes records of our own into TensorBoard's event files, through the writer that the run has."""

from __future__ import annotations

from typing import Any, Protocol

_WRITER = "torch.utils.tensorboard.writer"


class BoardRecord(Protocol):
    """Something that TensorBoard shows, and that is neither a scalar nor a text."""

    def write_to(self, writer: Any, *, step: int) -> None:
        """Write it with *writer*, torch's ``SummaryWriter``, at *step*."""


def write_record(writer: Any, record: BoardRecord, *, step: int) -> bool:
    """Write *record* to *writer* if that is torch's ``SummaryWriter``; whether it is.

    Another package's writer of event files takes records of its own alone.
    """
    if not any(kind.__module__ == _WRITER for kind in type(writer).__mro__):
        return False
    record.write_to(writer, step=step)
    writer.flush()
    return True
