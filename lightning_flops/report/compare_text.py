"""What is held against something else: two runs, by profiles, traces or throughput; and the ranks of one."""

from __future__ import annotations

import math
import shlex
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import chain
from operator import itemgetter
from statistics import median

from lightning_flops.analysis.counts import grouped
from lightning_flops.analysis.rates import sum_if_all_known
from lightning_flops.records import OUTSIDE
from lightning_flops.report.document import (
    Column,
    Item,
    Section,
    Table,
    all_of,
    at,
    points,
    sentences,
    short,
    some_of,
)
from lightning_flops.report.profile_document import devices_of, missing_rates, whose
from lightning_flops.schema.comparison import (
    CONFIDENCE,
    CalledDifference,
    Cause,
    CausedDifference,
    Comparison,
    ModuleDifference,
    TableName,
    TimeDifference,
)
from lightning_flops.schema.profile import Profile
from lightning_flops.schema.trace import RankCollectiveRow, RankComparison, RankRow, RanksProfile
from lightning_flops.units import duration, name_ranks, percent, plain, si

_NS = 1e9
_CAUSES_NAMED, _LEAST_NAMED = 3, 0.1  # parts or modules in a sentence, and the least share of the difference of each
_BEARS_ON_SPEED = (
    *("optimizer", "workers", "cores", "compiled", "dtypes", "micro_steps", "params"),
    *("context.precision", "context.device_name", "context.world_size", "context.strategy"),
    *("context.micro_batch_size", "context.torch_version"),
)
_WORDS = {"work": ("more work", "less work"), "efficiency": ("worse efficiency", "better efficiency")} | {
    "waiting": ("more waiting", "less waiting")
}
_TITLES: dict[TableName, str] = {
    "kernels": "By kernel, copy and memset",
    "operators": "By operator, on the host, without those it called",
    "collectives": "By collective",
}


def comparison_headline(comparison: Comparison) -> str:
    """The difference of the steps, and what of it is noise, in one sentence."""
    step, noise = comparison.step, comparison.step.noise_ns
    share = f" ({'+' if step.difference_ns > 0 else ''}{percent(step.difference_ns / step.a_ns)})" if step.a_ns else ""
    which = "The whole trace" if step.name == "whole trace" else f"One {step.name}"
    of_a, of_b = (duration(ns / _NS) for ns in (step.a_ns, step.b_ns))
    words = f"{which} takes {of_b} in B and {of_a} in A: {_signed(step.difference_ns)}{share}"
    if comparison.starved and not comparison.is_told:
        return (
            f"{words}, which decides nothing: {' and '.join(comparison.starved)} had to wait for processors. Run that "
            "again where nothing else runs."
        )
    if noise is None:
        return f"{words}; what of it is noise is not known."
    by_noise = "more than noise explains" if step.beyond_noise else "within noise"
    if step.beyond_noise and not comparison.is_told and comparison.kind != "traces":
        by_noise += f", but two starts of one program may differ by {comparison.starts_share:.0%} more"
    ends = " to ".join(_signed(step.difference_ns + one) for one in (-noise, noise))
    runs = comparison.a.runs, comparison.b.runs
    by = "by one run a side" if runs == (1, 1) else "by {} and {} runs".format(*runs)
    return f"{words}, {by_noise} ({CONFIDENCE:.0%}: {ends}, {by})."


def _next_command(comparison: Comparison) -> str:
    """What decides a comparison that one run a side leaves open; empty where nothing is open, or it cannot help."""
    a, b, noise = comparison.a, comparison.b, comparison.step.noise_ns
    is_open = comparison.kind == "profiles" and a.runs == b.runs == 1 and not comparison.is_told
    if noise is None or not is_open or comparison.starved or (a.source, b.source) == ("A", "B"):
        return ""  # profiles that a program compares have no files
    command = shlex.join(["lightning-flops", "compare", a.source, "A2", "--", b.source, "B2"])
    return f"One run a side leaves it open: run each program again, with log_dir A2 and B2; `{command}` decides."


