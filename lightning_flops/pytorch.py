"""For any PyTorch loop: count what a block of code spends, or profile a model's forwards the way DeepSpeed does."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

from torch import nn

from lightning_flops.analysis.flop_counts import FlopCounts
from lightning_flops.doors.standalone import FlopsProfiler, get_model_profile
from lightning_flops.instrument.counting.flop_counter import FlopCounter
from lightning_flops.instrument.counting.formulas import register_flop_formula
from lightning_flops.instrument.counting.offline import count_on_fake_tensors
from lightning_flops.instrument.module_scope import describe_modules, require_module

__all__ = [
    "FlopCounts",
    "FlopsProfiler",
    "count_flops",
    "count_offline",
    "get_model_profile",
    "register_flop_formula",
]


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

    Raises:
        TypeError: *model* is neither a module nor None.
        Exception: counting could not begin, by a fault of this package's: then nothing inside has run, and nothing of
            ours is on torch. Once the block has begun no error of ours is raised in it or at its end: where something
            was not counted a note says so, and a record that could not be made is an error to who asks for the counts.
    """
    if model is not None:
        require_module(model)
    counter = FlopCounter(model, causal_attention=causal_attention)
    described = () if model is None else functools.partial(describe_modules, model, settings=False)
    counts = FlopCounts(counter.record, described)
    try:
        counter.__enter__()
        yield counts
    finally:
        try:
            counter.__exit__()
            counts.settle()  # so that they do not keep the model
        except BaseException as error:
            counter.__exit__()  # nothing happens where it came to its end before
            counts.settle()
            if not isinstance(error, Exception):
                raise


def count_offline(model: nn.Module, batch: Any, *, causal_attention: Literal["full", "half"] = "full") -> FlopCounts:
    """Counts one eager forward and backward of *model* on a batch of these shapes, without running it.

    For a compiled model, whose compiled path may do less work or hide it, this is the figure of the eager one. The
    backward is that of everything the forward puts out; there is no loss function and no optimizer.

    Where the forward asks for values, as of a mask or of lengths, those that follow from the batch and from buffers are
    worked out, and the shapes are those of this example. Values that a parameter or chance went into are not settled by
    it, nor are those of a tensor of more than a million elements.

    Args:
        model: stays as it is.
        batch: a tuple of positional arguments, a dict of keyword arguments, or the one argument (a named tuple is one).
        causal_attention: ``"half"`` counts half of the score matrix where attention is flagged causal.

    Returns:
        The counts.

    Raises:
        TypeError: *model* is no module.
        LightningFlopsError: a lazy module has no shapes yet.
        Exception: whatever the model raises where its forward needs values that the batch does not settle.
    """
    require_module(model)
    record = count_on_fake_tensors(model, batch, causal_attention=causal_attention)
    counts = FlopCounts(record, functools.partial(describe_modules, model, settings=False))
    counts.settle()
    return counts
