"""What torch's autograd engine says about itself: which backward runs, and which node of it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from types import CodeType, FrameType
from typing import Any

import torch
import torch.utils.checkpoint

from lightning_flops.measure.torch_private.names import optional, take

NO_GRAPH_TASK = -1
"""Id of the graph task outside any backward."""

ACCUMULATES_GRADIENT = 1 << 63
"""From this sequence number on, a node is no call's: it accumulates a leaf's gradient."""


# The hot path calls these three as they are: torch's own functions, without one of ours around them.

graph_task_id: Callable[[], int] = take("torch._C:_current_graph_task_id")
"""Number of the backward that is running on this thread; ``NO_GRAPH_TASK`` when none is."""

current_node: Callable[[], Any] = take("torch._C:_current_autograd_node")
"""The autograd node whose backward is running on this thread, or None."""

sequence_number: Callable[[], int] = take("torch.autograd:_get_sequence_nr")
"""Number that the next autograd node made on this thread will have."""

ENGINE_ENTRY = "_engine_run_backward"
"""The function of ``torch.autograd`` through which every backward goes."""

_ENGINE_CODE: CodeType | None = take("torch.autograd.graph:_engine_run_backward.__code__")
_APPLY_CODE: CodeType | None = optional("torch.autograd:Function.apply.__func__.__code__")()
"""None from torch 2.14 on, where no code of Python's calls a function's forward."""

_Context: Any = take("torch.autograd.function:BackwardCFunction")
_WRAPPED_CALL_CODE: CodeType | None = take("torch.nn:Module._wrapped_call_impl.__code__")


def _codes_in(function: Any, name: str) -> list[CodeType]:
    """Code objects of the functions called *name* that are defined inside *function*."""
    constants = getattr(getattr(function, "__code__", None), "co_consts", ())
    return [constant for constant in constants if isinstance(constant, CodeType) and constant.co_name == name]


_REPEATING_CODE: CodeType | None = take("torch.utils.checkpoint:CheckpointFunction.backward.__code__")
_UNPACKING_CODES = _codes_in(take("torch.utils.checkpoint:_checkpoint_hook.__init__"), "unpack_hook")
take("torch._C:_functions.AccumulateGrad._sequence_nr")  # every kind of node has it, or none


def node_sequence(node: Any) -> int:
    """Sequence number of an autograd node; ``ACCUMULATES_GRADIENT`` or more when it has none."""
    try:
        return node._sequence_nr()  # type: ignore[no-any-return]
    except AttributeError:
        return ACCUMULATES_GRADIENT


def function_in_forward() -> Any:
    """The ``autograd.Function`` in whose forward the running code is; None where in none.

    Such code runs with grad disabled although a backward will follow: custom functions, compiled regions, and the
    first pass of reentrant checkpointing.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if code is _APPLY_CODE:
            return frame.f_locals.get("cls", torch.autograd.Function)
        # No other frame's variables are looked at: in a user's they would be kept beyond their time.
        if _APPLY_CODE is None and code.co_name == "forward" and code.co_varnames[:1] == ("ctx",):
            context = frame.f_locals.get("ctx")
            if isinstance(context, _Context):
                return context._forward_cls
        if code is _ENGINE_CODE:
            return None  # what is further out is the code that called backward()
        frame = frame.f_back
    return None


def checkpoint_codes() -> frozenset[CodeType]:
    """The code with which torch's activation checkpoints, and DeepSpeed's where it is loaded, repeat a forward."""
    module = sys.modules.get("deepspeed.runtime.activation_checkpointing.checkpointing")
    reentrant = getattr(getattr(getattr(module, "CheckpointFunction", None), "backward", None), "__code__", None)
    other = _codes_in(getattr(module, "non_reentrant_checkpoint", None), "checkpoint_unpack")
    return frozenset((*_UNPACKING_CODES, *other, *(code for code in (_REPEATING_CODE, reentrant) if code is not None)))


def calling_modules() -> Iterator[torch.nn.Module]:
    """The modules whose calls are on this thread's stack, innermost first."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code is _WRAPPED_CALL_CODE:
            module = frame.f_locals.get("self")
            if isinstance(module, torch.nn.Module):
                yield module
        frame = frame.f_back
