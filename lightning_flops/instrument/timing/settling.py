"""How many steps are left alone before some are timed: until the loop has used the batches that were fetched ahead.

While a step is counted, the loader's workers run ahead, and the next steps find batches ready. If those steps were
timed, they would show less waiting than there is in the long run.
"""

from __future__ import annotations

import math

_LEAST_STEPS = 2
"""Least steps to leave alone after a counted one, whatever feeds the loop."""


def steps_to_settle(*, batches_ahead: int, batches_a_step: int) -> int:
    """Steps to leave alone after a counted one: until the batches that were fetched ahead meanwhile are used up.

    This assumes that the loader makes nothing after it.

    Args:
        batches_ahead: most batches that the loader fetches ahead.
        batches_a_step: batches that a step uses.
    """
    return max(_LEAST_STEPS, math.ceil(batches_ahead / batches_a_step))
