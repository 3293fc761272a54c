"""How often the steps of a run are looked at that are not worth counting."""

from __future__ import annotations

import pytest
from torch import nn

from lightning_flops.instrument.window_states import CountedStep
from lightning_flops.session.batches import StepBook
from lightning_flops.session.step_flops import StepFlops

STEPS = 4000
SPENT = {("forward", "float32"): 16}


def looked_at_in_vain(*, apart: int) -> int:
    """How many of 4,000 steps are looked at and not counted, when each batch has *apart* samples more than the last.

    The monitor is read every 50 steps, and finds steps that nobody knows.
    """
    model = nn.Linear(1, 1)
    flops = StepFlops(model, lambda _: None, updated=model.parameters, shown=True, share=1e9, padding_counts=False)
    book, looks = StepBook(), 0
    for step in range(STEPS):
        batch = ((2 + step * apart, 8),)
        flops.look(steps_done=step)
        counts = False
        if flops.wants_shapes:
            flops.at_border = True
            counts = flops.is_worth_counting((batch,), book)
            looks += not counts
        key = book.book(batch, 1, True)
        assert key is not None
        if step == 0:
            flops.was_counted(key, CountedStep(flops=SPENT, lower_bound=False, sampled=False))
            flops.window_closes(shapes_deceive=False, variable=True, steps_done=1)
        elif counts:
            flops.was_counted(key, CountedStep(flops=SPENT, lower_bound=False, sampled=True))
        elif step % 50 == 0:
            flops.misses({((((step, 9),),), 1): 1}, steps_done=step)
    return looks


@pytest.mark.parametrize("apart", [0, 1])
def test_one_step_in_twenty_is_looked_at_in_vain_at_most(apart: int) -> None:
    """Where lengths are ever new, no step comes that is foretold. Where all are alike, each is foretold."""
    assert 20 <= looked_at_in_vain(apart=apart) <= STEPS // 20
