"""A law of FLOPs in words: each bucket as a sum of products."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

from lightning_flops.report.layout import paragraph, rule, table, title
from lightning_flops.schema.law import (
    LONGEST_LENGTH,
    NO_OTHER_SIZE,
    NO_STEP_TIMED,
    REAL_TOKENS,
    SUM_OF_SQUARES,
    TRAINED_TOKENS,
    WHOLE,
    LawReport,
    LawSum,
    LawTerm,
    LawVariable,
    StepLaw,
)
from lightning_flops.text.printable import page
from lightning_flops.units import duration, percent, plain, plural, si

_RAISED = str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹")
_LETTERS = {"batch": "B", "sequence": "S", "height": "H", "width": "W"}


def render_law(report: LawReport) -> str:
    """*report* as text, ending in a line break."""
    lines = [title("FLOPs by size")]
    if report.holds:
        names = [one.name for one in report.variables]
        lines += law_lines(report.sums, names)
        meanings = [f"{letter} is {name}" for name, letter in letters_of(names).items() if letter != name]
        lines += paragraph(
            f"{_sentence(meanings)}A multiply-add is two FLOPs. Counted on fake tensors for {plain(report.counted)} "
            f"{plural('batch', report.counted)} of different sizes, {plain(report.checks)} of which the others "
            f"foretold to the last FLOP; used for {' and '.join(map(range_text, report.variables))}. "
            "What lies outside is counted for its own size."
        )
    else:
        lines += paragraph(f"No law: {report.reason}.")
    if report.lower_bound:
        lines += paragraph("An operator that may spend FLOPs could not be counted: every figure is a lower bound.")
    if report.asked:
        names = list(report.asked[0].sizes)
        lines += table(
            [*names, "forward", "backward", "recompute", "model FLOPs", "hardware FLOPs", "from"],
            [
                [
                    *(plain(one.sizes[name]) for name in names),
                    *map(plain, (one.forward, one.backward, one.recompute, one.model_flops, one.hardware_flops)),
                    one.source,
                ]
                for one in report.asked
            ],
            left=(),
        )
    return page([*lines, rule()])


def law_lines(sums: Sequence[LawSum], names: Sequence[str]) -> list[str]:
    """The formulas, each wrapped to the report's width."""
    return [line for formula in law_formulas(sums, names) for line in paragraph(formula, rest="    ")]


def law_formulas(sums: Sequence[LawSum], names: Sequence[str]) -> list[str]:
    """One formula for each of *sums*: ``forward = B·(1,024·S + 64·S²)``."""
    letters = letters_of(names)
    several = len({one.dtype for one in sums}) > 1
    found = []
    for one in sums:
        label = f"{one.bucket.replace('_', ' ')} ({one.dtype})" if several else one.bucket.replace("_", " ")
        found.append(f"{label} = {_sum(one.terms, letters)}")
    return found


_MEANINGS = {
    WHOLE: "1 for a batch without padding, and 0 for one with padding",
    REAL_TOKENS: "the number of tokens that are no padding",
    SUM_OF_SQUARES: "the sum of the squares of the sequences' lengths",
    TRAINED_TOKENS: "the number of tokens with a label that the loss counts",
}
"""Variables that are no sizes of tensors."""

_UP_TO = {LONGEST_LENGTH: "sequences of up to {greatest} tokens", TRAINED_TOKENS: "N up to {greatest}"}
"""Those that a law is used for up to the greatest that was counted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLawWords:
    """The law of a run's steps in words."""

    formulas: tuple[str, ...]
    """One for each bucket."""
    support: str
    """For which sizes it is used, and what it rests on."""
    length: str
    """The size that steps are told apart by."""


