"""The thread that a run's reports are made on: what is slow, or hangs, never stops the training there."""

from __future__ import annotations

import logging
import os
import threading
from collections import deque
from collections.abc import Callable

from lightning_flops import host_clock
from lightning_flops.units import duration, package_logger

logger = package_logger(__name__)

_SEC_TO_COMPUTE = 60.0  # a job that takes longer waits for a file system, and slows nothing down


class Worker:
    """Runs jobs one after another on a daemon thread, which is there while there are jobs, and in no forked child."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a signal handler of the user's may come back here
        self._jobs: deque[tuple[str, Callable[[], None]]] = deque()
        self._running: str | None = None
        self._running_since = 0.0
        self._thread: threading.Thread | None = None
        self._latest: threading.Thread | None = None  # it ends a moment after it has nothing more to do
        self._pid = os.getpid()
        self._given_up = False

    def submit(self, job: Callable[[], None], what: str = "a report") -> None:
        """Run *job*, which makes *what*, on the worker's thread."""
        if self.is_off:
            return
        with self._lock:
            self._jobs.append((what, job))
            if self._thread is None:
                thread = threading.Thread(target=self._work, name="lightning_flops", daemon=True)
                try:
                    thread.start()
                    self._thread = self._latest = thread
                except RuntimeError:  # the interpreter ends, and starts no more threads
                    self._work()

    @property
    def is_off(self) -> bool:
        """Whether nothing is made any more: the end has not waited longer, or this is a forked child."""
        return self._given_up or os.getpid() != self._pid

    @property
    def is_busy(self) -> bool:
        """Whether a job takes processor time from the training."""
        return self._thread is not None and host_clock.now() < self._running_since + _SEC_TO_COMPUTE

    def _work(self) -> None:
        while True:
            with self._lock:
                self._running = None
                if not self._jobs:
                    self._thread = None
                    return
                self._running, job = self._jobs.popleft()
                self._running_since = host_clock.now()
            try:
                job()
            except BaseException as error:  # no caller above could take it
                words, shown = f"{type(error).__name__}: {error}", error if logger.isEnabledFor(logging.DEBUG) else None
                logger.warning("%s was lost: %s", self._running, words, exc_info=shown)

    def finish(self, within_sec: float = 10.0) -> bool:
        """Wait for all jobs; False: it has said what is missing after *within_sec*."""
        until = host_clock.now() + within_sec
        while not self.is_off:
            if (thread := self._latest) is not None:
                thread.join(max(0.0, until - host_clock.now()))
            if self._thread is None:
                break
            if host_clock.now() >= until:
                with self._lock:
                    self._given_up = True
                    missing = ", ".join([self._running or "a report", *(what for what, _ in self._jobs)])
                    self._jobs.clear()
                words = "%s could not be written within %s of the run's end; does a file system hang?"
                logger.warning(words, missing, duration(within_sec))
        return not self._given_up
