"""Numbers in tensors that decide sizes on the way: whether they decide FLOPs, too."""

from __future__ import annotations

from lightning_flops.analysis.idle_values import IdleValues
from lightning_flops.analysis.step_keys import StepKey, without_lengths
from lightning_flops.analysis.step_laws import DEPENDS, StepLaws
from lightning_flops.instrument.batches import known_by_lengths
from lightning_flops.records import NO_VALUES, BatchTokens, Line, SizesSeen, ValuesSeen

FLOPS = {("forward", "float32"): 100, ("backward", "float32"): 200}
OTHERS = {("forward", "float32"): 90, ("backward", "float32"): 180}

HERE, THERE = ("model.py", 7), ("model.py", 9)


def key(rows: int, *, trained: int = 7, real: int = 40, squares: int = 800, batches: int = 1) -> StepKey:
    batch = known_by_lengths(((rows, 30),), BatchTokens(60, real, trained, 2, squares, 20))
    return ((batch,) * batches, 1)


def selected(*numbers: int, line: Line = HERE) -> ValuesSeen:
    """Masks selected so many elements, one after the other, in one line."""
    return ValuesSeen(sized={line: SizesSeen(len(numbers), sum(number**2 for number in numbers))})


def test_three_different_sizes_and_the_same_flops_show_that_they_decide_nothing() -> None:
    values = IdleValues()
    idle = []
    for number in (3, 4, 5):
        values.add(key(2), FLOPS, selected(number, 10 - number))
        idle.append(values.are_idle(key(2)))
    assert idle == [False, False, True]  # 3 and 7, 4 and 6, 5 and 5: as many together, and yet others
    assert values.are_idle(key(2)) and values.are_idle(key(5))


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
    assert not values.are_idle(key(2)) and not values.lengths_are_idle


def test_a_kernel_that_spends_by_values_is_told_by_no_size() -> None:
    values = IdleValues()
    for number in range(3, 9):
        values.add(key(2), FLOPS, selected(number)._replace(spent=1))
    assert not values.are_idle(key(2)) and not values.lengths_are_idle


def test_steps_without_such_values_show_nothing() -> None:
    values = IdleValues()
    for _ in range(5):
        values.add(key(2), FLOPS, NO_VALUES)
    assert not values.are_idle(key(2)) and values.lengths_are_idle


def test_sizes_of_one_line_are_no_evidence_for_those_of_another_one() -> None:
    """Two tasks have batches of one form: one of them has a metric on a mask, the other one a head."""
    values = IdleValues()
    for number in (3, 4, 5):
        values.add(key(2), FLOPS, selected(number))
    assert values.are_idle(key(4), selected(6)) and not values.are_idle(key(4), selected(6, line=THERE))
    assert not values.are_idle(key(4), selected(6)._replace(spent=1))
    values.add(key(4), OTHERS, selected(6, line=THERE))
    assert not values.are_idle(key(4))


def test_steps_of_fewer_batches_are_like_those_of_more() -> None:
    """The last group of accumulated batches is a short one."""
    values = IdleValues()
    for number in (3, 4, 5):
        values.add(key(2, batches=3), FLOPS, selected(number))
    assert values.are_idle(key(2, batches=2))


def varied(values: IdleValues, *, trained: tuple[int, int, int], line: Line = HERE, rows: int = 2) -> None:
    for number, labels in zip((3, 4, 5), trained, strict=True):
        counted = key(rows, trained=labels, real=30 + number, squares=700 + number)
        values.add(counted, FLOPS, selected(number, line=line))


def test_a_length_that_never_was_another_one_may_decide() -> None:
    constant, other = IdleValues(), IdleValues()
    varied(constant, trained=(7, 7, 7))
    varied(other, trained=(7, 7, 8))
    assert constant.are_idle(key(2)) and not constant.lengths_are_idle
    assert other.are_idle(key(2)) and other.lengths_are_idle


def test_lengths_may_decide_as_long_as_a_form_of_steps_has_not_shown_that_they_do_not() -> None:
    values = IdleValues()
    bare: StepKey = ((((2, 30), (2,)),), 1)
    values.add(bare, OTHERS, selected(2, line=THERE))
    varied(values, trained=(5, 6, 7))
    assert values.are_idle(key(2)) and not values.lengths_are_idle
    for number in (3, 4):
        values.add(bare, OTHERS, selected(number, line=THERE))
    assert values.lengths_are_idle


def test_what_values_decide_is_that_of_one_step() -> None:
    before = ValuesSeen(1, {HERE: SizesSeen(2, 50), THERE: SizesSeen(1, 4)})
    now = ValuesSeen(3, {HERE: SizesSeen(3, 59), THERE: SizesSeen(1, 4)})
    assert now.since(before) == ValuesSeen(2, {HERE: SizesSeen(1, 9)})
    assert [one.decide for one in (NO_VALUES, ValuesSeen(spent=1), selected(0))] == [False, True, True]


def test_laws_learn_again_without_lengths_what_was_counted_with_them() -> None:
    laws = StepLaws(lambda _: None)
    for number in (7, 8, 9):
        laws.counted(key(2, trained=number), FLOPS, by_values=True)
    assert laws.known(without_lengths(key(2))) is None
    laws.drop_lengths()
    known = laws.known(without_lengths(key(2)))
    assert known is not None and known.flops == FLOPS
    assert laws.confirmed == 0  # nobody had foretold them


def test_what_was_doubted_with_lengths_is_doubted_without_them() -> None:
    notes: list[str] = []
    laws = StepLaws(notes.append)
    laws.counted(key(2), FLOPS, by_values=True)
    laws.doubt(key(2))
    laws.drop_lengths()
    assert laws.known(without_lengths(key(2))) is None and notes == [DEPENDS]


def test_one_counted_step_tells_of_its_shapes_once_values_are_idle() -> None:
    laws = StepLaws(lambda _: None)
    bare = without_lengths(key(2))
    laws.counted(bare, FLOPS, by_values=True)
    assert laws.known(bare) is None
    laws.trust_shapes(lambda step: step != bare)
    assert laws.known(bare) is None
    laws.trust_shapes(lambda step: step == bare)
    known = laws.known(bare)
    assert known is not None and known.flops == FLOPS


def test_shapes_that_three_steps_have_told_of_stay_known_when_others_go_by_values() -> None:
    laws = StepLaws(lambda _: None)
    often, once = without_lengths(key(2)), without_lengths(key(3))
    for _ in range(3):
        laws.counted(often, FLOPS)
    laws.counted(once, OTHERS, by_values=True)
    known = laws.known(often)
    assert known is not None and known.flops == FLOPS and laws.known(once) is None
