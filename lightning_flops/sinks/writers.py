"""Sinks that a training loop of the user's gives us: a TensorBoard writer, trackers, or a function."""

from __future__ import annotations

import functools
import importlib
import os
from collections.abc import Iterable, Mapping
from typing import Any

from lightning_flops.sinks.services import Services, add_text


class WritersSink:
    """Gives scalars and texts to writers, each of which takes what it can.

    A writer is an object with ``add_scalar``, as TensorBoard's ``SummaryWriter``; if it also has ``add_text``, it
    gets the texts. Or it is a tracker of accelerate's, with ``log(values, step=…)``. Or it is a function of a dict of
    scalars and a step, as ``wandb.log`` and ``mlflow.log_metrics`` are. A writer that raises costs one warning, however
    often it does, and keeps nothing from the others.
    """

    def __init__(self, writers: Iterable[Any]) -> None:
        self._writers = tuple(writers)
        self._guarded = Services(self._writers, name="writers")

    @property
    def takes_scalars(self) -> bool:
        """Whether there is a writer."""
        return bool(self._writers)

    @property
    def has_board(self) -> bool:
        """Whether one of them takes texts, as TensorBoard's do."""
        return any(hasattr(type(_written_to(writer)), "add_text") for writer in self._writers)

    def write_scalars(self, scalars: Mapping[str, float], *, step: int) -> None:
        """Write all *scalars* at *step*."""
        self._guarded.each(lambda writer: _write_scalars(writer, dict(scalars), step))

    def write_text(self, tag: str, text: str, *, step: int) -> bool:
        """Add *text*, which TensorBoard reads as Markdown; returns whether any writer took it."""
        return self._guarded.each(lambda writer: add_text(_written_to(writer), tag, text, step))

    def keep_file(self, path: str) -> None:
        """Nothing: no writer keeps files."""

    def folder(self) -> str | None:
        """The local folder of the first writer that has one."""
        for writer in self._writers:
            folder = getattr(_written_to(writer), "log_dir", None)
            if isinstance(folder, (str, os.PathLike)) and (path := os.fsdecode(folder)):
                return path
        return None

    def close(self) -> None:
        """Close the writers that were made here; those of the user are left open."""
        self._guarded.each(lambda writer: writer.close() if isinstance(writer, TensorBoardFiles) else None)


class TensorBoardFiles:
    """TensorBoard's files in one folder, made when there is something to write."""

    def __init__(self, folder: str) -> None:
        self.log_dir = folder

    @functools.cached_property
    def inner(self) -> Any:
        """The writer that torch has."""
        # The one place here that needs torch, for its writer of TensorBoard's files.
        return importlib.import_module("torch.utils.tensorboard").SummaryWriter(self.log_dir)

    def add_scalar(self, tag: str, value: float, step: int) -> None:
        """Write one number."""
        self.inner.add_scalar(tag, value, step)

    def add_text(self, tag: str, text: str, step: int) -> None:
        """Write one text, which TensorBoard reads as Markdown."""
        self.inner.add_text(tag, text, step)

    def flush(self) -> None:
        """Let TensorBoard see what was written."""
        self.inner.flush()

    def close(self) -> None:
        """Close the files, if any were made."""
        if "inner" in vars(self):
            self.inner.close()


def is_writer(value: object) -> bool:
    """Whether *value* is something to write to."""
    return callable(getattr(value, "add_scalar", None)) or _is_tracker(value) or callable(value)


def _is_tracker(writer: Any) -> bool:
    return callable(getattr(writer, "log", None)) and callable(getattr(writer, "store_init_configuration", None))


def _written_to(writer: Any) -> Any:
    """What a tracker itself writes to; of any other writer, the writer."""
    return writer.tracker if _is_tracker(writer) else writer


def _write_scalars(writer: Any, scalars: dict[str, float], step: int) -> None:
    add_scalar = getattr(writer, "add_scalar", None)
    if callable(add_scalar):
        for tag, value in scalars.items():
            add_scalar(tag, value, step)
        _flush(writer)
    elif _is_tracker(writer):
        writer.log(scalars, step=step)
    else:
        writer(scalars, step)


def _flush(writer: Any) -> None:
    if callable(flush := getattr(writer, "flush", None)):
        flush()
