"""A profile as a document: the short report, which everybody sees, and what is shown when details are asked for."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lightning_flops.analysis.rates import ratio
from lightning_flops.analysis.step_rates import RATES_OF_TRAINING
from lightning_flops.report.document import Column, Figure, Section, Table, field, quantity, share, table
from lightning_flops.report.layout import some_of
from lightning_flops.schema.advice import Advice
from lightning_flops.schema.answer import whole_step_sec
from lightning_flops.schema.modules import ModuleProfile
from lightning_flops.schema.profile import Profile
from lightning_flops.schema.step import FEW_STEPS
from lightning_flops.units import NOT_AVAILABLE, duration, percent, plain, plural, si

NO_ADVICE = "Nothing that was measured is above its threshold."

MODULES_SHOWN = 10
_NAME_CHARS = 40
_CLASS_CHARS = 18
_NS = 1e-9

RATE_WORDS = {
    "forward_flops_per_sec": "fwd FLOP/s",
    "backward_flops_per_sec": "bwd FLOP/s",
    "backward_flops_per_sec_estimated": "bwd FLOP/s",
    "forward_backward_flops_per_sec": "fwd+bwd FLOP/s",
    "forward_backward_flops_per_sec_estimated": "fwd+bwd FLOP/s",
    "iter_flops_per_sec": "FLOP/s",
    "iter_flops_per_sec_estimated": "FLOP/s",
    "samples_per_sec": "samples/second",
    "iter_samples_per_sec": "samples/second",
    "tokens_per_sec": "tokens/second",
    "tokens_per_sec_per_device": "tokens/second",
    "mfu": "MFU",
    "hfu": "HFU",
    "data_wait_ratio": "data wait",
}
"""How a report names a rate that has no value."""


def short_sections(
    profile: Profile, *, modules: int = MODULES_SHOWN, advice: int = 4, notes: int = 2
) -> Iterator[Section]:
    """What every report shows below its summary."""
    yield times_section(profile)
    if profile.budget is not None:
        yield breakdown_section(profile)
    yield modules_section(profile, most=modules)
    yield advice_section(profile.advice, most=advice, nothing=no_advice(profile))
    if profile.notes:
        yield notes_section(profile.notes, most=notes)


def no_advice(profile: Profile) -> str:
    """Why there is no advice, where there is none."""
    timing, words = profile.timing, profile.context.step_word
    if timing is not None and timing.few_steps:
        return f"No advice from few steps: it begins with {FEW_STEPS} timed {plural(words, FEW_STEPS)}."
    return NO_ADVICE


def times_section(profile: Profile, *, spread: bool = False) -> Section:
    """The parts of a typical step, which add up to it; with *spread* the mean and spread of the timed ones."""
    timing, word = profile.timing, profile.context.step_word
    title = f"Time of a {'' if spread else 'typical '}{profile.step_name}"
    if timing is None:
        return Section(title, "", [f"No {word} was timed."])
    parts = [part for part in timing.parts if part.maximum_sec]
    columns = [
        Column("", lambda part: profile.step_name if part is timing.global_step else part.name, str),
        quantity("typical", lambda part: part.typical_sec, "s"),
        share("share", lambda part: ratio(part=part.typical_sec, whole=timing.global_step.typical_sec)),
    ]
    if spread:
        columns[2:] = [
            quantity("mean", lambda part: part.mean_sec, "s"),
            quantity("min", lambda part: part.minimum_sec, "s"),
            quantity("median", lambda part: part.median_sec, "s"),
            quantity("max", lambda part: part.maximum_sec, "s"),
        ]
    words = f"Over {plain(timing.timed_steps)} timed {plural(word, timing.timed_steps)}"
    words += "." if spread else f"; typical is the mean of the middle {plain(timing.typical_steps)} by wall time."
    if timing.reader_sec is not None:
        words += f" The data loader ran {duration(timing.reader_sec)} per {word}, whether other work hid it or not."
    return Section(title, "", [table([*parts, timing.global_step], columns, whole=True, after=[words])])


def breakdown_section(profile: Profile) -> Section:
    """What the time of a step went to; the rows add up to the step."""
    budget = profile.budget
    if budget is None:
        return Section("Step time breakdown", "", [f"{NOT_AVAILABLE}: no step was timed."])
    number = {one.rule: place for place, one in enumerate(profile.advice, start=1)}
    rows: list[tuple[str, int, str]] = []
    for one in budget.rows:
        links = ", ".join(str(number[rule]) for rule in one.advice if rule in number)
        rows.append((one.label, one.time_ns, links))
        if one.memory_ns is not None:
            rows.append(("  of it moving bytes at the memory's bandwidth, at most", one.memory_ns, ""))
    rows.append((profile.step_name, budget.wall_ns, ""))
    columns = [
        Column("", lambda row: row[0], str),
        quantity("typical", lambda row: row[1] * _NS, "s"),
        share("share", lambda row: row[1] / budget.wall_ns),
        *([Column("advice", lambda row: row[2], str, left=True)] if any(row[2] for row in rows) else []),
    ]
    word = profile.context.step_word
    traced = profile.traced
    about = []
    if traced is not None and budget.traced_step is not None:
        about.append(f"Phases are divided as in the traced {traced.named(word)}.")
    beside = [f"{one.label} {duration(one.time_ns * _NS)}" for one in budget.run]
    if len(beside) > 1:
        about.append(f"Other time during profiling: {', '.join(beside[1:])}.")
    heading = "Step time breakdown" + ("" if budget.knows_peak else ": time alone, as the peak is not known")
    return Section(heading, "", [table(rows, columns, whole=True, after=[" ".join((*about, *budget.notes))])])


@dataclass(frozen=True, slots=True)
class _Group:
    """Modules of one class at one place in equal layers, added up, without the modules inside them."""

    name: str
    members: Sequence[ModuleProfile]

    def _sum(self, of: Any) -> float | None:
        values = [of(one.times) for one in self.members if one.times is not None]
        known = [value for value in values if value is not None]
        return math.fsum(known) if known else None

    @property
    def forward_sec(self) -> float | None:
        return self._sum(lambda times: times.own_forward_sec)

    @property
    def backward_sec(self) -> float | None:
        return self._sum(lambda times: times.own_backward_sec)

    @property
    def self_sec(self) -> float:
        return (self.forward_sec or 0.0) + (self.backward_sec or 0.0)

    @property
    def flops(self) -> int:
        return sum(one.own.total for one in self.members)

    @property
    def kind(self) -> str:
        many = f"{len(self.members)} x " if len(self.members) > 1 else ""
        return f"{many}{self.members[0].type_name or '(not described)'}"

    @property
    def of_peak(self) -> float | None:
        """Share of the peak; None where a module's FLOPs are not all its own, or its peak is not known."""
        reached = seconds = 0.0
        for one in self.members:
            times = one.times
            if times is None or one.own != one.total:
                return None
            sides = (
                (one.own.forward, times.forward_sec, times.forward_utilization),
                (one.own.total - one.own.forward, times.backward_sec, times.backward_utilization),
            )
            for flops, spent, utilization in sides:
                if flops and (spent is None or utilization is None):
                    return None
                reached += (spent or 0.0) * (utilization or 0.0)
                seconds += spent or 0.0
        return ratio(part=reached, whole=seconds) if reached else None


