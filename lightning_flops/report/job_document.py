"""All ranks of a job as one section of the report: as long for thousands of ranks as for four."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from lightning_flops.analysis.rank_names import name_ranks
from lightning_flops.analysis.straggler_words import straggler_evidence
from lightning_flops.report.document import Column, Figure, Section, Table, quantity, table
from lightning_flops.report.profile_document import missing_rates
from lightning_flops.schema.profile import Profile
from lightning_flops.schema.ranks import RankFigures, RanksCommunication, RankSpread, RanksProfile, StageProfile
from lightning_flops.units import NOT_AVAILABLE, duration, percent, plain, si

_REASONS_SHOWN = 3
_DEVICES_SHOWN = 4
_STAGES_SHOWN = 8
_STRAGGLERS_SHOWN = 3
_COLLECTIVES_SHOWN = 8
_NOTES_SHOWN = 3

Items = Iterator[Figure | Table | str]


def ranks_section(profile: Profile) -> Section | None:
    """What all ranks did together, how much they differ, and who did not answer; None where there is one rank."""
    ranks = profile.ranks
    if ranks is None:
        return None
    items: list[Figure | Table | str] = [
        *_who(profile, ranks),
        *_stragglers(ranks),
        *_rates(profile, ranks),
        _flops(profile, ranks),
        *_spreads(profile, ranks),
        *_stages(ranks),
        *([] if ranks.communication is None else _communication(ranks.communication)),
        *_left_out(profile, ranks),
    ]
    return Section("All ranks", "", items)


def whose(ranks: RanksProfile) -> str:
    """Which ranks a figure is of: "3 of 4 ranks"; nothing where all answered."""
    return f"{plain(ranks.answered)} of {plain(ranks.world_size)} ranks" if ranks.absences else ""


def _who(profile: Profile, ranks: RanksProfile) -> Items:
    waited = (
        f"Rank {profile.context.rank} waited {duration(ranks.waited_sec)} for the others' records after its own window."
    )
    if not ranks.absences:
        yield f"All {plain(ranks.world_size)} ranks answered. {waited}"
        return
    yield f"{whose(ranks).upper()} ANSWERED, and every figure here is of those. {waited}"
    by_reason: defaultdict[str, list[int]] = defaultdict(list)
    for absence in ranks.absences:
        by_reason[absence.reason].append(absence.rank)
    reasons = sorted(by_reason, key=lambda reason: (-len(by_reason[reason]), by_reason[reason][0]))
    for reason in reasons[:_REASONS_SHOWN]:
        yield f"- {name_ranks(by_reason[reason]).capitalize()}: {reason}."
    rest = [rank for reason in reasons[_REASONS_SHOWN:] for rank in by_reason[reason]]
    if rest:
        yield f"- {name_ranks(rest).capitalize()}: for other reasons."


def _stragglers(ranks: RanksProfile) -> Items:
    """Whom the others wait for."""
    if ranks.answered < 2 or ranks.global_step is None:
        return
    if not ranks.stragglers:
        yield f"Straggler: {_no_straggler(ranks)}."
    shown = ranks.stragglers[:_STRAGGLERS_SHOWN]
    for straggler in shown:
        yield f"STRAGGLER: {straggler_evidence(straggler)}"
    rest = [straggler.rank for straggler in ranks.stragglers[len(shown) :]]
    if rest:
        yield f"And {len(rest)} more, less late: {name_ranks(rest)}."


def _no_straggler(ranks: RanksProfile) -> str:
    """In which parts of the step it is known that there is none."""
    stages: defaultdict[int, list[RankFigures]] = defaultdict(list)
    for one in ranks.ranks:
        if one.global_step_sec is not None:
            stages[one.stage].append(one)
    alike = [one for peers in stages.values() if len(peers) > 1 for one in peers]
    if not alike:
        return "n/a, no two of the ranks that timed their steps do the same work"
    if not all(one.traced for one in alike):
        return (
            "none is late in data wait or transfer; in the other parts, work cannot be told from waiting for other "
            "ranks without a traced step of each"
        )
    return "none, every rank keeps pace with the others"


def _rates(profile: Profile, ranks: RanksProfile) -> Items:
    rates, name = ranks.rates, profile.step_name
    mark = f" ({whose(ranks)})" if ranks.absences else ""
    latency = "iter latency (as DeepSpeed)" if profile.context.trains else "fwd latency"
    bound = " (lower bound)" if ranks.lower_bound else ""

    def marked(text: str, *marks: str) -> str:
        return text if text == NOT_AVAILABLE else "".join((text, *marks))

    yield Figure(f"MFU of all ranks = model FLOPs / (peaks * {name} times)", marked(percent(rates.mfu), bound, mark))
    yield Figure(f"HFU of all ranks = hardware FLOPs / (peaks * {name} times)", marked(percent(rates.hfu), bound, mark))
    yield Figure("  peak FLOP/s of all devices", marked(si(ranks.peak_flops_per_sec, "FLOP/s"), mark))
    for one in ranks.devices[:_DEVICES_SHOWN]:
        peak = f"{plain(one.ranks)} x {si(one.peak_flops_per_sec, 'FLOP/s')}"
        yield Figure(f"    {one.device_name or 'unknown device'}", peak)
    others = ranks.devices[_DEVICES_SHOWN:]
    if others:
        yield Figure(f"    and {len(others)} more kinds of devices", f"{sum(one.ranks for one in others)} of them")
    yield Figure(f"samples/second over the {name}", marked(plain(rates.samples_per_sec), mark))
    yield Figure(f"samples/second over the {latency}", marked(plain(rates.iter_samples_per_sec), mark))
    yield Figure(f"tokens/second over the {name}", marked(plain(rates.tokens_per_sec), mark))
    per_device = marked(plain(rates.tokens_per_sec_per_device), mark)
    yield Figure(f"tokens/second per {profile.context.device_word}", per_device)
    yield from missing_rates(ranks.unavailable)


def _flops(profile: Profile, ranks: RanksProfile) -> Table:
    """FLOPs of the job, and of one copy of the model."""
    together, copy = ranks.flops, ranks.flops_of_model
    rows = [
        ("fwd", "forward"),
        ("bwd (measured)", "backward"),
        ("recomputed in the bwd", "recompute"),
        ("optimizer", "optimizer"),
        ("model FLOPs = fwd + bwd", "model"),
        ("hardware FLOPs", "hardware"),
    ]
    if not profile.has_backward:
        rows = [("fwd = model FLOPs", "forward"), rows[-1]]
    mark = whose(ranks) or f"all {plain(ranks.world_size)} ranks"
    columns = [
        Column(f"FLOPs of a {profile.step_name}", lambda row: row[0], str),
        Column(f"{'at least, ' if ranks.lower_bound else ''}{mark}", lambda row: getattr(together, row[1]), si),
        Column("exact", lambda row: getattr(together, row[1])),
        Column("of model", lambda row: None if copy is None else getattr(copy, row[1]), si),
    ]
    return table(rows, columns, whole=True)


def _spreads(profile: Profile, ranks: RanksProfile) -> Items:
    """Each figure of a rank over the ranks."""
    parts = [(part.name, part.seconds) for part in ranks.parts]
    if ranks.global_step is not None:
        parts.append((profile.step_name, ranks.global_step.seconds))
    if parts:
        yield _spread_table(f"of each rank, a {profile.step_name}", parts, of=ranks.answered, unit="s")
    kind = "" if profile.memory is None else f" ({profile.memory.kind})"
    others: list[tuple[str, RankSpread | None, str]] = [
        ("model FLOPs", ranks.model_flops, ""),
        ("params on the rank", ranks.local_params, ""),
        (f"peak memory{kind}", ranks.peak_memory_bytes, "B"),
    ]
    rows = [(label, spread, unit) for label, spread, unit in others if spread is not None]
    show = {label: unit for label, _, unit in rows}
    yield _spread_table("of each rank", [row[:2] for row in rows], of=ranks.answered, units=show)
    if ranks.global_step is None:
        yield "No rank timed a step."


def _spread_table(
    head: str, rows: Sequence[tuple[str, RankSpread]], *, of: int, unit: str = "", units: dict[str, str] | None = None
) -> Table:
    """The least, median and greatest of figures over ranks: all of one unit, or each of its own."""

    def number(label: str, name: str) -> Column:
        if units is None and unit:
            return quantity(label, lambda row: getattr(row[1], name), unit)
        if units is None:
            return Column(label, lambda row: getattr(row[1], name), percent)
        return Column(label, lambda row: si(getattr(row[1], name), units[row[0]]), str)

    def rank(name: str) -> Callable[[Any], str]:
        return lambda row: f"rank {getattr(row[1], name)}" if row[1].least < row[1].greatest else ""

    columns = [
        Column(head, lambda row: row[0] + ("" if row[1].ranks == of else f" ({plain(row[1].ranks)} ranks)"), str),
        number("min", "least"),
        Column("", rank("least_rank"), str, left=True),
        number("median", "median"),
        number("max", "greatest"),
        Column("", rank("greatest_rank"), str, left=True),
    ]
    return table(rows, columns, whole=True, least_width=6)


def _stages(ranks: RanksProfile) -> Items:
    """The stages of a pipeline; of many, those that work longest."""
    if not ranks.stages:
        return

    def median_sec(stage: StageProfile, name: str) -> float | None:
        return next((part.seconds.median for part in stage.parts if part.name == name), None)

    def busy_sec(stage: StageProfile) -> float:
        return (median_sec(stage, "forward") or 0.0) + (median_sec(stage, "backward") or 0.0)

    longest = sorted(ranks.stages, key=lambda stage: (-busy_sec(stage), stage.stage))[:_STAGES_SHOWN]
    columns = [
        Column("stage", lambda stage: plain(stage.stage), str),
        Column("ranks", lambda stage: stage.answered),
        Column("params", lambda stage: stage.params, si),
        quantity("fwd", lambda stage: stage.flops.forward, "FLOPs"),
        quantity("bwd", lambda stage: stage.flops.backward, "FLOPs"),
        quantity("forward", lambda stage: median_sec(stage, "forward"), "s"),
        quantity("backward", lambda stage: median_sec(stage, "backward"), "s"),
        quantity("bubble", lambda stage: median_sec(stage, "bubble"), "s"),
    ]
    more = len(ranks.stages) - len(longest)
    words = "FLOPs and params are of one copy of the model; times are medians of the stage's ranks."
    if more:
        words += f" And {more} more stages, with less time in forward and backward."
    yield table(sorted(longest, key=lambda stage: stage.stage), columns, whole=True, least_width=6, after=[words])


def _communication(communication: RanksCommunication) -> Items:
    """What the traced steps say of communication: what was hidden, and what was waiting."""
    known = [
        (label, spread)
        for label, spread in (
            ("wall time", communication.wall_sec),
            ("computation", communication.computation_sec),
            ("communication", communication.communication_sec),
            ("  not hidden by computation", communication.exposed_sec),
            ("transfer", communication.transfer_sec),
            ("waiting for other ranks", communication.wait_sec),
        )
        if spread is not None
    ]
    yield _spread_table(
        f"of the traced step of {plain(communication.ranks)} ranks", known, of=communication.ranks, unit="s"
    )
    if communication.overlap_ratio is not None:
        rows = [("communication that computation hides", communication.overlap_ratio)]
        yield _spread_table("", rows, of=communication.ranks)

    def wait(name: str) -> Callable[[Any], Any]:
        return lambda one: None if one.wait_sec is None else getattr(one.wait_sec, name)

    def longest(one: Any) -> str:
        spread = one.wait_sec
        return f"rank {spread.greatest_rank}" if spread is not None and spread.least < spread.greatest else ""

    columns = [
        Column("collective, all ranks", lambda one: one.name, str, chars=32),
        Column("calls", lambda one: one.calls),
        Column("matched", lambda one: one.matched_calls),
        quantity("", lambda one: one.bytes, "B"),
        quantity("transfer", lambda one: None if one.transfer_sec is None else one.transfer_sec.median, "s"),
        quantity("wait", wait("median"), "s"),
        quantity("longest wait", wait("greatest"), "s"),
        Column("", longest, str, left=True),
    ]
    shown = communication.collectives[:_COLLECTIVES_SHOWN]
    words = (
        "Matched: the i-th call of each rank of a process group. Transfer is the shortest; the rest of a call is "
        "waiting. Both are medians of the ranks."
    )
    if any(one.bytes is None for one in shown):
        words += " Bytes are n/a where the traces do not say them; gloo's do with record_shapes=True."
    if more := len(communication.collectives) - len(shown):
        words += f" And {more} more collectives, which take less time."
    yield table(shown, columns, whole=True, least_width=5, after=[words])
    yield from _first(communication.notes)


def _first(notes: Sequence[str]) -> Items:
    yield from (f"- {note}" for note in notes[:_NOTES_SHOWN])
    if len(notes) > _NOTES_SHOWN:
        yield f"- And {len(notes) - _NOTES_SHOWN} more such notes, in profile.json."


def _left_out(profile: Profile, ranks: RanksProfile) -> Items:
    """What is missing here: what did not fit into the ranks' records, and notes of their own reports."""
    yield from _first([f"Left out of the record of {sentence}." for sentence in ranks.left_out])
    noting = [one.rank for one in ranks.ranks if one.notes > len(profile.notes)]
    if noting:
        have = "has" if len(noting) == 1 else "have"
        yield (
            f"- {name_ranks(noting).capitalize()} {have} more notes than this report; with all_ranks=True every rank "
            "writes its own."
        )
