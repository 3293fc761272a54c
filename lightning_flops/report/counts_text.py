"""The counts of a block of code as a table by module: parameters, their shapes, FLOPs forward and backward."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import accumulate

from lightning_flops.analysis.flop_counts import FlopCounts
from lightning_flops.analysis.module_tree import ModuleNode, build_modules, lower_bound_modules, module_tree
from lightning_flops.records import OUTSIDE, ModuleRecord, PhaseFlops
from lightning_flops.report.document import Section, cells
from lightning_flops.report.layout import shortened, some_of
from lightning_flops.units import NOT_AVAILABLE, bytes_by_dtype, plain, plural, si

_ROWS = 200
_NAME_CHARS = 60
_SHAPES_SHOWN = 4


def counts_section(counts: FlopCounts, *, most: int = _ROWS) -> Section:
    """The table of *counts*: the upper levels of the tree of modules, *most* rows of them, and what was left out of it.

    Modules in a row that are equal are one row, with the figures of each.
    """
    record = counts.record
    records = [replace(one, extra_repr=_shapes(one)) for one in counts.modules]
    counts = FlopCounts(record)  # of one moment, also while counting goes on
    total, outside = counts.total, counts.own_by_module().get(OUTSIDE, PhaseFlops())
    phases = {"forward": "FLOPs forward", "backward": "FLOPs backward"}
    phases |= {"recompute": "FLOPs recomputed"} if total.recompute else {}
    phases |= {"optimizer": "FLOPs optimizer"} if total.optimizer else {}

    def flops(amounts: PhaseFlops) -> list[str]:
        return [si(getattr(amounts, phase)) for phase in phases]

    root = module_tree(build_modules(records, counts), lower_bound_modules(record.uncounted))
    nodes = [] if root is None else list(_nodes(root))
    at_depth = accumulate(count for _, count in sorted(Counter(node.module.depth for node in nodes).items()))
    deepest = max(1, sum(rows_down_to <= most for rows_down_to in at_depth) - 1)
    rows = []
    for node in [node for node in nodes if node.module.depth <= deepest][:most]:
        module = node.module
        name = "  " * module.depth + shortened(_name(node), chars=_NAME_CHARS)
        known = [si(module.params), module.extra_repr] if module.type_name else [NOT_AVAILABLE] * 2
        rows.append([name, *known, *flops(module.total)])
    remarks = []
    if left_out := len(nodes) - len(rows):
        remarks.append(f"And {plain(left_out)} more {plural('row', left_out)}; by_module() has every module.")
    if sizes := next((one.parameter_bytes for one in records if not one.name), {}):
        remarks.append(f"Parameters: {bytes_by_dtype(sizes)}.")
    if names := sorted(counts.uncounted):
        bound = ": these figures are lower bounds" if counts.is_lower_bound else ""
        remarks.append(f"Not counted: {some_of(names, most=_SHAPES_SHOWN)}{bound}.")
    if outside.total:
        rows.append([OUTSIDE, "", "", *flops(outside)])
    shown = cells(["module", "params", "weight shapes", *phases.values()], rows, left=(0, 2), least_width=6)
    about = "Of each module with those inside it; a multiply-add is two FLOPs."
    return Section("FLOPs by module", about, [shown, *remarks, *record.notes])


def _name(node: ModuleNode) -> str:
    module = node.module
    kind = module.type_name or "(not described)"
    if not module.name:
        return kind
    if node.last is not None:
        return f"{module.short_name}-{node.last.short_name}: {node.count} x {kind}"
    same = "" if module.alias_of is None else f", the same as {module.alias_of or 'the root'}"
    return f"{module.short_name}: {kind}{same}"


def _shapes(record: ModuleRecord) -> str:
    """Shapes of the module's own parameters: "64x3x7x7, 64"."""
    texts = ["x".join(map(str, shape)) or "scalar" for shape in record.parameter_shapes]
    return some_of(texts, most=_SHAPES_SHOWN)


def _nodes(node: ModuleNode) -> Iterator[ModuleNode]:
    yield node
    for child in node.children:
        yield from _nodes(child)
