"""Two runs compared by their throughput alone: how long a batch takes, and how long it is waited for.

Of runs without a profile nothing else is known. What of a difference is chance is seen in stretches of batches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from lightning_flops.analysis import compare_figures as figures
from lightning_flops.schema.comparison import SHARED, Comparison
from lightning_flops.schema.throughput import ThroughputSummary
from lightning_flops.units import plain, plural

_ONLY_PROFILES = (
    "Only profiles say which part of a step and which module a difference is in, how the runs are set up, and whether "
    "one had to wait for processors: train both without timer_only for that."
)
_OTHERS = "whether other programs ran beside it is not known"
_PARTS = ("batch", "data wait", "the rest")
_WHY = {
    "samples_per_sec": "how many samples a batch has was not known",
    "batches_per_sec": "its rate is in samples/s",
    "tokens_per_sec": "how many tokens a batch has was not known",
    "reader_cost_sec": "no wait was seen",
    "data_wait_ratio": "no wait was seen",
    "mfu": "no step was counted, or no peak is known",
}


def compare_throughputs(
    a: Sequence[ThroughputSummary], b: Sequence[ThroughputSummary], *, sources: tuple[Sequence[str], Sequence[str]]
) -> Comparison:
    """What a batch of the runs *b* takes longer than one of the runs *a*, and their rates; *sources* names the runs.

    Of several runs a side, figures are means over the runs, and noise is that between them.
    """
    sides = a, b
    of_a, of_b = (figures.of_side([_figures(one) for one in side], _WHY) for side in sides)
    step, waits, rest = (figures.difference(name, of_a.pop(name), of_b.pop(name)) for name in _PARTS)
    rest = replace(rest, a_ns=step.a_ns - waits.a_ns, b_ns=step.b_ns - waits.b_ns)
    lengths = [len(one.batch_stretches_sec) for one in (a[0], b[0])] if min(len(a), len(b)) == 1 else []
    few = [one for one in zip(sources, lengths, strict=False) if one[1] < figures.LEAST_STEPS]
    run_a, run_b = (
        figures.identity(
            names,
            f"{plain(side[0].batches)} {plural('batch', side[0].batches)}, without a profile",
            starts_share=SHARED,
            others=_OTHERS,
        )
        for side, names in zip(sides, sources, strict=True)
    )
    return Comparison(
        kind="throughput",
        a=run_a,
        b=run_b,
        figures=tuple(one for one in figures.differences(of_a, of_b, peaks=("", "")) if (one.a, one.b) != (None, None)),
        step=step,
        parts=(waits, rest) if all(one.reader_stretches_sec for one in (*a, *b)) else (),
        notes=(_ONLY_PROFILES, *(figures.too_few(names[0], f"{plain(number)} batches") for names, number in few)),
    )


def _figures(one: ThroughputSummary) -> dict[str, figures.OfRun]:
    """What the run knows, and last the parts of a batch."""
    batches = np.array(one.batch_stretches_sec)
    waits = np.array(one.reader_stretches_sec or np.zeros(len(batches)))
    rates = {} if one.ips is None else {one.ips_unit: one.ips.average}
    batch_sec, reader = one.batch_cost_sec.average, one.reader_cost_sec
    wait_sec = (one.reader_ratio or 0.0) * batch_sec  # the reader cost is that of the batches that were waited for
    return {
        "samples_per_sec": (rates.get("samples/s"), batches),
        "batches_per_sec": (rates.get("batches/s"), batches),
        "tokens_per_sec": (one.tokens_per_sec, batches),
        "batch_cost_sec": (batch_sec, batches),
        "reader_cost_sec": (None if reader is None else reader.average, waits),
        "data_wait_ratio": (one.reader_ratio, waits / batches),
        "mfu": (one.mfu, batches),
        **dict(
            zip(_PARTS, ((batch_sec, batches), (wait_sec, waits), (batch_sec - wait_sec, batches - waits)), strict=True)
        ),
    }
