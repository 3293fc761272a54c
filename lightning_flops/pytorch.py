"""For any PyTorch loop: count what a block of code spends."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

from torch import nn

from lightning_flops.analysis.flop_counts import FlopCounts
from lightning_flops.instrument.flop_counter import FlopCounter
from lightning_flops.instrument.formulas import register_flop_formula

__all__ = ["FlopCounts", "count_flops", "register_flop_formula"]


@contextmanager
def count_flops(model: nn.Module | None, *, causal_attention: Literal["full", "half"] = "full") -> Iterator[FlopCounts]:
    """Counts the FLOPs of everything that runs inside, by the modules of *model*; a multiply-add is two FLOPs.

    Forward, backward and optimizer steps are counted as they run, and run as they would without it. The counts may be
    read inside the block, where they are those of the moment, and after it.

    Args:
        model: the model whose modules own the work; None counts all work as outside.
        causal_attention: ``"half"`` counts half of the score matrix where attention is flagged causal.

    Yields:
        The counts.
    """
    counter = FlopCounter(model, causal_attention=causal_attention)
    with counter:
        yield FlopCounts(counter.record)
