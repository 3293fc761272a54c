"""What an object is made of, to compare a copy with the copy of another."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import torch


def _goes_on(thing: Any) -> str | None:
    return None


def made_of(thing: Any, *, known_as: Callable[[Any], str | None] = _goes_on) -> dict[str, str]:
    """The class of everything that is reached from *thing* by attributes, keys and indices, by the way to it.

    What *known_as* has a name for is not looked into.
    """
    found: dict[str, str] = {}
    pending, seen, kept = [("", thing)], set[int](), []
    while pending:
        path, one = pending.pop()
        name = known_as(one)
        if name is not None:
            found[path] = name
            continue
        found[path] = kind = f"{type(one).__module__}.{type(one).__qualname__}"
        if isinstance(one, types.MethodType):
            found[path] = f"{kind} {one.__func__.__qualname__}"
            pending.append((f"{path}.__self__", one.__self__))
            continue  # the rest that it shows is its function's
        if id(one) in seen or isinstance(one, (type, types.ModuleType, torch.Tensor)):
            continue
        seen.add(id(one))
        kept.append(one)  # as long as ids are compared
        if isinstance(one, dict):
            pending += [(f"{path}[{key!r}]", value) for key, value in one.items() if isinstance(key, (str, int))]
        elif isinstance(one, (list, tuple)):
            pending += [(f"{path}[{index}]", value) for index, value in enumerate(one)]
        pending += [(f"{path}.{name}", value) for name, value in getattr(one, "__dict__", {}).items()]
    return found
