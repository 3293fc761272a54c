"""A sink that is all the loggers of a run, as Lightning keeps them in ``trainer.loggers``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from lightning_flops.sinks.services import Services


class LoggersSink:
    """Gives scalars to every logger, and texts to those that are TensorBoard's.

    Neither Lightning nor TensorBoard is imported: a logger is what has ``log_metrics``, and TensorBoard is what has an
    ``experiment`` of a class with ``add_text``. A logger that raises costs one warning, however often it does, and
    keeps nothing from the others.
    """

    def __init__(self, loggers: Iterable[Any]) -> None:
        self._loggers = Services(loggers, name="loggers")

    def write_scalars(self, scalars: Mapping[str, float], *, step: int) -> None:
        """Log all *scalars* in one call per logger."""
        # A dict of its own for each: some loggers add a prefix or a step in place. By name, as Lightning's own call has
        # it: a logger of the user's need not take it in any other way.
        self._loggers.each(lambda target: target.log_metrics(metrics=dict(scalars), step=step))

    def write_text(self, tag: str, text: str, *, step: int) -> bool:
        """Add *text*, which TensorBoard reads as Markdown, and flush it so that it shows at once.

        Returns:
            Whether any logger took it.
        """
        return self._loggers.each(lambda target: _add_text(target, tag, text, step))


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
