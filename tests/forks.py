"""Child Pythons that need not import what others before them have imported: each is a fork of a process that has.

Torch, Lightning and DeepSpeed take a process two to nine seconds to import, and the tests start about a hundred. Here
``python ARGUMENTS`` is a fork of a process that has imported some modules and has done nothing else. It has its own
folder, environment, arguments and output, and ends as any program does. This is for programs that only use what they
import; one that is about importing, or about a launcher, is started as its user starts it.

A process of tests has one such process for each tuple of modules, itself a fork of the one that has imported the
beginning of its tuple. It ends with the process that asks it, and takes along the forks that still run.
"""

from __future__ import annotations

import contextlib
import faulthandler
import fcntl
import gc
import hashlib
import io
import json
import os
import random
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")

REPOSITORY = Path(__file__).resolve().parents[1]


# ---- who asks for forks


class Fork:
    """A Python that runs a module, to be watched like a ``Popen``. It leads a process group of its own.

    At SIGUSR1 it prints where each of its threads is.
    """

    def __init__(self, server: _Server, pid: int) -> None:
        self._server = server
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Its exit status, or minus the number of the signal that ended it; None while it runs."""
        if self.returncode is None:
            self.returncode = self._server.ask({"status_of": self.pid})
        return self.returncode

    def wait(self) -> int:
        """The same, when it has ended."""
        while (status := self.poll()) is None:
            time.sleep(0.02)
        return status


def start_fork(
    arguments: Sequence[str],
    *,
    imports: tuple[str, ...],
    folder: Path,
    environment: Mapping[str, str],
    place: Mapping[str, str],
    output: int,
    errors: int | None = None,
) -> Fork:
    """Start ``python ARGUMENTS``: a module, a file or a text, with or without ``-W ignore`` before it.

    It finds *imports* imported, in the *environment* of the first who asked for these; the variables of its *place*
    were not set then. Its streams go to the files *output* and *errors*, or both to *output*.
    """
    silent = list(arguments[:2]) == ["-W", "ignore"]
    server = _server(imports, os.getpid(), tuple(environment.items()))
    program = {
        "arguments": list(arguments[2:] if silent else arguments),
        "silent": silent,
        "folder": str(folder),
        "environment": {**environment, **place},
    }
    return Fork(server, server.ask(program, output, output if errors is None else errors))


TORCH = ("torch", "torch._dynamo")  # the second is imported by the first optimizer that is made
BEFORE_LIGHTNING = (*TORCH, "torchmetrics")  # what takes Lightning long to import, without anything of Lightning itself
LIGHTNING = (
    *BEFORE_LIGHTNING,
    *("lightning_flops", "lightning.pytorch", "torch.utils.tensorboard", "lightning_flops.lightning"),
)

_BEGINNINGS = (TORCH, BEFORE_LIGHTNING, LIGHTNING)  # each has a process that others with more imports are forks of


def run_fork(
    arguments: Sequence[str],
    *,
    folder: Path,
    imports: tuple[str, ...] = BEFORE_LIGHTNING,
    timeout_sec: float = 240.0,
    environment: Mapping[str, str] | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run ``python ARGUMENTS`` in *folder* to its end, with our repository on its path."""
    with tempfile.TemporaryFile("w+", encoding="utf-8") as out, tempfile.TemporaryFile("w+", encoding="utf-8") as err:
        fork = start_fork(
            arguments,
            imports=imports,
            folder=folder,
            environment={**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"},
            place=environment or {},
            output=out.fileno(),
            errors=err.fileno(),
        )
        end = time.monotonic() + timeout_sec
        while (status := fork.poll()) is None:
            if time.monotonic() > end:
                os.killpg(fork.pid, signal.SIGKILL)
            time.sleep(0.02)
        for printed in (out, err):
            printed.seek(0)
        return subprocess.CompletedProcess(list(arguments), status, out.read(), err.read())


def once_in_a_run(name: str, make: Callable[[], T]) -> T:
    """What *make* returned, which JSON can hold, to the first of this run of the tests that asked for *name*."""
    run = os.environ.get("PYTEST_XDIST_TESTRUNUID", str(os.getpid()))
    place = Path(tempfile.gettempdir(), f"once-{hashlib.sha256(f'{run} {name}'.encode()).hexdigest()[:16]}")
    with Path(f"{place}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not place.exists():
            place.write_text(json.dumps(make()), encoding="utf-8")
        made: T = json.loads(place.read_text(encoding="utf-8"))
        return made


def _server(imports: tuple[str, ...], process: int, environment: tuple[tuple[str, str], ...]) -> _Server:
    key = (imports, process)  # a fork of this process would mix its questions with ours
    if key not in _SERVERS:
        _SERVERS[key] = _Server(imports, environment)
    return _SERVERS[key]


class _Server:
    """The process that has imported something, as the one sees it that asks."""

    def __init__(self, imports: tuple[str, ...], environment: tuple[tuple[str, str], ...]) -> None:
        self._socket, its = socket.socketpair()
        with its:
            if begins := [known for known in _BEGINNINGS if known == imports[: len(known)] and known != imports]:
                beginning = _server(max(begins, key=len), os.getpid(), environment)
                beginning.ask({"imports": imports}, its.fileno())
            else:
                self._process = subprocess.Popen(
                    [sys.executable, "-m", "tests.forks", str(its.fileno()), *imports],
                    cwd=REPOSITORY,
                    env=dict(environment),
                    stdin=subprocess.DEVNULL,
                    pass_fds=[its.fileno()],
                    start_new_session=True,
                )
        self._answers = self._socket.makefile("r")

    def ask(self, request: dict[str, Any], *files: int) -> Any:
        """The answer to *request*, which may hand over *files*."""
        line = f"{json.dumps(request)}\n".encode()
        sent = socket.send_fds(self._socket, [line], files) if files else 0
        self._socket.sendall(line[sent:])
        answer = self._answers.readline()
        assert answer, "the process that forks has ended"
        return json.loads(answer)


_SERVERS: dict[tuple[tuple[str, ...], int], _Server] = {}


# ---- the process that forks


def serve(asking: socket.socket, imports: Sequence[str]) -> list[str] | None:
    """Answer until the one who asks has gone. In a fork: the arguments of the Python that it is to be."""
    for module in imports:
        with contextlib.suppress(ImportError):  # not every environment has everything
            import_module(module)
    gc.collect()
    gc.freeze()  # no fork copies all this by collecting it
    running: set[int] = set()
    while True:
        line, files, _, _ = socket.recv_fds(asking, 1 << 20, 3)
        while line and not line.endswith(b"\n"):
            line += asking.recv(1 << 20)
        if not line:
            break
        request = json.loads(line)
        if "status_of" in request:
            answer = _status(request["status_of"], running)
        else:
            answer = os.fork()
            if not answer:
                asking.close()
                if "imports" in request:
                    return serve(socket.socket(fileno=files[0]), request["imports"])
                return _become(request, *files)
            if "imports" not in request:
                running.add(answer)
        for file in files:
            os.close(file)
        asking.sendall(f"{json.dumps(answer)}\n".encode())
    for left in running:
        _end(left)
    return None


def _status(pid: int, running: set[int]) -> int | None:
    ended, status = os.waitpid(pid, os.WNOHANG)
    if not ended:
        return None
    running.discard(pid)
    return os.waitstatus_to_exitcode(status)


def _end(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


def _become(program: dict[str, Any], output: int, errors: int) -> list[str]:
    """Make this fork the program that was asked for."""
    os.setsid()
    for stream, file in ((0, os.open(os.devnull, os.O_RDONLY)), (1, output), (2, errors)):
        os.dup2(file, stream)
        os.close(file)
    for text in (sys.stdout, sys.stderr):
        if isinstance(text, io.TextIOWrapper):
            text.reconfigure(encoding="utf-8")
    os.chdir(program["folder"])
    os.environ.clear()
    os.environ.update(program["environment"])
    if program["silent"]:
        sys.warnoptions[:] = ["ignore"]
        warnings.simplefilter("ignore")
    faulthandler.register(signal.SIGUSR1, file=2)
    random.seed()
    tempfile.tempdir = None  # it may have been asked for, with another environment
    ranks: Any = sys.modules.get("lightning_utilities.core.rank_zero")
    if ranks is not None:  # Lightning notes it when it is imported
        ranks.rank_zero_only.rank = int(os.environ.get("RANK", "0"))
    arguments: list[str] = program["arguments"]
    return arguments


if __name__ == "__main__":
    os.dup2(2, 1)  # nothing is printed where a program's output is read
    own_ = serve(socket.socket(fileno=int(sys.argv[1])), sys.argv[2:])
    if own_ is not None:
        what_, *rest_ = own_
        if what_ == "-m":
            sys.argv[:] = rest_
            sys.path[0] = os.getcwd()
            runpy.run_module(rest_[0], run_name="__main__", alter_sys=True)
        elif what_ == "-c":
            sys.argv[:] = ["-c", *rest_[1:]]
            sys.path[0] = ""
            exec(compile(rest_[0], "<string>", "exec", dont_inherit=True))
        else:
            sys.argv[:] = own_
            sys.path[0] = os.path.dirname(os.path.abspath(what_))
            runpy.run_path(what_, run_name="__main__")
