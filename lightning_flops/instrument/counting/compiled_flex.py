"""Flex attention in code that inductor made: its kernels call no operator, but the graph they were made from is kept.

It is kept as text, with the shape of each tensor. The values of a block mask are read from the graph's inputs.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from lightning_flops.instrument.counting.formulas import Unreadable

_ANNOTATED = re.compile(r'(\w+): "(\w+)(?:\[([^\]]*)\]|\((\w+)\))')
"""A tensor with its dtype and shape, or a number: ``arg0_1: "f32[1, 2, 256, 16][…]cpu"``, ``arg1_1: "Sym(s0)"``."""

_CALL = re.compile(r"= torch\.ops\.higher_order\.(flex_attention(?:_backward)?)(\(.*\));  ")

_DTYPES = {"f64": torch.float64, "f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}


class _Graph(NamedTuple):
    """What the text of a graph says."""

    inputs: list[str]
    tensors: dict[str, tuple[str, str]]
    """Dtype and sizes of each tensor, as written."""
    symbols: dict[str, str]
    """Names of the inputs that are sizes, by the symbols that stand for them."""
    calls: list[tuple[str, ast.Call]]


@lru_cache(maxsize=64)
def _read(text: str) -> _Graph:
    own = text.partition("\n    class ")[0]  # the functions on scores and masks follow
    signature = next((line for line in own.splitlines() if "def forward(" in line), "")
    inputs = _ANNOTATED.findall(signature)
    calls = [(name, ast.parse(f"call{written}", mode="eval").body) for name, written in _CALL.findall(own)]
    return _Graph(
        [name for name, *_ in inputs],
        {name: (dtype, sizes) for name, dtype, sizes, symbol in _ANNOTATED.findall(own) if not symbol},
        {symbol: name for name, _, _, symbol in inputs if symbol},
        [(name, call) for name, call in calls if isinstance(call, ast.Call)],
    )


def flex_calls(text: str, inputs: Sequence[Any]) -> Iterator[tuple[Any, tuple[Any, ...]]]:
    """The calls of flex attention in a graph that is called with *inputs*: the operator, and its arguments.

    Most of its tensors hold no values.

    Raises:
        Unreadable: a shape is not a number, nor one of the graph's inputs.
    """
    if "higher_order.flex_attention" not in text:
        return
    graph = _read(text)
    given = dict(zip(graph.inputs, inputs, strict=False))
    for name, call in graph.calls:
        yield getattr(torch.ops.higher_order, name), tuple(_value(one, graph, given) for one in call.args)


def _value(written: ast.expr, graph: _Graph, given: Mapping[str, Any]) -> Any:
    if isinstance(written, ast.Tuple):
        return tuple(_value(one, graph, given) for one in written.elts)
    if isinstance(written, ast.Constant):
        return written.value
    name = written.id if isinstance(written, ast.Name) else ""
    if name in given or name not in graph.tensors:
        return given.get(name)
    dtype, shape = graph.tensors[name]
    wanted = [given.get(graph.symbols[one], one) if one in graph.symbols else one for one in shape.split(", ")]
    if not all(str(one).isdigit() for one in wanted):
        raise Unreadable("it has sizes that the graph computes")
    return torch.empty([int(one) for one in wanted], dtype=_DTYPES.get(dtype, torch.int32), device="meta")
