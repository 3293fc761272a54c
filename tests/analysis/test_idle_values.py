"""Numbers in tensors that decide sizes on the way: whether they decide FLOPs, too."""

from __future__ import annotations

from lightning_flops.analysis.idle_values import IdleValues
from lightning_flops.analysis.step_keys import StepKey, without_lengths
from lightning_flops.analysis.step_laws import DEPENDS, StepLaws
from lightning_flops.instrument.batches import known_by_lengths
from lightning_flops.records import NO_VALUES, BatchTokens, ValuesSeen

FLOPS = {("forward", "float32"): 100, ("backward", "float32"): 200}
OTHERS = {("forward", "float32"): 90, ("backward", "float32"): 180}


def key(rows: int, *, trained: int = 7) -> StepKey:
    return ((known_by_lengths(((rows, 30),), BatchTokens(60, 40, trained, 2, 800, 20)),), 1)


def selected(*numbers: int) -> ValuesSeen:
    """Masks selected so many elements, one after the other."""
    return ValuesSeen(sized=len(numbers), sizes=sum(number**2 for number in numbers))


def test_three_different_sizes_and_the_same_flops_show_that_they_decide_nothing() -> None:
    values = IdleValues()
    idle = []
    for number in (3, 4, 5):
        values.add(key(2), FLOPS, selected(number, 10 - number))
        idle.append(values.are_idle(key(2)))
    assert idle == [False, False, True]  # 3 and 7, 4 and 6, 5 and 5: as many together, and yet others
    assert values.are_idle(key(2)) and values.are_idle(key(5)) and values.decide_nowhere


def test_three_different_sizes_are_needed() -> None:
    values = IdleValues()
    for number in (3, 3, 3, 3, 4):
        values.add(key(2), FLOPS, selected(number))
        assert not values.are_idle(key(2))
    values.add(key(2), FLOPS, selected(6))
    assert values.are_idle(key(2))


def test_steps_of_other_shapes_are_no_evidence_for_each_other() -> None:
    values = IdleValues()
    for rows in (2, 3, 4):
        values.add(key(rows), FLOPS, selected(rows))
    assert not values.are_idle(key(2))


def test_one_step_that_spends_something_else_settles_that_they_decide() -> None:
    values = IdleValues()
    values.add(key(2), FLOPS, selected(3))
    values.add(key(2, trained=6), OTHERS, selected(4))
    for number in range(5, 9):
        values.add(key(2), FLOPS, selected(number))
    assert not values.are_idle(key(2)) and not values.decide_nowhere


def test_a_kernel_that_spends_by_values_is_told_by_no_size() -> None:
    values = IdleValues()
    for number in range(3, 9):
        values.add(key(2), FLOPS, ValuesSeen(spent=1, sized=1, sizes=number))
    assert not values.are_idle(key(2))


def test_steps_without_such_values_show_nothing() -> None:
    values = IdleValues()
    for _ in range(5):
        values.add(key(2), FLOPS, NO_VALUES)
    assert not values.are_idle(key(2)) and values.decide_nowhere


def test_what_values_decide_is_that_of_one_step() -> None:
    assert ValuesSeen(3, 5, 70).since(ValuesSeen(1, 5, 50)) == ValuesSeen(2, 0, 20)
    assert [one.decide for one in (NO_VALUES, ValuesSeen(spent=1), ValuesSeen(sized=1))] == [False, True, True]


def test_laws_learn_again_without_lengths_what_was_counted_with_them() -> None:
    laws = StepLaws(lambda _: None)
    counted = [(key(2, trained=number), FLOPS) for number in (7, 8, 9)]
    for one, flops in counted:
        laws.counted(one, flops, by_values=True)
    assert laws.known(without_lengths(key(2))) is None
    laws.drop_lengths(counted)
    known = laws.known(without_lengths(key(2)))
    assert known is not None and known.flops == FLOPS
    assert laws.confirmed == 0  # nobody had foretold them


def test_what_was_doubted_with_lengths_is_doubted_without_them() -> None:
    notes: list[str] = []
    laws = StepLaws(notes.append)
    laws.counted(key(2), FLOPS, by_values=True)
    laws.doubt(key(2))
    laws.drop_lengths([(key(2), FLOPS)])
    assert laws.known(without_lengths(key(2))) is None and notes == [DEPENDS]


def test_one_counted_step_tells_of_its_shapes_once_values_are_idle() -> None:
    laws = StepLaws(lambda _: None)
    bare = without_lengths(key(2))
    laws.counted(bare, FLOPS, by_values=True)
    assert laws.known(bare) is None
    laws.trust_shapes(bare)
    known = laws.known(bare)
    assert known is not None and known.flops == FLOPS
