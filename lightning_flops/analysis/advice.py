"""What holds a run back, and what to try."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from lightning_flops.analysis.advice_claims import STRAGGLER, claim, set_apart
from lightning_flops.analysis.advice_rules import LOW_MFU, STARVED, low_mfu, seen_alone
from lightning_flops.analysis.evidence import Evidence
from lightning_flops.config import AdviceThresholds
from lightning_flops.schema.advice import Advice


def advise(
    evidence: Evidence, thresholds: AdviceThresholds, *, known: Iterable[Advice] = (), rank: int | None = None
) -> tuple[Advice, ...]:
    """What to try, the most at stake first; empty for a run that nothing measured holds back.

    Args:
        evidence: what was measured.
        thresholds: what it is held against.
        known: advice from earlier evidence, of one rank. It stays where *evidence* says nothing about its rule.
        rank: the rank whose step this is about.
    """
    found = {advice.rule: advice for advice in seen_alone(evidence, thresholds)}
    is_another = rank is None or evidence.straggler is None or evidence.straggler.rank != rank
    claims = [
        claim(
            advice,
            whose="another" if advice.rule == STRAGGLER and is_another else "",
            knows_waiting=evidence.waiting_share is not None,
        )
        for advice in found.values()
    ]
    claims += [
        replace(claim(advice, knows_waiting=evidence.waiting_share is not None), is_apart=True)
        for advice in known
        if advice.rule != LOW_MFU and advice.rule not in found
    ]
    ordered = in_order(set_apart(claims))
    low = low_mfu(evidence, thresholds, largest=ordered[0] if ordered else None)
    return (*ordered, low) if low is not None else ordered


def in_order(found: Iterable[Advice]) -> tuple[Advice, ...]:
    """The most at stake first; advice whose stake is not known comes last, but for what puts all else in question."""
    return tuple(
        sorted(found, key=lambda advice: (advice.rule != STARVED, advice.stake is None, -(advice.stake or 0.0)))
    )