def comparison_sections(comparison: Comparison) -> list[Section]:
    """What differs, why, by part, and by module or kernel."""
    of_traces, of_profiles, settings = comparison.kind == "traces", comparison.kind == "profiles", comparison.settings
    sides, named = {"A": comparison.a, "B": comparison.b}, _named(comparison)
    names = [
        Column("set up differently", lambda row: row[0].removeprefix("context."), str),
        *(Column("A", at("1.0"), str, left=True), Column("B", at("1.1"), str, left=True)),
    ]
    alike = "Set up alike: device, ranks, batch, precision, versions, parameters and settings."
    items: list[Item] = [
        *(
            sentences(comparison_headline(comparison), _next_command(comparison)),
            *(f"Starved in {letter}: {run.starved_runs}" for letter, run in sides.items() if run.starved_runs),
            _set_up(settings),
            _by_cause(comparison),
            _most_of_it(comparison, named),
            _what_to_do(comparison, named),
            _other_counts(comparison, named),
        ),
        *(
            f"{letter} was starved: its threads together had to wait for a processor for {percent(run.starved_share)} "
            "of the time in which steps were timed."
            for letter, run in sides.items()
            if run.starved_share
        ),
        *(f"{letter}: {run.source} ({run.about})" for letter, run in sides.items()),
        alike if of_profiles and not settings else "",
        *([Table([*settings.items()], names, whole=True)] if settings else []),
    ]
    verdict = Column("verdict", partial(_verdict, comparison), str, left=True)
    columns = [*_columns("mean", causes=of_profiles), *all_of({"noise": "noise_ns"}, unit="ns"), verdict]
    parts = Table((*comparison.parts, comparison.step), columns, whole=True)
    reasons = {one.name: one.reason for one in comparison.figures if one.reason}
    noise = (
        _BETWEEN_RUNS
        if comparison.has_several_runs
        else _WITHIN_RUNS + ("" if of_traces else _ONE_RUN.format(comparison.starts_share))
    )
    return [
        Section("Two traces compared" if of_traces else "Two runs compared", "", items),
        Section(f"By part of the {'batch' if comparison.kind == 'throughput' else 'step'}", "", [parts]),
        *([Section("By module", "", _modules(comparison, verdict))] if of_profiles else []),
        *(Section(_TITLES[of], "", [_table(rows, verdict)]) for of, rows in comparison.tables.items()),
        Section("Figures of both", "", [Table(comparison.figures, _FIGURES, whole=True), *missing_rates(reasons)]),
        Section("How to read it", "", points([_HOW_TO_READ[comparison.kind], noise, *comparison.notes])),
    ]


def _set_up(settings: Mapping[str, tuple[str, str]]) -> str:
    """What bears on speed and is set up differently: "AdamW: fused in A, foreach in B"."""
    named = []
    for name in filter(_BEARS_ON_SPEED.__contains__, settings):
        kinds, ways = zip(*(one.partition(", ")[::2] for one in settings[name]), strict=True)
        of_one_kind = len(set(kinds)) == 1 and all(ways)
        label, values = (kinds[0], ways) if of_one_kind else (name.removeprefix("context."), settings[name])
        named.append(f"{label.replace('_', ' ')}: {values[0]} in A, {values[1]} in B")
    return f"Set up differently: {'; '.join(named)}." if named else ""


def _signed(ns: int) -> str:
    return f"{'+' if ns > 0 else ''}{duration(ns / _NS)}"


def _columns(first: str, *, causes: bool) -> list[Column]:
    """Columns of differences: their names under *first*, the times of both, and their *causes*."""
    fields = {"A": "a_ns", "B": "b_ns", "B - A": "difference_ns"} | {kind: f"{kind}_ns" for kind in _WORDS if causes}
    return [Column(first, lambda row: short(_name(row)), str), *all_of(fields, unit="ns")]


