"""Counts a model's products from the outside: by the calls that Python code makes, and what autograd asks of them.

An oracle for the counter of this project, which shares no mechanism with it and none of its formulas. Where the counter
sees operators below autograd, this sees the functions above it: ``torch.matmul``, ``F.linear``, ``F.conv2d`` and so on,
with the arguments that the model's author wrote. What a call costs is worked out here from the shapes. Its backward is
not seen, it is expected: one product more for each operand that needed a gradient when the call was made, once the
call's result is reached by the backward. What runs a second time is known from the checkpoint itself: the function that
was handed to it is called again.

Only products are expected: matrix products, convolutions, attention, recurrent layers, and triangular solves. A
multiply-add is two FLOPs.
"""

from __future__ import annotations

import types
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from tests.corpus.case import tensors_in


@dataclass
class Expected:
    """FLOPs by part of the step."""

    forward: int = 0
    backward: int = 0
    recompute: int = 0


class Product(NamedTuple):
    """One product of a call: what it costs, and what each operand's gradient costs if it needs one."""

    flops: int
    gradients: Sequence[tuple[Tensor | None, int]]


class CallOracle(TorchFunctionMode):
    """While entered: what the Python calls on this thread should cost; ``expected`` has the sums.

    ``in_backward()`` stands around the backward, ``checkpoint`` in the place of ``torch.utils.checkpoint.checkpoint``.
    """

    def __init__(self) -> None:
        super().__init__()
        self.expected = Expected()
        self._again = 0
        """How many checkpointed functions run that have run before."""
        self._backward = False

    @contextmanager
    def in_backward(self) -> Iterator[None]:
        """Inside, a call that no checkpoint repeats is part of the backward: of a function with its own one."""
        self._backward = True
        try:
            yield
        finally:
            self._backward = False

    def checkpointing(self, checkpoint: Callable[..., Any]) -> Callable[..., Any]:
        """The same checkpoint, of functions whose calls after the first one are known to repeat it."""

        def run(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            calls = 0

            def watched(*inner: Any, **keywords: Any) -> Any:
                nonlocal calls
                calls += 1
                again = calls > 1
                self._again += again
                try:
                    return function(*inner, **keywords)
                finally:
                    self._again -= again

            return checkpoint(watched, *args, **kwargs)

        return run

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        rule = _rule_of(func)
        if rule is None:
            inside = _without_override(func)
            if inside is None:
                return func(*args, **kwargs)
            with self:  # a function in Python: what it calls is seen in its turn
                return inside(*args, **kwargs)
        # Before the call, which may write into its operands.
        needs = {id(item): item.requires_grad for item in tensors_in((args, kwargs))}
        grad_enabled = torch.is_grad_enabled()
        result = func(*args, **kwargs)
        for product in rule(result, *args, **kwargs):
            self._book(product, result, needs if grad_enabled else {})
        return result

    def _book(self, product: Product, result: Any, needs: dict[int, bool]) -> None:
        self._add("recompute" if self._again else "backward" if self._backward else "forward", product.flops)
        gradients = sum(flops for tensor, flops in product.gradients if tensor is not None and needs.get(id(tensor)))
        node = next((_maker(item.grad_fn) for item in tensors_in(result) if item.grad_fn is not None), None)
        if not gradients or node is None:
            return
        fused = "ScaledDotProduct" in node.name()
        if fused:  # one kernel for all three gradients, which works out the scores once more
            gradients = 2 * product.flops
        again = product.gradients[0][1] if fused else 0

        def before(incoming: Sequence[Tensor | None]) -> None:
            if any(gradient is not None for gradient in incoming):
                self._add("backward", gradients)
                self._add("recompute", again)

        node.register_prehook(before)

    def _add(self, part: str, flops: int) -> None:
        setattr(self.expected, part, getattr(self.expected, part) + flops)


_SHAPES = ("View", "UnsafeView", "ReshapeAlias", "Permute", "Transpose", "Squeeze", "Unsqueeze", "T", "Alias")


def _maker(node: Any) -> Any:
    """The autograd node of the product itself: that of a view of its result is replaced by writing into the view."""
    while node.name().rstrip("0123456789").removesuffix("Backward") in _SHAPES:
        below = node.next_functions[0][0]
        if below is None or not below.next_functions:
            break
        node = below
    return node


Rule = Callable[..., list[Product]]


def _rule_of(func: Any) -> Rule | None:
    in_python = isinstance(func, types.FunctionType) and func.__module__ != "torch._tensor"
    return None if in_python else RULES.get(str(getattr(func, "__name__", "") or func).split(".")[0])


_SEEN_THROUGH = ("torch.functional", "torch.nn.functional", "torch.autograd")
"""Modules of torch whose functions in Python are looked into."""

_OVERRIDES = {f"has_torch_function{kind}": lambda *_: False for kind in ("", "_unary", "_variadic")}


@cache
def _without_override(func: Any) -> Any:
    """A copy of torch's Python function that does not hand itself to modes; None for what is not in Python."""
    if not isinstance(func, types.FunctionType) or not _OVERRIDES.keys() & set(func.__code__.co_names):
        return None
    # Of the methods only this one: others hand themselves to modes again, by super().
    if func.__module__ not in _SEEN_THROUGH and func is not Tensor.backward:
        return None
    names = {**func.__globals__, **_OVERRIDES}
    copy = types.FunctionType(func.__code__, names, func.__name__, func.__defaults__, func.__closure__)
    copy.__kwdefaults__ = func.__kwdefaults__
    return copy


def _pair(flops: int, first: Tensor, second: Tensor) -> list[Product]:
    """A bilinear product: each operand's gradient is a product of the same size."""
    flops *= _real_products(first, second)
    return [Product(flops, ((first, flops), (second, flops)))]


def _real_products(*operands: Tensor) -> int:
    """A complex multiply-add is four real ones."""
    return 4 if any(item.is_complex() for item in operands) else 1


def _linear(result: Tensor, input: Tensor, weight: Tensor, *_: Any, **__: Any) -> list[Product]:
    return _pair(2 * result.numel() * int(input.shape[-1]), input, weight)


def _matmul(result: Tensor, input: Tensor, other: Tensor, **_: Any) -> list[Product]:
    flops = 2 * result.numel() * int(input.shape[-1])
    if input.dim() == other.dim() == 1:  # both gradients are scaled vectors
        return [Product(flops, ())]
    if input.dim() == 2 and other.dim() == 1:
        # The matrix's gradient is an outer product: a multiplication for each element, and no sum.
        return [Product(flops, ((input, flops // 2), (other, flops)))]
    return _pair(flops, input, other)


def _add_matmul(result: Any, *operands: Any, **named: Any) -> list[Product]:
    # What is added, and the two that are multiplied, whose names differ from function to function.
    added = ("input", "beta", "alpha", "out")
    first, second = [*operands, *(value for name, value in named.items() if name not in added)][-2:]
    columns = int(second.shape[-1]) if second.dim() > 1 else 1
    return _pair(2 * first.numel() * columns, first, second)


def _convolution(result: Tensor, input: Tensor, weight: Tensor, *_: Any, **__: Any) -> list[Product]:
    return _pair(2 * result.numel() * prod(weight.shape[1:]), input, weight)


def _transposed(result: Tensor, input: Tensor, weight: Tensor, *_: Any, **__: Any) -> list[Product]:
    return _pair(2 * input.numel() * prod(weight.shape[1:]), input, weight)


def _attention(result: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> list[Product]:
    rows = prod(result.shape[:-1]) * int(key.shape[-2])
    scores = 2 * rows * int(query.shape[-1])
    mixed = 2 * rows * int(value.shape[-1])
    # The scores first: the oracle reads off what a fused backward repeats there.
    products = ((query, scores), (key, scores), (value, mixed))
    of_scores = mixed if query.requires_grad or key.requires_grad else 0
    return [Product(scores + mixed, (*products, (query if query.requires_grad else key, of_scores)))]


def _einsum(result: Tensor, equation: str, *operands: Any, path: Any = None, **_: Any) -> list[Product]:
    tensors = list(operands[0]) if len(operands) == 1 and isinstance(operands[0], (list, tuple)) else list(operands)
    names, out = _names_of(equation, tensors)
    sizes: dict[str, int] = {}
    for name, tensor in zip(names, tensors, strict=True):
        for letter, size in zip(name, tensor.shape, strict=True):
            sizes[letter] = max(int(size), sizes.get(letter, 1))
    terms = [(name, tensor.requires_grad, tuple(tensor.shape)) for name, tensor in zip(names, tensors, strict=True)]
    if len(terms) == 1:
        return []
    order = [tuple(path[i : i + 2]) for i in range(0, len(path), 2)] if path else [(0, 1)] * (len(terms) - 1)
    flops = backward = 0
    for first, second in order:
        (a, a_needs, a_shape), (b, b_needs, b_shape) = terms[first], terms[second]
        terms = [term for index, term in enumerate(terms) if index not in (first, second)]
        later = set(out).union(*(set(name) for name, _, _ in terms))
        # A letter of one side alone that is asked for no more is summed before; one of size one is no sum.
        both = {letter for letter in set(a) & set(b) if a_shape[a.index(letter)] > 1 < b_shape[b.index(letter)]}
        summed = {letter for letter in both if letter not in later}
        asked = {letter for letter in set(a) | set(b) if letter in later or letter in summed}
        cost = 2 * prod(sizes[letter] for letter in asked)
        if summed:
            flops += cost
            backward += cost * (int(a_needs) + int(b_needs))
        merged = "".join(sorted(asked - summed))
        terms.append((merged, a_needs or b_needs, tuple(sizes[letter] for letter in merged)))
    anyone = next((tensor for tensor in tensors if tensor.requires_grad), None)
    factor = _real_products(*tensors)
    return [Product(flops * factor, ((anyone, backward * factor),))]


def _names_of(equation: str, tensors: Sequence[Tensor]) -> tuple[list[str], str]:
    """Each operand's letters and the result's; an ellipsis becomes letters that are not used otherwise."""
    text = equation.replace(" ", "")
    left, arrow, out = text.partition("->")
    names = left.split(",")
    free = [chr(code) for code in range(0x3B1, 0x3C9)]
    widest = 0
    for index, (name, tensor) in enumerate(zip(names, tensors, strict=True)):
        if "..." in name:
            count = tensor.dim() - (len(name) - 3)
            widest = max(widest, count)
            names[index] = name.replace("...", "".join(free[len(free) - count :]) if count else "")
    if not arrow:
        letters = Counter("".join(names))
        out = "..." + "".join(sorted(letter for letter, seen in letters.items() if seen == 1 and letter not in free))
    return names, out.replace("...", "".join(free[len(free) - widest :]) if widest else "")


def _triangular_solve(result: Tensor, matrix: Tensor, right: Tensor, *_: Any, **__: Any) -> list[Product]:
    # A multiply-add for each element of a triangle of half a square and each column. Any gradient starts with a solve
    # of the same size, and the matrix's is then a product with the solution.
    flops = result.numel() * int(matrix.shape[-1])
    either = right if right.requires_grad else matrix
    return [Product(flops, ((either, flops), (matrix, 2 * flops)))]


def _recurrent(result: Any, input: Tensor, *args: Any, **_: Any) -> list[Product]:
    # The arguments after the input: (state, weights, biases?, layers, dropout, train, bidirectional, batch_first), or
    # (batch sizes, state, weights, biases?, layers, dropout, train, bidirectional) for a packed sequence.
    first = 2 if isinstance(args[2], (list, tuple)) else 1
    weights, _biases, layers, _dropout, _train, both = args[first : first + 6]
    steps = input.numel() // int(input.shape[-1])
    directions = 2 if both else 1
    each = len(weights) // (layers * directions)
    flops = 0
    gradients: list[tuple[Tensor, int]] = []
    for index in range(layers * directions):
        for place, weight in enumerate(weights[index * each : index * each + 2]):
            product = 2 * steps * weight.numel()
            flops += product
            # The first layer's input is the caller's; all other operands are the layer's own.
            operand = input if place == 0 and index < directions else weight
            gradients += [(operand, product), (weight, product)]
    return [Product(flops, gradients)]


_CALLS: dict[Rule, str] = {
    _linear: "linear grouped_mm _grouped_mm grouped_mm_fallback",
    _matmul: "matmul __matmul__ mm bmm mv dot vdot",
    lambda result, other, input: _matmul(result, input, other): "__rmatmul__",
    _add_matmul: "addmm addmm_ addmv baddbmm baddbmm_ addbmm",
    _einsum: "einsum",
    _convolution: "conv1d conv2d conv3d",
    _transposed: "conv_transpose1d conv_transpose2d conv_transpose3d",
    _attention: "scaled_dot_product_attention",
    _triangular_solve: "linalg_solve_triangular",
    _recurrent: "lstm gru rnn_tanh rnn_relu",
}
RULES: dict[str, Rule] = {name: rule for rule, names in _CALLS.items() for name in names.split()}
"""By the name of a built-in function or method of torch, how its products are worked out."""
