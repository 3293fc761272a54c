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
    calls: list[tuple[str, list[ast.expr]]]


@lru_cache(maxsize=64)
def _read(text: str) -> _Graph:
    own = text.partition("\n    class ")[0]  # the functions on scores and masks follow
    signature = next((line for line in own.splitlines() if "def forward(" in line), "")
    inputs = _ANNOTATED.findall(signature)
    return _Graph(
        [name for name, *_ in inputs],
        {name: (dtype, sizes) for name, dtype, sizes, symbol in _ANNOTATED.findall(own) if not symbol},
        {symbol: name for name, _, _, symbol in inputs if symbol},
        [(name, _arguments(written)) for name, written in _CALL.findall(own)],
    )


def _arguments(written: str) -> list[ast.expr]:
    call = ast.parse(f"call{written}", mode="eval").body
    return call.args if isinstance(call, ast.Call) else []


def flex_calls(text: str, inputs: Sequence[Any]) -> Iterator[tuple[Any, tuple[Any, ...]]]:
    """The calls of flex attention in a graph: the operator, and its arguments, in which most tensors hold no values.

    Args:
        text: the graph.
        inputs: what it is called with.

    Raises:
        Unreadable: a shape is not a number, nor one of the graph's inputs.
    """
    if "higher_order.flex_attention" not in text:
        return
    graph = _read(text)
    given = dict(zip(graph.inputs, inputs, strict=False))
    sizes = {symbol: given.get(name) for symbol, name in graph.symbols.items()}
    for name, arguments in graph.calls:
        operator = getattr(torch.ops.higher_order, name)
        yield operator, tuple(_value(argument, graph, given, sizes) for argument in arguments)


def _value(written: ast.expr, graph: _Graph, given: Mapping[str, Any], sizes: Mapping[str, Any]) -> Any:
    if isinstance(written, ast.Tuple):
        return tuple(_value(one, graph, given, sizes) for one in written.elts)
    if isinstance(written, ast.Constant):
        return written.value
    if not isinstance(written, ast.Name):
        return None
    name = written.id
    if name in given or name not in graph.tensors:
        return given.get(name)
    dtype, shape = graph.tensors[name]
    wanted = [sizes.get(one, one) for one in shape.split(", ")]
    if not all(str(one).isdigit() for one in wanted):
        raise Unreadable("it has sizes that the graph computes")
    return torch.empty([int(one) for one in wanted], dtype=_DTYPES.get(dtype, torch.int32), device="meta")
