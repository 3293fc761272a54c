"""What is no profile: counts of a block of code, a formula of FLOPs, the throughput of a run as Paddle prints it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import replace
from operator import attrgetter
from typing import Any

from lightning_flops.analysis.counts import FlopCounts, ModuleNode, build_modules, module_tree
from lightning_flops.records import OUTSIDE, ModuleRecord, PhaseFlops
from lightning_flops.report.document import Column, Item, Section, Table, all_of, field, short, some_of
from lightning_flops.report.module_text import names_of
from lightning_flops.schema.plan import FormulaReport, FormulaSize, FormulaTerm
from lightning_flops.schema.profile import ThroughputSummary
from lightning_flops.units import NOT_AVAILABLE, bytes_by_dtype, percent, plain, plural, si

_SHAPES_SHOWN = 4
_RAISED = str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹")
_PHASES = {"forward": "forward", "backward": "backward", "recompute": "recomputed", "optimizer": "optimizer"}


def counts_section(counts: FlopCounts) -> Section:
    """The tree of modules, of which equal ones in a row are one row with the figures of each, and what is not in it."""
    record = counts.record
    records = [replace(one, extra_repr=_shapes(one)) for one in counts.modules]
    counts = FlopCounts(record)  # of one moment, also while counting goes on
    total, outside = counts.total, counts.own_by_module().get(OUTSIDE, PhaseFlops())
    phases = [phase for phase in _PHASES if phase in ("forward", "backward") or getattr(total, phase)]
    root, names = module_tree(build_modules(records, counts)), sorted(counts.uncounted)

    def of_described(name: str) -> Callable[[ModuleNode], Any]:
        return lambda node: getattr(node.module, name) if node.module.type_name else None

    columns = [
        Column("module", _name, str),
        Column("", of_described("params"), unit=" params"),
        Column("weight shapes", of_described("extra_repr"), str, left=True),
        *(Column(_PHASES[phase], attrgetter(f"module.total.{phase}"), unit="FLOPs") for phase in phases),
    ]
    amounts = ", ".join(f"{_PHASES[phase]} {si(getattr(outside, phase))}" for phase in phases)
    sizes = next((one.parameter_bytes for one in records if not one.name), {})
    bound = ": these figures are lower bounds" if counts.is_lower_bound else ""
    remarks = [
        f"{OUTSIDE}: {amounts}." if outside.total else "",
        f"Parameters: {bytes_by_dtype(sizes)}." if sizes else "",
        f"Not counted: {some_of(names, most=_SHAPES_SHOWN)}{bound}." if names else "",
    ]
    about = "Of each module with those inside it; a multiply-add is two FLOPs."
    nodes = [] if root is None else list(_nodes(root))
    return Section("FLOPs by module", about, [Table(nodes, columns), *remarks, *record.notes])


def _name(node: ModuleNode) -> str:
    name, kind = names_of(node)
    same = node.module.alias_of
    kind += "" if same is None or node.last is not None else f", the same as {same or 'the root'}"
    return "  " * node.module.depth + short(f"{name}: {kind}" if name else kind)


def _shapes(record: ModuleRecord) -> str:
    """Shapes of the module's own parameters: "64x3x7x7, 64"."""
    texts = ["x".join(map(str, shape)) or "scalar" for shape in record.parameter_shapes]
    return some_of(texts, most=_SHAPES_SHOWN)


def _nodes(node: ModuleNode) -> Iterator[ModuleNode]:
    yield node
    for child in node.children:
        yield from _nodes(child)


_LOWER_BOUND = "An operator that may have FLOPs could not be counted: every figure is a lower bound."


def formula_section(report: FormulaReport) -> Section:
    """The formula, the sizes that it holds for, and what was asked of it."""
    several = len({term.dtype for term in report.terms}) > 1
    sums = defaultdict[str, list[str]](list)
    for term in report.terms:
        sums[f"{term.bucket} ({term.dtype})" if several else term.bucket].append(_product(term))
    columns = [
        Column("sizes", lambda one: ", ".join(f"{name} {plain(size)}" for name, size in one.sizes.items()), str),
        *all_of({phase: phase for phase in ("forward", "backward", "recompute")}),
        *all_of({"model FLOPs": "model_flops", "hardware FLOPs": "hardware_flops"}),
        field("from", "source", str),
    ]
    found = (
        f"A multiply-add is two FLOPs. Counted on fake tensors for {plain(report.counted)} "
        f"{plural('batch', report.counted)} of different sizes, {plain(report.checks)} of which the others predict "
        f"to the last FLOP. Used for {' and '.join(map(_range, report.sizes)) or 'the counted sizes'}; other sizes "
        "are counted by themselves."
    )
    items: list[Item] = [
        *(f"{bucket} = {' + '.join(terms).replace('+ -', '- ')}" for bucket, terms in sums.items()),
        found if report.reason is None else f"No formula: {report.reason}.",
        _LOWER_BOUND if report.lower_bound else "",
        *([Table(report.asked, columns, whole=True)] if report.asked else []),
    ]
    return Section("FLOPs by size", "", items)


