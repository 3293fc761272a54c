"""A profile as a document: the short report, which everybody sees, and what is shown when details are asked for."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from lightning_flops.analysis.counts import grouped, pattern_of
from lightning_flops.analysis.rates import RATES_OF_TRAINING, ratio
from lightning_flops.report.document import (
    Column,
    Section,
    Table,
    at,
    filled,
    points,
    sentences,
    share,
    some_of,
)
from lightning_flops.schema.profile import Profile
from lightning_flops.schema.step import FEW_STEPS, Advice, Budget, BudgetKey, LinesProfile, ModuleProfile
from lightning_flops.schema.trace import RanksProfile
from lightning_flops.units import NOT_AVAILABLE, duration, percent, plain, plural, si

NOT_DESCRIBED = "(not described)"  # stands for the class of a module that did work but that the model does not list
STARVED = "STARVED."
NO_ADVICE = "Nothing that was measured is above its threshold."
IN_DETAILS = "in the detailed report"
_FAR_SLOWER, _ENOUGH_ALIKE = 3.0, 3  # a module that takes so many times as long as most of so many has its own row


def short_sections(
    profile: Profile,
    *,
    tables: bool = True,
    modules: int = 10,
    lines: int | None = None,
    advice: int | None = None,
    notes: int | None = None,
) -> Iterator[Section]:
    """What every report shows below its summary: so many modules, lines and so on; all advice has its rules.

    Without *tables*, neither the phases nor what fills the step.
    """
    yield times_section(profile)
    if profile.phases and tables:
        yield phases_section(profile)
    if profile.budget is not None and tables:
        yield breakdown_section(profile, profile.budget)
    yield modules_section(profile, most=modules)
    if profile.lines is not None:
        yield lines_section(profile.lines, most=lines)
    section = advice_section(profile.advice, most=advice, nothing=without_advice(profile))
    warning = f"{STARVED} {profile.starved}" if profile.starved else ""
    yield replace(section, items=list(filter(None, [warning, *section.items, profile.unexplained])))
    yield from notes_sections(profile.notes, most=notes)


def times_section(profile: Profile) -> Section:
    """The parts of a typical step, which add up to it, and the mean and spread of the timed ones."""
    timing, word = profile.timing, profile.context.step_word
    title = f"Time of a typical {profile.step_name}"
    if timing is None:
        return Section(title, "", [f"No {word} was timed."])
    columns = [
        Column("", lambda part: profile.step_name if part is timing.global_step else part.name, str),
        Column("typical", at("typical_sec"), unit="s"),
        share("share", lambda part: ratio(part=part.typical_sec, whole=timing.global_step.typical_sec)),
        Column("mean", at("mean_sec"), unit="s"),
        Column("min", lambda part: min(part.steps_sec), unit="s"),
        Column("max", lambda part: max(part.steps_sec), unit="s"),
    ]
    reader, between = timing.reader_sec, [f"{cause} {duration(sec)}" for cause, sec in timing.excluded_sec.items()]
    busy, system = ratio(part=timing.cpu_time_sec, whole=timing.global_step.mean_sec), timing.cpu_system_ratio
    of_all = "n/a (it is known on Linux, from 0.2 s on)" if system is None else f"{percent(system)} of all"
    words = sentences(
        f"Over {plain(timing.timed_steps)} timed {plural(word, timing.timed_steps)}; typical is the mean of the middle "
        "half by wall time.",
        f"They took {percent(abs(timing.longer - 1))} {'longer' if timing.longer > 1 else 'less'} than the "
        f"{plain(timing.whole_steps)} that were timed as a whole: all their times are scaled to these."
        if timing.whole_steps
        else "",
        f"{plain(timing.unhooked_steps)} more ran without our hooks: if these took less, all times are scaled to them."
        if timing.unhooked_steps
        else "",
        # A tenth less is not by the marks, which can only lengthen a step.
        "Rough: steps got longer meanwhile, maybe not all parts alike." if timing.longer < 0.9 else "",
        ""
        if reader is None or reader <= 1.01 * (timing.data_wait_sec or 0.0)  # it was waited for all the time
        else f"The data loader ran {duration(reader)} per {word}, whether other work hid it or not.",
        f"Between steps: {', '.join(between)}." if between else "",
        "" if busy is None else f"CPU (process) {percent(busy)} of a processor, CPU (system) {of_all}.",
    )
    rows = [*(part for part in timing.parts if any(part.steps_sec)), timing.global_step]
    return Section(title, "", [Table(rows, columns, whole=True), words], "steps")


def phases_section(profile: Profile) -> Section:
    """The phases of a step that has some beside training; they add up to it."""
    rows = list(profile.phases.items())
    columns = [
        Column("", at("0"), str),
        Column("mean", at("1.seconds"), unit="s"),
        share("share", at("1.ratio")),
        Column("", at("1.flops"), unit="FLOPs"),
        Column("MFU", at("1.mfu"), percent),
        Column("in", at("1.dtype"), str),
        Column("tokens", at("1.tokens")),
        Column("completed", at("1.completion_tokens")),
        Column("completed/s", at("1.tokens_per_sec")),
    ]
    words = sentences(
        "Rollout runs inside generate; scoring is a model that is called without gradients outside of it. Tokens of a "
        "rollout are prompts and completions, padding included.",
        "A server generated: FLOPs of its rollout are an estimate, the training's forward over as many tokens, and in "
        "no sum."
        if any(one.estimated for one in profile.phases.values())
        else "",
    )
    return Section(f"Phases of a {profile.step_name}", "", [Table(rows, filled(rows, columns), whole=True), words])


_ROWS: dict[BudgetKey, str] = {
    "model": "model FLOPs at the peak (a typical step's MFU)",
    "other_flops": "all other FLOPs at the peak",
    "compute": "matmul-like operators beyond these",
    "operators": "other operators",
    "communication": "communication that nothing hides",
    "idle": "idle while the host prepares, and copies",
    "data": "data wait and transfer",
    "other": "other: callbacks, logging, schedulers",
}


def breakdown_section(profile: Profile, budget: Budget) -> Section:
    """What the time of a step went to; the rows add up to the step."""
    other_labels: dict[BudgetKey, tuple[object, str]] = {
        "model": (profile.flops.skipped, "model FLOPs that kernels execute, at the peak"),
        # The time of what is outside the model is in "other".
        "other_flops": (profile.flops.outside, "recomputed and optimizer's FLOPs at the peak"),
        # No trace divides what is in "compute".
        "compute": (budget.rows_ns["operators"] is None, "all phases beyond these"),
    }
    labels = _ROWS | {key: label for key, (holds, label) in other_labels.items() if holds}
    rows = [*((label, budget.rows_ns[key]) for key, label in labels.items()), (profile.step_name, budget.wall_ns)]
    columns = [
        Column("", at("0"), str),
        Column("typical", at("1"), unit="ns"),
        share("share", lambda row: None if row[1] is None else row[1] / budget.wall_ns),
    ]
    why = profile.unavailable.get("mfu") if budget.rows_ns["model"] is None else None
    about = f"FLOPs at the peak are {NOT_AVAILABLE}: {why}." if why else ""
    return Section("Step time breakdown", "", [Table(rows, columns, whole=True), sentences(about, *budget.notes)])


def own_sec(modules: Sequence[ModuleProfile], phases: Sequence[str] = ("forward", "backward")) -> float | None:
    """Own time of *modules* in these phases, without the modules inside them; None where it is not known of any."""
    found = [at(f"times.own_{phase}_sec")(one) for one in modules for phase in phases]
    return None if set(found) <= {None} else math.fsum(filter(None, found))


def name_of_all(modules: Sequence[ModuleProfile]) -> str:
    """How many there are and their name, with a star for each number that differs; or the name of one."""
    columns = zip(*(one.name.split(".") for one in modules), strict=True)
    pattern = ".".join(parts[0] if len(set(parts)) == 1 else "*" for parts in columns)
    return f"{len(modules)} x {pattern}" if len(modules) > 1 else pattern or "(root)"


def share_of_peak(modules: Sequence[ModuleProfile]) -> float | None:
    """Share of the peak that *modules* reach, over the phases that have FLOPs; None where one of them is not known."""
    phases = [
        (at(f"times.{phase}_sec")(one), at(f"times.{phase}_utilization")(one))
        for one in modules
        for phase, flops in (("forward", one.total.forward), ("backward", one.total.backward + one.total.recompute))
        if flops
    ]
    if any(spent is None or part is None for spent, part in phases):
        return None
    return ratio(part=sum(spent * part for spent, part in phases), whole=sum(spent for spent, _ in phases))


def top_modules(profile: Profile) -> tuple[list[tuple[list[ModuleProfile], float | None]], bool]:
    """The modules with most self time and their shares of a typical step, repeated layers added up, and True.

    Where none was timed, those with most FLOPs and their shares of all, and False.
    """
    tables = None if profile.traced is None else profile.traced.tables
    alike = grouped(  # names that differ in numbers alone
        (one for one in profile.modules if one.alias_of is None),
        lambda one: (pattern_of(one.name), one.type_name, one.extra_repr),
    )
    groups = [group for found in alike.values() for group in _without_the_slow(found)]
    weights = [own_sec(group) or 0.0 for group in groups]
    if timed := tables is not None and any(weights):
        whole = at("timing.global_step.typical_sec")(profile) or at("step_times.mean.wall_us")(tables) * 1e-6
    else:
        weights = [sum(one.own.total for one in group) for group in groups]
        whole = sum(weights) + profile.outside.total
    found = sorted(zip(groups, weights, strict=True), key=lambda item: -item[1])
    return [(group, ratio(part=weight, whole=whole)) for group, weight in found if weight], timed


def _without_the_slow(alike: Sequence[ModuleProfile]) -> Iterator[list[ModuleProfile]]:
    """Modules that are alike, and each by itself that takes far longer than most of them."""
    taken = {one.name: own_sec([one]) or 0.0 for one in alike}
    most = _FAR_SLOWER * statistics.median(taken.values())
    slow = [one for one in alike if taken[one.name] > most] if len(alike) >= _ENOUGH_ALIKE else []
    yield [one for one in alike if one not in slow]
    yield from ([one] for one in slow)


def modules_section(profile: Profile, *, most: int) -> Section:
    """The top modules as a table."""
    found, timed = top_modules(profile)
    title = "Top modules by self time" if timed else "Top modules by FLOPs of their own"
    if not found:
        return Section(title, "", [f"{NOT_AVAILABLE}: no module was seen to have FLOPs."])

    columns = [
        Column("module", lambda item: name_of_all(item[0]), str),
        Column("class", lambda item: item[0][0].type_name or NOT_DESCRIBED, str, left=True),
        Column("fwd", lambda item: own_sec(item[0], ["forward"]), unit="s"),
        Column("bwd", lambda item: own_sec(item[0], ["backward"]), unit="s"),
        share("share", at("1")),
        Column("calls", lambda item: profile.per_step(sum(one.calls for one in item[0]))),
        Column("", lambda item: profile.per_step(sum(one.own.total for one in item[0])), unit="FLOPs"),
        share("of peak", lambda item: None if any(one.own != one.total for one in item[0]) else share_of_peak(item[0])),
    ]
    elsewhere, own = (one.forward + one.backward for one in (profile.outside, profile.modules[0].total))
    words = sentences(
        f"And {plain(len(found[most:]))} more." if found[most:] else "",
        "A star stands for numbers that differ: these modules are added up."
        if any(len(group) > 1 for group, _ in found[:most])
        else "",
        f"{percent(ratio(part=elsewhere, whole=elsewhere + own))} of the FLOPs, "
        f"{si(profile.per_step(elsewhere))}, ran in no module of these. In a loop of your own, give "
        "every model, as a dict; what the loop itself multiplies has no row."
        if elsewhere > 0.01 * own
        else "",
        "FLOPs are lower bounds." if profile.lower_bound else "",
        "Rough: traced steps took far longer, or shorter." if at("traced.is_apart")(profile) else "",
    )
    return Section(title, "", [Table(found[:most], filled(found, columns), whole=True), words])


def _cut(text: str) -> str:
    return text if len(text) <= 44 else f"{text[:43]}…"


def lines_section(lines: LinesProfile, *, most: int | None = None) -> Section:
    """The user's lines with most of a step's time on the host."""
    title = "Your lines"
    if not lines.rows:
        return Section(title, "", [f"{NOT_AVAILABLE}: {lines.why or 'no sample fell into a part of a step'}."])
    columns = [
        Column("", lambda row: row.where or "(nothing of yours on the stack)", str, link=at("link")),
        Column("", at("seconds"), unit="s"),
        share("share", at("share")),
        Column("part", at("part"), str, left=True),
        Column("line", at("text"), _cut, left=True),
    ]
    words = sentences(
        f"By samples of the host's time in {plain(lines.steps)} further {plural('step', lines.steps)}; in place of a "
        "line the next one may stand.",
        f"No more of them: {lines.why}." if lines.why else "",
    )
    return Section(title, "", [Table(lines.rows[:most], columns, whole=True), words])


def advice_section(
    advice: Sequence[Advice], *, most: int | None = None, nothing: str = NO_ADVICE, of: str = "a step"
) -> Section:
    """What to do, the largest saving *of* a step first: all with their rules, or *most* without; or *nothing*."""
    items = [
        f"{number}. {one.fact} {one.remedy}{saving(one, of)} Do not follow it {one.unless}."
        + (f" (Rule {one.rule}: {one.threshold}; {one.source}.)" if most is None else "")
        for number, one in enumerate(advice, start=1)
    ]
    return Section("Advice", "", points(items, most, mark="", others=IN_DETAILS) or [nothing])


_SAVES = {True: "saves at least", False: "can save up to", None: "saves about"}


def saving(advice: Advice, of: str = "a step") -> str:
    """What *advice* saves at most, at least, or about, and whether it changes the model, as sentences after others."""
    words = "" if advice.saves is None else f" It {_SAVES[advice.at_least]} {percent(advice.saves)} of {of}."
    return f"{words} It changes the model's results." if advice.changes else words


_MUCH = 0.25  # of a step


def without_advice(profile: Profile) -> str:
    """What is said where no rule has anything to say: what the step's time is for, and at which of the user's lines."""
    timing, word = profile.timing, profile.context.step_word
    if timing is None:
        return f"No advice: no {word} was timed."
    if timing.few_steps:
        return f"No advice from few steps: it begins with {FEW_STEPS} timed {plural(word, FEW_STEPS)}."
    part = max(timing.parts, key=lambda one: one.typical_sec)
    own = [row for row in at("lines.rows")(profile) or () if row.file]
    rows = [row for row in own if row.part == part.name]
    classes = {row.function.rpartition(".")[0].rpartition(".")[2] for row in own if row.in_module}
    # No rule looks into what a class of the user's computes by itself.
    in_own_sec = own_sec([one for one in profile.modules if one.type_name in classes]) or 0.0
    is_unclear = profile.starved, profile.unexplained, in_own_sec > _MUCH * timing.global_step.typical_sec
    knows_modules = at("traced.is_apart")(profile) is False
    found = "Nothing slow was found" if knows_modules and not any(is_unclear) else "No rule names a cause"
    says = f"{found}: {part.name} takes {percent(part.typical_sec / timing.global_step.typical_sec)} of a step"
    if not rows:
        return f"{says}."
    first = rows[0]
    # What is joined with the forward or the backward is the model's as well as the loop's.
    is_loops = "other" in part.name and "ward" not in part.name
    inside = profile.context.whose_loop if is_loops else f"what {first.where} calls"
    place = f"in {inside}." if first.only_enters else f"at {first.where}: {first.start}."
    return f"{says}, {percent(first.share)} {place}".replace("….", "…")


def notes_sections(notes: Sequence[str], *, most: int | None = None) -> list[Section]:
    """What is missing or degraded; nothing where nothing is."""
    return [Section("Notes", "", points(notes, most, others=IN_DETAILS))] if notes else []


def missing_rates(unavailable: Mapping[str, str]) -> list[str]:
    """Why some rates, by their fields' names, are not known; one sentence for each reason."""
    reasons = grouped(unavailable, unavailable.__getitem__)
    return [f"{NOT_AVAILABLE}: {', '.join(rates)}: {reason}." for reason, rates in reasons.items()]


