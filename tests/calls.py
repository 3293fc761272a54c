"""Counts calls of functions of ours: what a step costs, told without a clock; on a shared machine that tells more."""

from __future__ import annotations

import gc
import sys
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

import lightning_flops

_PACKAGE = str(Path(str(lightning_flops.__file__)).parent)

_EVERYWHERE = ("when_imported.py",)
"""What Python calls for the imports of others, whether something is profiled or not."""


class OurCalls:
    """Counts them between two steps of a training.

    Args:
        first: the step before which it begins to count.
        last: the step before which it ends.
    """

    def __init__(self, *, first: int, last: int) -> None:
        self.calls: Counter[str] = Counter()
        self._first, self._last = first, last
        self._steps = 0

    @property
    def a_step(self) -> float:
        """Calls a step."""
        return sum(self.calls.values()) / (self._last - self._first)

    def step_begins(self) -> None:
        """The training calls this once in each step."""
        if self._steps == self._first:
            gc.collect()  # or what earlier trainings have left undoes itself in between
            sys.setprofile(self._called)
        elif self._steps == self._last:
            sys.setprofile(None)
        self._steps += 1

    def _called(self, frame: FrameType, event: str, arg: Any) -> None:
        if event == "call":
            file = frame.f_code.co_filename
            if file.startswith(_PACKAGE) and not file.endswith(_EVERYWHERE):
                self.calls[f"{file[len(_PACKAGE) + 1 :]}:{frame.f_code.co_name}"] += 1
