"""What is no profile: counts of a block of code by module, a formula of FLOPs in words, the throughput of a run.

That of a run has the form of the benchmark summary of Paddle's profiler.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from itertools import accumulate

from lightning_flops.analysis.flop_counts import FlopCounts
from lightning_flops.analysis.module_tree import ModuleNode, build_modules, lower_bound_modules, module_tree
from lightning_flops.records import OUTSIDE, ModuleRecord, PhaseFlops
from lightning_flops.report.document import Item, Section, cells
from lightning_flops.report.layout import shortened, some_of
from lightning_flops.schema.formula import FormulaReport, FormulaSize, FormulaTerm
from lightning_flops.schema.throughput import Spread, ThroughputSummary
from lightning_flops.units import NOT_AVAILABLE, bytes_by_dtype, percent, plain, plural, si

_ROWS = 200
_NAME_CHARS = 60
_SHAPES_SHOWN = 4
_RAISED = str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹")
_LETTERS = {"batch": "B", "sequence": "S", "height": "H", "width": "W"}


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


def formula_section(report: FormulaReport) -> Section:
    """The formula, the sizes that it holds for, and what was asked of it."""
    items: list[Item] = [f"No formula: {report.reason}."]
    if report.reason is None:
        letters = {one.name: _LETTERS.get(one.name, one.name) for one in report.sizes}
        sums: dict[tuple[str, str], list[FormulaTerm]] = {}
        for term in report.terms:
            sums.setdefault((term.bucket, term.dtype), []).append(term)
        several = len({dtype for _, dtype in sums}) > 1
        items = [
            f"{bucket}{f' ({dtype})' if several else ''} = {_sum(terms, letters)}"
            for (bucket, dtype), terms in sums.items()
        ]
        meanings = ", ".join(f"{letter} is {name}" for name, letter in letters.items() if letter != name)
        items.append(
            f"{meanings}{'. ' if meanings else ''}A multiply-add is two FLOPs. Counted on fake tensors for "
            f"{plain(report.counted)} {plural('batch', report.counted)} of different sizes, {plain(report.checks)} of "
            "which the others predict to the last FLOP. Used for "
            f"{' and '.join(map(_range, report.sizes)) or 'the counted sizes'}; other sizes are counted by themselves."
        )
    if report.lower_bound:
        items.append("An operator that may have FLOPs could not be counted: every figure is a lower bound.")
    if report.asked:
        names = list(report.asked[0].sizes)
        head = [*names, "forward", "backward", "recompute", "model FLOPs", "hardware FLOPs", "from"]
        rows = [
            [
                *(plain(one.sizes[name]) for name in names),
                *map(plain, (one.forward, one.backward, one.recompute, one.model_flops, one.hardware_flops)),
                one.source,
            ]
            for one in report.asked
        ]
        items.append(cells(head, rows))
    return Section("FLOPs by size", "", items)


def _sum(terms: Sequence[FormulaTerm], letters: Mapping[str, str]) -> str:
    """The terms with the batch before a bracket, and those without it: ``B·(1,024·S + 64·S²) + 8``."""
    groups: dict[int, list[str]] = {}
    for term in terms:
        value = Fraction(term.numerator, term.denominator)
        number = plain(value.numerator) if value.denominator == 1 else f"{value.numerator:,}/{value.denominator:,}"
        factors = [_power(letters[name], power) for name, power in term.powers.items() if name != "batch"]
        groups.setdefault(term.powers.get("batch", 0), []).append("·".join([number, *factors]))
    parts = []
    for power, products in sorted(groups.items(), reverse=True):
        inside = " + ".join(products)
        bracket = f"({inside})" if len(products) > 1 else inside
        parts.append(f"{_power('B', power)}·{bracket}" if power else inside)
    return " + ".join(parts).replace("+ -", "- ") or "0"


def _power(letter: str, power: int) -> str:
    return letter if power == 1 else f"{letter}{str(power).translate(_RAISED)}"


def _range(size: FormulaSize) -> str:
    words = f"{size.name} from {plain(size.least)} to {plain(size.greatest)}"
    return words if size.apart == 1 else f"{words} in steps of {plain(size.apart)}"


def run_section(summary: ThroughputSummary) -> Section:
    """What a run's batches cost, and the FLOPs and tokens of all of them."""

    def row(name: str, spread: Spread | None) -> list[str]:
        values = (None,) * 3 if spread is None else (spread.average, spread.maximum, spread.minimum)
        return [name, *(NOT_AVAILABLE if value is None else f"{value:.6f}" for value in values)]

    costs = {"reader_cost": summary.reader_cost_sec, "batch_cost": summary.batch_cost_sec, "ips": summary.ips}
    about = (
        f"Over {plain(summary.batches)} {plural('batch', summary.batches)} of this rank. ips is this rank's, times "
        "the number of ranks that see different data, as if all were as fast. An average is a total divided by a "
        "total. Left out: batches that were counted or traced, validation, checkpoints and what lies between epochs."
    )
    items: list[Item] = [
        f"Reader Ratio: {percent(summary.reader_ratio)}",
        f"Time Unit: s, IPS Unit: {summary.ips_unit}",
        cells(["", "avg", "max", "min"], [row(name, spread) for name, spread in costs.items()]),
        about,
        *_flops_of_run(summary),
        *_tokens(summary),
    ]
    return Section("Throughput of the run", "", items)


