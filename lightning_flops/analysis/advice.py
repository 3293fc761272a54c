"""What holds a run back, and what to try: the rules of ``rules.py`` held against evidence, in an order to follow."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from lightning_flops.analysis.evidence import DATA_WAIT, Evidence, of_optimizer
from lightning_flops.analysis.rules import NAMED, RULES
from lightning_flops.schema.step import Advice
from lightning_flops.units import percent

ON_COMMUNICATION = ("exposed_communication", "waiting", "straggler")  # rules that the other ranks' answers change
_WORTH = 0.05  # what changes the model's results is not first while anything else may save so much


def advise(evidence: Evidence, thresholds: Mapping[str, float], *, known: Iterable[Advice] = ()) -> tuple[Advice, ...]:
    """What to try by *evidence* and what is *known* already, the largest possible saving first.

    What changes the model's results is not first while something else may save a twentieth of the step.
    """
    found = [advice for rule in RULES if (advice := rule.advice(evidence, thresholds)) is not None]
    ordered = sorted((*found, *known), key=lambda one: (one.saves is None, -(one.saves or 0.0)))
    harmless = next((one for one in ordered if not one.changes and (one.saves or 0.0) >= _WORTH), None)
    if harmless is not None and ordered[0].changes:
        ordered.remove(harmless)
        ordered.insert(0, harmless)
    return tuple(ordered)


def unexplained_words(evidence: Evidence, thresholds: Mapping[str, float]) -> str:
    """The largest part around the model's work of which no rule says why it takes so long, with its lines; or empty."""
    lines = [cause.part for cause in evidence.causes.get("line", ()) if cause.share > thresholds["line"]]
    named = {DATA_WAIT, *lines, *(["optimizer"] if of_optimizer(evidence)["ways"] else [])}
    found = {name: share for name, share in evidence.parts.items() if name not in named and "ward" not in name}
    part = max(found, key=found.__getitem__, default="")
    if found.get(part, 0.0) <= thresholds["part"]:
        return ""
    rows, says = evidence.rows.get(part, ()), f"{part} takes {percent(found[part])} of the step"
    own = [f"{row.where} ({percent(row.share)})" for row in rows if not row.only_enters]
    if rows and not own:
        calls = "" if "other" in part else rows[0].where  # around the parts it is the framework that runs
        return f"{says}, in {f'what {calls} calls' if calls else evidence.whose_loop}: no line of yours was seen in it."
    return f"{says}, and no rule says why{': ' if own else ''}{', '.join(own[:NAMED])}."


def starved_words(evidence: Evidence, thresholds: Mapping[str, float]) -> str:
    """A warning where the process waited for processors: no advice is as sure as it says then. Else empty."""
    share = evidence.shares.get("starved")
    if share is None or share <= thresholds["starved"]:
        return ""
    return (
        f"For {percent(share)} of the timed steps' time this process was ready to run and waited for a processor: all "
        "times, rates and shares are those of a starved run. Give it cores of its own, or fewer threads and workers, "
        "and profile again."
    )
