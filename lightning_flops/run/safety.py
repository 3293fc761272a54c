"""The one error boundary: every hook of ours is ``@safe``, so that a failure of ours never reaches the training."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

from lightning_flops.signals import words_of
from lightning_flops.text.printable import package_logger

if TYPE_CHECKING:
    from lightning_flops.run.run import Run

logger = package_logger(__name__)

P = ParamSpec("P")
R = TypeVar("R")


def safe(hook: Callable[Concatenate[Any, P], R]) -> Callable[Concatenate[Any, P], R | None]:
    """A method of an object that has a ``run``: its first ``Exception`` ends our part of the run with one warning.

    After the run is closed the hook does nothing. ``KeyboardInterrupt`` and the like pass through, as does an exception
    that a signal handler of the user's raised while our code ran.
    """

    @functools.wraps(hook)
    def call(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> R | None:
        run = self.run
        if run is not None and run.closed:
            return None
        try:
            return hook(self, *args, **kwargs)
        except Exception as error:
            failed(self.run, error)
            return None

    return call


def failed(run: Run | None, error: Exception) -> None:
    """Our side raised *error*: close *run*, and say so once."""
    words, shown = words_of(error), error if logger.isEnabledFor(logging.DEBUG) else None
    if run is not None:
        run.fail(words)
    logger.warning("the FLOPs profiler failed and is off; the program goes on: %s", words, exc_info=shown)


def close_quietly(undo: ExitStack) -> None:
    """Run every undo of *undo*; one that raises is a warning, and the others still run."""
    try:
        undo.close()
    except Exception as error:
        logger.warning("something of the FLOPs profiler could not be removed: %s", words_of(error), exc_info=error)