def _product(term: FormulaTerm) -> str:
    """A product of its factors: ``64·batch·sequence²``."""
    number = plain(term.numerator) + ("" if term.denominator == 1 else f"/{plain(term.denominator)}")
    powers = [name + ("" if power == 1 else str(power).translate(_RAISED)) for name, power in term.powers.items()]
    return "·".join([number, *powers])


def _range(size: FormulaSize) -> str:
    words = f"{size.name} from {plain(size.least)} to {plain(size.greatest)}"
    return words if size.apart == 1 else f"{words} in steps of {plain(size.apart)}"


def run_section(summary: ThroughputSummary) -> Section:
    """What a run's batches cost, and the FLOPs and tokens of all of them."""
    costs = {"reader_cost": summary.reader_cost_sec, "batch_cost": summary.batch_cost_sec, "ips": summary.ips}
    spreads = all_of({"avg": "1.average", "max": "1.maximum", "min": "1.minimum"}, "{:.6f}".format)
    error, bound = summary.flops_error, " (lower bound)" if summary.lower_bound else ""
    counted = "by tokens_per_sample" if summary.tokens is None else "without padding"
    almost, useful = "" if error == 0.0 else "≈ ", "useful MFU, of the FLOPs without padding"
    figures = {
        "model FLOPs": f"{almost}{plain(summary.model_flops)}{bound}",
        "hardware FLOPs": f"{almost}{plain(summary.hardware_flops)}{bound}",
        "MFU": f"{estimate_text(summary.mfu, error, summary.checks)}{bound}",
        useful: f"{estimate_text(summary.useful_mfu, error, summary.checks)}{bound}",
        "tokens": plain(summary.tokens),
        "tokens without padding": plain(summary.real_tokens),
        "padding": percent(summary.padding_ratio),
        f"tokens/s, {counted}": plain(summary.tokens_per_sec),
    }
    known = {label: value for label, value in figures.items() if NOT_AVAILABLE not in value}
    reasons = {"MFU": summary.unavailable.get("mfu"), useful: summary.unavailable.get("useful_mfu")}
    items: list[Item] = [
        f"Reader Ratio: {percent(summary.reader_ratio)}",
        f"Time Unit: s, IPS Unit: {summary.ips_unit}",
        Table([*costs.items()], [field("", "0", str), *spreads], whole=True),
        f"Over {plain(summary.batches)} {plural('batch', summary.batches)} of this rank. ips is this rank's, times the "
        "number of ranks that see different data, as if all were as fast. An average is a total divided by a total. "
        "Left out: batches that were counted or traced, validation, checkpoints and what lies between epochs.",
        known | {label: f"{NOT_AVAILABLE} ({reason})" for label, reason in reasons.items() if reason},
        *summary.notes,
        "" if summary.model_flops is None else _steps(summary),
    ]
    return Section("Throughput of the run", "", items)


# With fewer nothing is said of the error.
_LEAST_CHECKS = 3


def estimate_text(value: float | None, error: float | None, checks: int) -> str:
    """A share whose FLOPs have this *error*: ``34.2%``, ``≈ 34.2% ± 0.30%`` or ``≈ 34.2% (12 checks agreed)``."""
    if value is None or error == 0.0:
        return percent(value)
    if error is not None:
        return f"≈ {percent(value)} ± {percent(value * error)}"
    return f"≈ {percent(value)} " + ("(unchecked)" if checks < _LEAST_CHECKS else f"({plain(checks)} checks agreed)")


def _steps(summary: ThroughputSummary) -> str:
    """How the FLOPs of the run's steps are known, and what random checks show of them."""
    numbers = {
        "of shapes that were counted": summary.steps_counted,
        "by an exact formula of the batch's sizes": summary.steps_by_formula,
        "estimated": summary.steps_estimated,
    }
    steps, error, number = sum(numbers.values()), summary.flops_error, summary.checks
    shares = ", ".join(f"{percent(number / steps)} {words}" for words, number in numbers.items() if number)
    checks = f"{plain(number)} random {plural('check', number)}"
    checked = f"By {checks} they are within {percent(error)} of the truth, with 95% confidence."
    if error == 0.0:
        checked = f"They are exact, and {checks} agreed." if number else "They are exact."
    elif error is None and number < _LEAST_CHECKS:
        checked = f"Their error is not known: there were {checks}, and it takes three."
    elif error is None:
        differ = f"at most {percent(min(1.0, 3 / number))} of the steps differ, with 95% confidence"
        checked = f"{checks} agreed to the last FLOP: {differ}."
    return f"FLOPs are of all {plain(steps)} {plural('step', steps)}: {shares}. {checked}"
