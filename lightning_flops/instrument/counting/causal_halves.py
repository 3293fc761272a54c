"""Counts half of the score matrix where attention is called with the causal flag, whatever backend runs it.

A fused kernel's operator has the flag among its arguments. The math backend computes separate products, which do not
have it. But it makes its causal mask by operators in an order that nobody else uses: it scales the query, makes a
boolean matrix of ones and its lower triangle, and scales the key. (A mask that a caller made is there before both are
scaled.) The two products that follow are the flagged ones. In the backward these are the products of the autograd nodes
that the two have made.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Mapping
from typing import Any

import torch
from torch import is_grad_enabled

from lightning_flops.instrument.counting.counting_mode import CountingMode
from lightning_flops.instrument.counting.formulas import Work
from lightning_flops.instrument.counting.formulas.contract import Arguments, Entry, Keywords
from lightning_flops.instrument.counting.operator_facts import Operator, needs_gradient
from lightning_flops.instrument.counting.thread_state import Cell, Table, ThreadState
from lightning_flops.instrument.torch_private.autograd import (
    current_node,
    function_in_forward,
    node_sequence,
    sequence_number,
)
from lightning_flops.instrument.torch_private.compiler import is_compiled
from lightning_flops.instrument.torch_private.operators import schema_if_any

_PRODUCTS = frozenset(("aten.bmm", "aten.mm", "aten.baddbmm"))
_MASKING = ("aten.mul", "aten.ones", "aten.tril")
"""What the math backend runs, one right after the other, where it is called with the causal flag."""


@functools.cache
def _name_of(function: Any) -> str:
    """Name of an operator as entries have it; nothing for one of higher order."""
    schema = schema_if_any(function)
    return "" if schema is None else schema.name.replace("::", ".", 1)


class _Calls(threading.local):
    """How far the math backend's causal attention has come on each thread."""

    def __init__(self) -> None:
        self.masking = 0
        """How many of ``_MASKING`` ran last, in order."""
        self.mask: tuple[int, ...] | None = None
        """Queries and keys of the call whose products are awaited."""
        self.scalings = 0
        """Scalings since its mask was made: the key's alone, before its first product."""
        self.weighted = False
        """Its scores went through the softmax."""


class HalvingMode(CountingMode):  # type: ignore[no-untyped-call]
    """A counting mode that also finds the causal calls of attention's math backend."""

    _at_once = True  # whether one is halved shows only then

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._calls = _Calls()
        self._flagged: set[tuple[int, int]] = set()
        """Autograd nodes of flagged products: the thread that made each, and its number."""
        self._halved: dict[Operator, Operator] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = super().__torch_dispatch__(func, types, args, kwargs)
        calls = self._calls
        name = _name_of(func)
        calls.scalings += name == _MASKING[0]
        if name == _MASKING[calls.masking]:
            calls.masking += 1
            if calls.masking == len(_MASKING):
                calls.masking = 0
                if isinstance(out, torch.Tensor) and out.dtype is torch.bool and out.dim() == 2:
                    calls.mask, calls.scalings, calls.weighted = tuple(out.shape), 0, False
        else:
            calls.masking = int(name == _MASKING[0])
            if name == "aten._safe_softmax":
                calls.weighted = True
        return out

    def _work(
        self,
        state: ThreadState,
        table: Table,
        operator: Operator,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        out: Any,
    ) -> Cell:
        if operator.name in _PRODUCTS and self._is_flagged(state, args, out):
            operator = self._halved_form(operator)
        return super()._work(state, table, operator, args, kwargs, out)

    def _is_flagged(self, state: ThreadState, args: tuple[Any, ...], out: Any) -> bool:
        """Whether a product belongs to attention that was called with the causal flag."""
        calls = self._calls
        if calls.mask is not None and tuple((args[0] if calls.weighted else out).shape[-2:]) == calls.mask:
            # Of a compiled region the backward does not tell its products apart: its forward counts in full too.
            flagged = (calls.weighted or calls.scalings == 1) and not is_compiled(function_in_forward())
            if calls.weighted or not flagged:
                calls.mask = None  # this was the call's second product, or the mask was a caller's
            if flagged:
                if is_grad_enabled() and needs_gradient(args):
                    # The product's autograd node was made just before.
                    self._flagged.add((state.ident, sequence_number() - 1))
                return True
        if not state.in_backward:
            return False
        node = current_node()
        owner = state.ident if state.task is None else state.task.owner
        return node is not None and (owner, node_sequence(node)) in self._flagged

    def _halved_form(self, operator: Operator) -> Operator:
        halved = self._halved.get(operator)
        if halved is None:

            def compute(args: Arguments, kwargs: Keywords, out: Any) -> Work:
                work = operator.compute(args, kwargs, out)
                return Work(work if isinstance(work, int) else work.flops, causal=True)

            entry = Entry(operator.name, "formula", compute, operator.dtype_of)
            halved = self._halved[operator] = Operator(entry, entry)
        return halved
