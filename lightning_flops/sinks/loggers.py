"""A sink that is all the loggers of a run, as Lightning keeps them in ``trainer.loggers``."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import Any

from lightning_flops.sinks.services import Services, add_text


class LoggersSink:
    """Gives scalars to every logger, and texts to those that are TensorBoard's.

    Neither Lightning nor TensorBoard is imported: a logger is what has ``log_metrics``, and TensorBoard is what has an
    ``experiment`` of a class with ``add_text``. A logger that raises costs one warning, however often it does, and
    keeps nothing from the others.
    """

    def __init__(self, loggers: Iterable[Any]) -> None:
        loggers = tuple(loggers)
        self._loggers = Services(loggers, name="loggers")
        self.has_board = any("TensorBoardLogger" in _kinds(one) for one in loggers)
        """Whether TensorBoard's is one of them. Told by its name: an ``experiment`` that is asked for is made."""

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
        """Add *text*, which TensorBoard reads as Markdown; returns whether any logger took it."""
        return self._loggers.each(lambda target: add_text(getattr(target, "experiment", None), tag, text, step))

    def keep_file(self, path: str) -> None:
        """Keep the local file at *path* as an artifact of the run, in W&B's and MLflow's loggers."""
        self._loggers.each(lambda target: _keep_file(target, path))


def _kinds(target: Any) -> set[str]:
    return {kind.__name__ for kind in type(target).__mro__}


def _keep_file(target: Any, path: str) -> None:
    # Told by their names: both services' runs have other methods under the same names.
    if not (kinds := _kinds(target) & {"WandbLogger", "MLFlowLogger"}) or not os.path.isfile(path):
        return
    if "WandbLogger" in kinds:
        name, _ = os.path.splitext(os.path.basename(path))
        target.experiment.log_artifact(path, name=f"flops-{name}", type="profile")
    else:
        target.experiment.log_artifact(target.run_id, path)
