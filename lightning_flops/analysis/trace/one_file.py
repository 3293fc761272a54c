"""One trace file, read and analyzed: all that a process imports that reads beside others."""

from __future__ import annotations

import os
from collections.abc import Callable

from lightning_flops.analysis.trace.flops import Formulas
from lightning_flops.analysis.trace.one_trace import AnalyzedTrace, analyze_one
from lightning_flops.analysis.trace.reading import load_trace

_MB = 1e6


def analyze_file(
    file: str,
    *,
    compared: bool,
    stepwise: bool,
    formulas: Formulas | None,
    tell: Callable[[str], object] | None = None,
) -> AnalyzedTrace:
    """What the trace in *file* says by itself.

    Args:
        file: a path, or a URL.
        compared: as for ``analyze_one``, as the next two.
        stepwise: whether it will be held against another run's.
        formulas: what a recorded call spent.
        tell: is told in words, often, how far the work is.

    Raises:
        TraceFormatError: the file cannot be read.
    """
    name, size = os.path.basename(file), os.path.getsize(file) if os.path.isfile(file) else None
    of_all = f" of {size / _MB:,.0f}" if size else ""
    progress = None if tell is None else lambda read: tell(f"reading {name}: {read / _MB:,.0f}{of_all} MB")
    trace = load_trace(file, progress=progress)
    if tell is not None:
        tell(f"analyzing {name}: {len(trace):,} events")
    return analyze_one(trace, compared=compared, formulas=formulas, stepwise=stepwise)
