"""What numbers in tensors decide, beside shapes, while operators are counted."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch

from lightning_flops.instrument.counting.operator_facts import bytes_of
from lightning_flops.records import Line, SizesSeen, ValuesSeen

_NO_PROGRAM = tuple(f"{Path(one).resolve().parent}" for one in (torch.__file__, Path(__file__).parents[1]))
"""Where the files of torch and of this package are."""

_OF_ENGINES = f"{os.sep}deepspeed{os.sep}runtime{os.sep}"
"""In the path of files whose code trains. Under ZeRO-3 it reads numbers in hooks of each module, to compare ranks.
These are no sizes of the model."""


class ValuesWatch:
    """Is told of what numbers in tensors decide."""

    def __init__(self) -> None:
        self.spent = 0
        """So many calls spent what they decide."""
        self._sized: dict[Line, SizesSeen] = {}

    @property
    def seen(self) -> ValuesSeen:
        """What they have decided so far."""
        return ValuesSeen(self.spent, dict(self._sized))

    def sized(self, result: Any) -> None:
        """A call has made *result*, a tensor of a size that they decide, or has read such a number."""
        line, is_number = _running_line(), isinstance(result, int)
        if is_number and _OF_ENGINES in line[0]:
            return
        size = result if is_number else bytes_of(result)
        calls, squares = self._sized.get(line, (0, 0))
        self._sized[line] = SizesSeen(calls + 1, squares + size**2)


def _running_line() -> Line:
    """The line of the user's program that runs; of no file where Python runs none, as in a backward's own thread."""
    frame = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(_NO_PROGRAM):
        frame = frame.f_back  # type: ignore[assignment]
    return ("", 0) if frame is None else (frame.f_code.co_filename, frame.f_lineno)