def module_groups(modules: Sequence[ModuleProfile]) -> list[_Group]:
    """*modules* added up where their names differ in numbers alone and their classes do not differ."""
    members: dict[tuple[str, str], list[ModuleProfile]] = {}
    for module in modules:
        if module.alias_of is None:
            pattern = ".".join("*" if part.isdecimal() else part for part in module.name.split("."))
            members.setdefault((pattern, module.type_name), []).append(module)
    return [
        _Group((group[0].name if len(group) == 1 else pattern) or "(root)", group)
        for (pattern, _), group in members.items()
    ]


def modules_section(profile: Profile, *, most: int | None = MODULES_SHOWN) -> Section:
    """The modules with most self time, or with most FLOPs where no step was traced; repeated layers added up."""
    groups = module_groups(profile.modules)
    timed = any(group.self_sec for group in groups)

    def weight(group: _Group) -> float:
        return group.self_sec if timed else group.flops

    found = sorted((group for group in groups if weight(group)), key=lambda group: -weight(group))
    title = "Top modules by self time" if timed else "Top modules by FLOPs of their own"
    if not found:
        return Section(title, "", [f"{NOT_AVAILABLE}: no module was seen to spend FLOPs."])
    shares = _shares(profile, groups, timed=timed)
    columns = [
        Column("module", lambda group: group.name, str, chars=_NAME_CHARS),
        Column("class", lambda group: group.kind, str, left=True, chars=_CLASS_CHARS),
    ]
    if timed:
        columns.append(quantity("fwd", lambda group: group.forward_sec, "s"))
        if any(group.backward_sec is not None for group in found):
            columns.append(quantity("bwd", lambda group: group.backward_sec, "s"))
    columns += [
        share("share", lambda group: shares(weight(group))),
        quantity("", lambda group: profile.per_step(group.flops), "FLOPs"),
    ]
    if any(group.of_peak is not None for group in found):
        columns.append(share("of peak", lambda group: group.of_peak))
    more = len(found) - len(found[:most])
    words = [f"And {plain(more)} more."] if more else []
    if any(len(group.members) > 1 for group in found[:most]):
        words.append("A star stands for any number: these modules are added up.")
    if profile.lower_bound:
        words.append("FLOPs are lower bounds.")
    return Section(title, "", [table(found[:most], columns, whole=True, least_width=5, after=[" ".join(words)])])


