"""Runs a function and writes down what its operators cost, without any counter: what the formula tests stand on."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_flops.measure.counting.formulas.contract import Entry, Work
from lightning_flops.measure.counting.formulas.registry import lookup


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Keeps the work of every operator that has a formula, and the names of unknown ones."""

    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.work: list[tuple[Entry, Work]] = []
        self.unknown: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        entry = lookup(func)
        if entry.composite:
            with self:
                return func.decompose(*args, **(kwargs or {}))
        out = func(*args, **(kwargs or {}))
        if entry.kind == "unknown":
            self.unknown.append(entry.name)
        elif entry.kind == "formula":
            work = entry.compute(args, kwargs or {}, out)
            self.work.append((entry, work if isinstance(work, Work) else Work(work)))
        return out


def record(run: Callable[[], Any]) -> Recorder:
    """What ran while *run* did."""
    recorder = Recorder()
    with recorder:
        run()
    return recorder


def flops_by_operator(run: Callable[[], Any]) -> Mapping[str, int]:
    """Model FLOPs of *run*, by operator; every operator that is not free must have had a formula."""
    recorder = record(run)
    assert recorder.unknown == []
    flops: dict[str, int] = {}
    for entry, work in recorder.work:
        flops[entry.name] = flops.get(entry.name, 0) + work.flops
    return flops


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


def work_by_name(name: str, out: Any, given: dict[str, Any]) -> Work:
    """What the formula says of a call with the *given* arguments, put where the operator's schema has them."""
    name = name.partition(",")[0]
    schema = operator(name)._schema
    assert set(given) <= {argument.name for argument in schema.arguments}, schema
    args = [given.get(argument.name) for argument in schema.arguments if not argument.kwarg_only]
    keywords = {each.name: given[each.name] for each in schema.arguments if each.kwarg_only and each.name in given}
    return work_of(name, *args, out=out, **keywords)


def meta(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A tensor that has a shape and no values."""
    return torch.empty(shape, dtype=dtype, device="meta")


def leaf(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A tensor that wants a gradient."""
    return torch.randn(shape, dtype=dtype).requires_grad_()
