"""Has the processes that Fabric's launcher starts run the program as the first one does.

Under ``lightning-flops run`` the first process of a program knows of us. The launcher starts the others by the
program's own name, so they would know nothing of us, and rank 0 would wait for records that nobody sends.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

LAUNCHERS = tuple(f"{root}.strategies.launchers.subprocess_script" for root in ("lightning.fabric", "lightning_fabric"))
"""The modules that start them, by each name that Fabric is installed under."""


def tap(launcher: ModuleType, *, log_dir: str | None) -> None:
    """Put our command before the program in every command line that *launcher* makes.

    Args:
        launcher: one of ``LAUNCHERS``.
        log_dir: the folder that the user has given to our command; its settings are in the environment.

    Raises:
        AttributeError: this Fabric makes them in another way.
    """

    def with_us(command: Sequence[str]) -> list[str]:
        python, *program = command
        return [python, "-m", "lightning_flops", "run", *(["--log-dir", log_dir] if log_dir else []), *program]

    def basic(make: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(make)
        def run(*args: Any, **kwargs: Any) -> Any:
            return with_us(make(*args, **kwargs))

        return run

    def with_folder(make: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(make)
        def run(*args: Any, **kwargs: Any) -> Any:
            command, folder = make(*args, **kwargs)
            return with_us(command), folder

        return run

    launcher._basic_subprocess_cmd = basic(launcher._basic_subprocess_cmd)  # type: ignore[attr-defined]
    launcher._hydra_subprocess_cmd = with_folder(launcher._hydra_subprocess_cmd)  # type: ignore[attr-defined]
