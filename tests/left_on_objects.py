"""What there is of this package on somebody else's object, and on the classes through which it is tapped."""

from __future__ import annotations

from typing import Any


def left_on_object(thing: Any) -> list[str]:
    """Names of the attributes of *thing* and of its classes that are ours."""
    found = [name for name, value in vars(thing).items() if is_ours(value)]
    for kind in type(thing).__mro__:
        found += [f"{kind.__name__}.{name}" for name, value in vars(kind).items() if is_ours(value)]
    return found


def is_ours(value: Any) -> bool:
    """Whether *value* is a function of ours, an object of ours, or a bound method whose function is one."""
    return (
        hasattr(value, "__lightning_flops_patch__")
        or type(value).__module__.startswith("lightning_flops")
        or str(getattr(value, "__module__", "")).startswith("lightning_flops")
        or type(getattr(value, "__func__", None)).__module__.startswith("lightning_flops")
    )
