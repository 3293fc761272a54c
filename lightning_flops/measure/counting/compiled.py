"""What code that torch.compile made multiplies, and what its backwards repeat.

Inductor's kernels are seen by no dispatcher, or not all of them are: its graphs are counted from their text, in which
every value has its shape. A call of the graph gives the sizes that it leaves open. A product that depends on no
incoming gradient is one of the forward's, computed again. Where the text cannot be read, what the dispatcher sees
counts, and kernels of templates are listed. Other backends run their graph's operators one by one: these are counted as
they come, and the line that runs says whether it repeats the forward.
"""

from __future__ import annotations

import functools
import inspect
import linecache
import operator
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from lightning_flops.measure.counting.formulas.contract import Unreadable
from lightning_flops.measure.counting.formulas.registry import lookup
from lightning_flops.measure.torch_private import optional
from lightning_flops.measure.torch_private.needed import OpOverload, OpOverloadPacket, schema_of

#: A kernel in inductor's generated code: its name, and its source up to the closing quotes.
_DEFINITION = re.compile(r"^(\w+) = async_compile\.\w+\((.*?)^'''", re.MULTILINE | re.DOTALL)

#: What stands in the name or the source of a kernel that multiplies, and in no other.
_TEMPLATE = re.compile(r"triton_tem_|micro_gemm|cutlass_|flex_attention")

_TRITON_PRODUCT = re.compile(r"\bdot(_scaled)?\s*\(")  # in the source of a kernel that a user has written


def repeats_forward() -> bool | None:
    """Whether the operator that runs in a compiled backward is one of the forward's again, by the line it is in.

    None: that line cannot be found.
    """
    frame = optional.graph_frame()
    lines = [] if frame is None else linecache.getlines(frame.f_code.co_filename, frame.f_globals)
    repeating = lines_that_repeat("".join(lines))
    return None if frame is None or repeating is None else lines[frame.f_lineno - 1].rstrip("\n") in repeating


def multiplies(kernel: Any) -> bool:
    """Whether a Triton kernel that a user has written has a product in its source, or in that of one that it calls."""
    function = getattr(kernel, "fn", kernel)
    called = inspect.getclosurevars(function).globals.values() if inspect.isfunction(function) else ()
    sources = [getattr(one, "src", None) for one in (kernel, *called) if type(one) is type(kernel)]
    return any(one is None or _TRITON_PRODUCT.search(one) for one in sources)


@functools.lru_cache(maxsize=256)
def templates_in(source: str) -> tuple[str, ...]:
    """Inductor's own kernels for matrix products and attention in a source that it has generated."""
    return tuple(
        match[1] for match in _DEFINITION.finditer(source) if _TEMPLATE.search(match[1]) or _TEMPLATE.search(match[2])
    )


_INCOMING_GRADIENT = "tangents_"  #: Start of the names of a backward graph's inputs that are gradients.

_GRAPH = re.compile(r"^ *class (\S+)\(torch\.nn\.Module\):$", re.MULTILINE)
_LINE = re.compile(r'^ +(\w+)(?:: "[^"]*")? = (.+?)(?:;  (?:\w+ = )+None)?$', re.MULTILINE)
#: A value with its size or its dtype, shape and device: ``primals_1: "Sym(s0)"``, ``mm: "f32[s0, 64][64, 1]cpu"``.
_VALUE = re.compile(r'(\w+): "(?:Sym\((.*?)\)|(\w+)\[(.*?)\]\[.*?\](\w*))')
_CALL = re.compile(r"torch\.ops\.([\w.]+)(\(.*\))")
#: The sum of two products, which max-autotune writes as a call of its own function, no operator.
_SUM = re.compile(r"torch__inductor\w+_mm_plus_mm\(mat1 = (\w+), mat2 = (\w+), mat3 = (\w+), mat4 = (\w+)\)")
#: A call of any other function that makes tensors, but those that take a ``cat`` away.
_FUNCTION = re.compile(r'^ +\w+(?:: "\w+\[[^"]*")? = (?!torch__inductor\w+_post_grad_\w*cat\w*\()\w+\(', re.MULTILINE)
_PART = re.compile(r"(\w+)\[(\d+)\]")
_INNER = re.compile(r"self\.(\w+)")
_NAME = re.compile(r"(?<![\w.'\"])[A-Za-z_]\w*(?!\w| = )")
_NO_VALUES = frozenset("torch device True False None".split())

#: The functions of sympy and torch that stand in sizes.
_IN_SIZES: Mapping[str, Any] = {
    **dict.fromkeys(("FloorDiv", "CleanDiv", "IntTrueDiv"), operator.floordiv),
    **dict.fromkeys(("Mod", "PythonMod"), operator.mod),
    **{"Max": max, "Min": min},
}


class Product(NamedTuple):
    """One call in a graph, of an operator that may have FLOPs."""

    function: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    out: Any
    repeats: bool  #: Whether it depends on none of the gradients that come into its graph.
    on_cuda: bool


class _Graph(NamedTuple):
    inputs: list[tuple[str, str, str]]  #: The name of each with its size, or its shape, as written.
    values: dict[str, list[str]]  #: By name: a size; a dtype, a shape and a device.
    lines: dict[str, str]  #: What is computed under each name.
    calls: dict[str, re.Match[str]]  #: Of these, the calls of operators.
    repeated: set[str]  #: In a backward, the names of those that depend on no incoming gradient.


