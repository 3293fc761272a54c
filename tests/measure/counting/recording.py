"""What functions cost, and what formulas say of calls that are not made: what the formula tests stand on."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from lightning_flops import count_flops
from lightning_flops.measure.counting.formulas.contract import Work
from lightning_flops.measure.counting.formulas.registry import lookup


def flops_by_operator(run: Callable[[], Any]) -> Mapping[str, int]:
    """Model FLOPs of *run*, by operator; every operator that is not free must have had a formula."""
    with count_flops() as counts:
        run()
    assert counts.uncounted == {}
    return {name: flops.total - flops.recompute for name, flops in counts.by_operator().items()}


def total_flops(run: Callable[[], Any]) -> int:
    """Model FLOPs of *run*."""
    return sum(flops_by_operator(run).values())


def forward_and_backward(run: Callable[[], torch.Tensor]) -> tuple[int, int]:
    """Model FLOPs of *run* and of the backward from what it returns."""
    out: list[torch.Tensor] = []
    forward = total_flops(lambda: out.append(run()))
    gradient = torch.ones_like(out[0])
    return forward, total_flops(lambda: torch.autograd.backward(out[0], gradient))


def operator(name: str) -> Any:
    """The overload called ``aten::mm`` (the default one) or ``aten::mm.out``."""
    qualified, _, overload = name.partition(".")
    namespace, _, short = qualified.partition("::")
    return getattr(getattr(getattr(torch.ops, namespace), short), overload or "default")


def work_of(name: str, *args: Any, out: Any = None, **kwargs: Any) -> Work:
    """What the formula of operator *name* says of a call that is not made: for operators no kernel here can run."""
    entry = lookup(operator(name))
    assert entry.kind == "formula"
    work = entry.compute(args, kwargs, out)
    return work if isinstance(work, Work) else Work(work)


class Call:
    """A call that returns *out*, its arguments by the names that the operator's schema has, and what it costs."""

    def __init__(self, cost: int | Work, /, out: Any = None, **given: Any) -> None:
        self.cost, self.out, self.given = cost, out, given


def work_by_name(name: str, call: Call) -> Work:
    """What the formula says of the call, each argument of which is put where the operator's schema has it."""
    name, given = name.partition(",")[0], call.given
    schema = operator(name)._schema
    assert set(given) <= {argument.name for argument in schema.arguments}, schema
    args = [given.get(argument.name) for argument in schema.arguments if not argument.kwarg_only]
    keywords = {each.name: given[each.name] for each in schema.arguments if each.kwarg_only and each.name in given}
    return work_of(name, *args, out=call.out, **keywords)


def meta(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A tensor that has a shape and no values."""
    return torch.empty(shape, dtype=dtype, device="meta")


def leaf(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A tensor that wants a gradient."""
    return torch.randn(shape, dtype=dtype).requires_grad_()
