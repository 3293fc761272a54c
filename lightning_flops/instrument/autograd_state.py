"""What torch's autograd engine tells about itself: the private torch interfaces of the counter, all in one place.

Each of them is tried once, at import. Where one is missing, a stand-in answers and ``LOST`` says what is lost by it.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from types import CodeType, FrameType
from typing import Any

import torch
import torch.utils.checkpoint

NO_GRAPH_TASK = -1
"""Id of the graph task outside any backward."""

ACCUMULATES_GRADIENT = 1 << 63
"""From this sequence number on, a node is no call's: it accumulates a leaf's gradient."""

LOST: list[str] = []
"""What this torch build cannot tell, in sentences for the report."""


def _no_graph_task() -> int:
    return NO_GRAPH_TASK


def _no_node() -> Any:
    return None


def _no_sequence() -> int:
    return 0


def _interface(owner: Any, name: str, stand_in: Any, loss: str) -> Any:
    function: Any = getattr(owner, name, None)
    try:
        function()
    except (TypeError, RuntimeError):  # there is none, it takes arguments, or it does not work in this build
        LOST.append(f"This torch ({torch.__version__}) does not tell {loss}.")
        return stand_in
    return function


graph_task_id = _interface(
    torch._C,
    "_current_graph_task_id",
    _no_graph_task,
    "whether a backward is running: backward and recompute FLOPs count as forward",
)
"""Number of the backward that is running on this thread; ``NO_GRAPH_TASK`` when none is."""

current_node = _interface(
    torch._C,
    "_current_autograd_node",
    _no_node,
    "which autograd node is running: the modules' backward FLOPs stand under the root",
)
"""The autograd node whose backward is running on this thread, or None."""

sequence_number = _interface(
    torch.autograd,
    "_get_sequence_nr",
    _no_sequence,
    "the sequence numbers of autograd nodes: the modules' backward FLOPs stand under the root",
)
"""Number that the next autograd node made on this thread will have."""

_ENGINE_CODE = getattr(getattr(torch.autograd.graph, "_engine_run_backward", None), "__code__", None)
_APPLY_CODE = getattr(torch.autograd.Function.apply, "__func__", torch.autograd.Function.apply).__code__
_CALL_CODE = torch.nn.Module._call_impl.__code__
_WRAPPED_CALL_CODE = torch.nn.Module._wrapped_call_impl.__code__
_STEP_CODE = next(
    (
        constant
        for constant in torch.optim.Optimizer.profile_hook_step.__code__.co_consts
        if isinstance(constant, CodeType) and constant.co_name == "wrapper"
    ),
    None,
)
"""Of what calls an optimizer's hooks around its step."""


def node_sequence(node: Any) -> int:
    """Sequence number of an autograd node; ``ACCUMULATES_GRADIENT`` or more when it has none."""
    try:
        return node._sequence_nr()  # type: ignore[no-any-return]
    except AttributeError:
        return ACCUMULATES_GRADIENT


@dataclass(frozen=True, slots=True)
class BackwardCall:
    """A call of backward() or grad() that is under way."""

    thread: int
    """Identifier of the Python thread it was called on."""
    create_graph: bool


def _backward_call(frame: FrameType | None, thread: int) -> BackwardCall | None:
    """The innermost call of backward() on the stack that ends in *frame*."""
    while frame is not None:
        if frame.f_code is _ENGINE_CODE:
            return BackwardCall(thread, _creates_graph(frame))
        frame = frame.f_back
    return None


def _creates_graph(engine_frame: FrameType) -> bool:
    # _engine_run_backward(outputs, gradients, retain_graph, create_graph, inputs, ...)
    positional = engine_frame.f_locals.get("args", ())
    return bool(positional[2]) if len(positional) > 2 else False


def find_backward_call(owners: frozenset[int]) -> BackwardCall | None:
    """The call of backward() that started the graph task which now runs on this thread.

    A graph task runs on the thread that called backward(), and on the autograd engine's own device threads, which have
    no Python frame of it. *owners* are the threads whose calls other running graph tasks were traced to. None when it
    was not called from Python.
    """
    if _ENGINE_CODE is None:
        return None
    here = threading.get_ident()
    call = _backward_call(sys._getframe(1), here)
    if call is not None:
        return call
    elsewhere = [
        call
        for thread, frame in sys._current_frames().items()
        if thread != here and (call := _backward_call(frame, thread)) is not None
    ]
    for call in elsewhere:
        if call.thread not in owners:
            return call
    return elsewhere[0] if elsewhere else None


