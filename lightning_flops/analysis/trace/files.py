"""Trace files into one report: several large ones by several processes, one of them in memory in each."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, suppress
from functools import partial

from lightning_flops.analysis.trace.flops import Formulas
from lightning_flops.analysis.trace.joined_traces import join_analyses
from lightning_flops.analysis.trace.one_file import analyze_file
from lightning_flops.analysis.trace.one_trace import AnalyzedTrace
from lightning_flops.config import AdviceThresholds
from lightning_flops.errors import LightningFlopsError
from lightning_flops.schema.trace import TracesReport

WORTH_PROCESSES_BYTES = 8 << 20
"""Files of more bytes than these, together, are read side by side: a process takes a third of a second to start."""


def analyze_files(
    files: Sequence[str],
    *,
    thresholds: AdviceThresholds | None = None,
    formulas: Formulas | None = None,
    processes: int = 1,
    progress: Callable[[str], object] | None = None,
) -> TracesReport:
    """The report of the traces in *files*, one of each rank.

    Args:
        files: paths, or URLs.
        thresholds: of the advice; None for the defaults.
        formulas: as for ``analyze_trace``; a function of a module, so that other processes find it.
        processes: most that read at the same time, if the files are worth it.
        progress: is told in words, often, how far the work is.

    Raises:
        TraceFormatError: a file cannot be read; of several the first in order.
        RanksError: two files are of the same rank, or there is none.
        LightningFlopsError: a process was ended from outside.
    """
    analyzed = analyze_each(files, compared=len(files) > 1, formulas=formulas, processes=processes, progress=progress)
    return join_analyses(analyzed, thresholds=thresholds)


def analyze_each(
    files: Sequence[str],
    *,
    compared: bool = False,
    stepwise: bool = False,
    formulas: Formulas | None = None,
    processes: int = 1,
    progress: Callable[[str], object] | None = None,
) -> list[AnalyzedTrace]:
    """What each of *files* says by itself, in their order.

    Args:
        files: paths, or URLs.
        compared: as for ``analyze_one``, as the next two.
        stepwise: whether they will be held against another run's.
        formulas: what a recorded call spent.
        processes: as for ``analyze_files``, as the next.
        progress: is told how far the work is.

    Raises:
        TraceFormatError: a file cannot be read; of several the first in order.
        LightningFlopsError: a process was ended from outside.
    """
    tell = progress or (lambda words: None)
    analyze = partial(analyze_file, compared=compared, stepwise=stepwise, formulas=formulas)
    side_by_side = min(processes, len(files))
    if side_by_side > 1 and _are_worth_processes(files):
        return _by_processes(files, side_by_side, analyze, tell)
    return [analyze(file, tell=tell) for file in files]


def _are_worth_processes(files: Sequence[str]) -> bool:
    """Whether *files* are large, and can be opened by another process: a pipe cannot."""
    if not all(os.path.isfile(file) for file in files):
        return False
    # What is packed takes many times as long as its size says.
    return sum(os.path.getsize(file) * (16 if file.endswith(".gz") else 1) for file in files) > WORTH_PROCESSES_BYTES


def _by_processes(
    files: Sequence[str], processes: int, analyze: Callable[..., AnalyzedTrace], tell: Callable[[str], object]
) -> list[AnalyzedTrace]:
    # The largest first, so that no process is left with it at the end. This process reads, too, from the other end: it
    # is there already, and another one takes a third of a second to start.
    waiting = deque(sorted(range(len(files)), key=lambda place: -os.path.getsize(files[place])))
    found: dict[int, AnalyzedTrace | Exception] = {}

    def read(take: Callable[[], int], analyzed: Callable[[str], AnalyzedTrace]) -> None:
        with suppress(IndexError):  # none waits any more
            while True:
                place = take()
                try:
                    found[place] = analyzed(files[place])
                except Exception as error:
                    found[place] = error
                    _drop_after(place, waiting)
                tell(f"read and analyzed {len(found)} of {len(files)} files")

    with ExitStack() as stack:
        # Not by fork: numpy has threads.
        pool = ProcessPoolExecutor(
            processes - 1, mp_context=multiprocessing.get_context("spawn"), initializer=_end_at_ctrl_c
        )
        stack.callback(pool.shutdown, wait=False, cancel_futures=True)  # the others end while we go on
        feeders = stack.enter_context(ThreadPoolExecutor(processes - 1))
        stack.callback(waiting.clear)
        fed = [
            feeders.submit(read, waiting.popleft, lambda file: pool.submit(analyze, file).result())
            for _ in range(processes - 1)
        ]
        tell(f"reading {len(files)} files")
        read(waiting.pop, lambda file: analyze(file, tell=tell))
        for one in fed:
            one.result()
    return [_analyzed(found[place]) for place in range(len(files)) if place in found]


def _end_at_ctrl_c() -> None:
    """In a process that reads: Ctrl-C ends it without a word. It is this process's parent that tells of it."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def _drop_after(place: int, waiting: deque[int]) -> None:
    """Of *waiting*, drop what comes after *place*, which has failed: of several that fail the first one is told."""
    for other in list(waiting):
        if other > place:
            with suppress(ValueError):  # somebody has taken it by now
                waiting.remove(other)


def _analyzed(found: AnalyzedTrace | Exception) -> AnalyzedTrace:
    if isinstance(found, BrokenProcessPool):
        raise LightningFlopsError(
            "a process that read a trace was ended from outside: for want of memory, perhaps. Give fewer files"
        ) from found
    if isinstance(found, Exception):
        raise found
    return found
