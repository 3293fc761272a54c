"""Follows a program into the processes that it starts by multiprocessing, as torch's and Fabric's launchers do.

Such a process does not come back to the command that runs the program. One that is forked has all that we have put up;
one that is spawned begins anew, and is told of us by its command line.
"""

from __future__ import annotations

import multiprocessing
import os
import secrets
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from multiprocessing import spawn, util
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, TypeVar

from lightning_flops.text.printable import package_logger

logger = package_logger(__name__)

T = TypeVar("T")


@contextmanager
def followed(owner: T, forked: Callable[[T], None], *, then: Callable[..., None], **arguments: Any) -> Iterator[None]:
    """Inside, a process that is started says so first. Daemons, as a loader's workers, do not.

    Args:
        owner: is not held.
        forked: is called with *owner* in a process that is forked.
        then: a function of a module, called in a process that is spawned; nobody hears of what it raises.
        arguments: its arguments, which are made again from their ``repr``.
    """
    util.register_after_fork(owner, lambda one: None if multiprocessing.current_process().daemon else forked(one))
    make = spawn.get_command_line
    ours = (
        f"try:\n from {__name__} import _is_spawned\n"
        f" _is_spawned({then.__module__!r}, {then.__name__!r}, {arguments!r})\n"
        "except Exception: pass\n"
    )

    def with_ours(*args: Any, **kwargs: Any) -> list[str]:
        command = make(*args, **kwargs)
        if "-c" in command:  # not so in a program that was frozen into an executable
            place = command.index("-c") + 1
            command[place] = ours + command[place]
        return command

    spawn.get_command_line = with_ours
    try:
        yield
    finally:
        spawn.get_command_line = make


def _is_spawned(module: str, function: str, arguments: dict[str, Any]) -> None:
    """A spawned process begins: wait until it is known what it is for."""
    BaseProcess.run = _RunOnce(getattr(import_module(module), function), arguments)  # type: ignore[method-assign,assignment]


class _RunOnce:
    """``BaseProcess.run`` until it is asked for; a process asks for its own when it is known what it is for.

    A function in its place would be one more frame in the program's tracebacks.
    """

    def __init__(self, then: Callable[..., None], arguments: dict[str, Any]) -> None:
        self._then = then
        self._arguments = arguments
        self._run = BaseProcess.run

    def __get__(self, process: BaseProcess | None, kind: type[BaseProcess]) -> Callable[..., None]:
        if process is not None:
            BaseProcess.run = self._run  # type: ignore[method-assign]
            try:
                if not process.daemon:
                    self._then(**self._arguments)
            except Exception:  # the process must do its work, whatever fails on our side
                logger.warning("the FLOPs profiler does not follow into %s", process.name, exc_info=True)
        found: Callable[..., None] = self._run.__get__(process, kind)
        return found


def at_end(call: Callable[[], None]) -> None:
    """Call *call* when this process, which multiprocessing has started, ends."""
    util.Finalize(None, call, exitpriority=0)


class Word:
    """By it the processes that a program starts tell the first one that they have profiled something.

    They have no pipe to it in common: some are begun anew, and some by one another. So it is a file, which there is
    only if something was told.

    Args:
        path: where it is; empty in the first process, which chooses.
    """

    def __init__(self, path: str) -> None:
        self.path = path or os.path.join(tempfile.gettempdir(), f"lightning_flops-{secrets.token_hex(8)}")

    def tell(self) -> None:
        """This process has profiled something."""
        with suppress(OSError), open(self.path, "a", encoding="utf-8") as file:
            file.write(f"{os.getpid()}\n")

    def hear(self) -> list[str]:
        """The processes that have told so far, by their numbers, each once."""
        try:
            told = Path(self.path).read_text(encoding="utf-8").split()
            os.unlink(self.path)
        except OSError:
            return []
        return list(dict.fromkeys(told))
