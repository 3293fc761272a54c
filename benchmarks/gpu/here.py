"""What every part is told of where it runs, and how one check is run so that its failure stays its own."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from .judge import failed, not_here
from .results import Row


@dataclass(frozen=True, slots=True, kw_only=True)
class Here:
    """Where the program runs."""

    device_type: str
    """``cuda`` or ``cpu``."""
    small: bool
    """Sizes are those of a test."""
    folder: Path
    """For what a part writes; it is deleted afterwards."""

    @property
    def on_gpu(self) -> bool:
        """Whether this is a GPU."""
        return self.device_type == "cuda"

    @property
    def device(self) -> torch.device:
        """The device."""
        return torch.device("cuda", torch.cuda.current_device()) if self.on_gpu else torch.device("cpu")

    def pick(self, whole: int, small: int) -> int:
        """A size: of the whole program, or of a test."""
        return small if self.small else whole

    def settle(self) -> None:
        """Wait until the device has done all that it was given."""
        if self.on_gpu:
            torch.cuda.synchronize()


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """Something to look at."""

    claim: str
    look: Callable[[Here], Iterable[Row]]
    needs_gpu: str = ""
    """Why a CPU cannot show it; empty if it can."""


def rows_of(check: Check, here: Here) -> Iterator[Row]:
    """What *check* sees; one that raises says so in a row of its own, after the rows that it has given."""
    if check.needs_gpu and not here.on_gpu:
        yield not_here(check.claim, f"on a CPU: {check.needs_gpu}")
        return
    try:
        yield from check.look(here)
    except Exception:
        yield failed(check.claim, traceback.format_exc())
