"""Trace files into one report, one of each rank and the ranks side by side; several large ones by several processes."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from functools import partial
from typing import Any

from lightning_flops.analysis.advice import advise_on_traces
from lightning_flops.analysis.collectives import compare, refuse_mixed_ranks
from lightning_flops.analysis.stragglers import find_stragglers_in_traces
from lightning_flops.config import AdviceThresholds
from lightning_flops.errors import LightningFlopsError
from lightning_flops.schema.trace import SCHEMA_VERSION, TracesReport
from lightning_flops.trace.report import AnalyzedTrace, analyze_file

WORTH_PROCESSES_BYTES = 4 << 20
"""Files of more bytes than these, together, are read side by side: a process takes a third of a second to start."""
_UNMARKED = (
    "No rank is named a straggler: not every trace has the profiler's marks of steps, so what its rank did in a step "
    "is not known."
)


def analyze_each(files: Sequence[str], *, processes: int = 1, **settings: Any) -> list[AnalyzedTrace]:
    """Each of *files*, paths or URLs, by itself, in their order; by up to *processes* if they are worth it.

    *settings* are those of ``analyze_one``; formulas are a function of a module, so that other processes find it.

    Raises:
        TraceFormatError: a file cannot be read; of several the first in order.
        LightningFlopsError: a process was ended from outside.
    """
    sizes = [os.path.getsize(one) for one in files if os.path.isfile(one)]  # another process cannot open a pipe
    if min(processes, len(files)) < 2 or len(sizes) < len(files) or sum(sizes) <= WORTH_PROCESSES_BYTES:
        return [analyze_file(file, **settings) for file in files]
    spawn = multiprocessing.get_context("spawn")  # not by fork: numpy has threads
    # Ctrl-C ends a process that reads without a word; it is this process that reports it.
    end_quietly = (signal.SIGINT, signal.SIG_DFL)
    try:
        with ProcessPoolExecutor(min(processes, len(files)), spawn, signal.signal, end_quietly) as pool:
            return list(pool.map(partial(analyze_file, **settings), files))
    except BrokenProcessPool as error:
        raise LightningFlopsError(
            "a process that read a trace was ended from outside: for want of memory, perhaps. Give fewer files"
        ) from error


def join_analyses(analyzed: Sequence[AnalyzedTrace], *, thresholds: AdviceThresholds | None = None) -> TracesReport:
    """Reports of several traces, and their ranks side by side; traces that do not say theirs are of separate runs.

    Raises:
        RanksError: two traces are of the same rank, or none is given.
    """
    refuse_mixed_ranks(analyzed)
    ordered = sorted(analyzed, key=lambda one: -1 if one.rank is None else one.rank)
    reports = tuple(one.report for one in ordered)
    comparison = straggler = None
    if len(ordered) > 1 and ordered[0].rank is not None:
        comparison = compare(ordered)
        if all(one.step_times.marked for one in reports):
            parts = {one.rank or 0: one.parts for one in ordered}
            straggler = next(iter(find_stragglers_in_traces(parts, thresholds=thresholds)), None)
        else:
            comparison = replace(comparison, notes=(_UNMARKED, *comparison.notes))
    abilities = tuple(one.abilities for one in ordered)
    advice = advise_on_traces(reports, comparison, straggler=straggler, devices=abilities, thresholds=thresholds)
    return TracesReport(schema_version=SCHEMA_VERSION, traces=reports, ranks=comparison, advice=advice)
