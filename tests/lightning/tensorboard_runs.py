"""TensorBoard under the fits of the tests: a logger for one run, and what it has written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator


def tensorboard_logger(folder: Path) -> Any:
    return TensorBoardLogger(folder, name="run", version=0)


def read_back(folder: Path) -> EventAccumulator:
    return EventAccumulator(str(folder / "run" / "version_0")).Reload()
