"""What there is of this package on somebody else's object, and on the classes through which it is tapped."""

from __future__ import annotations

from types import NoneType
from typing import Any

_PLAIN = frozenset({NoneType, bool, int, float, str, bytes, tuple, list, dict, set})
"""Types whose values are never ours: nobody can write an attribute on them."""


def left_on_object(thing: Any) -> list[str]:
    """Names of the attributes of *thing* that are ours, as it shows them: of its own, and of its classes."""
    found = [name for name, value in vars(thing).items() if is_ours(value)]
    return found + [name for name in left_on_classes(thing) if is_ours(getattr(thing, name.rpartition(".")[2]))]


def left_on_classes(thing: Any) -> list[str]:
    """Names of the attributes of *thing*'s classes that are ours, for whichever instance."""
    return [
        f"{kind.__name__}.{name}"
        for kind in type(thing).__mro__
        for name, value in vars(kind).items()
        if is_ours(value)
    ]


def is_ours(value: Any) -> bool:
    """Whether *value* is a function of ours, an object of ours, or a bound method whose function is one."""
    if type(value) in _PLAIN:
        return False
    return (
        hasattr(value, "__lightning_flops_patch__")
        or type(value).__module__.startswith("lightning_flops")
        or str(getattr(value, "__module__", "")).startswith("lightning_flops")
        or type(getattr(value, "__func__", None)).__module__.startswith("lightning_flops")
    )
