"""Steps that are known by the lengths of their sequences, until it is known that these decide nothing."""

from __future__ import annotations

from lightning_flops.analysis.run_books import RunFlops
from lightning_flops.analysis.step_keys import StepKey, without_lengths
from lightning_flops.analysis.step_laws import StepLaws
from lightning_flops.instrument.batches import known_by, known_by_lengths, of_tensors
from lightning_flops.records import BatchTokens

SHAPE = ((2, 30),)
FLOPS = {("forward", "float32"): 100, ("backward", "float32"): 200}


def key(number: int) -> StepKey:
    """A step on one batch with so many tokens that are no padding, and other squares for each *number*."""
    tokens = BatchTokens(60, 40, None, 2, 800 + number, 20)
    return ((known_by_lengths(SHAPE, tokens),), 1)


def bare() -> StepKey:
    return ((known_by(SHAPE, BatchTokens(60, 40, None, 2, 800, 20)),), 1)


def books() -> RunFlops:
    return RunFlops(StepLaws(lambda _: None))


def test_lengths_are_in_what_a_batch_is_known_by_and_in_no_shape() -> None:
    tokens = BatchTokens(60, 40, None, 2, 850, 25)
    assert known_by_lengths(SHAPE, tokens) == ((2, 30), (-3, 0), (-11, 40, 850, 25))
    assert of_tensors(known_by_lengths(SHAPE, tokens)) == SHAPE
    assert known_by_lengths(SHAPE, None) == SHAPE
    of_labels = BatchTokens(60, None, 7, None, None, None)
    assert known_by_lengths(SHAPE, of_labels) == ((2, 30), (-12, 7))
    assert of_tensors(known_by_lengths(SHAPE, of_labels)) == SHAPE
    assert without_lengths(((known_by_lengths(SHAPE, of_labels),), 1)) == ((SHAPE,), 1)
    assert without_lengths(key(3)) == bare()


def test_steps_that_are_booked_by_their_lengths_are_foretold_without_them() -> None:
    """Two at once and three alone, one of which was slowed down."""
    run = books()
    run.book([key(1), key(1)], [1.0, 2.0])
    run.book([key(2), key(3)], [3.0, 4.0])
    run.book_slowed(key(4))
    run.drop_lengths()
    run.laws.counted(bare(), FLOPS)
    assert run.totals().model_flops == 5 * 300
    assert {one: tuple(its) for one, its in run.seconds_by_key().items()} == {bare(): (4, 10.0)}
    sums = run.sums(run.reading())
    assert sums is not None and (sums.steps, sums.model) == (4, 4 * 300)


def test_a_long_run_before_the_first_counted_step_stays_known() -> None:
    """So many lengths are no longer remembered one by one, and nobody knows yet whether they matter."""
    run = books()
    for begin in range(0, 30_000, 1000):
        run.book([key(number) for number in range(begin, begin + 1000)], [0.5] * 1000)
    run.drop_lengths()
    run.laws.counted(bare(), FLOPS)
    totals = run.totals()
    assert (totals.steps_unknown, totals.model_flops) == (0, 30_000 * 300)


def test_one_counted_step_foretells_no_other_where_values_decide() -> None:
    laws = StepLaws(lambda _: None)
    known = []
    for _ in range(4):
        known.append(laws.known(bare()) is not None)
        laws.counted(bare(), FLOPS, by_values=True)
    assert known == [False, False, False, True]
    laws.counted(bare(), {("forward", "float32"): 90, ("backward", "float32"): 180}, by_values=True)
    assert laws.known(bare()) is None


def test_steps_that_were_foretold_by_shapes_are_so_no_longer_once_values_decide() -> None:
    laws = StepLaws(lambda _: None)
    laws.counted(bare(), FLOPS)
    assert laws.known(bare()) is not None
    laws.counted(bare(), FLOPS, by_values=True)
    assert laws.known(bare()) is None
    laws.counted(bare(), FLOPS, by_values=True)
    assert laws.known(bare()) is not None
