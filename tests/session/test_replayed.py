"""Which batch a loop uses again, by the arguments of its model."""

from __future__ import annotations

from lightning_flops.session.replayed import Replayed

ROWS, LABELS = (8, 3), (8,)


def test_the_arguments_of_a_batch_that_was_fetched_tell_it_again() -> None:
    replayed = Replayed()
    replayed.learn((ROWS, LABELS), None, (ROWS,))
    assert replayed.fetched_as((ROWS,), None) == (ROWS, LABELS)
    assert replayed.fetched_as((LABELS,), None) is None
    assert (ROWS, LABELS) in replayed.known


def test_arguments_of_two_different_batches_tell_neither() -> None:
    replayed = Replayed()
    replayed.learn((ROWS, LABELS), None, (ROWS,))
    replayed.learn((ROWS, (8, 2)), None, (ROWS,))
    replayed.learn((ROWS, LABELS), None, (ROWS,))
    assert replayed.fetched_as((ROWS,), None) is None


def test_arguments_that_are_no_part_of_the_batch_may_be_those_of_a_piece() -> None:
    replayed = Replayed()
    replayed.learn((ROWS, LABELS), None, ((4, 3),))
    replayed.learn((ROWS,), None, (ROWS, ROWS))
    replayed.learn((ROWS,), None, ())
    assert [replayed.fetched_as(one, None) for one in (((4, 3),), (ROWS, ROWS), ())] == [None, None, None]
