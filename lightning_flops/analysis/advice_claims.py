"""Which part of a step each piece of advice claims, so that no moment of the step is claimed twice."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from lightning_flops.schema.advice import Advice

_STEP = frozenset(("data wait", "transfer", "waiting", "copies", "products", "operators", "idle"))
"""The parts of a step; no moment is in two of them. Of transfer and waiting, only what no computation hides. Products
are what matmul-like operators run, operators what all others do."""

STRAGGLER = "straggler"

_PARTS: Mapping[str, frozenset[str]] = {
    # In this order: who comes first claims first.
    STRAGGLER: _STEP,  # any part may take it longer; in the steps of the others this is waiting
    "data_wait": frozenset(("data wait",)),
    "waiting": frozenset(("waiting",)),
    "backend": frozenset(("transfer",)),
    "exposed_communication": frozenset(("transfer",)),
    "overlap": frozenset(("transfer",)),
    "pageable_copies": frozenset(("copies",)),
    "optimizer": _STEP - {"data wait"},  # it launches kernels, may wait for them, and in ZeRO communicates
    "tensor_core_eligible": frozenset(("products",)),
    "without_flops": frozenset(("operators",)),
    "blocks_per_sm": frozenset(("products", "operators")),
    "idle": frozenset(("idle",)),
    "short_kernels": frozenset(("idle",)),
    "gpu_utilization": frozenset(("idle",)),
}
"""The parts of the step that each rule with something at stake claims."""

_PLACE = {rule: place for place, rule in enumerate(_PARTS)}
_LEAST_STAKE = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """A piece of advice, and the parts of a step in which its stake lies."""

    advice: Advice
    parts: frozenset[str]
    elsewhere: frozenset[str] = frozenset()
    """Parts of the other ranks' steps."""
    whose: str = ""
    """Whose step the parts are of, by any name."""
    is_apart: bool = False
    """It was set apart before from the others of the same step that are marked so."""


def claim(advice: Advice, *, whose: str = "", knows_waiting: bool) -> Claim:
    """The claim of *advice*.

    Args:
        advice: one piece.
        whose: see ``Claim``; for a straggler's advice, the straggler.
        knows_waiting: waiting for other ranks is known apart, so exposed communication is transfer alone.
    """
    parts = _PARTS.get(advice.rule, frozenset())
    if "transfer" in parts and not knows_waiting:
        parts |= {"waiting"}
    elsewhere = frozenset(("waiting",)) if advice.rule == STRAGGLER else frozenset()
    return Claim(advice=advice, parts=parts, elsewhere=elsewhere, whose=whose)


def set_apart(claims: Iterable[Claim]) -> list[Advice]:
    """Every piece of advice with only the stake that no other claims, so that no moment of the step counts twice.

    The first to claim a part keeps it. A later one keeps what lies outside for certain: in the same parts, it may be
    the same moments. All together claim no more than the step.
    """
    settled: list[Advice] = []
    before: list[tuple[Claim, float]] = []
    for one in sorted(claims, key=lambda one: _PLACE.get(one.advice.rule, len(_PLACE))):
        stake = one.advice.stake
        if stake is not None:
            taken = sum(claimed for other, claimed in before if _may_share(one, other))
            free = 1.0 - sum(claimed for _, claimed in before)
            stake = min(stake - taken, free)
            stake = stake if stake > _LEAST_STAKE else None
        if stake is not None:
            before.append((one, stake))
        settled.append(replace(one.advice, stake=stake))
    return settled


def _may_share(one: Claim, other: Claim) -> bool:
    if one.whose != other.whose:
        return bool(one.parts & other.elsewhere or other.parts & one.elsewhere)
    return not (one.is_apart and other.is_apart) and bool(one.parts & other.parts)