def step_law_words(law: StepLaw) -> StepLawWords:
    """*law* in words, for any report."""
    names = [one.name for one in law.variables]
    meanings = "".join(f"{name} is {meaning}. " for name, meaning in _MEANINGS.items() if name in names)
    ranges = [
        _UP_TO[one.name].format(greatest=plain(one.greatest)) if one.name in _UP_TO else range_text(one)
        for one in law.variables
        if one.name not in _MEANINGS or one.name in _UP_TO
    ]
    used = f"Used for {' and '.join(ranges)}. " if ranges else ""
    return StepLawWords(
        formulas=tuple(law_formulas(law.sums, names)),
        support=(
            f"{meanings}{used}It rests on {plain(law.counted)} counted "
            f"{plural('step', law.counted)}, {plain(law.checks)} of which the others foretold to the last FLOP."
        ),
        length=next((one for one in names if one not in ("B", LONGEST_LENGTH, *_MEANINGS)), "B"),
    )


def no_law_sentence(why_none: str | None) -> str:
    """Why a run whose sizes varied has no law; empty where nothing gave reason to look for one."""
    return "" if why_none in (None, "", NO_STEP_TIMED, NO_OTHER_SIZE) else f"No law of the FLOPs: {why_none}."


def step_law_lines(law: StepLaw | None, *, why_none: str) -> list[str]:
    """The law of a run's steps in words, and its steps by length; *why_none*, if there is none and sizes varied."""
    if law is None:
        return paragraph(no_law_sentence(why_none))
    words = step_law_words(law)
    lines = [
        "FLOPs of a batch by its sizes:",
        *(f"  {line}" for formula in words.formulas for line in paragraph(formula, rest="    ")),
        *paragraph(words.support),
    ]
    if not law.lengths:
        return lines
    whole = sum(row.steps for row in law.lengths)
    rows = [
        [
            f"{row.shortest}-{row.longest}" if row.longest != row.shortest else str(row.shortest),
            percent(row.steps / whole),
            si(row.model_flops),
            duration(row.step_sec),
            percent(row.mfu),
        ]
        for row in law.lengths
    ]
    return [*lines, *table([f"length ({words.length})", "of the steps", "model FLOPs", "step", "MFU"], rows)]


def letters_of(names: Iterable[str]) -> dict[str, str]:
    """What stands for each name in a formula."""
    return {name: _LETTERS.get(name, name) for name in names}


def _sum(terms: Sequence[LawTerm], letters: Mapping[str, str]) -> str:
    """The terms with the batch before a bracket, and those without it."""
    batch = next((name for name, letter in letters.items() if letter == "B"), None)
    groups: dict[int, list[LawTerm]] = {}
    for term in terms:
        groups.setdefault(term.powers.get(batch, 0) if batch is not None else 0, []).append(term)
    parts = []
    for power, group in sorted(groups.items(), reverse=True):
        others = {name: letter for name, letter in letters.items() if name != batch}
        inside = " + ".join(_product(term, others) for term in group).replace("+ -", "- ")
        if power == 0:
            parts.append(inside)
        elif len(group) == 1:
            parts.append(f"{_power('B', power)}·{inside}")
        else:
            parts.append(f"{_power('B', power)}·({inside})")
    return " + ".join(parts).replace("+ -", "- ")


def _product(term: LawTerm, letters: Mapping[str, str]) -> str:
    factors = [_power(letter, term.powers[name]) for name, letter in letters.items() if term.powers.get(name)]
    return "·".join([_number(Fraction(term.numerator, term.denominator)), *factors])


def _number(value: Fraction) -> str:
    return plain(value.numerator) if value.denominator == 1 else f"{value.numerator:,}/{value.denominator:,}"


def _power(letter: str, power: int) -> str:
    return letter if power == 1 else f"{letter}{str(power).translate(_RAISED)}"


def _sentence(parts: Sequence[str]) -> str:
    return f"{', '.join(parts)}. " if parts else ""


def range_text(variable: LawVariable) -> str:
    """The sizes that a law is used for, in words."""
    sizes = f"{variable.name} from {plain(variable.least)} to {plain(variable.greatest)}"
    if not variable.between:
        return f"{sizes}, only those counted"
    return sizes if variable.apart == 1 else f"{sizes} in steps of {plain(variable.apart)}"