def _shares(profile: Profile, groups: Sequence[_Group], *, timed: bool) -> Any:
    """Share of a typical step, of all modules' forwards where there is no trace, or of all FLOPs."""
    tables = None if profile.traced is None else profile.traced.tables
    if not timed:
        whole: float = sum(group.flops for group in groups) + profile.outside.total
    elif tables is not None:
        whole = whole_step_sec(profile, tables)
    else:
        whole = math.fsum(group.self_sec for group in groups)
    return lambda part: ratio(part=part, whole=whole)


def advice_section(
    advice: Sequence[Advice], *, most: int | None = None, rules: bool = False, nothing: str = NO_ADVICE
) -> Section:
    """What to do, the largest saving first.

    Args:
        advice: all of it.
        most: so many pieces at most; None for all.
        rules: say of each what it was held against, when not to follow it, and who says so.
        nothing: what to say without advice.
    """
    items = [
        f"{number}. {one.fact} {one.remedy}{saving(one)}"
        + (f" Not {one.unless}. (Rule {one.rule}: {one.threshold}; {one.source}.)" if rules else "")
        for number, one in enumerate(advice[:most], start=1)
    ]
    if more := len(advice) - len(items):
        items.append(f"And {plain(more)} more in the detailed report.")
    return Section("Advice", "", items or [nothing])


def saving(advice: Advice) -> str:
    """The ceiling of what *advice* can save, as a sentence after others."""
    return "" if advice.ceiling is None else f" It can save up to {100 * advice.ceiling:.1f}% of a step."


def notes_section(notes: Sequence[str], *, most: int | None = None) -> Section:
    """What is missing or degraded."""
    items = [f"- {note}" for note in notes[:most]]
    if more := len(notes) - len(items):
        items.append(f"- And {plain(more)} more in the detailed report.")
    return Section("Notes", "", items)


def missing_rates(unavailable: Mapping[str, str]) -> list[str]:
    """Why some rates, by their fields' names, are not known; one sentence for each reason."""
    reasons: dict[str, list[str]] = {}
    for rate, reason in unavailable.items():
        words = reasons.setdefault(reason, [])
        if RATE_WORDS[rate] not in words:
            words.append(RATE_WORDS[rate])
    return [f"{NOT_AVAILABLE}: {', '.join(words)}: {reason}." for reason, words in reasons.items()]


