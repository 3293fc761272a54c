"""Runs without a model: what each step costs is drawn, and ``StepFlops`` sees of it what a run would show it."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from typing import NamedTuple

from lightning_flops.analysis.step_flops import StepFlops
from lightning_flops.records import BatchTokens, Shapes, StepSums, UnprofiledFlops

STEP_SEC = 0.1


class Step(NamedTuple):
    """One step of a run."""

    batches: tuple[Shapes, ...]
    forward: int
    tokens: BatchTokens | None = None
    data_dependent: bool = False


class Ran(NamedTuple):
    """A whole run."""

    sums: StepSums
    truth: int  # model FLOPs of all its steps
    counted: int  # how many were counted
    added_sec: float  # what counting added after the free ones

    @property
    def covered(self) -> bool:
        """Whether what the sums say of their error is true."""
        assert self.sums.error is not None
        return abs(self.sums.model_flops - self.truth) <= self.sums.error * self.sums.model_flops + 1


def simulate(
    steps: Iterable[Step],
    *,
    seed: int = 0,
    cost: float = 3.0,
    each: Callable[[UnprofiledFlops | None], None] | None = None,
) -> Ran:
    """Run *steps*: the backward costs twice the forward, a counted step *cost* more usual steps.

    The *seed* is that of the checks; *each* gets a reading after every fiftieth step.
    """
    flops = StepFlops(seed=seed)
    truth = counted = 0
    for number, step in enumerate(steps, 1):
        tokens = (step.tokens,) * len(step.batches)
        drawn = flops.schedule.draws_check()
        cost_of_step = {("forward", "float32"): step.forward, ("backward", "float32"): 2 * step.forward}
        truth += 3 * step.forward
        key = step.batches, tokens, 1
        if drawn or flops.wants(step.batches[0], tokens[0]):
            counted += 1
            flops.counted(
                *key,
                cost_of_step,
                seconds=STEP_SEC * (1 + cost),
                random=drawn,
                data_dependent=step.data_dependent,
                lower_bound=False,
            )
        else:
            flops.ran(*key, seconds=STEP_SEC)
        if each is not None and number % 50 == 0:
            each(flops.reading())
    sums = flops.totals()
    assert sums is not None
    return Ran(sums, truth, counted, max(0, counted - 8) * cost * STEP_SEC)


def rows(batch: int, length: int) -> tuple[Shapes, ...]:
    """One batch of token ids and labels."""
    return (((batch, length), (batch, length)),)


def generator(seed: int) -> random.Random:
    """Of a run's sizes: independent of the generator that draws checks."""
    return random.Random(f"sizes {seed}")
