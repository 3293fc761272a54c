"""torch.compile: functions of ours kept out of it, when it compiles, and what it keeps of what it has compiled."""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Callable
from importlib import import_module
from typing import Any, TypeVar

import torch
from torch.compiler import is_dynamo_compiling

from lightning_flops.instrument.torch_private.names import optional, take
from lightning_flops.text.printable import package_logger

logger = package_logger(__name__)

_Function = TypeVar("_Function", bound=Callable[..., Any])

_mark: Any = take("torch._C._dynamo.eval_frame:set_code_exec_strategy")
_skip: Any = take("torch._C._dynamo.eval_frame:_FrameAction.SKIP")
_default: Any = take("torch._C._dynamo.eval_frame:_FrameAction.DEFAULT")
_strategy: Any = take("torch._C._dynamo.eval_frame:_FrameExecStrategy")


def hide(function: Callable[..., Any], *, alone: bool = False) -> bool:
    """Marks one of our functions, so that its calls, and what they call, are not compiled. Returns whether it could.

    The mark is on the function's code and stays there: it is for code of this package only. *alone*: what it calls, as
    the user's functions, is compiled as it would be without it.
    """
    try:
        _mark(function.__code__, _strategy(_skip, _default if alone else _skip))
    except (AttributeError, TypeError):  # it has no code of its own, such as a callable object; or torch has no marks
        logger.debug("%r could not be marked as not to be compiled", function, exc_info=True)
        return False
    return True


def hide_around(run: _Function, *ours: Callable[..., Any] | None) -> _Function:
    """*run*, a wrapper that compiled code may call: neither it nor *ours*, which it calls, is compiled.

    What it is around is compiled as it would be without us.
    """
    hide(run, alone=True)
    for function in ours:
        if function is not None:
            hide(function)
    return run


@functools.cache
def can_compile() -> bool:
    """Whether torch's compiler can be imported. A broken package among those that it imports may raise anything.

    Where it cannot be imported nothing is ever compiled.
    """
    try:
        import_module("torch._dynamo")
    except Exception:
        logger.debug("torch's compiler cannot be imported", exc_info=True)
        return False
    return True


def was_used() -> bool:
    """Whether the compiler was loaded: before that, nothing can have been compiled."""
    return "torch._dynamo" in sys.modules


def leave_compiled_code() -> None:
    """What calls us is compiled in two parts, and we run between them as we are; nothing where it is not compiled.

    Our caller must be hidden.
    """
    if is_dynamo_compiling():
        torch._dynamo.graph_break()


# ---- calls of what it has compiled

_EVAL_FRAME = "torch._dynamo.eval_frame"
END_OF_COMPILED_CALL = "_maybe_set_eval_frame"
"""Torch calls this function of ``module_of_compiled_calls`` when all else of such a call is over."""

_end_of_call = optional(f"{_EVAL_FRAME}:{END_OF_COMPILED_CALL}")


def module_of_compiled_calls() -> Any:
    """The module of torch in which functions that were given to ``torch.compile`` are called; None: it is not seen."""
    return None if not was_used() or _end_of_call() is None else sys.modules[_EVAL_FRAME]


def is_in_compiled_call(frame: types.FrameType | None) -> bool:
    """Whether *frame*, or what has called it, runs inside a function that was given to ``torch.compile``."""
    if module_of_compiled_calls() is None:
        return False
    while frame is not None:
        if frame.f_code.co_name == "compile_wrapper" and frame.f_globals.get("__name__") == _EVAL_FRAME:
            return True
        frame = frame.f_back
    return False


# ---- when it compiles

_handler = optional("torch._dynamo.callback:callback_handler")


def compiler_callbacks() -> Any:
    """Torch's callbacks for the start and end of a compilation; None if this torch has none, or cannot compile."""
    return _handler() if can_compile() else None


# ---- modules and regions it has compiled


def is_compiled_in_place(module: torch.nn.Module) -> bool:
    """Whether ``module.compile()`` was called: no hook fires inside of such a module."""
    return vars(module).get("_compiled_call_impl") is not None


BACKWARD_ENTRY = "_backward_impl"
"""Attribute of a compiled region's ``autograd.Function`` which calls its backward graph with ``(ctx, inputs)``."""


def is_compiled(function: Any) -> bool:
    """Whether an ``autograd.Function`` is a compiled region's, and the calls of its backward graph can be seen."""
    return (
        getattr(function, "__name__", "") == "CompiledFunction" and getattr(function, BACKWARD_ENTRY, None) is not None
    )


_backward_module = optional("torch._dynamo.compiled_autograd:extract_bw_module")


def backward_graph(function: Any) -> torch.fx.Graph:
    """The backward graph of a compiled region.

    Raises:
        Exception: whatever torch raises where it has kept none.
    """
    graph: torch.fx.Graph = _backward_module()(function).graph
    return graph


def whole_backward_is_compiled() -> bool:
    """Whether all of the backward that runs now is compiled code: then autograd runs no nodes."""
    module = sys.modules.get("torch._dynamo.compiled_autograd")
    return bool(getattr(module, "in_compiled_autograd_region", False))


# ---- inductor's generated code

_INDUCTOR = "torch._inductor.output_code"

_graph_class = optional(f"{_INDUCTOR}:CompiledFxGraph")


def class_of_generated_graphs() -> Any:
    """The class of what inductor makes of a graph, whose instances are called to run it; None if nothing was made."""
    return _graph_class() if _INDUCTOR in sys.modules else None


def generated_source(graph: Any) -> str:
    """The source of what inductor made of a graph."""
    return str(getattr(graph, "source_code", ""))


def source_graph(graph: Any) -> str:
    """The graph that inductor made *graph* of, as text."""
    return str(getattr(graph, "inductor_post_grad_graph_str", ""))
