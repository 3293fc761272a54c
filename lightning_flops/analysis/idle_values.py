"""Whether what steps spend goes by numbers in their tensors, or by their shapes alone."""

from __future__ import annotations

from collections.abc import Iterator

from lightning_flops.analysis.law_fit import NEEDED_CHECKS
from lightning_flops.analysis.step_keys import Kind, StepKey, kind_of, without_lengths
from lightning_flops.records import BucketFlops, ValuesSeen


class IdleValues:
    """Finds kinds of steps in which numbers in tensors decide sizes on the way, and no FLOPs.

    So it is where a metric is computed on what a mask selects, and where experts share the same tokens in another way
    each time. The evidence is of steps of the same shapes, in each of which these sizes were others, and that have
    spent the same.
    """

    def __init__(self) -> None:
        self._steps: dict[StepKey, dict[StepKey, BucketFlops]] = {}
        """What counted steps have spent, by what they are known by without lengths, and with them."""
        self._sizes: dict[StepKey, set[int]] = {}
        self._idle: set[Kind] = set()
        self._deciding: set[Kind] = set()

    def add(self, key: StepKey, flops: BucketFlops, values: ValuesSeen) -> None:
        """A step was counted.

        Args:
            key: what it is known by.
            flops: that it has spent.
            values: what numbers in its tensors have decided. Where they decide what a kernel spends, no size tells
                whether they were others.
        """
        bare = without_lengths(key)
        kind = kind_of(bare)
        if kind in self._idle or kind in self._deciding:
            return
        steps = self._steps.setdefault(bare, {})
        steps[key] = flops
        if values.spent or next(iter(steps.values())) != flops:
            self._deciding.add(kind)
        elif values.sized:
            seen = self._sizes.setdefault(bare, set())
            seen.add(values.sizes)
            if len(seen) > NEEDED_CHECKS:
                self._idle.add(kind)

    def are_idle(self, key: StepKey) -> bool:
        """Whether steps like this one are known to spend the same, whatever these numbers are."""
        return kind_of(without_lengths(key)) in self._idle

    @property
    def decide_nowhere(self) -> bool:
        """Whether no kind of steps has shown that such numbers decide what it spends."""
        return not self._deciding

    def counted(self) -> Iterator[tuple[StepKey, BucketFlops]]:
        """What was added, but for steps of kinds of which it was known already whether such numbers decide."""
        for steps in self._steps.values():
            yield from steps.items()
