"""What a batch costs whatever the dataset does: the constants behind what advice on waits for data can save.

``python -m benchmarks.loading`` prints the wait for batches of a dataset that hands them over whole, in a plain loop
and where a framework fetches them (``FETCH_SEC``, ``FRAMEWORK_FETCH_SEC`` in lightning_flops/analysis/evidence.py), and
how much longer a worker takes for a batch than the loop without workers (``HAND_OVER_SEC``): a step that does nothing
else is as long as one worker's loading. Samples are waited for, as from a disk, or computed. Figures are medians over
rounds, in random order, and their least and most.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from functools import partial
from itertools import islice, pairwise
from typing import Any

from torch.utils.data import DataLoader

from .advice_frameworks import Lightning, Transformers
from .advice_parts import Samples, WholeBatches
from .page import table
from .runner import answer_of, in_rounds, start

_STEPS, _LEFT_OUT, _WIDTH = 60, 12, 256
_LOADS: dict[str, Callable[[], object]] = {
    "waited for": partial(time.sleep, 0.0005),
    "computed": partial(sum, range(2_000)),
}


def whole_batches(size: int) -> float:
    """The median wait for a batch of so many samples that the dataset hands over whole."""
    loader = DataLoader(WholeBatches(bool, 384), batch_size=size, collate_fn=lambda batch: batch)
    return wait_sec(loader)


def by_worker(load: str, workers: int, size: int = 32) -> float:
    """The median wait for a batch of 32 KB with so many *workers*, where the loop does nothing else."""
    loader = DataLoader(Samples(_LOADS[load], _WIDTH), batch_size=size, num_workers=workers)
    return wait_sec(loader)


def wait_sec(loader: DataLoader[Any]) -> float:
    """The median from batch to batch."""
    ends = [time.perf_counter() for _ in islice(loader, _STEPS)][_LEFT_OUT:]
    return statistics.median(after - before for before, after in pairwise(ends))


def of_framework(framework: Callable[[], Lightning]) -> float:
    """The wait for a batch in a profiled training of it, whose dataset hands over whole batches."""
    return answer_of(partial(_data_wait, framework), timeout_sec=60).value or math.nan  # its words are not ours


def _data_wait(framework: Callable[[], Lightning]) -> float:
    profile = framework().profile()
    return next(float(part.typical_sec) for part in profile.timing.parts if "data wait" in part.name)


def main() -> None:
    """Measure all, and print it."""
    rounds = start(__file__, __doc__, None, rounds=5).rounds
    arms = {f"fetch: plain loop, {size} samples": partial(whole_batches, size) for size in (8, 64)}
    arms |= {f"fetch: {one.__name__}": partial(of_framework, one) for one in (Lightning, Transformers)}
    arms |= {f"{load}, {workers} workers": partial(by_worker, load, workers) for load in _LOADS for workers in (0, 1)}
    found = in_rounds(arms, rounds)
    for load in _LOADS:
        alone, worker = (found.pop(f"{load}, {workers} workers") for workers in (0, 1))
        found[f"hand over: {load}"] = [after - before for before, after in zip(alone, worker, strict=True)]
    rows = [[name, *(f"{1e3 * of(sec):.3f}" for of in (statistics.median, min, max))] for name, sec in found.items()]
    print("\n".join(table(["of a batch", "median, ms", "least", "most"], rows)))


if __name__ == "__main__":
    main()
