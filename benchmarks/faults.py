"""Campaigns against both promises, and their figures.

``make bench-faults`` runs them again. Failures are raised at random lines of this package that run inside its hooks in
a training (``benchmarks/fault_lines.py``); random settings, mutated trace files, ranks' records and profiles are
tried (``benchmarks/fault_inputs.py``). Each trial draws from a generator seeded by its number, and
each fault is printed with the arguments that show it again. The figures say what is, not what should be.
"""

from __future__ import annotations

import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from .machine import RESULTS
from .page import described, table, write_page
from .runner import start

_SHOWN = 40  # So many kinds and places of faults of one campaign are listed

_UNNOTICED = "losses, weights and random state to the last bit those without the profiler; nothing raised, nothing left"

CAMPAIGNS = {
    "lines-loop": f"an exception at a line of ours in a loop of one's own: {_UNNOTICED}",
    "lines-lightning": f"the same in a Lightning fit: {_UNNOTICED}",
    "lines-lightning-manual": f"the same with manual optimization: {_UNNOTICED}",
    "lines-transformers": f"the same in the Trainer of transformers: {_UNNOTICED}",
    "settings": "random settings in every way to give them: taken, or a ConfigError that names setting, rule and value",
    "traces": "mutated files for `lightning-flops trace`: a report, or a line naming the file; bounded time and memory",
    "records": "mutated records of ranks: read, or an error of zlib or msgspec; bounded time and memory",
    "profiles": "mutated profile.json: read, or a ProfileFormatError; bounded time and memory",
}
"""Each campaign, and what a trial without fault shows."""


@dataclass(frozen=True, slots=True)
class Fault:
    """Something that a promise of this project rules out."""

    kind: str  # In few words; faults of one kind and place are one line of the report
    where: str  # The place in our code, or what was asked
    words: str = ""


Trial = Callable[[random.Random], list[Fault]]


@dataclass(slots=True, kw_only=True)
class Tally:
    """What came out of one campaign."""

    campaign: str
    promise: str  # What a trial without fault shows
    seed: int = 1
    tried: int = 0
    faults: list[tuple[int, Fault]] = field(default_factory=list)  # Each with the number of its trial

    @property
    def faulty(self) -> int:
        """Trials with one fault or more."""
        return len({number for number, _ in self.faults})

    def run(self, trial: Trial, numbers: Iterator[int]) -> None:
        """Try *numbers*, each with a generator of its own."""
        for number in numbers:
            found = trial(random.Random(f"{self.seed}/{number}"))
            self.tried += 1
            self.faults += [(number, fault) for fault in found]

    def rows(self) -> list[list[object]]:
        """Each kind of fault at each place: how often, and one of them; the most frequent kind first."""
        kinds = Counter(fault.kind for _, fault in self.faults)
        places = Counter((fault.kind, fault.where) for _, fault in self.faults)
        first = {(fault.kind, fault.where): (number, fault.words) for number, fault in reversed(self.faults)}
        rows: list[list[object]] = []
        for kind, where in sorted(places, key=lambda place: (-kinds[place[0]], place[0], -places[place], place[1])):
            number, words = first[kind, where]
            again = f"`{self.campaign} --seed {self.seed} --only {number}`"
            rows.append([_cell(kind), _cell(where), places[kind, where], again, _cell(words)])
        return rows


def _until(end: float) -> Iterator[int]:
    number = 0
    while time.monotonic() < end:
        yield number
        number += 1


def _trial_of(campaign: str) -> Trial:
    """What a campaign tries; its imports are those that the trials' processes find loaded."""
    kind, _, run = campaign.partition("-")
    if kind == "lines":
        from .fault_lines import Lines

        return Lines(run).trial
    from .fault_inputs import TRIALS

    return TRIALS[kind]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the campaigns that were asked for, and print what came out; 0 whatever came out."""
    options = start(
        __file__, __doc__, RESULTS / "faults.md", arguments, campaigns=list(CAMPAIGNS), seconds=900.0, seed=1, only=-1
    )
    tallies = []
    for campaign in options.campaigns:
        tally = Tally(campaign=campaign, promise=CAMPAIGNS[campaign], seed=options.seed)
        tallies.append(tally)
        try:
            trial = _trial_of(campaign)
            end = time.monotonic() + options.seconds / len(options.campaigns)
            tally.run(trial, iter([options.only]) if options.only >= 0 else _until(end))
        except RuntimeError as error:  # the others are worth their while
            tally.promise += f". **It did not run: {error}**"
        print(f"{campaign}: {tally.tried} tried, {tally.faulty} with a fault", file=sys.stderr, flush=True)
    page = render(tallies)
    print("\n".join(page))
    if options.only < 0:
        write_page(options.output, page)
    return 0


def render(tallies: Sequence[Tally]) -> list[str]:
    """The lines of the page that says what the campaigns found."""
    rows = [[each.campaign, each.promise, f"{each.tried:,}", f"{each.faulty:,}"] for each in tallies]
    lines = [
        *described(__doc__, "torch", "lightning", "deepspeed"),
        *table(["campaign", "what it tries, and what then holds", ">tried", ">with a fault"], rows),
    ]
    for tally in tallies:
        if faults := tally.rows():
            lines += [
                "",
                f"## {tally.campaign}",
                "",
                f"Again: `python -m benchmarks.faults --campaigns …`. {_more(faults)}",
            ]
            lines += ["", *table(["fault", "where", ">times", "again", "for example"], faults[:_SHOWN])]
    return lines


def _more(faults: Sequence[object]) -> str:
    return f"{len(faults) - _SHOWN} more kinds and places are not shown." if len(faults) > _SHOWN else ""


def _cell(text: str) -> str:
    """*text* for a cell of a table, whatever it holds."""
    shown = "".join(character if character.isprintable() else ascii(character)[1:-1] for character in text)
    return (shown if len(shown) <= 160 else shown[:157] + "...").replace("<", "&lt;")


if __name__ == "__main__":
    raise SystemExit(main())
