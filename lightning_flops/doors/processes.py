"""Follows a program into the processes that it starts by multiprocessing, as torch's and Fabric's launchers do.

Such a process does not come back to the command that runs the program. One that is forked has all that we have put up;
one that is spawned begins anew, and is told of us by its command line.
"""

from __future__ import annotations

import multiprocessing
import os
import secrets
import tempfile
from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from multiprocessing import spawn, util
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, TypeVar

from lightning_flops.instrument.border import UndoLedger
from lightning_flops.text.printable import package_logger

logger = package_logger(__name__)

T = TypeVar("T")


def follow(
    owner: T, forked: Callable[[T], None], *, undo: UndoLedger, then: Callable[..., None], **arguments: Any
) -> None:
    """From here on a process that is started says so first. Daemons, as a loader's workers, do not.

    Args:
        owner: is not held.
        forked: is called with *owner* in a process that is forked.
        undo: ends it for processes that are spawned.
        then: a function of a module, called in a process that is spawned.
        arguments: its arguments, which are made again from their ``repr``.
    """
    util.register_after_fork(owner, lambda one: _begins(multiprocessing.current_process(), lambda: forked(one)))
    make = spawn.get_command_line
    ours = (
        f"try:\n from {__name__} import _is_spawned\n"
        f" _is_spawned({then.__module__!r}, {then.__name__!r}, {arguments!r})\n"
        "except Exception: pass\n"
    )

    def with_ours(*args: Any, **kwargs: Any) -> Any:
        command = make(*args, **kwargs)
        try:
            place = command.index("-c") + 1  # none in a program that was frozen into an executable
            return [*command[:place], ours + command[place], *command[place + 1 :]]
        except Exception:  # the process must begin, whatever its command line is
            return command

    undo.add(lambda: setattr(spawn, "get_command_line", make))
    spawn.get_command_line = with_ours


def _begins(process: BaseProcess, call: Callable[[], None]) -> None:
    """*process*, which is this one, begins its work: *call* first, unless it is a daemon."""
    try:
        if not process.daemon:
            call()
    except Exception:  # it must do its work, whatever fails on our side
        logger.warning("the FLOPs profiler does not follow into %s", process.name, exc_info=True)


def _is_spawned(module: str, function: str, arguments: dict[str, Any]) -> None:
    """A spawned process begins: wait until it is known what it is for."""

    def follow() -> None:
        getattr(import_module(module), function)(**arguments)

    def await_run(process: BaseProcess) -> None:
        # The method may be that of a class of the program's.
        owner = next(kind for kind in type(process).__mro__ if "run" in vars(kind))
        _WhenAskedFor(owner, "run", lambda process: _begins(process, follow))

    _WhenAskedFor(BaseProcess, "_bootstrap", lambda process: _begins(process, lambda: await_run(process)))


class _WhenAskedFor:
    """Stands for a method until it is asked for, and tells then of which process; it does so once.

    A function in its place would be one more frame in the program's tracebacks.

    Args:
        owner: the class that has the method.
        name: of the method.
        tell: is told; it never raises an ``Exception``.
    """

    def __init__(self, owner: type[BaseProcess], name: str, tell: Callable[[BaseProcess], None]) -> None:
        self._owner = owner
        self._name = name
        self._tell = tell
        self._method = vars(owner)[name]
        setattr(owner, name, self)

    def __get__(self, process: BaseProcess | None, kind: type[BaseProcess]) -> Any:
        if process is not None:
            setattr(self._owner, self._name, self._method)
            self._tell(process)
        bind = getattr(type(self._method), "__get__", None)
        return self._method if bind is None else bind(self._method, process, kind)


def at_end(call: Callable[[], None]) -> None:
    """Call *call* when this process, which multiprocessing has started, ends."""
    util.Finalize(None, call, exitpriority=0)


def after_children(call: Callable[[], None]) -> None:
    """Call *call* when the processes that this one has started are over: now, or when Python has waited for them."""
    if any(not child.daemon for child in multiprocessing.active_children()):
        util.Finalize(None, call, exitpriority=-1)  # Python waits for them before priorities below 0
    else:
        call()


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
