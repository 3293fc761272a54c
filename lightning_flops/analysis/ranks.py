"""The whole job in one profile: what every rank measured, merged, and which ranks did not answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from lightning_flops.analysis.rank_record import RankAbsence, RankRecord
from lightning_flops.config import AdviceThresholds

if TYPE_CHECKING:
    from lightning_flops.analysis.profile import Profile


@dataclass(frozen=True, slots=True, kw_only=True)
class RanksProfile:
    """All ranks of a job together: sums, spreads and rates over those that answered."""

    world_size: int
    answered: int
    """Ranks that the figures are of."""
    absences: tuple[RankAbsence, ...]
    """Every other rank, by number."""
    waited_sec: float
    """How long the rank that reports waited for the others."""


def with_ranks(
    profile: Profile,
    answers: Sequence[RankRecord | RankAbsence],
    *,
    waited_sec: float,
    thresholds: AdviceThresholds | None = None,
) -> Profile:
    """*profile* with what all ranks did together.

    Args:
        profile: of the rank that reports.
        answers: of all ranks, in any order; a rank that sent nothing is named by an absence of the caller's.
        waited_sec: how long the caller waited for them.
        thresholds: from where on something is worth a word of advice; None for the defaults.
    """
    records = {answer.rank: answer for answer in answers if isinstance(answer, RankRecord)}
    absences = {answer.rank: answer for answer in answers if isinstance(answer, RankAbsence)}
    ranks = RanksProfile(
        world_size=profile.context.world_size,
        answered=len(records),
        absences=tuple(absences[rank] for rank in sorted(absences.keys() - records.keys())),
        waited_sec=waited_sec,
    )
    return replace(profile, ranks=ranks)
