"""Operators: their kinds, their schemas, and how they are called."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from lightning_flops.instrument.torch_private.names import Attribute, take, take_later


class _NoOperator:
    """Stands for a class of operators in a torch that has none: nothing is an instance of it."""


if TYPE_CHECKING:
    from torch._ops import HigherOrderOperator as HigherOrderOperator
    from torch._ops import OpOverload as OpOverload
    from torch._ops import OpOverloadPacket as OpOverloadPacket
else:
    # The classes of public operators: no private name is needed for them.
    OpOverload = type(torch.ops.aten.mm.default)
    OpOverloadPacket = type(torch.ops.aten.mm)
    HigherOrderOperator = take(
        "torch._ops:HigherOrderOperator",
        _NoOperator,
        "does not tell operators of higher order from other functions: a FLOP formula for one is registered by its "
        "name alone, and what compiled backwards repeat of such an operator counts as backward",
    )

_OPERATOR = Attribute(
    "torch._ops:OpOverload",
    "_op",
    "does not show what an operator forwards its calls to: each is called a longer way, and counting takes longer",
    reported=False,
)

_schema_by_name: Any = take(
    "torch._C:_get_schema",
    None,
    "does not find an operator's schema by its name: nothing is lost by that",
    reported=False,
)

_parse_schema: Any = take(
    "torch._C:parse_schema",
    None,
    "does not read an operator's declaration: convolutions in traces of older versions are listed as uncounted",
    reported=False,
)

_SCHEMA = Attribute(
    "torch._ops:OpOverload",
    "_schema",
    "does not show an operator's schema: it is looked up by its name",
    reported=False,
)

_COMPOSITE = Attribute(
    "torch._ops:OpOverload",
    "_can_decompose",
    "does not tell which operators are made of others: in inference mode such operators are listed as uncounted",
)

_has_kernel: Any = take(
    "torch._C:_dispatch_has_kernel_for_dispatch_key",
    lambda name, key: True,
    "does not tell which operators have kernels of their own: in inference mode those made of others are listed as "
    "uncounted",
    reported=False,
)

_CustomOperator: Any = take(
    "torch.library:CustomOpDef",
    _NoOperator,
    "does not tell custom operators from other functions: a FLOP formula for one is registered by its name",
    reported=False,
)

_QUALIFIED_NAME = Attribute(
    "torch.library:CustomOpDef",
    "_qualname",
    "does not tell the name of a custom operator: it is read from what it prints as",
    reported=False,
)


def call_of(function: Any) -> Callable[..., Any]:
    """The function that the operator's ``__call__`` forwards to; an operator of higher order itself."""
    if not isinstance(function, OpOverload):
        return function  # type: ignore[no-any-return]
    return _OPERATOR.get(function, function)  # type: ignore[no-any-return]


def schema_of(function: OpOverload) -> Any:
    """The schema of an operator that has one.

    Raises:
        AttributeError: it cannot be found.
    """
    try:
        return _SCHEMA.of(function)
    except AttributeError:
        if _schema_by_name is None:
            raise
        full_name: str = function.name()  # type: ignore[no-untyped-call]
        name, _, overload = full_name.partition(".")
        return _schema_by_name(name, overload)


def declared_schema(text: str) -> Any:
    """The schema that *text* declares, in the notation of torch's own files; None if this torch cannot read it."""
    return None if _parse_schema is None else _parse_schema(text)


_REPLACES = re.compile(r"_native::(.+)_[a-z0-9]+_[0-9]+")
"""Torch names an operator that it runs in place of another by that, by what it is written in, and by a number."""


def replaced_by(function: OpOverload) -> OpOverload | None:
    """The operator of ``aten`` that *function* runs in place of, on some devices; None if it is none of those.

    They are one operator, as their declarations tell: ``_native::bmm_triton_0`` and ``aten::bmm``.
    """
    schema = schema_of(function)
    named = _REPLACES.fullmatch(schema.name)
    if named is None:
        return None
    # Of an overload the name follows that of the operator, after a line that the operator's name may have, too.
    whole = named.group(1)
    operator, _, overload = whole.rpartition("_")
    for name, wanted in ((whole, "default"), (operator, overload)):
        for one in overloads_named(f"aten::{name}") if name else ():
            original = schema_of(one)
            if (original.overload_name or "default") == wanted and _arguments(original) == _arguments(schema):
                return one
    return None


def _arguments(schema: Any) -> str:
    """What an operator takes and gives, as it is declared."""
    return str(schema).partition("(")[2]


def overloads_named(qualified_name: str) -> list[OpOverload]:
    """All overloads of the operator ``namespace::name``; empty where this torch knows no such operator."""
    namespace, _, name = qualified_name.partition("::")
    try:
        packet = getattr(getattr(torch.ops, namespace), name)
    except (AttributeError, RuntimeError):
        return []
    if not isinstance(packet, OpOverloadPacket):
        return []
    found = []
    for overload in packet.overloads():  # type: ignore[no-untyped-call]
        try:
            found.append(getattr(packet, overload))
        except (AttributeError, RuntimeError):  # one that only TorchScript knows
            continue
    return found


def is_composite(function: OpOverload) -> bool:
    """Whether the operator is no more than others, which ``function.decompose`` runs; False if torch does not tell."""
    try:
        # Some have a kernel too, of other bits.
        return bool(_COMPOSITE.of(function)()) and not _has_kernel(function.name(), "CPU")  # type: ignore[no-untyped-call]
    except (AttributeError, RuntimeError):
        return False


def packet_name(packet: OpOverloadPacket) -> str:
    """``namespace::name`` of an operator in all its overloads."""
    return str(packet).replace(".", "::", 1)  # it prints as namespace.name


def custom_operator_name(target: Any) -> str | None:
    """``namespace::name`` of what ``torch.library.custom_op`` and ``triton_op`` return; None for anything else."""
    if not isinstance(target, _CustomOperator):
        return None
    printed = repr(target).removeprefix("<CustomOpDef(").removesuffix(")>")
    name = str(_QUALIFIED_NAME.get(target, printed))
    return name if "::" in name else None


def higher_order_name(function: Any) -> str:
    """Name of an operator of higher order, without a namespace."""
    name = getattr(function, "name", None)
    return str(name()) if callable(name) else str(function)


# ---- Triton

_kernel_table = take_later(
    "torch._higher_order_ops.triton_kernel_wrap:kernel_side_table",
    None,
    "does not tell which Triton kernel compiled code launches: such launches are listed as uncounted",
)


def triton_kernel(index: int) -> Any:
    """The Triton kernel that compiled code knows by this number; None where torch does not tell."""
    table = _kernel_table()
    return None if table is None else table.get_kernel(index)
