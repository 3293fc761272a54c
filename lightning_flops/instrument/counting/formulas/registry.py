"""From an operator to what is known about it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch

from lightning_flops.instrument.counting.formulas.attention import ATTENTION_RULES, HIGHER_ORDER_RULES
from lightning_flops.instrument.counting.formulas.contract import (
    Arguments,
    Entry,
    Formula,
    Keywords,
    Kind,
    Rule,
    Unreadable,
    Work,
    bind_dtype,
    bind_formula,
    dtype_of_first_tensor,
    dtype_place,
    no_flops,
    tensors_in,
    whole_flops,
)
from lightning_flops.instrument.counting.formulas.convolution import CONVOLUTION_OVERLOAD_RULES, CONVOLUTION_RULES
from lightning_flops.instrument.counting.formulas.estimates import ESTIMATE_RULES
from lightning_flops.instrument.counting.formulas.free_operators import evidence_of, says_heavy
from lightning_flops.instrument.counting.formulas.libraries import LIBRARY_RULES
from lightning_flops.instrument.counting.formulas.matmul import MATMUL_RULES
from lightning_flops.instrument.counting.formulas.quantized import QUANTIZED_OVERLOAD_RULES, QUANTIZED_RULES
from lightning_flops.instrument.counting.formulas.recurrent import RECURRENT_OVERLOAD_RULES, RECURRENT_RULES
from lightning_flops.instrument.torch_private.operators import (
    OpOverload,
    higher_order_name,
    is_composite,
    replaced_by,
    schema_of,
    triton_kernel,
)

RULES: Mapping[str, Rule] = {
    **MATMUL_RULES,
    **CONVOLUTION_RULES,
    **ATTENTION_RULES,
    **RECURRENT_RULES,
    **ESTIMATE_RULES,
    **QUANTIZED_RULES,
    **LIBRARY_RULES,
}
"""Rules of whole operators, all overloads alike: ``aten::mm``."""

OVERLOAD_RULES: Mapping[str, Rule] = {
    **CONVOLUTION_OVERLOAD_RULES,
    **RECURRENT_OVERLOAD_RULES,
    **QUANTIZED_OVERLOAD_RULES,
}
"""Rules of single overloads, ``aten::lstm.input``; the default overload has no suffix. They win over ``RULES``."""

user_formulas: dict[str, Formula] = {}
"""Formulas users registered, by ``namespace::name`` or ``namespace::name.overload``."""

heard_kernels: set[int] = set()
"""Ids of the Triton kernels that users registered: their launches are heard of, whoever launches them."""

_CALLS_ANOTHER = {
    # position of the operator that is called, where its arguments start, where its result is in what comes out
    "out_dtype": (0, 2, None),
    "run_and_save_rng_state": (0, 1, 1),
    "run_with_rng_state": (1, 2, None),
    "graphsafe_run_with_rng_state": (0, 1, None),
    "with_effects": (1, 2, 1),
}
"""Higher-order operators that call the operator they are handed, with something set up around it."""

_entries: dict[Any, Entry] = {}


def forget_entries() -> None:
    """Forget what was looked up, because a formula was registered."""
    _entries.clear()


def formulas_without_operator() -> list[str]:
    """Names for which users registered a formula and under which torch knows no operator: misspelled, or not loaded."""
    return [name for name in sorted(user_formulas) if not _exists(name)]


def _exists(name: str) -> bool:
    namespace, _, rest = name.partition("::")
    operator, _, overload = rest.partition(".")
    try:
        packet = getattr(getattr(torch.ops, namespace), operator)
        return not overload or overload in packet.overloads()
    except (AttributeError, RuntimeError):
        return False


def lookup(operator: Any) -> Entry:
    """What is known about *operator*, an ``OpOverload`` or a higher-order operator; the same object at every call.

    A user's formula wins over ours, ours over one registered with ``torch.utils.flop_counter``, any over "free".
    """
    entry = _entries.get(operator)
    if entry is None:
        entry = _entries[operator] = _find(operator)
    return entry


def _find(operator: Any) -> Entry:
    if not isinstance(operator, OpOverload):
        return _find_higher_order(operator)
    schema = schema_of(operator)
    qualified = schema.name  # "aten::mm"
    overload = schema.overload_name
    full = f"{qualified}.{overload}" if overload else qualified
    name = qualified.replace("::", ".", 1)
    user = user_formulas.get(full) or user_formulas.get(qualified)
    if user is not None:
        return Entry(name, "formula", user, dtype_of_first_tensor)
    replaced = replaced_by(operator)
    if replaced is not None:
        return replace(lookup(replaced), name=name)
    rule = OVERLOAD_RULES.get(full) or RULES.get(qualified)
    if rule is not None:
        try:
            formula = bind_formula(rule, schema)
        except LookupError:
            # A torch version whose schema has other arguments: better listed as uncounted than counted wrong.
            return _unknown(name, operator)
        try:
            dtype_of, place = bind_dtype(rule, schema), dtype_place(rule, schema)
        except (LookupError, ValueError):
            dtype_of, place = dtype_of_first_tensor, None
        return Entry(name, "formula", formula, dtype_of, rule.estimate, dtype_place=place)
    from_torch = _formula_of_torch(operator)
    if from_torch is not None:
        return Entry(name, "formula", from_torch, dtype_of_first_tensor)
    if evidence_of(qualified, operator) is not None:
        return Entry(name, "free", no_flops, dtype_of_first_tensor)
    return _unknown(name, operator)


def _unknown(name: str, operator: Any) -> Entry:
    return Entry(name, "unknown", no_flops, dtype_of_first_tensor, composite=is_composite(operator))


def _find_higher_order(operator: Any) -> Entry:
    short = higher_order_name(operator)
    name = f"higher_order.{short}"
    user = user_formulas.get(f"higher_order::{short}")
    if user is not None:
        return Entry(name, "formula", user, dtype_of_first_tensor)
    rule = HIGHER_ORDER_RULES.get(short)
    if rule is not None:
        return Entry(name, "formula", bind_formula(rule, None), dtype_of_first_tensor, rule.estimate)
    if short in _CALLS_ANOTHER:
        return Entry(name, "formula", _flops_of_called(*_CALLS_ANOTHER[short]), dtype_of_first_tensor)
    if short.startswith("triton_kernel_wrapper"):
        return Entry(name, "formula", _no_flops_if_heard, dtype_of_first_tensor)
    return Entry(name, "unknown", no_flops, dtype_of_first_tensor)


def _flops_of_called(place: int, start: int, result: int | None) -> Formula:
    """FLOPs of the operator that a call hands over at *place*."""

    def flops(args: Arguments, kwargs: Keywords, out: Any) -> int | Work:
        called = lookup(args[place])
        if called.kind == "unknown":
            raise Unreadable(f"it calls {called.name}, which has no formula")
        return called.compute(args[start:], kwargs, out if result is None else out[result])

    return flops


def _no_flops_if_heard(args: Arguments, kwargs: Keywords, out: Any) -> int:
    """Zero for a launch of a Triton kernel with a formula, because its ``run`` is counted."""
    kernel = triton_kernel(kwargs["kernel_idx"])
    if kernel is None:
        raise Unreadable("this torch does not tell which Triton kernel is launched")
    if id(kernel) in heard_kernels:
        return 0
    name = getattr(getattr(kernel, "fn", kernel), "__name__", type(kernel).__name__)
    raise Unreadable(f"no formula is registered for the Triton kernel {name}")


def _formula_of_torch(operator: OpOverload) -> Formula | None:
    """A formula registered with ``torch.utils.flop_counter.register_flop_formula``, in our signature."""
    module = sys.modules.get("torch.utils.flop_counter")  # not imported: nobody registered anything
    registered: Mapping[Any, Callable[..., Any]] = getattr(module, "flop_registry", {})
    formula = registered.get(operator.overloadpacket)
    return None if formula is None else as_our_formula(formula)


def as_our_formula(formula: Callable[..., Any]) -> Formula:
    """Torch's signature ``f(*args, out_val=out, **kwargs)`` in ours."""

    def call(args: Arguments, kwargs: Keywords, out: Any) -> int | Work:
        return whole_flops(formula(*args, **kwargs, out_val=out))

    return call


