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

from lightning_flops.instrument.torch_private.names import optional
from lightning_flops.text.printable import package_logger

logger = package_logger(__name__)

_Function = TypeVar("_Function", bound=Callable[..., Any])

_EVAL_FRAME_C = "torch._C._dynamo.eval_frame"
_mark: Any = optional(f"{_EVAL_FRAME_C}:set_code_exec_strategy")()
_action: Any = optional(f"{_EVAL_FRAME_C}:_FrameAction")()
_strategy: Any = optional(f"{_EVAL_FRAME_C}:_FrameExecStrategy")()


def _strategies() -> tuple[Any, Any]:
    """Marks of a code object: neither it nor what it calls is compiled, or it alone is not; None if torch has none."""
    if None in (_mark, _action, _strategy):
        return None, None
    try:
        return _strategy(_action.SKIP, _action.SKIP), _strategy(_action.SKIP, _action.DEFAULT)
    except (AttributeError, TypeError):
        return None, None


_SKIP_ALL, _SKIP_ONE = _strategies()


def hide(function: Callable[..., Any], *, alone: bool = False) -> bool:
    """Marks one of our functions, so that its calls, and what they call, are not compiled. Returns whether it could.

    The mark is on the function's code and stays there: it is for code of this package only.

    Args:
        function: has the code that is marked.
        alone: what it calls is compiled as it would be without it: it calls the user's functions.
    """
    strategy = _SKIP_ONE if alone else _SKIP_ALL
    if strategy is None:
        return False
    try:
        _mark(function.__code__, strategy)
    except (AttributeError, TypeError):  # it has no code of its own, such as a callable object
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


def hidden(function: _Function) -> _Function:
    """A function that does what *function* does, and that torch never compiles.

    It is *function* itself where it can be marked; else torch's wrapper around it, which costs a microsecond a call.
    """
    if hide(function) or not can_compile():
        return function
    disable: Any = torch.compiler.disable
    return disable(function)  # type: ignore[no-any-return]


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


def leave_compiled_code() -> None:
    """What calls us is compiled in two parts, and we run between them as we are; nothing where it is not compiled.

    Our caller must be hidden.
    """
    if is_dynamo_compiling():
        torch._dynamo.graph_break()


# ---- calls of what it has compiled

_EVAL_FRAME = "torch._dynamo.eval_frame"
_CALL = "compile_wrapper"
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
        if frame.f_code.co_name == _CALL and frame.f_globals.get("__name__") == _EVAL_FRAME:
            return True
        frame = frame.f_back
    return False


# ---- when it compiles

_handler = optional("torch._dynamo.callback:callback_handler")


def compiler_callbacks() -> Any:
    """Torch's callbacks for the start and end of a compilation; None if this torch has none, or cannot compile."""
    return _handler() if can_compile() else None


def was_used() -> bool:
    """Whether the compiler was loaded: before that, nothing can have been compiled."""
    return "torch._dynamo" in sys.modules


# ---- modules and regions it has compiled

COMPILED_CALL = "_compiled_call_impl"
"""Attribute of a module that ``module.compile()`` sets. If it is not None, calling the module calls it."""

IS_EAGER = "_is_eager_call"
"""Attribute of what we put there ourselves, around a call that is not compiled."""


def is_compiled_in_place(module: torch.nn.Module) -> bool:
    """Whether ``module.compile()`` was called: no hook fires inside of such a module."""
    call = module.__dict__.get(COMPILED_CALL)
    return call is not None and not getattr(call, IS_EAGER, False)


def eager_call(module: torch.nn.Module) -> Callable[..., Any]:
    """What runs when *module* is called and is not compiled in place: its hooks and its forward."""
    call: Callable[..., Any] = module._call_impl
    return call


COMPILED_FUNCTION = "CompiledFunction"
"""Name of the ``autograd.Function`` that a compiled region's backward is."""

BACKWARD_ENTRY = "_backward_impl"
"""Attribute of that class which calls its backward graph with ``(ctx, inputs)``."""


def is_compiled(function: Any) -> bool:
    """Whether an ``autograd.Function`` is a compiled region's."""
    return getattr(function, "__name__", "") == COMPILED_FUNCTION


def shows_its_backward(function: Any) -> bool:
    """Whether the calls of a compiled region's backward graph can be seen, at ``BACKWARD_ENTRY``."""
    return getattr(function, BACKWARD_ENTRY, None) is not None


_backward_module = optional("torch._dynamo.compiled_autograd:extract_bw_module")


def backward_graph(function: Any) -> torch.fx.Graph:
    """The backward graph of a compiled region.

    Raises:
        LookupError: torch does not show it.
        Exception: whatever torch raises where it has kept none.
    """
    extract = _backward_module()
    if extract is None:
        raise LookupError("this torch does not show the backward graphs of compiled code")
    graph: torch.fx.Graph = extract(function).graph
    return graph


# ---- backwards that are compiled as a whole

_COMPILED_AUTOGRAD = "torch._dynamo.compiled_autograd"


def whole_backward_is_compiled() -> bool:
    """Whether all of the backward that runs now is compiled code: then autograd runs no nodes."""
    module = sys.modules.get(_COMPILED_AUTOGRAD)
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
