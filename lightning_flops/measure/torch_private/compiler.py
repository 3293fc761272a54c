"""torch.compile: functions of ours kept out of it, when it compiles, and what it keeps of what it has compiled."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch.compiler import is_dynamo_compiling

from lightning_flops.measure.torch_private.names import optional, take
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


def was_used() -> bool:
    """Whether the compiler was loaded: before that, nothing can have been compiled."""
    return "torch._dynamo" in sys.modules


def leave_compiled_code() -> None:
    """What calls us is compiled in two parts, and we run between them as we are; nothing where it is not compiled.

    Our caller must be hidden.
    """
    if is_dynamo_compiling():
        torch._dynamo.graph_break()


compiler_callbacks = optional("torch._dynamo.callback:callback_handler")
"""Answers with torch's callbacks for the start and end of a compilation; with None where torch cannot compile."""

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


# ---- inductor's generated code

_INDUCTOR = "torch._inductor.output_code"

_graph_class = optional(f"{_INDUCTOR}:CompiledFxGraph")


def class_of_generated_graphs() -> Any:
    """The class of what inductor makes of a graph, whose instances are called to run it; None if nothing was made.

    An instance's ``source_code`` and ``inductor_post_grad_graph_str`` are what was made and what of, as text.
    """
    return _graph_class() if _INDUCTOR in sys.modules else None
