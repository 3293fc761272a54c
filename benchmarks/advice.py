"""Whether the first advice names what is planted in a program, is silent on clean ones, and saves what it says.

``make bench-advice`` runs each program of ``advice_programs`` under the profiler, in a process of its own. Once that is
done, steps that nothing watches run with the cause and under the remedy that was advised: nine pairs of blocks, in
turns, so that both have the same machine; where a hook of Lightning or transformers is the cause all within one
training, where it is the dataset each block in one of its own. *Quiet*: alone. *Busy*: beside a process that keeps
one core busy. *Named first*: the first advice is of the rule, and names the line's function, the hook, the module or
the rank. *Saved*: of the time of a sample in a typical step, the mean of the middle half of a block: the median of
the pairs, and their middle half. *Size right*: a figure "at most" (<=) covers that median and is at most twice it; a
figure "at least" (>=) is covered by it, and it is at most twice the figure; of a run that was starved of processors,
what is said "about" is at most twice the other. All within five points. Records of earlier passes stay in a file, so
the passes may be run on different days: ``python -m benchmarks.advice --runs 6 --only quiet``.

The second table holds the share of each planted statement by the samples of its lines beside that by a clock around it,
in steps after the window, which nothing samples; and what is left of the step, with the cause and without. Where that
runs faster once the cause is gone, more is saved than the cause itself took.
"""

from __future__ import annotations

import json
import logging
import statistics
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial
from importlib import import_module
from itertools import product
from pathlib import Path
from typing import Any

from lightning_flops import Profile, compare_profiles
from lightning_flops.analysis.differences import judge

from .advice_programs import CLEAN, PLANTED, keep_busy, report
from .machine import RESULTS, ROOT
from .page import described, table, write_page
from .runner import answer_of, start

logger = logging.getLogger("benchmarks.advice")

RECORDS = ROOT / ".cache/bench_advice.jsonl"
PROFILES = ROOT / ".cache/bench_advice"
"""Profiles of the clean programs, by pass, round and name: two rounds are two identical runs."""
GATES = ("hardware_flops > 1", "cpu_time_sec > 1.1", "global_step_sec > 1.05", "samples_per_sec < 0.95")
_TIMEOUT_SEC = 120
_PASSES = ("quiet", "busy")
_POINTS = 0.05
_BOUNDS = {True: ">=", False: "<=", None: "about"}


def run(name: str, keep: Path | None = None) -> dict[str, Any]:
    """What the program *name* found, in a process of its own that begins with torch imported; empty if it failed."""
    answer = answer_of(partial(report, name, None, keep), timeout_sec=_TIMEOUT_SEC)
    if answer.words:
        logger.warning("%s failed: %s", name, answer.words)
    return answer.value or {}


