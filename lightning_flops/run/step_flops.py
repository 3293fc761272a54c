"""Stub."""

from __future__ import annotations

from collections import Counter
from typing import Any, NamedTuple

from lightning_flops.records import BatchTokens, Shapes


class StepKey(NamedTuple):
    batches: tuple[Shapes, ...]
    tokens: tuple[BatchTokens | None, ...]
    updates: int


class StepSums(NamedTuple):
    steps: int
    model_by_dtype: dict[str, float]
    useful_by_dtype: dict[str, float] | None = None
    error: float | None = 0.0


class StepFlops:
    def __init__(self) -> None:
        self.known: dict[StepKey, dict[str, int]] = {}
        self.new: Counter[StepKey] = Counter()
        self.all: Counter[StepKey] = Counter()

    def wants(self, batches: Any, tokens: Any) -> bool:
        return False

    def draws_check(self) -> bool:
        return False

    def counted(
        self, key: StepKey, flops: Any, *, seconds: float, random: bool, data_dependent: bool, lower_bound: bool
    ) -> None:
        found: Counter[str] = Counter()
        for bucket, n in flops.items():
            phase, dtype = bucket[0], bucket[1]
            if phase in ("forward", "backward"):
                found[dtype] += n
        self.known[key] = dict(found)

    def ran(self, key: StepKey, *, seconds: float) -> None:
        self.new[key] += 1
        self.all[key] += 1

    def _sums(self, steps: Counter[StepKey]) -> StepSums | None:
        total: Counter[str] = Counter()
        for key, n in steps.items():
            if key not in self.known:
                return None
            for dtype, flops in self.known[key].items():
                total[dtype] += flops * n
        return StepSums(sum(steps.values()), dict(total))

    def reading(self) -> StepSums | None:
        new, self.new = self.new, Counter()
        return self._sums(new)

    def totals(self) -> StepSums | None:
        return self._sums(self.all)