def _by_cause(comparison: Comparison) -> str:
    """The causes of a difference beyond noise."""
    found = {kind: int(getattr(comparison.step, f"{kind}_ns")) for kind in _WORDS if comparison.is_told}
    words = ", ".join(f"{_WORDS[kind][ns < 0]} {_signed(ns)}" for kind, ns in found.items() if ns)
    return f"By cause: {words}." if words else ""


def _most_of_it(comparison: Comparison, named: Sequence[TimeDifference]) -> str:
    """The parts and modules that a difference comes from."""
    half = 2 * abs(sum(one.difference_ns for one in named)) >= abs(comparison.step.difference_ns)
    of = "Beyond noise" if comparison.kind == "traces" else "Most of it" if half else "Part of it"
    found = (sentences(_name(one), _signed(one.difference_ns), _why(one)) for one in named)
    return f"{of}: {', '.join(found)}." if named else ""


def _what_to_do(comparison: Comparison, named: Sequence[TimeDifference]) -> str:
    """What a person does about time that no count of FLOPs or bytes explains."""
    rows = named or [comparison.step] if comparison.is_told else []
    names = [_name(one) for one in rows if _cause(one).endswith("efficiency")]
    first = "set both up alike and run them again; if it stays, " if _set_up(comparison.settings) else ""
    do = (
        "compare traces of both (trace_dir keeps them) for other kernels, dtypes and layouts; where these are alike, "
        "look at clocks and other programs"
    )
    of = ", ".join(names)
    return f"Efficiency of {of} is time that the counted FLOPs and bytes do not explain: {first}{do}." if names else ""


def _other_counts(comparison: Comparison, named: Sequence[TimeDifference]) -> str:
    """The modules that are not *named* and whose counts differ."""
    others = sorted((one for one in comparison.modules if one.other_counts), key=lambda one: -abs(one.work_ns))
    names = [(_name(one), f" ({_counts(one)})" if one.a and one.b else "") for one in others if one not in named]
    counts = some_of(["".join(words) for words in names], most=_CAUSES_NAMED)
    return f"Other counts, whatever the times are: {counts}." if counts else ""


def _named(comparison: Comparison) -> list[TimeDifference]:
    """The modules and parts beyond noise that make up the difference of the step, the largest first."""
    of_traces = comparison.kind == "traces"
    modules = [one for one in comparison.modules if one.beyond_noise]
    by_module = ("forward", "backward") if modules else ()  # modules say more
    parts = [one for one in comparison.parts if one.beyond_noise and one.name not in by_module]
    every: list[TimeDifference] = [*modules, *parts] if comparison.is_told or of_traces else []
    if not of_traces:
        every = [one for one in every if _is_cause(one, of_ns=comparison.step.difference_ns)]
    return sorted(every, key=lambda one: -abs(one.difference_ns))[:_CAUSES_NAMED]


def _is_cause(row: TimeDifference, *, of_ns: int) -> bool:
    """Whether *row* is no trifle, and, unless its counts differ, goes the same way as the whole difference."""
    other_counts = isinstance(row, ModuleDifference) and row.other_counts
    share = row.difference_ns / of_ns
    return (abs(share) if other_counts else share) >= _LEAST_NAMED


def _modules(comparison: Comparison, verdict: Column) -> list[Item]:
    if not any(one.a_ns or one.b_ns for one in comparison.modules[:-1]):
        return ["No times of modules in both runs; the notes say why."]
    rows = sorted(comparison.modules, key=lambda one: -abs(one.difference_ns))
    table = Table([one for one in rows if one.a_ns or one.b_ns], [*_columns("own", causes=True), verdict])
    return [
        "Forward and backward of each module without those below it; the parts are means over the timed steps, their "
        "shares from the traced steps.",
        table,
    ]


def _table(found: Sequence[CalledDifference], verdict: Column) -> Table | str:
    """A table of traces, without the rows that do not differ."""
    shown = [row for row in found if row.difference_ns or row.calls_a != row.calls_b]
    if not shown:
        return f"No difference in any of {plain(len(found))}."
    calls = Column("calls", lambda row: " -> ".join(dict.fromkeys(map(plain, (row.calls_a, row.calls_b)))), str)
    return Table(shown, [*_columns("mean", causes=False), calls, verdict])


