"""A formula of FLOPs in words: each bucket as a sum of products."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fractions import Fraction

from lightning_flops.report.document import Item, Section, cells
from lightning_flops.schema.formula import FormulaReport, FormulaSize, FormulaTerm
from lightning_flops.units import plain, plural

_RAISED = str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹")
_LETTERS = {"batch": "B", "sequence": "S", "height": "H", "width": "W"}


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
