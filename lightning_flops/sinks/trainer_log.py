"""A sink that is the log of a transformers Trainer: scalars go along with what the Trainer logs itself."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from lightning_flops.sinks.services import Services, add_text


class TrainerLogSink:
    """Keeps scalars for the Trainer's next ``log``, and adds texts to the writer of its TensorBoard callback.

    We do not call ``log`` ourselves. A Trainer's ``log`` may be more than writing: TRL's averages its metrics there and
    starts anew, and after a log the Trainer takes it that this step needs no other. So our values go along with the
    next ones that the Trainer logs itself, at the latest when it ends.

    transformers is not imported: TensorBoard's callback is one that has a ``tb_writer`` with ``add_text``.

    Args:
        callbacks: the Trainer's; a run has begun, so TensorBoard's has its writer.
    """

    def __init__(self, callbacks: Iterable[Any]) -> None:
        callbacks = tuple(callbacks)
        self._callbacks = Services(callbacks, name="callbacks")
        self.has_board = any(getattr(one, "tb_writer", None) is not None for one in callbacks)
        """Whether TensorBoard's callback is one of them."""
        self._waiting: dict[str, float] = {}
        self._in_log: dict[str, float] = {}

    takes_scalars = True
    """A Trainer's log is at least printed."""

    def write_scalars(self, scalars: Mapping[str, float], *, step: int) -> None:
        """Keep *scalars* until the Trainer logs; the latest value of a tag is the one it logs."""
        # The Trainer writes its log into trainer_state.json, and JSON knows neither NaN nor infinity.
        self._waiting.update({tag: float(value) for tag, value in scalars.items() if math.isfinite(value)})

    def write_text(self, tag: str, text: str, *, step: int) -> bool:
        """Add *text*, which TensorBoard reads as Markdown; returns whether TensorBoard took it."""
        return self._callbacks.each(lambda callback: add_text(getattr(callback, "tb_writer", None), tag, text, step))

    def keep_file(self, path: str) -> None:
        """Nothing: a Trainer's callbacks keep no files of ours."""

    # ---- the Trainer's log

    def log_begins(self, logs: dict[str, float]) -> None:
        """The Trainer logs *logs*: add what waits."""
        self._in_log, self._waiting = {tag: value for tag, value in self._waiting.items() if tag not in logs}, {}
        logs.update(self._in_log)

    def log_ends(self, logs: dict[str, float]) -> None:
        """The Trainer has logged *logs*, which may be its user's: what is ours leaves it again."""
        added, self._in_log = self._in_log, {}
        for tag in added:
            logs.pop(tag, None)