def whose(ranks: RanksProfile) -> str:
    """Which ranks a figure is of: "3 of 4 ranks"; nothing where all answered."""
    return f"{plain(ranks.answered)} of {plain(ranks.world_size)} ranks" if ranks.absences else ""


def devices_of(ranks: RanksProfile) -> list[str]:
    """How many ranks have each device."""
    return [f"{plain(number)} x {name or 'unknown device'}" for name, number in ranks.devices.items()]


# Short names of the phases that have FLOPs.
PHASES = {
    "forward": "fwd",
    "backward": "bwd",
    "recompute": "recomputed",
    "optimizer": "optimizer",
    "outside": "outside the model",
}

_FLOPS = {
    "forward": "fwd",
    "backward": "bwd (measured)",
    "backward_estimated": "bwd (estimated: {factor} x fwd)",
    "recompute": "recomputed in the bwd",
    "optimizer": "optimizer",
    "model": "model FLOPs = fwd + bwd",
    "hardware": "hardware FLOPs = all of these phases",
    "outside": "outside the model: callbacks, metrics, augmentation",
    "executed": "executed FLOPs: without masked attention",
}


def flops_section(profile: Profile) -> Section:
    """Every bucket of FLOPs that has any, to the last one, and why rates are not known."""
    flops, ranks, moved, trains = profile.flops, profile.ranks, profile.bytes_total, profile.has_backward
    labels = _FLOPS if trains else _FLOPS | {"model": "model FLOPs", "hardware": "hardware FLOPs"}
    shown = {name: getattr(flops, name) for name in labels}
    shown |= {"executed": flops.skipped, "backward_estimated": trains and flops.backward_estimated}
    factor = f"{2 + profile.settings.recompute_fwd_factor:g}"
    always = ("forward", "model", "hardware")
    rows = [(label.format(factor=factor), name) for name, label in labels.items() if name in always or shown[name]]
    bytes_of = {name: profile.per_step(getattr(moved, name)) for name in PHASES}
    columns = [Column("", at("0"), str), Column("FLOPs", lambda row: getattr(flops, row[1]))]
    columns += [Column("", lambda row: bytes_of.get(row[1], ""), unit="B")] if moved.total else []
    if ranks is not None:
        of_all, of_model = ranks.flops, ranks.flops_of_model
        columns += [
            Column(whose(ranks) or "all ranks", lambda row: getattr(of_all, row[1])),
            Column("one model", lambda row: at(row[1])(of_model)),
        ]
    note = sentences(
        "Matrix products, convolutions, attention and recurrent layers, two FLOPs a multiply-add. Attention",
        "that is flagged causal counts half the score matrix."
        if profile.settings.causal_attention == "half"
        else "counts the full score matrix, causal or not.",
        "Bytes are what all operators read and write, elementwise ones included." if moved.total else "",
        _lower_bound_words(profile),
    )
    unknown = {rate: why for rate, why in profile.unavailable.items() if trains or rate not in RATES_OF_TRAINING}
    return Section(
        f"FLOPs of a {profile.step_name} per {profile.context.device_word}",
        note,
        [Table(rows, columns, whole=True), *missing_rates(unknown)],
    )


