"""What several ranks did together, how much they differ, and who is waited for: of a job, and of traces."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from operator import itemgetter
from statistics import median
from typing import Any

from lightning_flops.analysis.rank_names import RankSpread, name_ranks, part_names, spread_over
from lightning_flops.analysis.rates import sum_if_all_known
from lightning_flops.analysis.stragglers import are_compared, longest_own_time, straggler_evidence
from lightning_flops.report.document import Column, Figure, Item, Section, Table, at, field, quantity, table, us
from lightning_flops.report.profile_document import missing_rates, whose
from lightning_flops.schema.communication import RankCollectiveRow, RankComparison
from lightning_flops.schema.profile import Profile
from lightning_flops.schema.ranks import RanksProfile, StageProfile
from lightning_flops.units import NOT_AVAILABLE, percent, plain, si

_SHOWN = 4
"""Points of a list."""

Items = Iterator[Item]


def ranks_section(profile: Profile) -> Section | None:
    """What all ranks did together, how much they differ, and who did not answer; None where there is one rank."""
    ranks = profile.ranks
    if ranks is None:
        return None
    items: list[Item] = [
        *_who(ranks),
        *_stragglers(ranks),
        *_rates(ranks),
        *_spreads(profile, ranks),
        *([_stages(ranks)] if ranks.stages else []),
        *([] if ranks.communication is None else _communication(ranks.communication)),
        *_first([f"Left out of the record of {sentence}." for sentence in ranks.left_out]),
    ]
    return Section("All ranks", "", items)


def _who(ranks: RanksProfile) -> Items:
    if not ranks.absences:
        yield f"All {plain(ranks.world_size)} ranks answered."
        return
    yield f"{whose(ranks).upper()} ANSWERED, and every figure here is of those."
    by_reason: defaultdict[str, list[int]] = defaultdict(list)
    for absence in ranks.absences:
        by_reason[absence.reason].append(absence.rank)
    reasons = sorted(by_reason, key=lambda reason: (-len(by_reason[reason]), by_reason[reason][0]))
    yield from _first([f"{name_ranks(by_reason[reason]).capitalize()}: {reason}." for reason in reasons])


def _stragglers(ranks: RanksProfile) -> Items:
    """Whom the others wait for, or in which parts of the step it is known that there is no such rank."""
    if ranks.answered < 2 or not any(one.parts_sec for one in ranks.ranks):
        return
    stages: defaultdict[int, list[bool]] = defaultdict(list)
    for one in ranks.ranks:
        if one.parts_sec:
            stages[one.stage].append(one.traced)
    alike = [traced for peers in stages.values() if len(peers) > 1 for traced in peers]
    if not alike:
        yield "Straggler: n/a, no two of the ranks that timed their steps do the same work."
    elif not ranks.stragglers and all(alike):
        yield "Straggler: none, every rank keeps pace with the others."
    elif not ranks.stragglers:
        yield (
            "Straggler: none is late in data wait or transfer; in the other parts, work cannot be separated from "
            "waiting for other ranks without a traced step of each."
        )
    yield from _first([f"STRAGGLER: {straggler_evidence(straggler)}" for straggler in ranks.stragglers])


def _rates(ranks: RanksProfile) -> Items:
    yield f"Peaks, {si(ranks.peak_flops_per_sec, 'FLOP/s')} in all:"
    yield from _first(
        [
            f"{plain(one.ranks)} x {one.device_name or 'unknown device'}: {si(one.peak_flops_per_sec, 'FLOP/s')}"
            for one in ranks.devices
        ]
    )
    yield from missing_rates(ranks.unavailable)


def _spreads(profile: Profile, ranks: RanksProfile) -> Items:
    """Each figure of a rank over the ranks."""
    timed = [one for one in ranks.ranks if one.parts_sec]
    parts: dict[str, RankSpread | None] = {}
    for name in part_names(timed):
        known = [one for one in timed if name in (*one.parts_sec, "bubble")]
        parts[name] = spread_over({one.rank: one.parts_sec.get(name, 0.0) for one in known})
    if timed:
        parts[profile.step_name] = spread_over({one.rank: sum(one.parts_sec.values()) for one in timed})
        yield _spread_table(f"of each rank, a {profile.step_name}", parts, of=ranks.answered, unit="s")

    def over_ranks(name: str) -> RankSpread | None:
        known = {one.rank: getattr(one, name) for one in ranks.ranks}
        return spread_over({rank: value for rank, value in known.items() if value is not None})

    kind = "" if profile.memory is None else f" ({profile.memory.kind})"
    others = {
        "model FLOPs": over_ranks("model_flops"),
        "params on the rank": over_ranks("local_params"),
        f"peak memory{kind}, B": over_ranks("peak_memory_bytes"),
    }
    yield _spread_table("of each rank", others, of=ranks.answered)


def _spread_table(head: str, rows: dict[str, RankSpread | None], *, of: int, unit: str = "") -> Table:
    """The least, median and greatest of figures over ranks, all of one *unit*, or each with its own prefix."""

    def number(label: str, name: str) -> Column:
        return Column(label, lambda row: getattr(row[1], name), si, unit=unit)

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
    known = [row for row in rows.items() if row[1] is not None]
    return table(known, columns, whole=True, least_width=6)


def _stages(ranks: RanksProfile) -> Table:
    """The stages of a pipeline."""

    def median_of(part: str) -> Callable[[StageProfile], float | None]:
        def seconds(stage: StageProfile) -> float | None:
            known = [one.parts_sec[part] for one in ranks.ranks if one.stage == stage.stage and part in one.parts_sec]
            return median(known) if known else None

        return seconds

    columns = [
        field("stage", "stage"),
        Column("ranks", lambda stage: sum(one.stage == stage.stage for one in ranks.ranks)),
        field("params", "params", si),
        quantity("fwd", at("flops.forward"), "FLOPs"),
        quantity("bwd", at("flops.backward"), "FLOPs"),
        *(quantity(part, median_of(part), "s") for part in ("forward", "backward", "bubble")),
    ]
    words = "FLOPs and params are of one copy of the model; times are medians of the stage's ranks."
    return table(ranks.stages, columns, least_width=6, after=[words])


def _communication(comparison: RankComparison) -> Items:
    """What the traced steps say of communication: what was hidden, and what was waiting."""
    figures = {
        "wall time": "overlap.wall_us",
        "computation": "overlap.computation_us",
        "communication": "overlap.communication_us",
        "  not hidden by computation": "overlap.exposed_us",
        "transfer": "transfer_us",
        "waiting for other ranks": "wait_us",
    }
    rows = {}
    for label, path in figures.items():
        known = [(row, value) for row in comparison.ranks if (value := at(path)(row)) is not None]
        rows[label] = spread_over({row.rank or 0: value * 1e-6 / row.steps for row, value in known})
    ranks = len(comparison.ranks)
    yield _spread_table(f"of the traced step of {plain(ranks)} ranks", rows, of=ranks, unit="s")
    if hidden := [ratio for row in comparison.ranks if (ratio := row.overlap.overlap_ratio) is not None]:
        yield Figure("communication that computation hides, median of the ranks", percent(median(hidden)))
    yield _collectives(comparison)
    yield from _first(comparison.notes)


def _collectives(comparison: RankComparison) -> Table:
    """Each collective over all ranks; times are of one step."""
    by_name: defaultdict[str, list[tuple[int, RankCollectiveRow]]] = defaultdict(list)
    for rank in comparison.ranks:
        for one in rank.collectives:
            by_name[one.name].append((rank.steps, one))
    rows: list[dict[str, Any]] = []
    for name, found in by_name.items():
        row: dict[str, Any] = {"name": name, "all": sum(one.latency_us for _, one in found)}
        for figure in ("calls", "matched_calls", "bytes"):
            row[figure] = sum_if_all_known(getattr(one, figure) for _, one in found)
        for figure in ("latency_us", "transfer_us", "wait_us"):
            values = [(getattr(one, figure), steps) for steps, one in found]
            known = [value * 1e-6 / steps for value, steps in values if value is not None]
            row[figure] = median(known) if known else None
        rows.append(row)
    columns = [
        Column("collective", itemgetter("name"), str, "name", chars=32),
        Column("calls", itemgetter("calls"), sort="calls"),
        Column("matched", itemgetter("matched_calls")),
        quantity("", itemgetter("bytes"), "B"),
        *(quantity(label, itemgetter(f"{label}_us"), "s") for label in ("latency", "transfer", "wait")),
    ]
    words = (
        "Matched: the i-th call of each rank of a process group. Transfer: the shortest of the ranks for each call; "
        "wait: the rest, until the last rank came. Times are medians of the ranks, in one step."
    )
    if any(row["bytes"] is None for row in rows):
        words += " Bytes are n/a where the traces do not say them; gloo's do with record_shapes=True."
    return table(sorted(rows, key=lambda row: (-row["all"], row["name"])), columns, least_width=5, after=[words])


def _first(points: Sequence[str]) -> Items:
    yield from (f"- {point}" for point in points[:_SHOWN])
    if len(points) > _SHOWN:
        yield f"- And {len(points) - _SHOWN} more, in profile.json."


def rank_section(comparison: RankComparison, *, straggles: bool) -> Section:
    """Ranks side by side."""
    names = [str(row.rank) for row in comparison.ranks]
    note = (
        "A straggler is a rank that the others wait for: without communication that no computation hides, its step is "
        "longer than theirs by more than the advice's thresholds."
    )
    columns = [
        # Ranks are in order.
        field("rank", "rank", str),
        field("steps", "steps"),
        field("wall", "overlap.wall_us", us, "total"),
        field("compute", "overlap.computation_us", us),
        field("comm", "overlap.communication_us", us),
        field("overlap", "overlap.overlap_us", us),
        field("of comm", "overlap.overlap_ratio", percent),
        field("transfer", "transfer_us", us),
        field("wait", "wait_us", us),
        field("compute/median", "compute_over_median"),
    ]
    items: list[Item] = [table(comparison.ranks, columns, whole=True, least_width=6)]
    if any(rank.collectives for rank in comparison.ranks):
        items.append(_collectives(comparison))
    straggler = NOT_AVAILABLE
    if are_compared(comparison):
        straggler = f"rank {names[longest_own_time(comparison)]}" if straggles else "none"
    items += ["", Figure("straggler", straggler)]
    return Section("Ranks", note, [*items, *comparison.notes])