def _verdict(comparison: Comparison, row: TimeDifference) -> str:
    """The cause of a difference beyond noise, if it is known, or what else is special about a row."""
    if isinstance(row, CalledDifference) and not (row.calls_a and row.calls_b):
        return "new" if row.calls_b else "gone"  # which is no chance
    if row.beyond_noise and (comparison.kind == "traces" or comparison.is_told):
        return _cause(row) or "beyond noise"
    words = ["noise"] if row.difference_ns and row.beyond_noise is False else []
    words += [_counts(row)] if isinstance(row, ModuleDifference) and row.other_counts else []
    return ", ".join(words)


def _cause(row: TimeDifference) -> str:
    """The cause that has most of a difference, of those that have its sign."""
    sign = 1 if row.difference_ns > 0 else -1
    kind = max(_WORDS, key=lambda kind: sign * int(getattr(row, f"{kind}_ns", 0)))
    return _WORDS[kind][sign < 0] if isinstance(row, CausedDifference) and row.causes else ""


def _why(row: TimeDifference) -> str:
    """The cause of a difference, and of a module in both runs how much more it computes or moves."""
    cause, counts = _cause(row), _counts(row) if isinstance(row, ModuleDifference) and row.a and row.b else ""
    if counts:
        cause += f": {counts}" if cause.endswith("work") else f", with {counts}"
    return f"({cause})" if cause else ""


def _counts(one: ModuleDifference) -> str:
    """How many FLOPs, or bytes, a step of B has more, or less: of the two what has taken, or saved, more time.

    They are exact, whatever the times are.
    """
    if one.a is None or one.b is None:
        return "new" if one.a is None else "gone"
    more_bytes = one.b.bytes - one.a.bytes
    amounts: dict[Cause, tuple[int, str]] = {"flops": (one.b.flops - one.a.flops, "FLOPs"), "bytes": (more_bytes, "B")}
    found = [kind for kind, (more, _) in amounts.items() if more]
    more, unit = amounts[max(found, key=lambda kind: abs(one.causes.get(kind, 0)), default="flops")]
    return f"{'+' if more > 0 else ''}{si(more, unit)}" if more else ""


def _name(row: TimeDifference) -> str:
    if not isinstance(row, ModuleDifference):
        return row.name
    name = "no module, waiting included" if row.name == OUTSIDE else row.name or "the root"
    if row.a is None or row.b is None:
        return f"{name} ({'new' if row.a is None else 'gone'})"
    return name if row.a.name == row.b.name else f"{row.a.name} -> {name}"


_FIGURES = [
    Column("figure", at("name"), str),
    *all_of({"A": "a", "B": "b"}),
    Column("B / A", at("ratio"), "{:.4f}".format),
    Column(
        "by noise",
        lambda one: "exact" if one.noise_factor == 1 else one.ends and "{:.4f} to {:.4f}".format(*one.ends),
        str,
        left=True,
    ),
]
_HOW_TO_READ = {
    "profiles": "Work: more or fewer FLOPs and bytes, and modules that only one run has. Efficiency: the rest of the "
    "time that computes. Waiting: for data, for other ranks, of the device for the host, and what the loop does around "
    "the model. The causes of a line add up to its B - A, and the lines to the whole. A cause is named where the step "
    "differs by more than noise, which has what a starved run may have waited for processors; FLOPs or bytes that a "
    "module has more or fewer of are exact, and stand there within noise as well.",
    "traces": "Each moment of a step counts under the first part from the top that ran then. All other tables are sums "
    "of what was launched or began in the step; they may overlap. Steps under torch.profiler are slower: record both "
    "alike.",
    "throughput": "Times are means over all batches of the run but those that were counted or traced. Seconds of "
    "validation, checkpoints and between epochs are in none.",
}
_WITHIN_RUNS = (
    f"Noise is the spread of the steps ({CONFIDENCE:.0%} by Welch's t). What changes from one start of a program to "
    "the next, or with what else the machine does, is not in it."
)
_ONE_RUN = (
    " So here a cause is named from {:.0%} of the step beyond it on. Several runs a side show it: lightning-flops "
    "compare A1 A2 A3 -- B1 B2 B3."
)
_BETWEEN_RUNS = f"Noise is the spread of the runs of each side ({CONFIDENCE:.0%} by Student's t of their means)."


