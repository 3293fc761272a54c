"""How often the steps of a run are looked at that are not worth counting."""

from __future__ import annotations

from torch import nn

from lightning_flops.instrument.window_states import CountedStep
from lightning_flops.session.step_book import StepBook
from lightning_flops.session.step_flops import StepFlops

STEPS = 4000
SPENT = {("forward", "float32"): 16}


def looked_at_in_vain(*, apart: int) -> int:
    """How many of 4,000 steps are looked at and not counted, when each batch has *apart* samples more than the last.

    The monitor is read every 50 steps, and finds steps that nobody knows.
    """
    model = nn.Linear(1, 1)
    flops = StepFlops(model, lambda _: None, updated=model.parameters, shown=True, share=1e9, padding_counts=False)
    book, looks = StepBook(last=None), 0
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
            flops.was_counted(key, CountedStep(flops=SPENT, lower_bound=False, sampled=False, compile_sec=0.0))
            flops.window_closes(shapes_deceive=False, variable=True, steps_done=1)
        elif counts:
            flops.was_counted(key, CountedStep(flops=SPENT, lower_bound=False, sampled=True, compile_sec=0.0))
        elif step % 50 == 0:
            flops.misses([((((step, 9),),), 1)], steps_done=step)
    return looks


def test_one_step_in_twenty_is_looked_at_in_vain_where_none_can_be_counted_before_a_check() -> None:
    """Lengths are ever new, so no step comes that is foretold and would show whether samples are whole."""
    assert 20 <= looked_at_in_vain(apart=1) <= STEPS // 20


def test_where_steps_are_foretold_each_reading_that_finds_an_unknown_one_is_followed_by_twenty_looks() -> None:
    """Rare lengths come sooner or later. 79 readings find one, at steps 50, 100 and so on; the window closes before."""
    assert looked_at_in_vain(apart=0) == 80 * 20
