"""Writes docs/advice.md: the table of rules in ``lightning_flops.analysis.advice`` as a page.

``tests/test_profile_pages.py`` fails while the page is not what this program writes.

    make docs-profile
"""

from __future__ import annotations

import re
from pathlib import Path

from lightning_flops.analysis.evidence import FETCH_SEC, FRAMEWORK_FETCH_SEC
from lightning_flops.analysis.rules import RULES, Rule
from lightning_flops.analysis.waits import HAND_OVER_SEC, LEAST_WAIT_SEC, SHORT_SAMPLE_SEC
from lightning_flops.config import ADVICE_THRESHOLDS
from lightning_flops.schema.step import FEW_STEPS
from lightning_flops.units import duration

PAGE = Path(__file__).parent / "advice.md"


_LIMITS = {True: "saves at least, about, or at most", False: "saves at most", None: "saves about"}


def _range(seconds: tuple[float, float]) -> str:
    return " to ".join(map(duration, seconds))


_HEAD = f"""# What is advised, and when

Each rule compares one number with one limit. Its advice is the fact, the remedy and a ceiling: following it can save at
most so much of a typical step. Two pieces of advice may name the same time; the largest comes first. From fewer
than {FEW_STEPS} timed steps there is no advice. The limits are the setting `advice_thresholds`
([settings.md](settings.md)).

Three rules say *at least* instead, as their remedy puts nothing in the place of what it takes away: what is left of the
step runs as before, or faster. After a sleep, a write to a disk or a walk through Python the processor's caches are
cold: small models ran up to twice as fast once that was gone. Of lines that holds for a callback's: a step may need
what a line of your own loop makes, and another way of making it takes some time, so there the advice says *about*. It
holds where nothing runs beside the training thread: on a CPU, without loader workers, on one rank. Elsewhere that time
may hide what a device, a worker or another rank does, and the figure is a ceiling. It is one, too, where a line's
operators take milliseconds each: an operator just before the line may have taken the time, and stays when you delete
that line alone. All shares of a starved run, as its first lines say, are those of a run that waits for processors: what
would be the least is *about* so much there, and a ceiling is one for that run alone. Advice on loading which keeps
every core busy says *about*, too: without it the rest of the step is faster by an amount that is not known.

Waiting for data has four rules. Below {duration(LEAST_WAIT_SEC)} a batch no worker process helps, and
{_range(FETCH_SEC)} are left whatever the dataset does, {_range(FRAMEWORK_FETCH_SEC)} where Lightning or transformers
fetches: the limit leaves out the most of that, the ceiling the least. Else as many workers are advised as would keep
up, and never more than there are idle cores; each batch costs a worker {duration(HAND_OVER_SEC)} or more to hand over.
Where no core is idle, samples that take less than {duration(SHORT_SAMPLE_SEC)} each are advised to be taken by whole
batches: a TensorDataset's are only taken and stacked, and nothing of them can be prepared before.
Where loading hardly uses processors, workers may do that, and what little they compute, beside each other's waits:
there the ceiling is what the step waits in all, shared by the workers. `python -m benchmarks.loading` remakes these
times. Two runs of a program differ, so a saving may exceed its ceiling by that noise, which `compare` prints.
How many cores are idle is known where the timed steps together take a twentieth of a second.
What the others wait for a late rank is a share of a typical step of theirs.
Advice on modules rests on medians over the traced steps, and is not given where these took over twice, or under half,
of a typical step.

`make bench-advice` tries those that a CPU can show, by small programs with that cause planted, and the remedy applied:
[benchmarks/results/advice.md](../benchmarks/results/advice.md) says how often the first advice named it, and what
obeying it saved. ⟨Names⟩ stand for what was measured.
"""


def page() -> str:
    """The whole page."""
    return "\n".join([_HEAD, *map(_section, RULES)])


def _section(rule: Rule) -> str:
    return f"""## {rule.name}

{_filled(rule.fact)}

| | |
|---|---|
| when | {rule.threshold_text(ADVICE_THRESHOLDS)} |
| do | {_filled(rule.remedy)} |
| {_saves(rule)} |
| not | {rule.unless} |
| source | {rule.source} |
"""


def _saves(rule: Rule) -> str:
    words = rule.ceiling or ("the share that was measured" if rule.saves else "not known")
    return f"{_LIMITS[rule.removes]} | {words}"


def _filled(text: str) -> str:
    return re.sub(r"\{(\w+)\}", r"⟨\1⟩", text).replace("__", r"\_\_")


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
