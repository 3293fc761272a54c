"""The step that ran out of memory: found in the traceback of its error, to be predicted from its shapes alone."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from types import FrameType
from typing import Any

import torch
from torch import nn

from lightning_flops.measure.predicted_memory.fake_steps import FakeSteps

# Functions called with a batch: what the model is asked for, and its methods that hand values to a Trainer.
_STEPS: dict[str, tuple[str, tuple[str, ...]]] = {
    "forward": ("__call__", ()),
    "training_step": ("training_step", ("log", "log_dict")),
}
# Precisions, as frameworks name them, that are an autocast.
_HALF = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether an allocator of torch's raised *error*."""
    of_cpu = isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error)
    return of_cpu or isinstance(error, torch.OutOfMemoryError)


def failed_steps(
    error: BaseException, model: nn.Module, optimizers: Iterable[Any] | None, *, precision: str
) -> FakeSteps | None:
    """The steps of *model* like the one that raised *error*; None: the model was not called with a batch then."""
    trace = error.__traceback__
    while trace is not None:
        frame, trace = trace.tb_frame, trace.tb_next
        name = frame.f_code.co_name
        if name in _STEPS and frame.f_locals.get("self") is model:
            method, without = _STEPS[name]
            return FakeSteps(
                model,
                _arguments(frame),
                next(iter(optimizers or ()), None),
                loss=None,
                autocast=_HALF.get(precision),
                accumulate=1,
                on_cuda=any(one.is_cuda for one in model.parameters()),
                method=method,
                without=without,
            )
    return None


def _arguments(frame: FrameType) -> tuple[Any, ...]:
    """What a method was called with by position or name; a name that it has deleted ends them."""
    code, found = frame.f_code, list[Any]()
    with suppress(KeyError):
        found.extend(frame.f_locals[name] for name in code.co_varnames[1 : code.co_argcount])
    return tuple(found)
