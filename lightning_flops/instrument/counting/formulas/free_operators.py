"""Which operators spend no FLOPs as this package counts them, and what shows it.

An operator is free when there is evidence for it, looked for in this order:

1. people have read it: its name is in ``FREE_NAMES``;
2. it takes and makes no tensor;
3. it is torch's own, and torch says what it is: by a tag (element by element, a reduction, a copy of a view, a change
   of a view in place), or by a schema whose results all are views;
4. it is the list form (``_foreach_…``) of an operator that is free by 1 or 3.

Rules 2 to 4 stop at names that speak of a product (``says_heavy``). For an operator that is not torch's own,
neither its name nor its schema shows anything: its author registers a formula, or 0.
"""

from __future__ import annotations

import re
from typing import Any, Literal

import torch

from lightning_flops.instrument.counting.formulas.free_names import FREE_NAMES
from lightning_flops.instrument.torch_private.operators import schema_of

Evidence = Literal["read", "no tensors", "tag", "view", "list form"]
"""What shows that an operator is free."""

TORCH_NAMESPACES = frozenset(name.partition("::")[0] for name in FREE_NAMES)
"""Namespaces that torch itself fills."""

_HEAVY_WORDS = re.compile(
    # Short words stand alone or next to an underscore, a digit or their usual neighbours; long ones anywhere.
    r"(?:^|[_\d:.])(?:s|sp|add|badd|addb|b|int|f16|grouped|qk|av)?(?:mm|bmm|mv)(?:$|[_\d])"
    r"|matmul|gemm|gemv|conv(?!ert)|attention|attn|flash|(?:^|_)sdpa?(?:$|_)|(?<!bi)(?<!tri)linear(?!1d)|einsum"
    r"|lstm|(?:^|_)gru|(?:^|_|\d)rnn|(?:^|_)dot(?:$|_)|outer_?prod|tensordot|bilinear(?!2d)|trilinear(?!3d)"
    r"|cholesky|lstsq|(?:^|_)svd|(?:^|_)qr(?:$|_)|eig(?:h|vals)|(?<!re)solve|(?:^|_)fft|matrix_(?:exp|power)"
    r"|ssm|selective_scan|triton|(?:^|_)moe(?:$|_)|(?:^|_)mlp(?:$|_)|fused_(?:dense|experts)",
    re.IGNORECASE,
)

# Older versions of torch lack some.
_TAGS = frozenset(
    tag
    for tag in (getattr(torch.Tag, name, None) for name in ("pointwise", "reduction", "view_copy", "inplace_view"))
    if tag is not None
)
_LIST_FORM = re.compile(r"_foreach_(\w+?)_?$")


def says_heavy(name: str) -> bool:
    """Whether a name (without namespace) speaks of a product: mm, conv, attention, lstm, solve and the like."""
    return _HEAVY_WORDS.search(name) is not None


def evidence_of(qualified_name: str, operator: Any) -> Evidence | None:
    """What shows that *operator*, an ``OpOverload`` named ``namespace::name``, spends no FLOPs; None: nothing does."""
    namespace, _, name = qualified_name.partition("::")
    if _was_read(qualified_name):
        return "read"
    if says_heavy(name):
        return None
    if not _has_tensors(operator):
        return "no tensors"
    if namespace not in TORCH_NAMESPACES:
        return None
    if _has_tag(namespace, name):
        return "tag"
    if _makes_views(operator):
        return "view"
    list_form = _LIST_FORM.match(name) if namespace == "aten" else None
    if list_form is not None and (_was_read(f"aten::{list_form[1]}") or _has_tag("aten", list_form[1])):
        return "list form"
    return None


def _was_read(qualified_name: str) -> bool:
    return qualified_name in FREE_NAMES or (qualified_name.endswith("_") and qualified_name.rstrip("_") in FREE_NAMES)


def _makes_views(operator: Any) -> bool:
    """Whether all that the operator returns are views of what it is given, and it writes nothing."""
    schema = schema_of(operator)
    aliases = [value.alias_info for value in schema.returns]
    written = any(value.alias_info is not None and value.alias_info.is_write for value in schema.arguments)
    return bool(aliases) and not written and all(alias is not None and not alias.is_write for alias in aliases)


def _has_tag(namespace: str, name: str) -> bool:
    """Whether an overload of the operator, or of the one it is the in-place form of, has such a tag."""
    operators = getattr(torch.ops, namespace)
    for spelled in {name, name.rstrip("_")}:
        packet = getattr(operators, spelled, None)
        try:
            if packet is not None and any(_TAGS.intersection(getattr(packet, one).tags) for one in packet.overloads()):
                return True
        except (AttributeError, RuntimeError):  # an overload that only TorchScript knows
            continue
    return False


def _has_tensors(operator: Any) -> bool:
    schema = schema_of(operator)
    if "(...)" in str(schema):  # it takes or returns anything
        return True
    return any("Tensor" in str(value.type) for value in (*schema.arguments, *schema.returns))