def whole_backward_is_compiled() -> bool:
    """Whether the backward that is running, all of it, is compiled code: then autograd runs no nodes."""
    compiled = sys.modules.get("torch._dynamo.compiled_autograd")
    return bool(getattr(compiled, "in_compiled_autograd_region", False))


def function_in_forward(calls: int = 0) -> Any:
    """The ``autograd.Function`` in whose forward the running code is, within its module's forward; None where in none.

    Such code runs with grad disabled although a backward will follow: custom functions, compiled regions, and the
    first pass of reentrant checkpointing.

    Args:
        calls: innermost module calls to look past; 1 in a forward pre-hook, whose module is called but not running.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if code is _APPLY_CODE:
            return frame.f_locals.get("cls", torch.autograd.Function)
        if code is _CALL_CODE and not isinstance(frame.f_locals.get("self"), torch.fx.GraphModule):
            # Compilers call what they traced as a graph module, inside the function that runs it.
            if calls == 0:
                return None
            calls -= 1
        elif code is _ENGINE_CODE:
            return None  # what is further out is the code that called backward()
        frame = frame.f_back
    return None


def inside_function_forward(calls: int = 0) -> bool:
    """Whether the running code is, within its module's forward, inside the forward of an ``autograd.Function``.

    Args:
        calls: as for ``function_in_forward``.
    """
    return function_in_forward(calls) is not None


def running_calls(module: torch.nn.Module) -> int:
    """How many calls of *module* that hooks heard of are on this thread's stack."""
    calls = 0
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code is _CALL_CODE and frame.f_locals.get("self") is module:
            calls += 1
        frame = frame.f_back
    return calls


def runs_step_of(optimizer: Any) -> bool:
    """Whether a step of *optimizer* is on this thread's stack; also where torch does not let that be seen."""
    if _STEP_CODE is None:
        return True
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        # No other frame's variables are looked at: in a user's they would be kept beyond their time.
        if frame.f_code is _STEP_CODE and frame.f_locals.get("self") is optimizer:
            return True
        frame = frame.f_back
    return False


def _codes_in(function: Any, name: str) -> list[CodeType]:
    """Code of the functions called *name* that *function* defines in its body."""
    constants = getattr(getattr(function, "__code__", None), "co_consts", ())
    return [constant for constant in constants if isinstance(constant, CodeType) and constant.co_name == name]


def _codes_of_torch() -> list[CodeType]:
    module: Any = torch.utils.checkpoint
    reentrant = getattr(getattr(module, "CheckpointFunction", None), "backward", None)
    other = _codes_in(getattr(getattr(module, "_checkpoint_hook", None), "__init__", None), "unpack_hook")
    if reentrant is None or not other:
        LOST.append(
            f"This torch ({torch.__version__}) does not tell what activation checkpoints repeat from what else enables "
            "grad in a backward: gradients taken inside of what they repeat count as backward."
        )
    return [*other, *([] if reentrant is None else [reentrant.__code__])]


_CODES_OF_TORCH = _codes_of_torch()


def checkpoint_codes() -> frozenset[CodeType]:
    """The code with which torch's activation checkpoints, and DeepSpeed's where it is loaded, repeat a forward."""
    module = sys.modules.get("deepspeed.runtime.activation_checkpointing.checkpointing")
    reentrant = getattr(getattr(getattr(module, "CheckpointFunction", None), "backward", None), "__code__", None)
    other = _codes_in(getattr(module, "non_reentrant_checkpoint", None), "checkpoint_unpack")
    return frozenset((*_CODES_OF_TORCH, *other, *(() if reentrant is None else (reentrant,))))


def calling_modules() -> Iterator[torch.nn.Module]:
    """The modules whose calls are on this thread's stack, innermost first."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code is _WRAPPED_CALL_CODE:
            module = frame.f_locals.get("self")
            if isinstance(module, torch.nn.Module):
                yield module
        frame = frame.f_back
