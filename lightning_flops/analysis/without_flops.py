"""What takes long and computes no products: operators, and classes of modules, and what usually helps."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from lightning_flops.analysis.rates import ratio
from lightning_flops.records import ModuleRecord, OperatorCell
from lightning_flops.schema.modules import ModuleTimes
from lightning_flops.schema.trace import TracedStep
from lightning_flops.units import percent

_US_PER_SEC = 1e6
_NS_PER_SEC = 1e9

_NO_WORK = re.compile(r"autograd::|torch::autograd::|c10d|_c10d|prims::|profiler::")
"""Names of operators that only call others, wait or communicate."""

_COMPILE = "compile the model, which fuses it with what surrounds it"
_FUSE = "use a layer that has it built in"

_HELPS: tuple[tuple[re.Pattern[str], str, str], ...] = tuple(
    (re.compile(pattern, re.I), with_compiler, without)
    for pattern, with_compiler, without in (
        (
            r"dropout|bernoulli",
            f"Set its p to 0 where the data do not overfit, or {_COMPILE}.",
            "Set its p to 0 where the data do not overfit.",
        ),
        (
            r"item|local_scalar|nonzero|masked_select|unique",
            "It makes the host wait for the device: take it out of the step, or mask with where() in its place.",
            "It makes the host wait for the device: take it out of the step, or mask with where() in its place.",
        ),
        (
            r"::(new_)?empty|::resize_",
            "It allocates memory: make once what every step needs, and let the allocator keep what is freed (on a CPU "
            "jemalloc or TCMalloc do).",
            "It allocates memory: make once what every step needs, and let the allocator keep what is freed (on a CPU "
            "jemalloc or TCMalloc do).",
        ),
        (
            r"_to_copy|::to$|copy_|contiguous|clone",
            "Keep one dtype, one device and one memory layout through the model, so that fewer copies are made.",
            "Keep one dtype, one device and one memory layout through the model, so that fewer copies are made.",
        ),
        (
            r"_foreach_|_fused_|addcdiv|addcmul|lerp",
            "Construct the optimizer with fused=True where it takes that, or update every few batches (accumulation).",
            "Construct the optimizer with fused=True where it takes that, or update every few batches (accumulation).",
        ),
        (
            r"norm",
            f"Take one of torch's fused norms in place of one written out in Python, or {_COMPILE}.",
            "Take one of torch's fused norms in place of one written out in Python.",
        ),
        (
            r"embedding|index|gather|scatter",
            "Look up fewer rows, or keep the gradient sparse (nn.Embedding(sparse=True) and an optimizer for it).",
            "Look up fewer rows, or keep the gradient sparse (nn.Embedding(sparse=True) and an optimizer for it).",
        ),
        (
            r"nll_loss|cross_entropy|log_softmax",
            f"Compute the loss in chunks of the vocabulary or with a fused cross entropy, or {_COMPILE}.",
            "Compute the loss in chunks of the vocabulary or with a fused cross entropy.",
        ),
        (
            r"softmax",
            "Attention that is written out can use torch.nn.functional.scaled_dot_product_attention, which fuses it.",
            "Attention that is written out can use torch.nn.functional.scaled_dot_product_attention, which fuses it.",
        ),
    )
)
"""Patterns of names of operators and classes; what usually helps where torch.compile does, and where it does not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WithoutFlops:
    """The operator or the class of modules that takes most of a step without any FLOPs."""

    kind: Literal["operator", "class"]
    name: str
    share: float
    """Of the traced step; of a class, the own time of all its modules."""
    stake: float
    """Of that share, at most what operators without FLOPs fill."""

    @property
    def evidence(self) -> str:
        """What was measured, in a sentence."""
        what = self.name if self.kind == "operator" else f"{self.name}'s own work, the modules inside it left out,"
        return f"{what} takes {percent(self.share)} of the traced step and computes no products."


def longest_without_flops(
    *,
    cells: Iterable[OperatorCell],
    modules: Iterable[ModuleRecord],
    times: Mapping[str, ModuleTimes],
    traced: TracedStep | None,
) -> WithoutFlops | None:
    """What takes most of the traced step and has no FLOPs; None if nothing was traced.

    A class goes before an operator that takes as long: it says where to look.
    """
    tables = None if traced is None else traced.tables
    if traced is None or tables is None or traced.filling is None:
        return None
    spending_operators, spending_modules = set(), set()
    for cell in cells:
        if cell.flops:
            spending_operators.add(cell.operator.replace(".", "::", 1))
            spending_modules.add(cell.module)
    wall_sec = tables.step_times.mean.wall_us / _US_PER_SEC
    by_class = _own_seconds(modules, times, spending_modules)
    by_operator: dict[str, float] = {}
    for row in tables.operators or ():
        if not row.tensor_cores_eligible and _is_work(row.name) and row.name not in spending_operators:
            own = row.host_self if row.device_self is None else row.device_self
            by_operator[row.name] = own.total_us / _US_PER_SEC / len(tables.step_times.steps)
    # No fusing saves what Python does between operators; and a data loader's operators are no model's.
    filled_ns = sum(part.operators_ns for part in traced.filling.parts if part.name not in ("data_wait", "transfer"))
    most = ratio(part=filled_ns / _NS_PER_SEC, whole=wall_sec) or 0.0
    found: list[WithoutFlops] = []
    for kind, seconds in (("class", by_class), ("operator", by_operator)):
        for name, spent_sec in seconds.items():
            share = ratio(part=spent_sec, whole=wall_sec) or 0.0
            found.append(
                WithoutFlops(
                    kind="class" if kind == "class" else "operator", name=name, share=share, stake=min(share, most)
                )
            )
    return max(found, key=lambda one: one.share, default=None)


def what_helps(one: WithoutFlops, *, compiles: bool) -> str:
    """What usually makes *one* shorter, in a sentence.

    Args:
        one: an operator or a class.
        compiles: torch.compile makes kernels for the device.
    """
    for pattern, with_compiler, without in _HELPS:
        if pattern.search(one.name):
            return with_compiler if compiles else without
    ways = f"{_COMPILE}, or {_FUSE}" if compiles else f"{_FUSE}, so that it is fused with what surrounds it"
    return f"{ways[0].upper()}{ways[1:]}."


def _own_seconds(
    modules: Iterable[ModuleRecord], times: Mapping[str, ModuleTimes], spending: Collection[str]
) -> dict[str, float]:
    """Own seconds of each class none of whose modules spends FLOPs of its own, the root's left out."""
    sums: defaultdict[str, float] = defaultdict(float)
    excluded = {""}
    for module in modules:
        if module.name in spending or not module.name:
            excluded.add(module.type_name)
        elif (own := times.get(module.name)) is not None:
            sums[module.type_name] += own.own_forward_sec + (own.own_backward_sec or 0.0)
    return {name: seconds for name, seconds in sums.items() if name not in excluded}


def _is_work(operator: str) -> bool:
    return "::" in operator and _NO_WORK.match(operator) is None
