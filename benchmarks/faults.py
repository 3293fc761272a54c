"""Campaigns against both promises, and their figures.

``make bench-faults`` runs them again. Failures are raised at random lines of this package that run inside its hooks in
a training (``benchmarks/fault_lines.py``); random settings, mutated trace files, ranks' records and profiles are
tried (``benchmarks/fault_inputs.py``). Each trial draws from a generator seeded by its number, and
each fault is printed with the arguments that show it again. The figures say what is, not what should be.
"""

from __future__ import annotations

import itertools
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

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


class Fault(NamedTuple):
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
    seed: int
    tried: int = 0
    faults: list[tuple[int, Fault]] = field(default_factory=list)  # Each with the number of its trial

    @property
    def faulty(self) -> int:
        """Trials with one fault or more."""
        return len({number for number, _ in self.faults})

    def run(self, trial: Trial, numbers: Iterable[int], seconds: float) -> None:
        """Try *numbers*, each with a generator of its own, as long as there is time."""
        end = time.monotonic() + seconds
        for number in itertools.takewhile(lambda _: time.monotonic() < end, numbers):
            self.tried += 1
            self.faults += [(number, fault) for fault in trial(random.Random(f"{self.seed}/{number}"))]

    def rows(self) -> list[list[object]]:
        """Each kind of fault at each place: how often, and the first of them; the most frequent first."""
        places = Counter((fault.kind, fault.where) for _, fault in self.faults)
        first = {(fault.kind, fault.where): (number, fault.words) for number, fault in reversed(self.faults)}
        again = f"`{self.campaign} --seed {self.seed} --only {{}}`"
        return [
            [_cell(kind), _cell(where), times, again.format(first[kind, where][0]), _cell(first[kind, where][1])]
            for (kind, where), times in places.most_common()
        ]


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
    tallies = [Tally(campaign=name, promise=CAMPAIGNS[name], seed=options.seed) for name in options.campaigns]
    numbers = [options.only] if options.only >= 0 else itertools.count()
    for tally in tallies:
        try:
            tally.run(_trial_of(tally.campaign), numbers, options.seconds / len(tallies))
        except RuntimeError as error:  # the others are worth their while
            tally.promise += f". **It did not run: {error}**"
        print(f"{tally.campaign}: {tally.tried} tried, {tally.faulty} with a fault", file=sys.stderr, flush=True)
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
            more = f" {len(faults) - _SHOWN} more kinds and places are not shown." if len(faults) > _SHOWN else ""
            lines += ["", f"## {tally.campaign}", "", f"Again: `python -m benchmarks.faults --campaigns …`.{more}", ""]
            lines += table(["fault", "where", ">times", "again", "for example"], faults[:_SHOWN])
    return lines


def _cell(text: str) -> str:
    """*text* for a cell of a table, whatever it holds."""
    shown = "".join(character if character.isprintable() else ascii(character)[1:-1] for character in text)
    return (shown if len(shown) <= 160 else shown[:157] + "...").replace("<", "&lt;")


if __name__ == "__main__":
    raise SystemExit(main())
