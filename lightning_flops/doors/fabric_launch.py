"""Has the processes that Fabric's launcher starts run the program as the first one does.

Under ``lightning-flops run`` the first process of a program knows of us. The launcher starts the others by the
program's own name, so they would know nothing of us, and rank 0 would wait for records that nobody sends. The launcher
of Lightning's Trainer takes these functions from Fabric.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

from lightning_flops.session.private_names import PrivateNames
from lightning_flops.text.printable import package_logger

logger = package_logger(__name__)

LAUNCHERS = tuple(f"{root}.strategies.launchers.subprocess_script" for root in ("lightning.fabric", "lightning_fabric"))
"""The modules that start them, by each name that Fabric is installed under."""

_NOT_PROFILED = "the processes that its launcher starts are not profiled, and rank 0 waits for what they do not send"

LOST = {
    "_basic_subprocess_cmd": _NOT_PROFILED,
    "_hydra_subprocess_cmd": f"where hydra runs the program, {_NOT_PROFILED}",
}
"""Private names of Fabric that make a command line, and what is lost if one is missing."""


def tap(launcher: ModuleType, *, log_dir: str | None) -> None:
    """Put our command before the program in every command line that *launcher* makes.

    Args:
        launcher: one of ``LAUNCHERS``.
        log_dir: the folder that the user has given to our command; its settings are in the environment.
    """
    names = PrivateNames("Fabric", LOST)
    names.tell(logger.warning)
    ours = ("-m", "lightning_flops", "run", *(("--log-dir", log_dir) if log_dir else ()))
    for name in LOST:
        make = names.get(launcher, name, None)
        if make is not None:
            setattr(launcher, name, _putting(ours, before=make))


def _putting(ours: Sequence[str], *, before: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(before)
    def run(*args: Any, **kwargs: Any) -> Any:
        made = before(*args, **kwargs)
        try:
            # hydra's comes with the folder to start in
            command, *folder = made if isinstance(made, tuple) else (made,)
            python, *program = command
            whole = [python, *ours, *program]
            return (whole, *folder) if folder else whole
        except Exception as error:  # the process must begin, whatever its command line is
            logger.warning("the processes that Fabric starts are not profiled: %s: %s", type(error).__name__, error)
            return made

    return run