def gradients_made(lines: Iterable[tuple[str, str]]) -> Iterator[bool]:
    """For each line of a graph, a name and what is computed under it: whether it depends on an incoming gradient."""
    gradients = set[str]()
    for name, made in lines:
        names = _NAME.findall(made)
        depends = any(one in gradients or one.startswith(_INCOMING_GRADIENT) for one in names)
        if depends:
            gradients.add(name)
            if (call := _CALL.match(made)) is not None and _writes(call[1]):
                gradients.update(set(names) - _NO_VALUES)
        yield depends


@functools.lru_cache(maxsize=64)
def lines_that_repeat(text: str) -> frozenset[str] | None:
    """The lines of a backward graph's code that depend on no incoming gradient; None: the code has no gradient."""
    lines = list(_LINE.finditer(text))
    depend = gradients_made((line[1], line[2]) for line in lines)
    repeat = frozenset(line[0] for line, depends in zip(lines, depend, strict=True) if not depends)
    return repeat if _INCOMING_GRADIENT in text else None


@functools.lru_cache(maxsize=512)
def _operator(name: str) -> Any:
    function = operator.attrgetter(name)(torch.ops)
    return function.default if isinstance(function, OpOverloadPacket) else function


def _writes(name: str) -> bool:
    """Whether the operator of this name writes to what it is given."""
    function = _operator(name)
    if not isinstance(function, OpOverload):
        return name.endswith("_mutation")
    return any(one.alias_info is not None and one.alias_info.is_write for one in schema_of(function).arguments)


@functools.lru_cache(maxsize=64)
def _read(text: str) -> dict[str, _Graph]:
    """The graphs in the text by their names, the first of which calls the others.

    Raises:
        Unreadable: there is none.
    """
    _, *named = _GRAPH.split(_SUM.sub(r"torch.ops.inductor._mm_plus_mm(\1, \2, \3, \4)", text))
    if not named or any(map(_FUNCTION.search, named)):
        raise Unreadable("there is no text of the graph, or it calls a function that is no operator")
    return {name: _read_one(body) for name, body in zip(named[::2], named[1::2], strict=True)}


def _read_one(body: str) -> _Graph:
    signature, _, _ = body.partition("):\n")
    lines = _LINE.findall(body)
    depend = gradients_made(lines) if _INCOMING_GRADIENT in signature else [True] * len(lines)
    repeated = {name for (name, _), depends in zip(lines, depend, strict=True) if not depends}
    calls = {name: call for name, made in lines if (call := _CALL.fullmatch(made)) is not None}
    inputs = [(name, size, shape) for name, size, _, shape, _ in _VALUE.findall(signature)]
    return _Graph(inputs, {name: rest for name, *rest in _VALUE.findall(body)}, dict(lines), calls, repeated)


def products(text: str, inputs: Sequence[Any]) -> list[Product]:
    """The products in a graph that is called with *inputs*; what other operators do is left out.

    The values of a block mask are read from *inputs*; most other tensors hold none.

    Raises:
        Unreadable: there is no text, or values decide which products run.
        Exception: whatever a size that is not in the inputs leads to, or the text of another version of torch.
    """
    graphs = _read(text)
    graph = next(iter(graphs.values()))
    given, sizes = dict[str, Any](), dict[str, Any](_IN_SIZES)
    for (name, size, shape), value in zip(graph.inputs, inputs, strict=True):
        given[name] = value
        sizes.update(zip(shape.split(", "), value.shape, strict=False) if shape else {size: value})
    return list(_products(graph, given, sizes, graphs))


def _products(
    graph: _Graph, given: Mapping[str, Any], sizes: dict[str, Any], inner: Mapping[str, _Graph]
) -> Iterator[Product]:
    values = _Values(graph, given, sizes)
    for name, (operator_name, arguments) in ((name, call.groups()) for name, call in graph.calls.items()):
        function, repeats = _operator(operator_name), name in graph.repeated
        kind, is_plain = lookup(function).kind, isinstance(function, OpOverload)
        names = [] if is_plain else _NAME.findall(arguments)
        held = [_INNER.fullmatch(graph.lines.get(one, "")) for one in names]
        called = [inner[one[1]] for one in held if one is not None and one[1] in inner]
        if kind == "formula" or (kind == "unknown" and not is_plain and not called):
            args, kwargs = eval(f"_arguments{arguments}", {}, values)
            on_cuda = graph.values.get(name, ("",))[-1] == "cuda"
            yield Product(function, args, kwargs, values[name], repeats, on_cuda)
            continue
        for one in called:
            made = list(_products(one, {}, sizes, inner))
            if made and not operator_name.endswith(".invoke_subgraph"):
                raise Unreadable(f"values decide what {operator_name} runs")
            yield from (each._replace(repeats=each.repeats or repeats) for each in made)


class _Values(dict[str, Any]):
    """The values of a graph's names: what it is given, and tensors without values of the shapes that are written."""

    def __init__(self, graph: _Graph, given: Mapping[str, Any], sizes: dict[str, Any]) -> None:
        super().__init__(given, torch=torch, device=torch.device, _arguments=lambda *args, **names: (args, names))
        self._graph = graph
        self._sizes = sizes

    def __missing__(self, name: str) -> Any:
        if name not in self._graph.values:
            # What an operator has put out, if there are several; none of a graph, or what formulas do not ask for.
            found = ((key, _PART.fullmatch(made)) for key, made in self._graph.lines.items())
            parts = {int(part[2]): key for key, part in found if part is not None and part[1] == name}
            return tuple(self[parts[at]] if at in parts else None for at in range(max(parts) + 1)) if parts else None
        size, dtype, shape, _ = self._graph.values[name]
        if size:
            return eval(size, {}, self._sizes)
        made = torch.empty(eval(f"[{shape}]", {}, self._sizes), dtype=optional.dtype_abbreviated(dtype), device="meta")
        return self.setdefault(name, made)
