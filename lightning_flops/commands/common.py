"""What the commands share that read profiles and traces: a device's own figures, and how traces are analyzed."""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from lightning_flops.errors import ConfigError

if TYPE_CHECKING:
    from lightning_flops.schema.profile import Profile
    from lightning_flops.trace import Peaks
    from lightning_flops.trace.recorded import RecordedInputs, RecordedWork
    from lightning_flops.trace.report import AnalyzedTrace

PATH = "a profile.json, or a folder of logs with such files below it; path or URL"
"""What ``show`` and ``report`` are given."""


def analyzed(files: Sequence[str], options: argparse.Namespace, **settings: Any) -> list[AnalyzedTrace]:
    """What trace *files* say, one after the other, with the figures that were given."""
    from lightning_flops.trace import load_trace
    from lightning_flops.trace.report import analyze_one

    formulas = recorded_work if importlib.util.find_spec("torch") else None
    return [analyze_one(load_trace(file), formulas=formulas, peaks=peaks(options), **settings) for file in files]


def recorded_work(operator: str, inputs: RecordedInputs) -> RecordedWork:
    """FLOPs of a call in a trace, by the counter's formulas: the first call imports torch."""
    from lightning_flops.measure.counting.recorded_calls import recorded_work

    return recorded_work(operator, inputs)


def add_peaks(parser: argparse.ArgumentParser) -> None:
    """Add the options that give a device's own figures."""
    parser.add_argument(
        "--peak",
        type=_peak,
        action="append",
        default=[],
        metavar="DTYPE=FLOPS",
        help="dense peak of one device in FLOP/s, for a dtype or for all: bfloat16=312e12, or 312e12; wins over the "
        "table of devices, may be given several times",
    )
    parser.add_argument(
        "--bandwidth", type=_number, metavar="BYTES", help="bandwidth of one device's memory in bytes/s: 2.0e12"
    )


def peaks(options: argparse.Namespace) -> Peaks:
    """The figures that were given."""
    from lightning_flops.trace import Peaks

    given: dict[str | None, float] = dict(options.peak)
    by_dtype = {dtype: peak for dtype, peak in given.items() if dtype is not None}
    if None in given and by_dtype:
        raise ConfigError("--peak must be one figure for all dtypes, or one for each of them, and both were given")
    return Peaks(flops_per_sec=by_dtype or given.get(None), memory_bytes_per_sec=options.bandwidth)


def held_against(options: argparse.Namespace, profile: Profile) -> Profile:
    """*profile* with the figures that were given, or, if none were, with those that this machine has measured."""
    from lightning_flops.analysis.peaks import with_given_peaks, with_measured_peaks

    given = peaks(options)
    return with_measured_peaks(profile) if given == type(given)() else with_given_peaks(profile, **asdict(given))


def _peak(text: str) -> tuple[str | None, float]:
    from lightning_flops.config import ProfilerConfig

    dtype, equals, value = text.rpartition("=")
    peak = _number(value)
    try:
        kept = ProfilerConfig(peak_flops_per_sec={dtype: peak} if equals else peak).peak_flops_per_sec
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return next(iter(kept)) if isinstance(kept, dict) else None, peak


def _number(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"must be a number > 0, got {text!r}")
    return value