# ---- ranks: what they did together, how much they differ, and who is waited for

_SHOWN = 4  # points of a list
_TIMES = {
    "wall": "overlap.wall_us",
    "compute": "overlap.computation_us",
    "comm": "overlap.communication_us",
    "overlap": "overlap.overlap_us",
    "exposed": "overlap.exposed_us",
    "neither": "overlap.other_us",
    "transfer": "transfer_us",
    "wait": "wait_us",
}
# What a trace has of computation and communication: both at once, communication that no computation hides, waits.
OVERLAP = [*all_of(_TIMES, unit="us"), *all_of({"overlap / comm": "overlap.overlap_ratio"}, percent)]
_TRACED = "Exposed: communication that nothing hides. Neither: time without both. Transfer and wait: of collectives."

_first = partial(points, most=_SHOWN, others="in profile.json")


def ranks_section(profile: Profile) -> Section | None:
    """What all ranks did together, how much they differ, and who did not answer; None where there is one rank."""
    ranks = profile.ranks
    if ranks is None:
        return None
    traced = ranks.communication
    return Section(
        "All ranks",
        "",
        [
            *_who(ranks),
            *_stragglers(ranks),
            f"Peak of {some_of(devices_of(ranks), most=_SHOWN)}: {si(ranks.peak_flops_per_sec, 'FLOP/s')} in all.",
            *missing_rates(ranks.unavailable),
            _spreads(profile, ranks),
            *([] if traced is None else [_TRACED, *_collectives(traced)]),
            *_first([*(() if traced is None else traced.notes), *ranks.notes]),
        ],
    )


def _who(ranks: RanksProfile) -> list[str]:
    if not ranks.absences:
        return [f"All {plain(ranks.world_size)} ranks answered."]
    found = sorted(ranks.absences.items(), key=lambda item: (-len(item[1]), item[1][0]))
    reasons = _first([f"{name_ranks(numbers).capitalize()}: {reason}." for reason, numbers in found])
    return [f"{whose(ranks).upper()} ANSWERED, and every figure here is of those.", *reasons]


def _stragglers(ranks: RanksProfile) -> list[str]:
    """Whom the others wait for, or how far it is known that there is no such rank."""
    if ranks.stragglers:
        return _first([f"STRAGGLER: {straggler.evidence}" for straggler in ranks.stragglers])
    timed = [one for one in ranks.ranks if one.parts_sec]
    if timed and all(one.traced for one in timed) and ranks.pipeline_stages == 1:
        part, chance = max(ranks.chance_sec.items(), key=itemgetter(1), default=("", 0.0))
        most = f" (± {duration(chance)} in {part}, the least steady part)" if chance else ""
        return [f"Straggler: none beyond chance{most}."]
    words = (
        "Straggler: none was found in data wait and transfer; in the other parts, only ranks that do the same work and "
        "each traced a step can be compared."
    )
    return [words] if timed and ranks.answered > 1 else []


