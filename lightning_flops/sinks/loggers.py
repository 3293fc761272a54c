"""A sink that is all the loggers of a run, as Lightning keeps them in ``trainer.loggers``."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any

logger = logging.getLogger(__name__)


class LoggersSink:
    """Gives scalars to every logger, and texts to those that are TensorBoard's.

    Neither Lightning nor TensorBoard is imported: a logger is what has ``log_metrics``, and TensorBoard is what has an
    ``experiment`` of a class with ``add_text``. A logger that raises costs one warning, however often it does, and
    keeps nothing from the others.
    """

    def __init__(self, loggers: Iterable[Any]) -> None:
        self._loggers = tuple(loggers)
        self._failed: set[int] = set()

    def write_scalars(self, scalars: Mapping[str, float], *, step: int) -> None:
        """Log all *scalars* in one call per logger."""
        for index in range(len(self._loggers)):
            # A dict of its own for each: some loggers add a prefix or a step in place.
            self._guarded(index, lambda target: target.log_metrics(dict(scalars), step=step))

    def write_text(self, tag: str, text: str, *, step: int) -> bool:
        """Add *text*, which TensorBoard reads as Markdown, and flush it so that it shows at once.

        Returns:
            Whether any logger took it.
        """
        taken = False
        for index in range(len(self._loggers)):
            taken |= self._guarded(index, lambda target: _add_text(target, tag, text, step)) is True
        return taken

    def _guarded(self, index: int, write: Callable[[Any], Any]) -> Any:
        target = self._loggers[index]
        try:
            return write(target)
        except Exception as error:  # a user's logger, in the middle of training: whatever it raises stays here
            if index not in self._failed:
                self._failed.add(index)
                logger.warning(
                    "%s did not take the FLOPs report, the other loggers did not notice: %s: %s",
                    type(target).__name__,
                    type(error).__name__,
                    error,
                )
            return None


def _add_text(target: Any, tag: str, text: str, step: int) -> bool:
    experiment = getattr(target, "experiment", None)
    # Asked of the class: the experiment of a DummyLogger, and of every rank but the first, answers to any name.
    kind = type(experiment)
    if not callable(getattr(kind, "add_text", None)):
        return False
    assert experiment is not None
    experiment.add_text(tag, text, step)
    if callable(getattr(kind, "flush", None)):
        experiment.flush()
    return True
