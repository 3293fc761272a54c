"""Traces that no file holds, analyzed as the command does with files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeVar

from lightning_flops.analysis.trace_report import analyze_one, join_analyses
from lightning_flops.config import ADVICE_THRESHOLDS
from lightning_flops.schema.trace import TracesReport
from lightning_flops.trace.columns import Trace
from lightning_flops.trace.flops import Formulas

T = TypeVar("T")


def known(value: T | None) -> T:
    """*value*, which is not None."""
    assert value is not None
    return value


def analyze_traces(
    traces: Sequence[Trace], *, thresholds: Mapping[str, float] = ADVICE_THRESHOLDS, formulas: Formulas | None = None
) -> TracesReport:
    """Every table of each of *traces*, and their ranks side by side."""
    analyzed = [analyze_one(trace, formulas=formulas) for trace in traces]
    return join_analyses(analyzed, thresholds=thresholds)
