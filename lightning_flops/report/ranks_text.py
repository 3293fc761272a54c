"""All ranks of a job as one section of the report: as long for thousands of ranks as for four."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence

from lightning_flops.analysis.rank_names import name_ranks
from lightning_flops.analysis.straggler_words import straggler_evidence
from lightning_flops.records import RunContext
from lightning_flops.report.layout import line, paragraph, table, title
from lightning_flops.report.step_text import (
    HARDWARE_ROW,
    MODEL_ROW,
    ROWS_OF_A_FORWARD,
    missing_rates_lines,
    time_unit,
)
from lightning_flops.schema.profile import Profile
from lightning_flops.schema.ranks import (
    RankFigures,
    RanksCommunication,
    RanksPart,
    RankSpread,
    RanksProfile,
    StageProfile,
)
from lightning_flops.units import NOT_AVAILABLE, duration, percent, plain, si

_REASONS_SHOWN = 3
_DEVICES_SHOWN = 4
_STAGES_SHOWN = 8
_STRAGGLERS_SHOWN = 3
_COLLECTIVES_SHOWN = 8
_NOTES_SHOWN = 3


def ranks_lines(profile: Profile) -> list[str]:
    """What all ranks did together, how much they differ, and who did not answer; empty where there is one rank."""
    ranks = profile.ranks
    if ranks is None:
        return []
    return [
        title("All ranks"),
        *_who_lines(profile.context, ranks),
        *_straggler_lines(ranks),
        *_rate_lines(profile, ranks),
        "",
        *_flops_lines(profile, ranks),
        "",
        *_spread_lines(profile, ranks),
        *_stage_lines(ranks),
        *_communication_lines(ranks.communication),
        *_left_out_lines(profile, ranks),
    ]


def whose(ranks: RanksProfile) -> str:
    """Which ranks a figure is of: "3 of 4 ranks"; nothing where all answered."""
    return f"{_number_of(ranks)} ranks" if ranks.absences else ""


def _number_of(ranks: RanksProfile) -> str:
    return f"{plain(ranks.answered)} of {plain(ranks.world_size)}"


def _who_lines(context: RunContext, ranks: RanksProfile) -> list[str]:
    lines = []
    waited = f"Rank {context.rank} waited {duration(ranks.waited_sec)} for the others' records after its own window."
    if not ranks.absences:
        lines += paragraph(f"All {plain(ranks.world_size)} ranks answered. {waited}")
    else:
        lines += paragraph(f"{_number_of(ranks).upper()} RANKS ANSWERED, and every figure here is of those. {waited}")
        by_reason: defaultdict[str, list[int]] = defaultdict(list)
        for absence in ranks.absences:
            by_reason[absence.reason].append(absence.rank)
        reasons = sorted(by_reason, key=lambda reason: (-len(by_reason[reason]), by_reason[reason][0]))
        for reason in reasons[:_REASONS_SHOWN]:
            lines += paragraph(f"{name_ranks(by_reason[reason]).capitalize()}: {reason}.", first="- ", rest="  ")
        rest = [rank for reason in reasons[_REASONS_SHOWN:] for rank in by_reason[reason]]
        if rest:
            lines += paragraph(f"{name_ranks(rest).capitalize()}: for other reasons.", first="- ", rest="  ")
    return lines


def _straggler_lines(ranks: RanksProfile) -> list[str]:
    """Whom the others wait for."""
    if ranks.answered < 2 or ranks.global_step is None:
        return []
    if not ranks.stragglers:
        return paragraph(f"Straggler: {_no_straggler(ranks)}.", rest="  ")
    lines = []
    shown = ranks.stragglers[:_STRAGGLERS_SHOWN]
    for straggler in shown:
        lines += paragraph(f"STRAGGLER: {straggler_evidence(straggler)}", rest="  ")
    rest = [straggler.rank for straggler in ranks.stragglers[len(shown) :]]
    if rest:
        lines += paragraph(f"And {len(rest)} more, less late: {name_ranks(rest)}.", first="  ", rest="  ")
    return lines


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


def _rate_lines(profile: Profile, ranks: RanksProfile) -> list[str]:
    rates, name = ranks.rates, profile.step_name
    mark = f" ({whose(ranks)})" if ranks.absences else ""
    latency = "iter latency (as DeepSpeed)" if profile.context.trains else "fwd latency"
    bound = " (lower bound)" if ranks.lower_bound else ""

    def marked(text: str, *marks: str) -> str:
        return text if text == NOT_AVAILABLE else "".join((text, *marks))

    lines = [
        line(f"MFU of all ranks = model FLOPs / (peaks * {name} times)", marked(percent(rates.mfu), bound, mark)),
        line(f"HFU of all ranks = hardware FLOPs / (peaks * {name} times)", marked(percent(rates.hfu), bound, mark)),
        line("  peak FLOP/s of all devices", marked(si(ranks.peak_flops_per_sec, "FLOP/s"), mark)),
    ]
    shown = ranks.devices[:_DEVICES_SHOWN]
    lines += [
        line(
            f"    {one.device_name or 'unknown device'}", f"{plain(one.ranks)} x {si(one.peak_flops_per_sec, 'FLOP/s')}"
        )
        for one in shown
    ]
    if more := len(ranks.devices) - len(shown):
        others = sum(one.ranks for one in ranks.devices[len(shown) :])
        lines.append(line(f"    and {more} more kinds of devices", f"{others} of them"))
    lines += [
        line(f"samples/second over the {name}", marked(plain(rates.samples_per_sec), mark)),
        line(f"samples/second over the {latency}", marked(plain(rates.iter_samples_per_sec), mark)),
        line(f"tokens/second over the {name}", marked(plain(rates.tokens_per_sec), mark)),
        line(f"tokens/second per {profile.context.device_word}", marked(plain(rates.tokens_per_sec_per_device), mark)),
    ]
    return lines + missing_rates_lines(ranks.unavailable)


def _flops_lines(profile: Profile, ranks: RanksProfile) -> list[str]:
    """FLOPs of the job, and of one copy of the model."""
    together, copy = ranks.flops, ranks.flops_of_model
    rows = [
        ("fwd", "forward"),
        ("bwd (measured)", "backward"),
        ("recomputed in the bwd", "recompute"),
        ("optimizer", "optimizer"),
        (MODEL_ROW, "model"),
        (HARDWARE_ROW, "hardware"),
    ]
    if not profile.has_backward:
        rows = [("fwd = model FLOPs", "forward"), (ROWS_OF_A_FORWARD[HARDWARE_ROW], "hardware")]
    mark = f"{_number_of(ranks)} ranks" if ranks.absences else f"all {plain(ranks.world_size)} ranks"
    least = "at least, " if ranks.lower_bound else ""
    cells = [
        [
            label,
            si(getattr(together, name)),
            plain(getattr(together, name)),
            si(None if copy is None else getattr(copy, name)),
        ]
        for label, name in rows
    ]
    return table([f"FLOPs of a {profile.step_name}", f"{least}{mark}", "exact", "of model"], cells)


def _spread_lines(profile: Profile, ranks: RanksProfile) -> list[str]:
    """Each figure of a rank over the ranks."""
    median_sec = 0.0 if ranks.global_step is None else ranks.global_step.seconds.median
    unit, seconds = _seconds_in(median_sec)
    rows = [_spread_row(f"{part.name}, {unit}", part.seconds, seconds, of=ranks.answered) for part in ranks.parts]
    if ranks.global_step is not None:
        rows.append(_spread_row(f"{profile.step_name}, {unit}", ranks.global_step.seconds, seconds, of=ranks.answered))
    rows.append(_spread_row("model FLOPs", ranks.model_flops, si, of=ranks.answered))
    if ranks.local_params is not None:
        rows.append(_spread_row("params on the rank", ranks.local_params, si, of=ranks.answered))
    if ranks.peak_memory_bytes is not None:
        memory, kind = ranks.peak_memory_bytes, "" if profile.memory is None else f" ({profile.memory.kind})"
        rows.append(_spread_row(f"peak memory{kind}", memory, lambda value: si(value, "B"), of=ranks.answered))
    lines = _spread_table(f"of each rank, a {profile.step_name}", rows)
    return lines if ranks.global_step is not None else [*lines, "No rank timed a step."]


def _seconds_in(scale_sec: float) -> tuple[str, Callable[[float], str]]:
    """The unit for seconds of the size of *scale_sec*, and a function that writes seconds in it."""
    unit, size = time_unit(scale_sec)
    return unit, lambda value: f"{value / size:.3f}"


def _spread_row(label: str, spread: RankSpread, text: Callable[[float], str], *, of: int) -> list[str]:
    differ = spread.least < spread.greatest
    return [
        label if spread.ranks == of else f"{label} ({plain(spread.ranks)} ranks)",
        text(spread.least),
        f"rank {spread.least_rank}" if differ else "",
        text(spread.median),
        text(spread.greatest),
        f"rank {spread.greatest_rank}" if differ else "",
    ]


def _spread_table(head: str, rows: Sequence[Sequence[str]]) -> list[str]:
    return table([head, "min", "", "median", "max", ""], rows, left=(0, 2, 5))


def _stage_lines(ranks: RanksProfile) -> list[str]:
    """The stages of a pipeline; of many, those that work longest."""
    if not ranks.stages:
        return []

    def busy_sec(stage: StageProfile) -> float:
        return sum(part.seconds.median for part in stage.parts if part.name in ("forward", "backward"))

    longest = sorted(ranks.stages, key=lambda stage: (-busy_sec(stage), stage.stage))[:_STAGES_SHOWN]
    rows = [
        [
            plain(stage.stage),
            plain(stage.answered),
            si(stage.params),
            si(stage.flops.forward),
            si(stage.flops.backward),
            *(duration(_median_sec(stage.parts, name)) for name in ("forward", "backward", "bubble")),
        ]
        for stage in sorted(longest, key=lambda stage: stage.stage)
    ]
    head = ["stage", "ranks", "params", "fwd FLOPs", "bwd FLOPs", "forward", "backward", "bubble"]
    lines = ["", *table(head, rows, least_width=9)]
    lines += paragraph("FLOPs and params are of one copy of the model; times are medians of the stage's ranks.")
    if more := len(ranks.stages) - len(rows):
        lines += paragraph(f"And {more} more stages, with less time in forward and backward.")
    return lines


def _median_sec(parts: tuple[RanksPart, ...], name: str) -> float | None:
    return next((part.seconds.median for part in parts if part.name == name), None)


def _communication_lines(communication: RanksCommunication | None) -> list[str]:
    """What the traced steps say of communication: what was hidden, and what was waiting."""
    if communication is None:
        return []
    unit, seconds = _seconds_in(communication.wall_sec.median)
    rows = [
        _spread_row(label, spread, text, of=communication.ranks)
        for label, spread, text in (
            (f"wall time, {unit}", communication.wall_sec, seconds),
            (f"computation, {unit}", communication.computation_sec, seconds),
            (f"communication, {unit}", communication.communication_sec, seconds),
            (f"  not hidden by computation, {unit}", communication.exposed_sec, seconds),
            ("  hidden", communication.overlap_ratio, percent),
            (f"transfer, {unit}", communication.transfer_sec, seconds),
            (f"waiting for other ranks, {unit}", communication.wait_sec, seconds),
        )
        if spread is not None
    ]
    lines = ["", *_spread_table(f"of the traced step of {plain(communication.ranks)} ranks", rows)]
    shown = communication.collectives[:_COLLECTIVES_SHOWN]
    cells = [
        [
            one.name,
            plain(one.calls),
            plain(one.matched_calls),
            si(one.bytes, "B"),
            duration(None if one.transfer_sec is None else one.transfer_sec.median),
            duration(None if one.wait_sec is None else one.wait_sec.median),
            *_longest(one.wait_sec),
        ]
        for one in shown
    ]
    head = ["collective, all ranks", "calls", "matched", "bytes", "transfer", "wait", "longest wait", ""]
    lines += ["", *table(head, cells, least_width=7, left=(0, 7))]
    if more := len(communication.collectives) - len(shown):
        lines.append(f"And {more} more collectives, which take less time.")
    unsaid = ""
    if any(one.bytes is None for one in shown):
        unsaid = " Bytes are n/a where the traces do not say them; gloo's do with record_shapes=True."
    lines += paragraph(
        "Matched: the i-th call of each rank of a process group. Transfer is the shortest; the rest of a call is "
        f"waiting. Both are medians of the ranks.{unsaid}"
    )
    for note in communication.notes[:_NOTES_SHOWN]:
        lines += paragraph(note, first="- ", rest="  ")
    if len(communication.notes) > _NOTES_SHOWN:
        lines.append(f"- And {len(communication.notes) - _NOTES_SHOWN} more such notes, in profile.json.")
    return lines


def _longest(spread: RankSpread | None) -> tuple[str, str]:
    if spread is None:
        return NOT_AVAILABLE, ""
    return duration(spread.greatest), f"rank {spread.greatest_rank}" if spread.least < spread.greatest else ""


def _left_out_lines(profile: Profile, ranks: RanksProfile) -> list[str]:
    """What is missing here: what did not fit into the ranks' records, and notes of their own reports."""
    lines = []
    for sentence in ranks.left_out[:_NOTES_SHOWN]:
        lines += paragraph(f"Left out of the record of {sentence}.", first="- ", rest="  ")
    if len(ranks.left_out) > _NOTES_SHOWN:
        lines.append(f"- And {len(ranks.left_out) - _NOTES_SHOWN} more like this, in profile.json.")
    noting = [one.rank for one in ranks.ranks if one.notes > len(profile.notes)]
    if noting:
        have = "has" if len(noting) == 1 else "have"
        lines += paragraph(
            f"{name_ranks(noting).capitalize()} {have} more notes than this report; with all_ranks=True every rank "
            "writes its own.",
            first="- ",
            rest="  ",
        )
    return lines