def _spreads(profile: Profile, ranks: RanksProfile) -> Table:
    """Each figure of a rank over the ranks: the least, the median and the greatest, and whose they are."""
    parts = dict.fromkeys(chain.from_iterable(one.parts_sec for one in ranks.ranks))
    seconds = {name: {one.rank: one.parts_sec.get(name) for one in ranks.ranks} for name in parts}
    seconds[profile.step_name] = {one.rank: math.fsum(one.parts_sec.values()) for one in ranks.ranks if one.parts_sec}
    traced = () if ranks.communication is None else ranks.communication.ranks
    seconds |= {
        f"traced step: {name}": {row.rank or 0: _per_step(row, path, row.steps) for row in traced}
        for name, path in _TIMES.items()
    }
    kind = "" if profile.memory is None else f" ({profile.memory.kind})"
    others = {
        "model FLOPs": "model_flops",
        "params on the rank": "local_params",
        f"peak memory{kind}, B": "peak_memory_bytes",
    }
    counts = {name: {one.rank: getattr(one, field) for one in ranks.ranks} for name, field in others.items()}
    rows = [
        *(_spread(name, by_rank, duration, of=ranks.answered) for name, by_rank in seconds.items()),
        *(_spread(name, by_rank, si, of=ranks.answered) for name, by_rank in counts.items()),
    ]
    heads = enumerate(["of each rank", "min", "", "median", "max", ""])
    columns = [Column(head, itemgetter(place), str, left=place in (0, 2, 5)) for place, head in heads]
    return Table(list(filter(None, rows)), columns, whole=True)


def _spread(label: str, by_rank: Mapping[int, float | None], show: Callable[[float], str], *, of: int) -> list[str]:
    """A row of a figure that *by_rank* has of some *of* the ranks; empty where no rank knows it."""
    known = {rank: value for rank, value in sorted(by_rank.items()) if value is not None}
    if not known:
        return []
    least, greatest = min(known, key=known.__getitem__), max(known, key=known.__getitem__)
    some = "" if len(known) == of else f" ({plain(len(known))} ranks)"
    ends = [f"rank {rank}" if known[least] < known[greatest] else "" for rank in (least, greatest)]
    values = [show(value) for value in (known[least], median(known.values()), known[greatest])]
    return [f"{label}{some}", values[0], ends[0], *values[1:], ends[1]]


def _collectives(comparison: RankComparison) -> list[Table | str]:
    """Each collective over all ranks; times are of one step."""
    calls = [(rank.steps, one) for rank in comparison.ranks for one in rank.collectives]
    by_name = grouped(calls, lambda item: item[1].name)
    columns = [
        Column("collective", itemgetter(0), str, "name"),
        Column("calls", partial(_in_all, "calls"), sort="calls"),
        Column("matched", partial(_in_all, "matched_calls")),
        Column("", partial(_in_all, "bytes"), unit="B"),
        *(Column(label, partial(_typical, f"{label}_us"), unit="s") for label in ("latency", "transfer", "wait")),
    ]
    words = (
        "Matched: the i-th call of each rank of a process group. Transfer: the shortest of the ranks for each call; "
        "wait: the rest, until the last rank came. Times are medians of the ranks, in one step. Bytes are n/a where "
        "the traces do not say them; gloo's do with record_shapes=True."
    )
    rows = sorted(by_name.items(), key=lambda row: (-math.fsum(one.latency_us for _, one in row[1]), row[0]))
    return [Table(rows, columns), words] if rows else []


_Calls = tuple[str, Sequence[tuple[int, RankCollectiveRow]]]  # of one collective, by ranks with their steps


def _in_all(figure: str, row: _Calls) -> float | None:
    return sum_if_all_known(getattr(one, figure) for _, one in row[1])


def _typical(figure: str, row: _Calls) -> float | None:
    found = [_per_step(one, figure, steps) for steps, one in row[1]]
    known = [seconds for seconds in found if seconds is not None]
    return median(known) if known else None


def _per_step(row: RankRow | RankCollectiveRow, path: str, steps: int) -> float | None:
    """Seconds in one of so many *steps* of the microseconds that *row* has at *path*."""
    value = at(path)(row)
    return None if value is None else value * 1e-6 / steps


def rank_section(comparison: RankComparison) -> Section:
    """Ranks side by side."""
    ranks = Table(comparison.ranks, [*all_of({"rank": "rank", "steps": "steps"}, str), *OVERLAP], whole=True)
    return Section("Ranks", _TRACED, [ranks, *_collectives(comparison), *comparison.notes])