def operators_section(profile: Profile) -> Section | None:
    """Every operator with FLOPs, the most first."""
    spending = [operator for operator in profile.operators if operator.flops.total]
    if not spending:
        return None
    whole = sum(operator.flops.total for operator in spending)

    def per_step(path: str) -> Any:
        return lambda one: profile.per_step(at(path)(one))

    phases = {phase: label for phase, label in PHASES.items() if getattr(profile.flops, phase)}
    columns = [
        Column("operator", at("operator"), str),
        Column("calls", per_step("calls")),
        *(Column(label, per_step(f"flops.{phase}"), unit="FLOPs") for phase, label in phases.items()),
        share("share", lambda one: ratio(part=one.flops.total, whole=whole)),
        Column("dtype", lambda one: ", ".join(one.dtypes), str, left=True),
    ]
    bound = ["Shares are of what was counted, a lower bound."] if profile.lower_bound else []
    return Section(f"Operators with most FLOPs in a {profile.step_name}", "", [Table(spending, columns), *bound])


def uncounted_section(profile: Profile) -> Section:
    """Each operator that ran and is in no count."""
    ordered = sorted(profile.uncounted.items(), key=lambda item: (not item[1].may_have_flops, -item[1].calls, item[0]))
    columns = [
        Column("operator", at("0"), str),
        Column("calls", at("1.calls")),
        Column("", lambda row: "may have FLOPs" if row[1].may_have_flops else "", str, left=True),
        Column("modules", lambda row: some_of(row[1].modules, most=2), str, left=True),
    ]
    return Section(
        "Not counted",
        sentences(
            _lower_bound_words(profile),
            "lightning_flops.register_flop_formula has an operator counted, by a formula or as 0."
            if profile.lower_bound
            else "",
        ),
        [
            Table(ordered, columns, whole=True)
            if ordered
            else "Nothing: every operator that ran has a FLOP count or is known to have none."
        ],
    )


def _lower_bound_words(profile: Profile) -> str:
    """Which figures are lower bounds, and because of which operators; empty where none is."""
    names = sorted(name for name, operator in profile.uncounted.items() if operator.may_have_flops)
    return (
        f"LOWER BOUND: {', '.join(names)} may have FLOPs and could not be counted, so FLOPs, MACs, FLOP/s, MFU and HFU "
        "are at least what is printed."
        if profile.lower_bound
        else ""
    )


def traced_section(profile: Profile) -> Section | None:
    """What was traced, and where all of its tables are; None if no step was traced."""
    traced, word = profile.traced, profile.context.step_word
    if traced is None or traced.tables is None:
        return None
    took, unlike = duration(traced.tables.step_times.mean.wall_us * 1e-6), not traced.like_counted
    about = sentences(
        f"{traced.named(word).capitalize()} ran under torch.profiler, apart from the counted and the timed "
        f"{plural(word, 2)}, in {took} each; times of modules and operators are medians over them.",
        "It was not like the counted step: FLOP/s are estimates, by the elements of the batches." if unlike else "",
    )
    return Section(f"Traced {word}", about, [f"Every table: lightning-flops trace {file}" for file in traced.files])