def measure(which: str, runs: int, only: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Records of *runs* rounds over all programs; in each round every program runs once."""
    PROFILES.mkdir(parents=True, exist_ok=True)
    busy = keep_busy(int(which == "busy"))
    for index, name in product(range(runs), only):
        keep = PROFILES / f"{which}-{index:03}-{name}.json"
        found = run(name, keep=None if name in PLANTED else keep)
        record = {"pass": which, "round": index, "name": name, **found}
        words = [one[1] for one in found.get("advice", ())][:1]
        logger.info("%s %d %s: %s %s", which, index, name, [one[0] for one in found.get("advice", ())], words)
        yield record
    for process in busy:
        process.kill()


def first_rule(record: dict[str, Any]) -> str | None:
    """The rule of the first advice."""
    return next((one[0] for one in record.get("advice", ())), None)


def is_named(record: dict[str, Any]) -> bool:
    """Whether the first advice has the rule of what was planted, and names its line, module, part or rank."""
    cause = PLANTED[record["name"]]
    first = next(iter(record.get("advice", ())), None)
    return first is not None and first[0].startswith(cause.rule) and cause.where in first[1]


def is_sized(record: dict[str, Any]) -> bool | None:
    """Whether what obeying saved keeps the bound, and the smaller of both is at least half; None where not known.

    The profile's steps and those that the benchmark times vary by a few points between two runs of a program.
    """
    found, (share, at_least) = saved(record), bound(record)
    if share is None or found is None:
        return None
    low, high = (share, found) if at_least else (found, share)
    if at_least is None:
        low, high = sorted((share, found))
    return low - _POINTS <= high <= 2 * low + _POINTS


def saved(record: dict[str, Any]) -> float | None:
    """The share of a sample's time that obeying saved; None where no program can obey: to load less, or earlier."""
    found = savings(record)
    return statistics.median(found) if found else None


def savings(record: dict[str, Any]) -> list[float]:
    """The same of each pair of blocks."""
    rule = first_rule(record)
    pairs = [] if rule == "data_wait_full" != PLANTED[record["name"]].rule else record.get("pairs", ())
    return [1.0 - after / before for before, after in pairs]


def bound(record: dict[str, Any]) -> tuple[float | None, bool | None]:
    """What the advice on what was planted said it saves, and whether that is the least; None: about so much."""
    cause = PLANTED[record["name"]].rule
    return next((tuple(one[3:5]) for one in record.get("advice", ()) if one[0].startswith(cause)), (None, False))


def _figure(records: Sequence[dict[str, Any]]) -> str:
    found = [bound(one) for one in records]
    words = {_BOUNDS[at_least] for share, at_least in found if share is not None}
    return f"{' '.join(sorted(words))} {_percent([share for share, _ in found])}".strip()


def _percent(values: Sequence[float | None]) -> str:
    known = [value for value in values if value is not None]
    return f"{statistics.median(known):.0%}" if known else "–"


def _spread(values: Sequence[float]) -> str:
    if not values:
        return "–"
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return f"{middle:.0%} ({low:.0%} to {high:.0%})"


def _of(hits: Sequence[bool]) -> str:
    return f"{sum(hits)} of {len(hits)}" if hits else "–"


def page(records: Sequence[dict[str, Any]]) -> list[str]:
    """The lines of the page."""
    by = {
        (which, name): [one for one in records if (one["pass"], one["name"]) == (which, name)]
        for which in _PASSES
        for name in (*PLANTED, *CLEAN)
    }
    planted: list[list[str]] = []
    for name, cause in PLANTED.items():
        planted.append([name, cause.rule, cause.where])
        for found in (by[which, name] for which in _PASSES):
            of_pairs = [one for record in found for one in savings(record)]
            sized = [one for one in map(is_sized, found) if one is not None]
            planted[-1] += [_of([is_named(one) for one in found]), _figure(found)]
            planted[-1] += [_spread(of_pairs), _of(sized)]
    clean: list[list[str]] = []
    for name in CLEAN:
        clean.append([name])
        for rules in ([first_rule(one) for one in by[which, name]] for which in _PASSES):
            said = sorted({rule for rule in rules if rule is not None})
            clean[-1].append(_of([rule is not None for rule in rules]) + (f" ({', '.join(said)})" if said else ""))
    words = ("named first", "figure", "saved, median (middle half)", "size right")
    columns = [f"{which}: {word}" for which in _PASSES for word in words]
    falsely = [f"{which}: false first advice" for which in _PASSES]
    tables = [*table(["program", "rule", "names", *columns], planted), "", *table(["clean program", *falsely], clean)]
    return [*described(__doc__, "torch"), *tables, "", *_clocks(by), *_sums(by), *gates()]


def _clocks(by: dict[tuple[str, str], list[dict[str, Any]]]) -> Iterator[str]:
    """The share of each planted statement by its lines and by clocks, and the rest of the step."""
    head = [
        "planted line",
        "pass",
        "by its lines",
        "by clocks",
        "within five points",
        "rest, us a sample",
    ]
    rows, near = [], {which: list[bool]() for which in _PASSES}
    for (which, name), records in by.items():
        found = [one for one in records if one.get("by_lines") is not None and one.get("by_clocks")]
        close = [abs(one["by_lines"] - one["by_clocks"]) <= _POINTS for one in found]
        near[which] += close
        times = [tuple(map(statistics.median, zip(*one["pairs"], strict=True))) for one in found]
        rest = [before * (1.0 - one["by_clocks"]) for one, (before, _) in zip(found, times, strict=True)]
        if found:
            shares = [_percent([one[by_what] for one in found]) for by_what in ("by_lines", "by_clocks")]
            words = " -> ".join(_micros(sec) for sec in (rest, [after for _, after in times]))
            rows.append([name, which, *shares, _of(close), words])
    yield from table(head, rows)
    yield ""
    yield from (f"- {which}: within five points in {_of(close)} runs." for which, close in near.items() if close)


def _micros(seconds: Sequence[float]) -> str:
    return f"{statistics.median(seconds) * 1e6:.3g}"


def _sums(by: dict[tuple[str, str], list[dict[str, Any]]]) -> Iterator[str]:
    for which in _PASSES:
        planted = [is_named(one) for name in PLANTED for one in by[which, name]]
        clean = [first_rule(one) is not None for name in CLEAN for one in by[which, name]]
        sized = [one for name in PLANTED for record in by[which, name] if (one := is_sized(record)) is not None]
        if planted and clean and sized:
            yield (
                f"- {which}: the figure was right in {sum(sized) / len(sized):.1%} of {len(sized)} runs; "
                f"the first advice named what was planted in {sum(planted) / len(planted):.1%} of "
                f"{len(planted)} runs; false first advice on clean programs in {sum(clean) / len(clean):.1%} of "
                f"{len(clean)}."
            )


def gates() -> Iterator[str]:
    """How conditions end between two runs of the same clean program."""
    for which in _PASSES:
        kept = [sorted(PROFILES.glob(f"{which}-*-{name}.json")) for name in CLEAN]
        pairs = [pair for paths in kept for pair in zip(paths[::2], paths[1::2], strict=False)]
        comparisons = [compare_profiles(*map(Profile.load, pair)) for pair in pairs]
        for gate in GATES if pairs else ():
            found = Counter(judge(one, gate)[0] for one in comparisons)
            failed, open_ = f"{found['holds']} of {len(pairs)} pairs", found["is inconclusive"]
            yield f"- {which}: `{gate}` of two identical runs fails in {failed}, is open in {open_}."


def main() -> None:
    """Run the passes that the command line asks for, write the page from all records there are."""
    options = start(
        __file__, __doc__, RESULTS / "advice.md",
        runs=20, only=list(_PASSES), programs=[*PLANTED, *CLEAN], records=str(RECORDS),
    )  # fmt: skip
    import_module("torch._dynamo")  # once, not in each program's process
    records = Path(options.records)
    kept = [json.loads(line) for line in records.read_text().splitlines()] if records.exists() else []
    kept = [one for one in kept if one["pass"] not in options.only or one["name"] not in options.programs]
    records.parent.mkdir(parents=True, exist_ok=True)
    for which in options.only:
        for one in measure(which, options.runs, options.programs):
            kept.append(one)
            records.write_text("".join(json.dumps(one) + "\n" for one in kept))
    write_page(options.output, page(kept))


if __name__ == "__main__":
    main()
