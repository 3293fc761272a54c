"""Whether a comparison names a cause between two runs of one program, and names what was planted between two.

``make bench-twins`` runs the clean programs of ``advice_programs`` several times, each as a process of its own, and
compares every run with the next of its program: a module, a part or a cause that is named, and a gate that fails, are
false. The same runs are drawn into sides of several, too. Then it compares programs with a planted cause, four runs a
side, with the same under its remedy: the difference of the set-up, and the part or module that was planted, must be
named. Starved runs, whose waits for processors may explain a difference, are told apart here.
"""

from __future__ import annotations

import logging
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path

from lightning_flops import Comparison, Profile, compare_profiles
from lightning_flops.analysis.differences import judge

from .advice import GATES
from .advice_programs import CLEAN, report
from .machine import RESULTS, ROOT
from .page import described, table, write_page
from .runner import answer_of, start

logger = logging.getLogger("benchmarks.twins")

PROFILES = ROOT / ".cache/bench_twins"
PLANTED = {
    "slow_storage": ("workers: 0 in A, 4 in B", "data wait"),
    "tensor_by_tensor": ("AdamW: tensor by tensor in A, fused in B", "optimizer"),
    "written_out_norm": ("", "1 or 3 or 5 or 7"),
    "dropout": ("", "1 or 3 or 5 or 7"),
}
"""What a comparison with the remedy must name: the set-up that differs, and a part, or one of the equal modules."""
_NAMES = ("Most of it", "Part of it", "By cause")
_TIMEOUT_SEC = 120
_DRAWS = 6  # of each program's runs into two sides


def profiles(name: str, runs: int, folder: Path, *, obey: int | None = None) -> list[Profile]:
    """Profiles of so many runs of a program, each in a process of its own; none that *folder* has is run again."""
    found = []
    for number in range(runs):
        path = folder / f"{name}-{'remedy' if obey is not None else 'as-is'}-{number:02}.json"
        if not path.exists():
            answer = answer_of(partial(report, name, obey, path), timeout_sec=_TIMEOUT_SEC)
            logger.info("%s %s", path.stem, answer.words or "ran")
        if path.exists():
            found.append(Profile.load(path))
    return found


def words_of(comparison: Comparison) -> list[str]:
    """The sentences above the first table, each in one line."""
    text = str(comparison).split("\n\n")[0]
    lines = text.splitlines()[1:]
    starts = [at for at, line in enumerate(lines) if at == 0 or line[:1].isupper()]
    return [" ".join(lines[at:until]) for at, until in zip(starts, [*starts[1:], len(lines)], strict=True)]


def is_named(comparison: Comparison) -> bool:
    """Whether a module, part or cause is named, in the sentences or in a verdict of a module."""
    of_modules = any(one.beyond_noise for one in comparison.modules)
    return of_modules or any(words.startswith(_NAMES) for words in words_of(comparison))


def twins(runs: int, folder: Path) -> Iterator[list[str]]:
    """A row for each clean program: pairs, those starved, those in which something is named, and gates that fail."""
    for name in CLEAN:
        every = profiles(name, runs, folder)
        compared = [compare_profiles(*pair) for pair in zip(every[::2], every[1::2], strict=False)]
        starved = sum(bool(one.starved) for one in compared)
        ends = Counter(judge(one, gate)[0] for one in compared for gate in GATES)
        yield [name, *map(str, (len(compared), starved, sum(map(is_named, compared)), ends["holds"]))]


def several(runs: int, folder: Path) -> Iterator[list[str]]:
    """A row for each number of runs a side: sides that were drawn, those with something named, and gates that fail."""
    for many in (2, 3, runs // 2):
        order, compared = random.Random(many), []
        for name in CLEAN:
            every = profiles(name, runs, folder)
            drawn = [order.sample(every, 2 * many) for _ in range(_DRAWS)]
            compared += [compare_profiles(one[:many], one[many:]) for one in drawn]
        ends = Counter(judge(one, gate)[0] for one in compared for gate in GATES)
        yield [*map(str, (many, len(compared), sum(map(is_named, compared)), ends["holds"]))]


def planted(runs: int, folder: Path) -> Iterator[list[str]]:
    """A row for each planted cause: what had to be named, what was printed, and whether that has it."""
    for name, (set_up, part) in PLANTED.items():
        a, b = (profiles(name, runs, folder, obey=obey) for obey in (None, 4))
        comparison = compare_profiles(a, b)
        words = words_of(comparison)
        told = next((one for one in words if one.startswith(_NAMES[:2])), "")
        right = set_up in " ".join(words) and any(f" {one} " in told for one in part.split(" or "))
        starved = "starved" if comparison.starved else ""
        printed = [one for one in words[1:] if not one.startswith("Starved in ")]
        yield [name, set_up or "–", part, "named" if right else starved or "missed", " ".join(printed[:3])]


def page(runs: int, folder: Path) -> list[str]:
    """The lines of the page."""
    alike: Sequence[list[str]] = list(twins(runs, folder))
    sums = [sum(int(row[place]) for row in alike) for place in range(1, 5)]
    head = ["program", "pairs", "of these starved", "something named", "gates that fail"]
    differ = ["program", "set-up", "part or module", "verdict", "printed"]
    return [
        *described(__doc__, "torch"),
        *table(head, [*alike, ["all", *map(str, sums)]]),
        "",
        *table(["runs a side", "sides drawn", "something named", "gates that fail"], list(several(runs, folder))),
        "",
        *table(differ, list(planted(4, folder))),
    ]


def main() -> None:
    """Run what has not been run, and write the page."""
    options = start(__file__, __doc__, RESULTS / "twins.md", runs=10, profiles=str(PROFILES))
    import_module("torch._dynamo")  # once, not in each program's process
    folder = Path(options.profiles)
    folder.mkdir(parents=True, exist_ok=True)
    write_page(options.output, page(options.runs, folder))


if __name__ == "__main__":
    main()
