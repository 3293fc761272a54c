"""Campaigns against both promises, and their figures: `make bench-faults`.

Failures raised at random lines of this package inside a training, random settings, mutated trace files, ranks' records
and profiles, and hostile names. Each trial draws from a generator seeded by its number, and each fault is printed with
the arguments that show it again. The figures say what is, not what should be.
"""

from __future__ import annotations

import argparse
import logging
import sys
import warnings
from collections.abc import Callable, Sequence
from datetime import date
from pathlib import Path

from .fault_campaign import Fault, Tally, Trial, run_campaign
from .machine import code_in_words, machine_in_words, restart_in_one_thread_environment, versions

RESULT = Path(__file__).resolve().parent / "results" / "faults.md"
_SHOWN = 40
"""So many kinds and places of faults of one campaign are listed."""

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
    "names": "modules of hostile names: nothing that a terminal obeys, and no forged line, in report and console",
}
"""Each campaign, and what a trial without fault shows."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the campaigns that were asked for, and print what came out; 0 whatever came out."""
    options = _options(arguments)
    logging.disable(logging.NOTSET)
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    share = options.seconds / len(options.campaigns)
    tallies = []
    for campaign in options.campaigns:
        tally = Tally(campaign=campaign, promise=CAMPAIGNS[campaign], seed=options.seed)
        again = f"{campaign} --seed {{seed}} --only {{number}}"
        tallies.append(tally)
        try:
            run_campaign(tally, _trial_of(campaign), seconds=share, again=again, only=options.only)
        except RuntimeError as error:  # the others are worth their while
            tally.promise += f". **It did not run: {error}**"
        print(f"{campaign}: {tally.tried} tried, {tally.faulty} with a fault", file=sys.stderr, flush=True)
    ran = ", ".join(f"{name} {found}" for name, found in versions(("torch", "lightning", "deepspeed")).items())
    page = render(tallies, ran=f"{date.today()}, {code_in_words()}. {machine_in_words()}; {ran}.")
    print(page)
    if options.output:
        options.output.write_text(page)
    return 0


def _trial_of(campaign: str) -> Trial:
    """What a campaign tries; its imports are those that the trials' processes find loaded."""
    kind, _, run = campaign.partition("-")
    if kind == "lines":
        from .fault_lines import Lines

        return Lines(run).trial
    from . import fault_inputs

    trials: dict[str, Callable[..., list[Fault]]] = {
        "settings": fault_inputs.try_settings,
        "traces": fault_inputs.try_trace,
        "records": fault_inputs.try_record,
        "profiles": fault_inputs.try_profile,
        "names": fault_inputs.try_names,
    }
    return trials[kind]


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.faults", description=__doc__)
    parser.add_argument("campaigns", nargs="*", metavar="CAMPAIGN", help=f"of: {', '.join(CAMPAIGNS)} (default: all)")
    parser.add_argument("--seconds", type=float, default=900.0, help="for all of them together (default: %(default)g)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", type=int, metavar="NUMBER", help="this trial alone")
    parser.add_argument("--output", type=Path, help="the page is written here, too")
    options = parser.parse_args(arguments)
    options.campaigns = options.campaigns or list(CAMPAIGNS)
    if unknown := [name for name in options.campaigns if name not in CAMPAIGNS]:
        parser.error(f"no campaign is called {unknown[0]!r}; there are {', '.join(CAMPAIGNS)}")
    return options


def render(tallies: Sequence[Tally], *, ran: str) -> str:
    """The page that says what the campaigns found."""
    lines = ["# Campaigns against both promises", ""]
    lines += ["Written by `make bench-faults`, which runs them again: the figures say what is, not what should be."]
    lines += ["A line is drawn among those that run inside hooks of ours (`benchmarks/fault_lines.py`).", ""]
    lines += [f"*{ran}*", "", "| campaign | what it tries, and what then holds | tried | with a fault |"]
    lines += ["|---|---|---:|---:|"]
    lines += [f"| {each.campaign} | {each.promise} | {each.tried:,} | {each.faulty:,} |" for each in tallies]
    for tally in tallies:
        kinds = tally.kinds()
        if not kinds:
            continue
        lines += [
            "",
            f"## {tally.campaign}",
            "",
            "| fault | where | times | again: `python -m benchmarks.faults ...` | for example |",
        ]
        lines += ["|---|---|---:|---|---|"]
        for kind, where, times, first in kinds[:_SHOWN]:
            lines.append(
                f"| {_cell(kind)} | {_cell(where)} | {times} | `{_cell(first.again)}` | {_cell(first.words)} |"
            )
        if len(kinds) > _SHOWN:
            lines.append(f"\nand {len(kinds) - _SHOWN} more kinds and places.")
    return "\n".join(lines) + "\n"


def _cell(text: str) -> str:
    """*text* for a cell of a table, whatever it holds."""
    shown = "".join(character if character.isprintable() else ascii(character)[1:-1] for character in text)
    return (shown if len(shown) <= 160 else shown[:157] + "...").replace("|", "\\|").replace("<", "&lt;")


if __name__ == "__main__":
    restart_in_one_thread_environment("benchmarks.faults")
    raise SystemExit(main())