def hides_flops(name: str, args: Arguments, kwargs: Keywords, out: Any) -> bool:
    """Whether a call of an operator that nothing is known about may have spent FLOPs, so that counts are lower bounds.

    It may if it takes or makes a floating-point, complex or quantized tensor. One that works on integers alone does
    not, with two exceptions: its name (``namespace.name``) speaks of a product (mm, conv, attention …), or it looks
    like a product of quantized numbers, because two of its 8-bit inputs of at least two dimensions do not broadcast.
    """
    if says_heavy(name):
        return True
    shapes: list[tuple[int, ...]] = []
    for tensor in tensors_in((*args, *kwargs.values(), *(out if isinstance(out, (list, tuple)) else (out,)))):
        dtype = tensor.dtype
        if dtype.is_floating_point or dtype.is_complex or tensor.is_quantized:
            return True
    for tensor in tensors_in((*args, *kwargs.values())):
        if tensor.dtype in (torch.int8, torch.uint8) and not tensor.is_nested and tensor.dim() >= 2:
            shapes.append(tuple(tensor.shape))
    return any(not _broadcast(shapes[0], shape) for shape in shapes[1:])


def _broadcast(left: tuple[int, ...], right: tuple[int, ...]) -> bool:
    return all(a == b or a == 1 or b == 1 for a, b in zip(reversed(left), reversed(right), strict=False))


__all__ = ["Entry", "Formula", "Kind", "Work", "formulas_without_operator", "hides_flops", "lookup"]
