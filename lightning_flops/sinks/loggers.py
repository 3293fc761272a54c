"""A sink that is all the loggers of a run, as Lightning keeps them in ``trainer.loggers``."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import Any

from lightning_flops.sinks.event_files import BoardRecord, write_record
from lightning_flops.sinks.services import Services


class LoggersSink:
    """Gives scalars to every logger, and texts to those that are TensorBoard's.

    Neither Lightning nor TensorBoard is imported: a logger is what has ``log_metrics``, and TensorBoard is what has an
    ``experiment`` of a class with ``add_text``. A logger that raises costs one warning, however often it does, and
    keeps nothing from the others.
    """

    def __init__(self, loggers: Iterable[Any]) -> None:
        self._loggers = Services(loggers, name="loggers")

    @property
    def takes_scalars(self) -> bool:
        """Whether there is a logger."""
        return bool(self._loggers)

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

    def keep_file(self, path: str) -> None:
        """Keep the local file at *path* as an artifact of the run, in W&B's and MLflow's loggers."""
        if os.path.isfile(path):
            self._loggers.each(lambda target: _keep_file(target, path))

    def write_record(self, record: BoardRecord, *, step: int) -> None:
        """Write *record* to TensorBoard's loggers."""
        self._loggers.each(lambda target: write_record(getattr(target, "experiment", None), record, step=step))


def _keep_file(target: Any, path: str) -> None:
    # Told by their names: both services' runs have other methods under the same names.
    kinds = {kind.__name__ for kind in type(target).__mro__}
    if "WandbLogger" in kinds:
        name, _ = os.path.splitext(os.path.basename(path))
        target.experiment.log_artifact(path, name=f"flops-{name}", type="profile")
    elif "MLFlowLogger" in kinds:
        target.experiment.log_artifact(target.run_id, path)


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
