"""DeepSpeed's own profiler in one engine, which is off while ours runs, whatever framework drives the engine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning_flops.session.private_names import PrivateNames


class EngineProfiler:
    """Switches off the profiler that an engine was made with, and on again."""

    def __init__(self) -> None:
        self._settings: Any = None
        """Its settings, while we have switched it off."""

    def stand_down(self, engine: Any, *, names: PrivateNames) -> None:
        """Switch it off if it is on. The log lines that it forces cannot be stopped any more."""
        settings = getattr(names.get(engine, "_config", None), "flops_profiler_config", None)
        if settings is not None and settings.enabled:
            self._settings = settings
            settings.enabled = False

    def put_back(self) -> None:
        """Switch it on if we have switched it off; this may be called again."""
        if self._settings is not None:
            self._settings.enabled = True
            self._settings = None