def estimate_text(value: float | None, error: float | None) -> str:
    """A share whose FLOPs have this *error*: ``34.20%``, ``≈ 34.20% ± 0.30%`` or ``≈ 34.20% (unchecked)``."""
    if value is None or error == 0.0:
        return percent(value)
    return f"≈ {percent(value)} " + ("(unchecked)" if error is None else f"± {percent(value * error)}")


def _flops_of_run(summary: ThroughputSummary) -> Iterator[str]:
    """FLOPs of the run's steps, and how they are known."""
    if summary.model_flops is None:
        return
    bound = " (lower bound)" if summary.lower_bound else ""
    about = "" if summary.flops_error == 0.0 else "≈ "
    yield (
        f"Model FLOPs: {about}{plain(summary.model_flops)}{bound}, hardware FLOPs: {about}"
        f"{plain(summary.hardware_flops)}{bound}, MFU: {estimate_text(summary.mfu, summary.flops_error)}{bound}"
    )
    if reason := summary.unavailable.get("mfu"):
        yield f"MFU is {NOT_AVAILABLE}: {reason}."
    yield from summary.notes
    numbers = {
        "of shapes that were counted": summary.steps_counted,
        "by an exact formula of the batch's sizes": summary.steps_by_formula,
        "estimated": summary.steps_estimated,
    }
    steps = sum(numbers.values())
    shares = ", ".join(f"{percent(number / steps)} {words}" for words, number in numbers.items() if number)
    yield f"FLOPs are of all {plain(steps)} {plural('step', steps)}: {shares}. {_checked(summary)}"


def _checked(summary: ThroughputSummary) -> str:
    """What random checks show of these FLOPs."""
    checks = f"{plain(summary.checks)} random {plural('check', summary.checks)}"
    if summary.flops_error is None:
        return f"Their error is not known: there were {checks}, and it takes three."
    if summary.flops_error > 0:
        return f"By {checks} they are within {percent(summary.flops_error)} of the truth, with 95% confidence."
    if not summary.checks:
        return "Every step was counted."
    differ = percent(min(1.0, 3 / summary.checks))
    return f"{checks} agreed to the last FLOP: at most {differ} of the steps differ, with 95% confidence."


def _tokens(summary: ThroughputSummary) -> Iterator[str]:
    if summary.tokens is None:
        if summary.tokens_per_sec is not None:
            yield f"tokens/s, by tokens_per_sample: {plain(summary.tokens_per_sec)}"
        return
    yield f"Tokens: {plain(summary.tokens)} processed, {plain(summary.real_tokens)} without padding"
    reason = summary.unavailable.get("useful_mfu") if summary.useful_mfu is None else None
    yield (
        f"Padding: {percent(summary.padding_ratio)}; "
        f"useful MFU, of the FLOPs without it: {estimate_text(summary.useful_mfu, summary.flops_error)}"
        f"{f' ({reason})' if reason else ''}; tokens/s without padding: {plain(summary.tokens_per_sec)}"
    )
