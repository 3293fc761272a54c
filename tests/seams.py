"""Every method of ours that a hook of a framework reaches: a test makes each raise, and the program must not notice."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from lightning_flops.analysis.step_flops import CountSchedule, StepFlops
from lightning_flops.measure.batches import TokenReader
from lightning_flops.run.delivery import Delivery
from lightning_flops.run.run import Run, safe
from lightning_flops.run.throughput import Monitor, Throughput
from lightning_flops.run.window import Window

WORDS = "broken on purpose"

_OF_A_RUN = (Run, Monitor, Delivery, Throughput, StepFlops, CountSchedule, TokenReader, Window)
_OF_THE_BOUNDARY = {"does", "fail", "close", "warn"}
"""The boundary, and what takes a failure: it is called by the boundary, and not by a hook."""


def seams(*adapters: type) -> list[str]:
    """Methods of a run's objects and of *adapters*, each as ``Class.method``."""
    return [
        f"{kind.__name__}.{name}"
        for kind in (*_OF_A_RUN, *adapters)
        for name, value in vars(kind).items()
        if inspect.isfunction(value) and not name.startswith("__") and name not in _OF_THE_BOUNDARY
    ]


@dataclass
class Broken:
    """Whether the method was called."""

    called: bool = False


@contextmanager
def broken_at(seam: str, *adapters: type, after: int = 0) -> Iterator[Broken]:
    """Inside, the method *seam* raises when it is called for the first time after so many calls, and is whole again.

    Args:
        seam: as ``seams`` has it.
        adapters: as for ``seams``.
        after: calls that go well.
    """
    kind_name, name = seam.split(".")
    kind: Any = next(one for one in (*_OF_A_RUN, *adapters) if one.__name__ == kind_name)
    original: Callable[..., Any] = vars(kind)[name]
    broken, calls = Broken(), [0]

    # A method that is ``safe`` raises inside its boundary.
    inner = inspect.unwrap(original)

    @functools.wraps(inner)
    def raising(self: Any, *args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        if calls[0] > after and not broken.called:
            broken.called = True
            raise RuntimeError(WORDS)
        return inner(self, *args, **kwargs)

    del raising.__wrapped__
    setattr(kind, name, raising if inner is original else safe(raising))
    try:
        yield broken
    finally:
        setattr(kind, name, original)
