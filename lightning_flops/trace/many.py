"""Trace files into one report, one of each rank; several large ones by several processes."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from functools import partial

from lightning_flops.analysis.advice import advise_on_traces
from lightning_flops.analysis.stragglers import are_compared, find_stragglers_in_traces
from lightning_flops.config import AdviceThresholds
from lightning_flops.errors import LightningFlopsError
from lightning_flops.schema.ranks import Straggler
from lightning_flops.schema.trace import SCHEMA_VERSION, TracesReport
from lightning_flops.schema.trace_flops import JobFlops, JobStepFlops, TracedStepFlops, TraceFlops, of_all
from lightning_flops.trace.counting import Formulas
from lightning_flops.trace.flops import Peaks
from lightning_flops.trace.ranks import compare_ranks, refuse_mixed_ranks
from lightning_flops.trace.report import AnalyzedTrace, analyze_file

WORTH_PROCESSES_BYTES = 8 << 20
"""Files of more bytes than these, together, are read side by side: a process takes a third of a second to start."""
_UNPACKED = 16
"""How many times as long a packed file takes as its size says."""


def analyze_files(
    files: Sequence[str],
    *,
    thresholds: AdviceThresholds | None = None,
    formulas: Formulas | None = None,
    peaks: Peaks | None = None,
    processes: int = 1,
    progress: Callable[[str], object] | None = None,
) -> TracesReport:
    """The report of the traces in *files*, one of each rank.

    Args:
        files: paths, or URLs.
        thresholds: of the advice; None for the defaults.
        formulas: FLOPs of a recorded call; a function of a module, so that other processes find it.
        peaks: a user's own figures of the device.
        processes: most that read at the same time, if the files are worth it.
        progress: is called with words, often, on how far the work is.

    Raises:
        TraceFormatError: a file cannot be read; of several the first in order.
        RanksError: two files are of the same rank, or there is none.
        LightningFlopsError: a process was ended from outside.
    """
    compared = len(files) > 1
    analyzed = analyze_each(
        files, compared=compared, formulas=formulas, peaks=peaks, processes=processes, progress=progress
    )
    return join_analyses(analyzed, thresholds=thresholds)


def analyze_each(
    files: Sequence[str],
    *,
    compared: bool = False,
    stepwise: bool = False,
    formulas: Formulas | None = None,
    peaks: Peaks | None = None,
    processes: int = 1,
    progress: Callable[[str], object] | None = None,
) -> list[AnalyzedTrace]:
    """Each of *files* by itself, in their order; arguments are those of ``analyze_files`` and ``analyze_one``."""
    tell = progress or (lambda words: None)
    analyze = partial(analyze_file, compared=compared, stepwise=stepwise, formulas=formulas, peaks=peaks)
    # A pipe cannot be opened by another process.
    sizes = [
        os.path.getsize(file) * (_UNPACKED if file.endswith(".gz") else 1) for file in files if os.path.isfile(file)
    ]
    if min(processes, len(files)) < 2 or len(sizes) < len(files) or sum(sizes) <= WORTH_PROCESSES_BYTES:
        return [analyze(file, tell=tell) for file in files]
    spawn = multiprocessing.get_context("spawn")  # not by fork: numpy has threads
    # Ctrl-C ends a process that reads without a word; it is this process that reports it.
    end_quietly = (signal.SIGINT, signal.SIG_DFL)
    pool = ProcessPoolExecutor(min(processes, len(files)), spawn, initializer=signal.signal, initargs=end_quietly)
    try:
        waiting = [pool.submit(analyze, file) for file in files]
        for done, _ in enumerate(as_completed(waiting), start=1):
            tell(f"read and analyzed {done} of {len(files)} files")
        return [one.result() for one in waiting]
    except BrokenProcessPool as error:
        raise LightningFlopsError(
            "a process that read a trace was ended from outside: for want of memory, perhaps. Give fewer files"
        ) from error
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def join_analyses(analyzed: Sequence[AnalyzedTrace], *, thresholds: AdviceThresholds | None = None) -> TracesReport:
    """Reports of several traces, and their ranks side by side; all analyzed for a comparison if there are several.

    Raises:
        RanksError: two traces are of the same rank, or none is given.
    """
    ordered = sorted(analyzed, key=lambda one: -1 if one.report.rank is None else one.report.rank)
    reports = tuple(one.report for one in ordered)
    refuse_mixed_ranks(reports)
    summaries = [one.summary for one in analyzed if one.summary is not None]
    comparison = compare_ranks(summaries) if summaries else None
    found: Sequence[Straggler] = ()
    if comparison is not None and are_compared(comparison):
        found = find_stragglers_in_traces([one.parts for one in ordered], thresholds=thresholds)
    ranks = {report.rank: report.flops for report in reports if report.rank is not None}
    whole_job = len(reports) > 1 and len(ranks) == len(reports)
    return TracesReport(
        schema_version=SCHEMA_VERSION,
        traces=reports,
        ranks=comparison,
        job_flops=job_flops(ranks, world_sizes=[one.world_size for one in summaries]) if whole_job else None,
        advice=advise_on_traces(
            reports,
            comparison,
            straggler=next(iter(found), None),
            devices=tuple(one.abilities for one in ordered),
            thresholds=thresholds,
        ),
    )


def job_flops(ranks: Mapping[int, TraceFlops | None], *, world_sizes: Sequence[int | None]) -> JobFlops:
    """The FLOPs of each step that all ranks of a job have, added up.

    Args:
        ranks: FLOPs of the trace of each rank.
        world_sizes: how many ranks each of the traces says that there are.
    """
    reason, steps = _why_no_job(ranks, set(world_sizes)), []
    if reason is None:
        by_number = [{step.step: step for step in flops.steps} for flops in ranks.values() if flops is not None]
        common = [number for number in by_number[0] if all(number in one for one in by_number)]
        steps = [_job_step(number, [one[number] for one in by_number]) for number in common if number is not None]
        reason = None if steps else "no marked step is in the traces of all ranks"
    size = world_sizes[0] if len(set(world_sizes)) == 1 else None
    return JobFlops(ranks=size, steps=tuple(steps), reason=reason)


def _why_no_job(ranks: Mapping[int, TraceFlops | None], sizes: set[int | None]) -> str | None:
    size = next(iter(sizes), None)
    if size is None or None in sizes:
        return "not every trace says how many ranks there are"
    if len(sizes) > 1:
        return "the traces say different numbers of ranks"
    if set(ranks) != set(range(size)):
        return f"the job has {size:,} ranks, and there are traces of {len(ranks):,}"
    without = [rank for rank in sorted(ranks) if ranks[rank] is None]
    return f"those of rank {without[0]} are not known" if without else None


def _job_step(number: int, parts: Sequence[TracedStepFlops]) -> JobStepFlops:
    buckets = ("forward", "backward", "recompute", "optimizer", "skipped")
    return JobStepFlops(
        step=number,
        wall_us=sum(part.wall_us for part in parts) / len(parts),
        mfu=of_all([(part.mfu, part.wall_us) for part in parts]),
        hfu=of_all([(part.hfu, part.wall_us) for part in parts]),
        lower_bound=any(part.lower_bound for part in parts),
        **{name: sum(getattr(part, name) for part in parts) for name in buckets},
    )
