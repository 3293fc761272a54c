"""What there is of this package on a user's or a framework's object, and on its classes, which it hooks into."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import NoneType
from typing import Any

import lightning_flops

_PACKAGE = str(Path(lightning_flops.__file__).parent)
_PLAIN = frozenset({NoneType, bool, int, float, str, bytes, tuple, list, dict, set})
"""Types whose values are never ours: no attribute can be written on them."""


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
    code = getattr(getattr(value, "__func__", value), "__code__", None)
    return (
        hasattr(value, "__lightning_flops_patch__")
        or getattr(code, "co_filename", "").startswith(_PACKAGE)
        or type(value).__module__.startswith("lightning_flops")
        or str(getattr(value, "__module__", "")).startswith("lightning_flops")
        or type(getattr(value, "__func__", None)).__module__.startswith("lightning_flops")
    )


def written_on(objects: Mapping[str, Any], net: Any) -> dict[str, Any]:
    """Everything of *objects* and of the modules and parameters of *net* that a profiler might write on.

    Names and numbers alone, so that what is found in two processes can be compared.
    """
    modules = list(net.named_modules())
    named = {
        **objects,
        **{f"module {name}": module for name, module in modules},
        **{f"parameter {name}": parameter for name, parameter in net.named_parameters()},
    }
    ours = {name: left_on_object(thing) + left_on_classes(thing) for name, thing in named.items()}
    return {
        **{name: sorted(vars(thing)) for name, thing in named.items()},
        "ours": {name: found for name, found in ours.items() if found},
        "module hooks": {
            f"{name}.{table}": len(hooks)
            for name, module in modules
            for table, hooks in sorted(vars(module).items())
            if table.endswith("_hooks") and isinstance(hooks, dict)
        },
    }
