"""Operators: their kinds, their schemas, and how they are called."""

from __future__ import annotations

import re
from typing import Any

import torch

from lightning_flops.measure.torch_private.names import optional, take

# The classes of public operators: no private name is needed for them.
OpOverload: Any = type(torch.ops.aten.mm.default)
OpOverloadPacket: Any = type(torch.ops.aten.mm)
HigherOrderOperator: Any = take("torch._ops:HigherOrderOperator")

_has_kernel = optional("torch._C:_dispatch_has_kernel_for_dispatch_key", lambda name, key: True)
_CustomOperator = optional("torch.library:CustomOpDef", ())


def schema_of(function: Any) -> Any:
    """The schema of an operator that has one."""
    return function._schema


_REPLACES = re.compile(r"_native::(.+)_[a-z0-9]+_[0-9]+")
"""Torch names an operator that it runs in place of another by that, by what it is written in, and by a number."""


def replaced_by(function: Any) -> Any:
    """The operator of ``aten`` that *function* runs in place of, on some devices; None if it is none of those.

    They are one operator: ``_native::bmm_triton_0`` and ``aten::bmm``.
    """
    named = _REPLACES.fullmatch(schema_of(function).name)
    if named is None:
        return None
    # Of an overload the name follows that of the operator, after a line that the operator's name may have, too.
    whole = named.group(1)
    operator, _, overload = whole.rpartition("_")
    for name, wanted in ((whole, ""), (operator, overload)):
        for one in overloads_named(f"aten::{name}") if name else ():
            if schema_of(one).overload_name == wanted:
                return one
    return None


def overloads_named(qualified_name: str) -> list[Any]:
    """All overloads of the operator ``namespace::name``; empty where this torch knows no such operator."""
    namespace, _, name = qualified_name.partition("::")
    try:
        packet = getattr(getattr(torch.ops, namespace), name)
    except (AttributeError, RuntimeError):
        return []
    if not isinstance(packet, OpOverloadPacket):
        return []
    found = []
    for overload in packet.overloads():
        try:
            found.append(getattr(packet, overload))
        except (AttributeError, RuntimeError):  # one that only TorchScript knows
            continue
    return found


def is_composite(function: Any) -> bool:
    """Whether the operator is no more than others, which ``function.decompose`` runs; False if torch does not say."""
    try:
        # Some have a kernel too, of other bits.
        return bool(function._can_decompose()) and not _has_kernel()(function.name(), "CPU")
    except (AttributeError, RuntimeError):
        return False


def packet_name(packet: Any) -> str:
    """``namespace::name`` of an operator in all its overloads."""
    return str(packet).replace(".", "::", 1)  # it prints as namespace.name


def custom_operator_name(target: Any) -> str | None:
    """``namespace::name`` of what ``torch.library.custom_op`` and ``triton_op`` return; None for anything else."""
    return str(target._qualname) if isinstance(target, _CustomOperator()) else None


def higher_order_name(function: Any) -> str:
    """Name of an operator of higher order, without a namespace."""
    name = getattr(function, "name", None)
    return str(name()) if callable(name) else str(function)


# ---- Triton

_kernel_table = optional("torch._higher_order_ops.triton_kernel_wrap:kernel_side_table")


def triton_kernel(index: int) -> Any:
    """The Triton kernel that compiled code knows by this number; None where torch does not say."""
    table = _kernel_table()
    return None if table is None else table.get_kernel(index)
