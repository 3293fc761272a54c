"""How a private name of torch is looked up: once. Counting is refused where one that it needs is missing."""

from __future__ import annotations

import functools
from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch

from lightning_flops.errors import LightningFlopsError

MISSING: list[str] = []
"""Names, as ``module:attribute``, that counting needs and this torch lacks."""


_TESTED = (2, 13)
"""The newest torch that all tests have run with."""


def untested() -> tuple[str, ...]:
    """A sentence for the report where this torch is newer than all that were tested."""
    if tuple(map(int, torch.__version__.split(".")[:2])) <= _TESTED:
        return ()
    tested = ".".join(map(str, _TESTED))
    return (f"This torch ({torch.__version__}) is newer than {tested}, the newest that counting was tested with.",)


def look_up(path: str) -> Any:
    """What torch has under *path*, ``module:attribute``.

    Raises:
        Exception: it has nothing there; importing a part of torch may raise anything.
    """
    module, _, attributes = path.partition(":")
    found: Any = import_module(module)
    for name in attributes.split("."):
        found = getattr(found, name)
    return found


def take(path: str) -> Any:
    """What torch has under *path*, which counting needs, looked up now; None, and ``MISSING``, if it has nothing."""
    try:
        return look_up(path)
    except Exception:
        MISSING.append(path)
        return None


def optional(path: str, stand_in: Any = None) -> Callable[[], Any]:
    """A function that returns what torch has under *path*, or *stand_in*, looked up when it is first called."""

    @functools.cache
    def found() -> Any:
        try:
            return look_up(path)
        except Exception:
            return stand_in

    return found


def require_all() -> None:
    """Checks that torch has all that counting needs.

    Raises:
        LightningFlopsError: it does not.
    """
    if MISSING:
        raise LightningFlopsError(
            f"FLOPs cannot be counted: this torch ({torch.__version__}) has no {', '.join(MISSING)}."
        )
