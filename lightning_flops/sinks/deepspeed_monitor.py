"""A sink that is the monitors of a DeepSpeed engine: TensorBoard, WandB, CSV, Comet, as its config enables them."""

from __future__ import annotations

import html
import sys
from collections.abc import Mapping
from typing import Any

from lightning_flops.sinks.services import Services, add_text
from lightning_flops.sinks.writers import TensorBoardFiles


class DeepSpeedMonitorSink:
    """Gives scalars to every monitor, and texts to those that can show one.

    DeepSpeed is not imported: a monitor is what has ``write_events``. TensorBoard gets a text as Markdown, WandB as
    HTML. A monitor that raises costs one warning, however often it does, and keeps
    nothing from the others.

    Args:
        master: ``engine.monitor``, which keeps one monitor in each of its attributes, on rank 0.
        tensorboard_dir: a folder for TensorBoard beside them; None: the engine's monitors alone.
    """

    def __init__(self, master: Any, *, tensorboard_dir: str | None = None) -> None:
        monitors = [one for one in vars(master).values() if callable(getattr(one, "write_events", None))]
        if tensorboard_dir is not None:
            monitors.append(_TensorBoard(tensorboard_dir))
        self._monitors = tuple(monitors)
        self._guarded = Services(monitors, name="monitors")

    @property
    def takes_scalars(self) -> bool:
        """Whether there is a monitor."""
        return bool(self._monitors)

    @property
    def has_board(self) -> bool:
        """Whether one of them writes TensorBoard's files."""
        return self._guarded.each(lambda monitor: getattr(monitor, "summary_writer", None) is not None)

    def write_scalars(self, scalars: Mapping[str, float], *, step: int) -> None:
        """Write all *scalars* as events at *step*, in one call per monitor."""
        events = [(tag, value, step) for tag, value in scalars.items()]
        self._guarded.each(lambda monitor: monitor.write_events(list(events)))

    def write_text(self, tag: str, text: str, *, step: int) -> bool:
        """Show *text*, which is Markdown, wherever a text can be shown; returns whether any monitor took it."""
        return self._guarded.each(lambda monitor: _show(monitor, tag, text, step))

    def keep_file(self, path: str) -> None:
        """Nothing: no monitor keeps files."""

    def folder(self) -> str | None:
        """The local folder of the first monitor that has one."""
        for monitor in self._monitors:
            folder = getattr(monitor, "log_dir", None)  # of ours, and DeepSpeed's for CSV
            folder = folder or getattr(getattr(monitor, "summary_writer", None), "log_dir", None)
            if isinstance(folder, str) and folder:
                return folder
        return None


class _TensorBoard:
    """A monitor like DeepSpeed's, whose files are made when there is something to write."""

    def __init__(self, folder: str) -> None:
        self.log_dir = folder
        self.summary_writer = TensorBoardFiles(folder)

    def write_events(self, events: list[tuple[str, float, int]]) -> None:
        for event in events:
            self.summary_writer.add_scalar(*event)
        self.summary_writer.flush()


def _show(monitor: Any, tag: str, text: str, step: int) -> bool:
    if add_text(getattr(monitor, "summary_writer", None), tag, text, step):
        return True
    wandb = sys.modules.get("wandb")  # its monitor has imported it
    if wandb is not None and type(monitor).__name__ == "WandbMonitor":
        monitor.log({tag: wandb.Html(f"<pre>{html.escape(text)}</pre>")}, step=step)
        return True
    return False
