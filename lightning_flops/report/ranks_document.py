"""All ranks of a job, and traces of several ranks side by side: as long for thousands of ranks as for four."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from statistics import median
from typing import Any

from lightning_flops.analysis.rank_names import name_ranks
from lightning_flops.analysis.rates import sum_if_all_known
from lightning_flops.analysis.spreads import spread_over
from lightning_flops.analysis.straggler_words import straggler_evidence
from lightning_flops.analysis.stragglers import are_compared, longest_own_time
from lightning_flops.report.document import Column, Figure, Section, Table, quantity, table, us
from lightning_flops.report.profile_document import missing_rates, whose
from lightning_flops.schema.communication import RankCollectiveRow, RankComparison, RankRow
from lightning_flops.schema.profile import Profile
from lightning_flops.schema.ranks import RankFigures, RankSpread, RanksProfile, StageProfile
from lightning_flops.units import NOT_AVAILABLE, duration, percent, plain, si

_REASONS_SHOWN = 3
_DEVICES_SHOWN = 4
_STRAGGLERS_SHOWN = 3
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
        *_spreads(profile, ranks),
        *_stages(ranks),
        *([] if ranks.communication is None else _communication(ranks.communication)),
        *_left_out(profile, ranks),
    ]
    return Section("All ranks", "", items)


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
            "none is late in data wait or transfer; in the other parts, work cannot be separated from waiting for "
            "other ranks without a traced step of each"
        )
    return "none, every rank keeps pace with the others"


def _rates(profile: Profile, ranks: RanksProfile) -> Items:
    rates, name = ranks.rates, profile.step_name
    mark = f" ({whose(ranks)})" if ranks.absences else ""
    bound = " (lower bound)" if ranks.lower_bound else ""

    def marked(text: str, *marks: str) -> str:
        return text if text == NOT_AVAILABLE else "".join((text, *marks))

    yield Figure(f"MFU of all ranks = model FLOPs / (peaks * {name} times)", marked(percent(rates.mfu), bound, mark))
    yield Figure(f"HFU of all ranks = hardware FLOPs / (peaks * {name} times)", marked(percent(rates.hfu), bound, mark))
    yield Figure("  peak FLOP/s of all devices", marked(si(ranks.peak_flops_per_sec, "FLOP/s"), mark))
    for one in ranks.devices[:_DEVICES_SHOWN]:
        peak = f"{plain(one.ranks)} x {si(one.peak_flops_per_sec, 'FLOP/s')}"
        yield Figure(f"    {one.device_name or 'unknown device'}", peak)
    if others := ranks.devices[_DEVICES_SHOWN:]:
        yield Figure(f"    and {len(others)} more kinds of devices", f"{sum(one.ranks for one in others)} of them")
    yield from missing_rates(ranks.unavailable)


def _spreads(profile: Profile, ranks: RanksProfile) -> Items:
    """Each figure of a rank over the ranks."""
    parts = [(part.name, part.seconds) for part in ranks.parts]
    if ranks.global_step is not None:
        parts.append((profile.step_name, ranks.global_step.seconds))
        yield _spread_table(f"of each rank, a {profile.step_name}", parts, of=ranks.answered, unit="s")
    kind = "" if profile.memory is None else f" ({profile.memory.kind})"
    others = {
        "model FLOPs": ranks.model_flops,
        "params on the rank": ranks.local_params,
        f"peak memory{kind}, B": ranks.peak_memory_bytes,
    }
    yield _spread_table("of each rank", list(others.items()), of=ranks.answered)
    if ranks.global_step is None:
        yield "No rank timed a step."


def _spread_table(head: str, rows: Sequence[tuple[str, RankSpread | None]], *, of: int, unit: str = "") -> Table:
    """The least, median and greatest of figures over ranks, all of one *unit*, or each with its own prefix."""

    def number(label: str, name: str) -> Column:
        if unit:
            return quantity(label, lambda row: getattr(row[1], name), unit)
        return Column(label, lambda row: getattr(row[1], name), si)

    def rank(name: str) -> Column:
        def which(row: tuple[str, RankSpread]) -> str:
            return f"rank {getattr(row[1], name)}" if row[1].least < row[1].greatest else ""

        return Column("", which, str, left=True)

    columns = [
        Column(head, lambda row: row[0] + ("" if row[1].ranks == of else f" ({plain(row[1].ranks)} ranks)"), str),
        *(number("min", "least"), rank("least_rank")),
        number("median", "median"),
        *(number("max", "greatest"), rank("greatest_rank")),
    ]
    return table([row for row in rows if row[1] is not None], columns, whole=True, least_width=6)


def _stages(ranks: RanksProfile) -> Items:
    """The stages of a pipeline."""
    if not ranks.stages:
        return

    def median_sec(stage: StageProfile, name: str) -> float | None:
        return next((part.seconds.median for part in stage.parts if part.name == name), None)

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
    words = "FLOPs and params are of one copy of the model; times are medians of the stage's ranks."
    yield table(ranks.stages, columns, least_width=6, after=[words])


def _communication(comparison: RankComparison) -> Items:
    """What the traced steps say of communication: what was hidden, and what was waiting."""

    def over_ranks(time_us: Callable[[RankRow], float | None]) -> RankSpread | None:
        known = {row.rank or 0: (value, row.steps) for row in comparison.ranks if (value := time_us(row)) is not None}
        return spread_over({rank: value * 1e-6 / steps for rank, (value, steps) in known.items()})

    rows = [
        ("wall time", over_ranks(lambda row: row.overlap.wall_us)),
        ("computation", over_ranks(lambda row: row.overlap.computation_us)),
        ("communication", over_ranks(lambda row: row.overlap.communication_us)),
        ("  not hidden by computation", over_ranks(lambda row: row.overlap.exposed_us)),
        ("transfer", over_ranks(lambda row: row.transfer_us)),
        ("waiting for other ranks", over_ranks(lambda row: row.wait_us)),
    ]
    ranks = len(comparison.ranks)
    yield _spread_table(f"of the traced step of {plain(ranks)} ranks", rows, of=ranks, unit="s")
    hidden = [row.overlap.overlap_ratio for row in comparison.ranks if row.overlap.overlap_ratio is not None]
    if hidden:
        yield Figure("communication that computation hides, median of the ranks", percent(median(hidden)))
    yield _collectives(comparison, [f"rank {row.rank}" for row in comparison.ranks])
    yield from _first(comparison.notes)


def _collectives(comparison: RankComparison, names: Sequence[str]) -> Table:
    """Each collective over all ranks, which are called *names*; times are of one step."""
    by_name: defaultdict[str, list[tuple[str, int, RankCollectiveRow]]] = defaultdict(list)
    for name, rank in zip(names, comparison.ranks, strict=True):
        for one in rank.collectives:
            by_name[one.name].append((name, rank.steps, one))

    def over_ranks(name: str, figure: str) -> dict[str, float]:
        known = [(rank, steps, getattr(one, figure)) for rank, steps, one in by_name[name]]
        return {rank: value * 1e-6 / steps for rank, steps, value in known if value is not None}

    def typical(figure: str) -> Callable[[str], float | None]:
        return lambda name: median(found.values()) if (found := over_ranks(name, figure)) else None

    def total(figure: str) -> Callable[[str], int | None]:
        return lambda name: sum_if_all_known(getattr(one, figure) for _, _, one in by_name[name])

    def longest(name: str) -> str:
        found = over_ranks(name, "wait_us")
        return max(found, key=lambda rank: found[rank]) if len(set(found.values())) > 1 else ""

    columns = [
        Column("collective", lambda name: name, str, "name", chars=32),
        Column("calls", total("calls"), sort="calls"),
        Column("matched", total("matched_calls")),
        quantity("", total("bytes"), "B"),
        quantity("latency", typical("latency_us"), "s"),
        quantity("transfer", typical("transfer_us"), "s"),
        quantity("wait", typical("wait_us"), "s"),
        quantity("max wait", lambda name: max(over_ranks(name, "wait_us").values(), default=None), "s"),
        Column("", longest, str, left=True, chars=32),
    ]
    words = (
        "Matched: the i-th call of each rank of a process group. Transfer: the shortest of the ranks for each call; "
        "wait: the rest, until the last rank came. Times are medians of the ranks, in one step."
    )
    if any(total("bytes")(name) is None for name in by_name):
        words += " Bytes are n/a where the traces do not say them; gloo's do with record_shapes=True."
    ordered = sorted(by_name, key=lambda name: (-sum(one.latency_us for _, _, one in by_name[name]), name))
    return table(ordered, columns, least_width=5, after=[words])


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


def rank_section(comparison: RankComparison, *, straggles: bool) -> Section:
    """Ranks side by side."""
    names = [str(row.rank) for row in comparison.ranks]
    note = (
        "A straggler is a rank that the others wait for: without communication that no computation hides, its step is "
        "longer than theirs by more than the advice's thresholds."
    )
    listed = list(zip(names, comparison.ranks, strict=True))

    def of_rank(label: str, of: Callable[[Any], Any], show: Callable[[Any], str] = us, sort: str = "") -> Column:
        return Column(label, lambda one: of(one[1]), show, sort)

    def over_median(value: float | None) -> str:
        return NOT_AVAILABLE if value is None else f"{value:.3f}"

    columns = [
        # Ranks are in order.
        Column("rank", lambda one: one[0], str),
        of_rank("steps", lambda row: row.steps, plain),
        of_rank("wall", lambda row: row.overlap.wall_us, sort="total"),
        of_rank("compute", lambda row: row.overlap.computation_us),
        of_rank("comm", lambda row: row.overlap.communication_us),
        of_rank("overlap", lambda row: row.overlap.overlap_us),
        of_rank("of comm", lambda row: row.overlap.overlap_ratio, percent),
        of_rank("transfer", lambda row: row.transfer_us),
        of_rank("wait", lambda row: row.wait_us),
        of_rank("compute/median", lambda row: row.compute_over_median, over_median),
    ]
    items: list[Figure | Table | str] = [table(listed, columns, whole=True, least_width=6)]
    if any(rank.collectives for rank in comparison.ranks):
        items.append(_collectives(comparison, [f"rank {name}" for name in names]))
    longest = straggler = NOT_AVAILABLE
    if are_compared(comparison):
        by = comparison.computes_longest
        longest = "several alike" if by is None else f"rank {by}"
        straggler = f"rank {names[longest_own_time(comparison)]}" if straggles else "none"
    items += ["", Figure("computes longest", longest), Figure("straggler", straggler)]
    return Section("Ranks", note, [*items, *comparison.notes])