def flops_section(profile: Profile) -> Section:
    """Every bucket of FLOPs, to the last one."""
    mean, total, spread = profile.flops, profile.flops_total, profile.flops_spread
    half = profile.settings.causal_attention == "half"
    factor = f"{2 + profile.settings.recompute_fwd_factor:g}"
    rows: list[tuple[str, str]] = [
        ("fwd", "forward"),
        ("  of it no_grad", "without_backward"),
        ("bwd (measured)", "backward"),
        (f"bwd (estimated: {factor} x fwd with a bwd to follow)", "backward_estimated"),
        ("recomputed in the bwd", "recompute"),
        ("optimizer", "optimizer"),
        ("skipped: masked attention" + (", counted less executed" if half else ""), "skipped"),
        ("model FLOPs = fwd + bwd", "model"),
        ("hardware FLOPs = fwd + bwd + recomputed + optimizer - skipped", "hardware"),
    ]
    if not profile.has_backward:
        rows = [("fwd = model FLOPs", "forward"), rows[6], ("hardware FLOPs = fwd - skipped", "hardware")]

    def of_spread(which: str) -> Any:
        def value(row: tuple[str, str]) -> Any:
            assert spread is not None
            if row[1] == "model":
                return getattr(spread, f"model_{which}")
            return getattr(getattr(spread, which), row[1], None)

        return value

    several, moved = len(profile.counted_steps) > 1, profile.bytes_total
    steps = f"{len(profile.counted_steps)} {plural(profile.context.step_word, 2)}"
    columns = [
        Column("", lambda row: row[0], str),
        Column("FLOPs", lambda row: getattr(mean, row[1]), si),
        Column(f"all {steps}" if several else "exact", lambda row: getattr(total, row[1])),
    ]
    if spread is not None:
        columns += [Column("min", of_spread("minimum"), si), Column("max", of_spread("maximum"), si)]
    if moved.total:
        bytes_of = {name: profile.per_step(getattr(moved, name)) for name in ("forward", "backward", "recompute")}
        bytes_of["optimizer"] = profile.per_step(moved.optimizer)
        columns.append(
            Column("bytes", lambda row: bytes_of.get(row[1]), lambda value: "" if value is None else si(value, "B"))
        )
    attention = (
        "Attention that is flagged causal counts half the score matrix."
        if half
        else "Attention counts the full score matrix, causal or not."
    )
    note = f"Matrix products, convolutions, attention and recurrent layers, two FLOPs a multiply-add. {attention}"
    if moved.total:
        note += " Bytes are what all operators read and write, elementwise ones included."
    if profile.lower_bound:
        note += f" {lower_bound_words(profile)}"
    title = f"FLOPs of a {profile.step_name} per {profile.context.device_word}"
    return Section(title, note, [table(rows, columns, whole=True)])


def throughput_section(profile: Profile) -> Section:
    """What the run achieves, and what share of the device's peak that is."""
    rates, job, name = profile.rates, profile.job_rates, profile.step_name
    context, device = profile.context, profile.context.device_word
    latency = "iter latency (as DeepSpeed)" if context.trains else "fwd latency"

    def utilization(value: float | None) -> str:
        return f"{percent(value)}{' (lower bound)' if profile.lower_bound and value is not None else ''}"

    whole = sum(one.model for one in profile.dtypes)
    items: list[Figure | Table | str] = [
        Figure(f"MFU = model FLOPs per {device} / peak FLOP/s / {name} time", utilization(rates.mfu)),
        Figure(f"HFU = hardware FLOPs per {device} / peak FLOP/s / {name} time", utilization(rates.hfu)),
        *(
            Figure(
                f"  peak for {one.dtype}, {percent(ratio(part=one.model, whole=whole))} of the model FLOPs",
                si(one.peak_flops_per_sec, "FLOP/s"),
            )
            for one in profile.dtypes
        ),
        Figure(f"samples/second over the {name}", plain(job.samples_per_sec)),
        Figure(f"samples/second over the {latency}", plain(job.iter_samples_per_sec)),
        Figure(f"tokens/second over the {name}", plain(job.tokens_per_sec)),
        Figure(f"tokens/second per {device}", plain(job.tokens_per_sec_per_device)),
        Figure(f"data wait, share of the {name}", percent(rates.data_wait_ratio)),
    ]
    if context.world_size > 1 and profile.ranks is not None:
        items.append(f"MFU, HFU and times are those of rank {context.rank}; samples and tokens those of all ranks.")
    elif context.world_size > 1:
        whose = "that all ranks work on together"
        if context.dp_size > 1:
            whose = f"of all {context.dp_size} ranks that see different data, as {context.dp_size} times this rank's"
        items.append(f"MFU, HFU and times are those of rank {context.rank}; samples and tokens are those {whose}.")
    unavailable = profile.unavailable
    if not profile.has_backward:
        unavailable = {rate: why for rate, why in unavailable.items() if rate not in RATES_OF_TRAINING}
    return Section("Throughput and utilization", "", [*items, *missing_rates(unavailable)])


def operators_section(profile: Profile) -> Section | None:
    """Every operator that spent FLOPs, the most first."""
    spending = [operator for operator in profile.operators if operator.flops.total]
    if not spending:
        return None
    whole, per_step = sum(operator.flops.total for operator in spending), profile.per_step

    def of(phase: str) -> Any:
        return lambda one: per_step(getattr(one.flops, phase))

    columns = [
        field("operator", "operator", str),
        Column("calls", lambda one: per_step(one.calls), si),
        quantity("fwd", of("forward"), "FLOPs"),
        *([quantity("bwd", of("backward"), "FLOPs")] if profile.has_backward else []),
        *([quantity("recomputed", of("recompute"), "FLOPs")] if profile.flops_total.recompute else []),
        *([quantity("optimizer", of("optimizer"), "FLOPs")] if profile.flops_total.optimizer else []),
        share("share", lambda one: ratio(part=one.flops.total, whole=whole)),
        Column("dtype", lambda one: ", ".join(one.dtypes), str, left=True),
    ]
    after = ["Shares are of what was counted, a lower bound."] if profile.lower_bound else []
    title = f"Operators with most FLOPs in a {profile.step_name}"
    return Section(title, "", [table(spending, columns, least_width=5, after=after)])


