"""Text of the report on the cost of counting. Knows no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from .ratios import Estimate, Target, median_with_interval, ratio


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSeconds:
    """CPU seconds of one watched step."""

    inside: float
    """The step alone, being watched."""
    whole: float
    """The step, and taking up and ending the watch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Footprint:
    """What a watcher keeps while it watches a model, and what is left when it is gone."""

    held_bytes: int
    left_bytes: int
    left_hooks: int
    """Hooks on the model's modules, and global module and optimizer hooks, that were not there before."""
    left_attributes: int
    """Entries in the modules' ``__dict__`` that were not there before."""


Rounds = Mapping[str, Sequence[StepSeconds]]
"""By watcher, one measurement of each round, in the order of the rounds."""

BERT_TARGET = Target(limit=1.05, unit="× plain")
TINY_TARGET = Target(limit=1.20, unit="× no-op mode")
MODULES_TARGET = Target(limit=25.0, unit="ms")
HELD_TARGET_BYTES = 2**20


def step_table(rounds: Rounds, *, plain: str, floor: str, ours: str, target: Target, target_base: str) -> list[str]:
    """Markdown: each watcher's step over the plain one and over the no-op mode, and this project's target."""
    lines = [
        "| watcher | CPU ms of a step | ÷ plain | ÷ no-op mode | with its start and end ÷ plain | target |",
        "|---|---:|---:|---:|---:|---|",
    ]
    inside = {name: [sample.inside for sample in samples] for name, samples in rounds.items()}
    whole = {name: [sample.whole for sample in samples] for name, samples in rounds.items()}
    for name in rounds:
        milliseconds = median_with_interval([1e3 * seconds for seconds in inside[name]])
        to_target = target.verdict(ratio(inside[name], inside[target_base])) if name == ours else ""
        cells = [
            milliseconds.text(2),
            "1" if name == plain else ratio(inside[name], inside[plain]).text(3),
            "" if name == plain else "1" if name == floor else ratio(inside[name], inside[floor]).text(3),
            "1" if name == plain else ratio(whole[name], whole[plain]).text(3),
            to_target,
        ]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return lines


def added_per_operator(rounds: Rounds, name: str, *, plain: str, operators: int) -> Estimate:
    """CPU microseconds that *name* adds to each operator of a step."""
    return median_with_interval(
        [
            1e6 * (watched.inside - unwatched.inside) / operators
            for watched, unwatched in zip(rounds[name], rounds[plain], strict=True)
        ]
    )


def modules_table(
    seconds: Mapping[str, Sequence[float]], footprints: Mapping[str, Footprint], *, ours: str
) -> list[str]:
    """Markdown: entering and leaving a large model, and what is held and left."""
    lines = [
        "| watcher | CPU ms to enter and leave | held while entered | left afterwards | target |",
        "|---|---:|---:|---|---|",
    ]
    for name, samples in seconds.items():
        milliseconds = median_with_interval([1e3 * value for value in samples])
        footprint = footprints[name]
        verdict = ""
        if name == ours:
            held = "met" if footprint.held_bytes <= HELD_TARGET_BYTES else "**missed**"
            nothing = "met" if footprint.left_hooks == footprint.left_attributes == 0 else "**missed**"
            verdict = f"{MODULES_TARGET.verdict(milliseconds)}; ≤ 1 MiB held: {held}; nothing left: {nothing}"
        left = (
            f"{footprint.left_hooks} hooks, {footprint.left_attributes} attributes, {mebibytes(footprint.left_bytes)}"
        )
        lines.append(f"| {name} | {milliseconds.text(1)} | {mebibytes(footprint.held_bytes)} | {left} | {verdict} |")
    return lines


def mebibytes(count: int) -> str:
    """Such as ``0.80 MiB``."""
    return f"{count / 2**20:.2f} MiB"
