"""The error boundary between torch and us: what fails on our side stays there. The user's Ctrl-C passes through.

``error_boundary`` decorates a method that torch, or a function that we replaced, calls within the user's step.
``listening`` does the same for a function of a library or the user that we replace: we are called before and after it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

from lightning_flops.instrument.torch_private.compiler import hide

_Method = TypeVar("_Method", bound=Callable[..., None])

Failed = Callable[[str, Exception], None]
"""Gets the place where something of ours failed, and the error; it never raises."""


def error_boundary(where: str) -> Callable[[_Method], _Method]:
    """Catches the errors of a method, and gives them to the ``_failed`` of the method's owner.

    *where* is what the method does, in words for the report: "Counting failed in ...".
    """

    def guard(method: _Method) -> _Method:
        @functools.wraps(method)
        def enter(owner: Any, /, *args: Any, **kwargs: Any) -> None:
            try:
                method(owner, *args, **kwargs)
            except Exception as error:
                owner._failed(where, error)

        return enter  # type: ignore[return-value]

    return guard


def listening(
    original: Callable[..., Any],
    *,
    before: Callable[..., Callable[[], None] | None] | None = None,
    after: Callable[..., None] | None = None,
    failed: Callable[[Exception], None],
) -> Callable[..., Any]:
    """A function that runs *original*, and calls us before and after it.

    Args:
        original: gets the function's arguments; the function returns or raises what *original* does.
        before: is called first, with the same arguments. It may return a function, which is called when *original* has
            ended, also if it raised.
        after: is called with the same arguments when *original* has returned.
        failed: gets what *before* or *after* raised; it never raises.
    """

    def call(*args: Any, **kwargs: Any) -> Any:
        ends = None if before is None else _answer(failed, before, *args, **kwargs)
        try:
            result = original(*args, **kwargs)
        finally:
            if ends is not None:
                _answer(failed, ends)
        if after is not None:
            _answer(failed, after, *args, **kwargs)
        return result

    return call


def _answer(failed: Callable[[Exception], None], ask: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    try:
        return ask(*args, **kwargs)
    except Exception as error:
        failed(error)
        return None


hide(_answer)