def intensity_section(profile: Profile) -> Section | None:
    """FLOPs per byte of modules and operators, and what can be reached with it; None where no bytes were counted."""
    of_modules = [(one.name or "(root)", one.own.total, one.roofline) for one in profile.modules if one.own.total]
    of_operators = [(one.operator, one.flops.total, one.roofline) for one in profile.operators]
    tables = []
    for what, found in (("module", of_modules), ("operator", of_operators)):
        known = [row for row in found if row[2] is not None and row[2].flops_per_byte is not None]
        known.sort(key=lambda row: -row[1])
        columns = [
            Column(what, lambda row: row[0], str, chars=_NAME_CHARS),
            quantity("", lambda row: profile.per_step(row[1]), "FLOPs"),
            Column("FLOP/byte", lambda row: row[2].flops_per_byte),
        ]
        if any(row[2] is not None and row[2].achieved_flops_per_sec is not None for row in known):
            columns.append(quantity("achieved", lambda row: row[2].achieved_flops_per_sec, "FLOP/s"))
        if any(row[2] is not None and row[2].attainable_flops_per_sec is not None for row in known):
            columns.append(quantity("attainable", lambda row: row[2].attainable_flops_per_sec, "FLOP/s"))
        if known:
            tables.append(table(known, columns, least_width=5))
    if not tables:
        return None
    bandwidth, word = profile.memory_bytes_per_sec, profile.context.step_word
    attainable = (
        "What is attainable is n/a: the memory's bandwidth is not known for this device; set memory_bytes_per_sec."
        if bandwidth is None
        else f"Attainable: the least of the peak and FLOP/byte x {si(bandwidth, 'B/s')}, the memory's bandwidth"
        f"{', as given' if profile.settings.memory_given else ''}; what stays in a cache or is fused can be faster."
    )
    note = (
        f"FLOPs and bytes of the counted {word}, forward, backward and recomputation together; achieved: these FLOPs "
        f"over the time of the traced {word}. {attainable}"
    )
    return Section("Arithmetic intensity", note, tables)


def uncounted_section(profile: Profile) -> Section:
    """Each operator that ran and is in no count."""
    if not profile.uncounted:
        words = "Nothing: every operator that ran has a FLOP count or is known to spend none."
        return Section("Not counted", "", [words])
    ordered = sorted(profile.uncounted.items(), key=lambda item: (not item[1].heavy, -item[1].output_elements, item[0]))
    columns = [
        Column("operator", lambda row: row[0], str),
        Column("calls", lambda row: row[1].calls),
        Column("output elements", lambda row: row[1].output_elements, si),
        Column("", lambda row: "may have FLOPs" if row[1].heavy else "", str, left=True),
        Column("modules", lambda row: some_of(row[1].modules, most=2), str, left=True),
    ]
    note = " ".join((lower_bound_words(profile), *_how_to_teach(profile))) if profile.lower_bound else ""
    return Section("Not counted", note, [table(ordered, columns, whole=True, least_width=0)])


def lower_bound_words(profile: Profile) -> str:
    """Which figures are lower bounds, and because of which operators."""
    heavy = sorted(name for name, operator in profile.uncounted.items() if operator.heavy)
    return (
        f"LOWER BOUND: {', '.join(heavy)} may have FLOPs and could not be counted, so FLOPs, MACs, FLOP/s, MFU and HFU "
        "are at least what is printed."
    )


def _how_to_teach(profile: Profile) -> Iterator[str]:
    """How to have an operator counted; nothing where only kernels without an operator are not counted."""
    for name, operator in sorted(profile.uncounted.items()):
        namespace, _, short = name.partition(".")
        if operator.heavy and namespace not in ("cuda", "inductor", "triton") and short and "." not in short:
            yield (
                f'lightning_flops.register_flop_formula("{namespace}::{short}", formula) has an operator counted; 0 in '
                "place of the formula says that it spends none."
            )
            return
