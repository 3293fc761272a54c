"""How all benchmarks run: their command lines, rounds in random order, and processes that may hang or crash."""

from __future__ import annotations

import argparse
import contextlib
import gc
import logging
import multiprocessing
import os
import random
import resource
import signal
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

from .machine import ONE_THREAD

T = TypeVar("T")
Send = Callable[[Any], None]

_GRACE_SEC = 5.0
_FORKING = threading.RLock()
"""Held from a pipe to its process: a fork in another thread must not inherit the end that is written to.

The new process inherits it as held by its only thread, which may take it again.
"""


# ---- a benchmark's command line


def start(file: str, about: str | None, output: Path | None, **defaults: Any) -> argparse.Namespace:
    """Options of the benchmark in *file*, in a process that computes on one thread and logs its own words alone.

    Each of *defaults* is an option of its value's type; ``--output`` is the page that is written.
    """
    module = f"benchmarks.{Path(file).stem}"
    parser = argparse.ArgumentParser(prog=f"python -m {module}", description=about)
    for name, default in defaults.items():
        many = isinstance(default, (list, tuple))
        kind = type(default[0] if many else default)
        parser.add_argument(
            f"--{name.replace('_', '-')}", type=kind, default=default, nargs="*" if many else None, help="%(default)s"
        )
    parser.add_argument("--output", type=Path, default=output, help="%(default)s")
    options = parser.parse_args()
    if any(os.environ.get(name) != value for name, value in ONE_THREAD.items()):  # read only when a process begins
        os.execve(sys.executable, [sys.executable, "-m", module, *sys.argv[1:]], {**os.environ, **ONE_THREAD})
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    warnings.simplefilter("ignore")
    for name in ("lightning.pytorch", "lightning_flops", "DeepSpeed"):  # what they say is no part of a benchmark's log
        logging.getLogger(name).setLevel(logging.ERROR)
    return options


def in_rounds(arms: Mapping[str, Callable[[], T]], rounds: int, *, warm_up: int = 1) -> dict[str, list[T]]:
    """What each arm returned in each round: rounds in a new random order, after *warm_up* that are in no figure."""
    order, found = random.Random(0), {name: list[T]() for name in arms}
    for number in range(warm_up + rounds):
        for name in order.sample(list(arms), len(arms)):
            gc.collect()
            taken = arms[name]()
            if number >= warm_up:
                found[name].append(taken)
    return found


# ---- a process for each measurement


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """How something ended that ran in a process of its own."""

    kind: Literal["answered", "raised", "timed out", "crashed"] = "answered"
    value: Any = None  # What it returned; None unless *kind* is `answered`
    words: str = ""  # The exception's type and first line, or how the process ended
    traceback: str = ""


def answer_of(function: Callable[[], Any], *, timeout_sec: float) -> Answer:
    """What *function* returns, from a forked process that is ended after *timeout_sec*; what it prints is dropped."""
    return run_apart(lambda send: function(), timeout_sec=timeout_sec)


def run_apart(
    work: Callable[[Send], Any],
    *,
    timeout_sec: float,
    receive: Send = lambda message: None,
    method: Literal["fork", "spawn"] = "fork",
    log: str | os.PathLike[str] = os.devnull,
    clock: Callable[[], float] = time.monotonic,
) -> Answer:
    """What *work* returns, from a process of its own that is ended after *timeout_sec* with all that it has started.

    Args:
        work: is given a function that sends a message to *receive*, in the caller's process, at once.
        timeout_sec: by *clock*.
        receive: gets what is sent, so that it is not lost with a process that hangs or dies.
        method: a fork keeps the imports that the caller has made; CUDA is not usable in a fork of its user.
        log: file that gets what the process prints.
        clock: seconds.
    """
    context: Any = multiprocessing.get_context(method)
    with _FORKING:
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(target=_apart, args=(work, sender, os.fspath(log)))
        process.start()
        sender.close()
    end, answer = clock() + timeout_sec, None
    try:
        while answer is None:
            left = end - clock()
            if left <= 0 or not receiver.poll(left):
                return Answer(kind="timed out", words=f"no answer in {timeout_sec:g} s")
            message = receiver.recv()
            if isinstance(message, Answer):
                answer = message
            else:
                receive(message)
        process.join(_GRACE_SEC)
        return answer
    except EOFError:
        process.join(_GRACE_SEC)
        return Answer(kind="crashed", words=f"exit code {process.exitcode}")
    finally:
        receiver.close()
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)  # its session: itself, and what it has started
        process.kill()  # if it had no session yet
        process.join()


def _apart(work: Callable[[Send], Any], sender: Any, log: str) -> None:
    os.setsid()
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    os.dup2(file, 1)
    os.dup2(file, 2)
    sys.stdout = sys.stderr = os.fdopen(file, "w", buffering=1)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    try:
        answer = Answer(value=work(sender.send))
    except BaseException as error:
        first_line = (str(error).splitlines() or [""])[0]
        words = f"{type(error).__name__}: {first_line}"[:200]
        answer = Answer(kind="raised", words=words, traceback=traceback.format_exc())
    sender.send(answer)
    sender.close()
    # What libraries do at a process's exit is no part of a measurement, and may hang.
    os._exit(0)
