"""Keeps functions of ours out of torch's compiler, without a wrapper that every call would pay for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

from lightning_flops.text.printable import package_logger

logger = package_logger(__name__)

_Function = TypeVar("_Function", bound=Callable[..., Any])


def _skip_strategy() -> tuple[Callable[[Any, Any], None], Any] | None:
    """How to mark a code object so that neither it nor what it calls is compiled; None where torch has no such mark."""
    try:
        from torch._C._dynamo import eval_frame

        skip = eval_frame._FrameAction.SKIP
        return eval_frame.set_code_exec_strategy, eval_frame._FrameExecStrategy(skip, skip)
    except (ImportError, AttributeError, TypeError):
        logger.debug("this torch (%s) cannot mark code as not to be compiled", torch.__version__, exc_info=True)
        return None


_SKIP = _skip_strategy()


def hide(function: Callable[..., Any]) -> bool:
    """Marks a function of ours, so that calls of it, and what they call, are not compiled; whether that was possible.

    The mark is on the function's code and stays there: it is for code of this package only.
    """
    if _SKIP is None:
        return False
    mark, strategy = _SKIP
    try:
        mark(function.__code__, strategy)
    except (AttributeError, TypeError):  # it has no code of its own, such as a callable object
        logger.debug("%r could not be marked as not to be compiled", function, exc_info=True)
        return False
    return True


def hidden(function: _Function) -> _Function:
    """A function that torch does not compile when it is called, and that does what *function* does.

    It is *function* itself where it can be marked; else torch's wrapper around it, which costs a microsecond a call.
    The mark, unlike the wrapper, does not keep *function* from being read into a caller that is being compiled.
    """
    if hide(function):
        return function
    disable: Any = torch.compiler.disable
    wrapped: _Function = disable(function)
    return wrapped
