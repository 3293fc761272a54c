"""The exact law of a step's FLOPs: what it says is right, and where it cannot know it says nothing."""

from __future__ import annotations

import gc
import random
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_flops.analysis.law import FLAG, LawFinder
from lightning_flops.analysis.law_fit import ExactFit
from lightning_flops.analysis.run_books import RunFlops
from lightning_flops.analysis.step_keys import StepKey
from lightning_flops.analysis.step_laws import BESIDE_MODEL_DEPENDS, DEPENDS, StepLaws, StepSeconds
from lightning_flops.records import WITH_PADDING, WITHOUT_PADDING, BucketFlops

FORWARD = ("forward", "float32")

TEXT = [(0, 0), (0, 1), (1, 0), (1, 1)]
"""The axes of two tensors: ids and a mask, both of batch x length."""


def text(batch: int, length: int) -> tuple[tuple[int, ...], ...]:
    return ((batch, length, batch, length),)


def a_layer(batch: int, length: int) -> int:
    """A product with 16 x 16 weights for each token, and two products of attention over 16 channels."""
    return 2 * batch * length * 16 * 16 + 2 * 2 * batch * length * length * 16


def found(flops: Callable[[int, int], int], steps: list[tuple[int, int]]) -> LawFinder:
    finder = LawFinder(TEXT)
    for batch, length in steps:
        finder.add(text(batch, length), {FORWARD: flops(batch, length)})
    return finder


def whole(laws: StepLaws, key: StepKey) -> BucketFlops | None:
    """All that is foretold of a step; None where something is missing."""
    known = laws.known(key)
    return known.flops if known is not None and known.whole else None


def test_a_law_that_was_checked_twice_gives_every_other_length() -> None:
    finder = found(a_layer, [(2, 3), (2, 5), (2, 8), (2, 13), (2, 20)])
    assert finder.law is not None
    assert finder.law.checks == 2
    # 2·2·10·256 + 4·2·100·16 = 10,240 + 12,800
    assert finder.flops(text(2, 10)) == {FORWARD: 23_040}


def test_a_law_that_was_checked_once_says_nothing() -> None:
    finder = found(a_layer, [(2, 3), (2, 5), (2, 8), (2, 13)])
    assert finder.law is None
    assert finder.flops(text(2, 10)) is None


def test_a_step_beyond_what_was_counted_is_not_foretold() -> None:
    finder = found(a_layer, [(2, 3), (2, 5), (2, 8), (2, 13), (2, 20)])
    assert finder.flops(text(2, 21)) is None
    assert finder.flops(text(2, 2)) is None


def test_a_size_that_never_varied_is_a_constant() -> None:
    finder = found(a_layer, [(2, 3), (2, 5), (2, 8), (2, 13), (2, 20)])
    assert finder.flops(text(3, 10)) is None
    assert finder.flops(((2, 10, 2, 11),)) is None  # ids and mask were always of one length


def test_lengths_that_were_multiples_of_8_tell_nothing_of_others() -> None:
    finder = found(a_layer, [(2, 8), (2, 16), (2, 32), (2, 48), (2, 64)])
    assert finder.flops(text(2, 24)) == {FORWARD: a_layer(2, 24)}
    assert finder.flops(text(2, 25)) is None


def test_one_smaller_batch_tells_of_the_others_of_its_size() -> None:
    finder = found(a_layer, [(8, 3), (8, 5), (8, 8), (8, 13), (8, 20), (5, 7)])
    assert finder.flops(text(5, 10)) == {FORWARD: a_layer(5, 10)}
    assert finder.flops(text(6, 10)) is None  # two sizes of the batch are no line that was checked


def test_what_no_check_has_met_is_not_believed() -> None:
    """The part that is spent once a step was seen by one batch of another size alone."""

    def with_bias(batch: int, length: int) -> int:
        return a_layer(batch, length) + 1000

    steps = [(8, 3), (8, 5), (8, 8), (8, 13), (8, 20)]
    assert found(with_bias, [*steps, (5, 7)]).flops(text(5, 10)) is None
    assert found(with_bias, [*steps, (5, 7)]).flops(text(8, 10)) == {FORWARD: with_bias(8, 10)}
    assert found(with_bias, [*steps, (5, 7), (5, 9)]).flops(text(5, 10)) == {FORWARD: with_bias(5, 10)}


def test_checks_at_the_same_lengths_are_no_check_of_another_length() -> None:
    """Three lengths settle a parabola, however many batches each of them was seen with."""
    steps = [(batch, length) for batch in (1, 2, 3, 4) for length in (3, 5, 8)]
    finder = found(lambda batch, length: batch * (length**3 + 1), steps)
    assert finder.flops(text(2, 6)) is None
    assert finder.flops(text(2, 4)) is None


def test_the_same_step_twice_is_no_check() -> None:
    assert found(a_layer, [(2, 3), (2, 5), (2, 8), (2, 13), (2, 13), (2, 13)]).law is None


@pytest.mark.parametrize(
    "flops",
    [
        pytest.param(lambda batch, length: batch * (length // 2) * 64, id="a floor"),
        pytest.param(lambda batch, length: batch * length**3, id="a cube"),
        pytest.param(lambda batch, length: batch * max(length, 20), id="a threshold"),
        pytest.param(lambda batch, length: batch**2 * length**3, id="a square of the batch"),
    ],
)
def test_no_law_is_believed_where_there_is_none(flops: Callable[[int, int], int]) -> None:
    numbers = random.Random(0)
    steps = [(numbers.randint(1, 6), numbers.randint(3, 40)) for _ in range(40)]
    finder = found(flops, steps)
    assert finder.refused
    assert finder.flops(text(*steps[0])) is None


def test_the_first_flop_of_difference_ends_a_law() -> None:
    finder = found(a_layer, [(2, 3), (2, 5), (2, 8), (2, 13), (2, 20)])
    assert not finder.add(text(2, 10), {FORWARD: 23_041})
    assert finder.refused
    assert finder.flops(text(2, 9)) is None
    assert finder.add(text(2, 9), {FORWARD: a_layer(2, 9)})
    assert finder.law is None


def test_a_bucket_that_is_missing_spends_nothing() -> None:
    finder = found(a_layer, [(2, 3), (2, 5), (2, 8), (2, 13), (2, 20)])
    assert not finder.add(text(2, 10), {FORWARD: 23_040, ("recompute", "float32"): 2})


def test_images_whose_sides_change_alike_have_powers_up_to_four() -> None:
    """Patches of 4 x 4 are (h/4)² tokens, whose attention is (h/4)⁴."""

    def vit(side: int) -> int:
        tokens = (side // 4) ** 2
        return 2 * tokens * 100 + 4 * tokens**2 * 16

    finder = LawFinder([(0, 0), (0, 1), (0, 2), (0, 3)])
    for side in (4, 8, 12, 16, 20, 24, 28, 36):
        finder.add(((2, 3, side, side),), {FORWARD: vit(side)})
    assert finder.flops(((2, 3, 32, 32),)) == {FORWARD: vit(32)}
    assert finder.flops(((2, 3, 30, 30),)) is None
    assert finder.flops(((2, 3, 32, 28),)) is None


def test_sides_that_change_apart_have_products_of_squares() -> None:
    def vit(height: int, width: int) -> int:
        tokens = height * width + 1
        return 2 * tokens * 100 + 4 * tokens**2 * 16

    numbers = random.Random(1)
    finder = LawFinder([(0, 0), (0, 1), (0, 2)])
    for height, width in [(numbers.randint(1, 30), numbers.randint(1, 30)) for _ in range(24)]:
        finder.add(((2, height, width),), {FORWARD: vit(height, width)})
    assert finder.flops(((2, 11, 17),)) == {FORWARD: vit(11, 17)}


def test_batches_of_a_step_add_up() -> None:
    numbers = random.Random(2)
    finder = LawFinder(TEXT)
    for _ in range(8):
        pair = [(2, numbers.randint(3, 40)) for _ in range(2)]
        finder.add(tuple(text(*one)[0] for one in pair), {FORWARD: sum(a_layer(*one) for one in pair) + 77})
    foretold = finder.flops((*text(2, 10), *text(2, 20)))
    assert foretold == {FORWARD: a_layer(2, 10) + a_layer(2, 20) + 77}


@settings(max_examples=60, deadline=None)
@given(
    coefficients=st.lists(st.integers(0, 10**12), min_size=6, max_size=6),
    steps=st.lists(st.tuples(st.integers(1, 9), st.integers(1, 200)), min_size=1, max_size=30),
    asked=st.tuples(st.integers(1, 9), st.integers(1, 200)),
)
def test_whatever_a_law_says_is_right(
    coefficients: list[int], steps: list[tuple[int, int]], asked: tuple[int, int]
) -> None:
    def flops(batch: int, length: int) -> int:
        a, b, c, d, e, f = coefficients
        return a + b * length + c * length**2 + batch * (d + e * length + f * length**2)

    finder = found(flops, steps)
    assert not finder.refused
    assert finder.flops(text(*asked)) in (None, {FORWARD: flops(*asked)} if flops(*asked) else {})


def test_a_fit_gives_fractions_exactly() -> None:
    """n(n-1)/2 has halves for coefficients."""
    fit = ExactFit(3)
    for number in (3, 4, 7, 9, 12):
        fit.add([1, number, number**2], {FORWARD: number * (number - 1) // 2})
    believed = fit.believed()
    assert believed is not None
    assert [str(value) for value in believed.solution.unknowns[FORWARD]] == ["0", "-1/2", "1/2"]
    assert believed.solution.constraints == ()


def test_equations_that_no_check_connects_are_not_believed_together() -> None:
    """The second unknown is settled by one equation alone."""
    fit = ExactFit(2)
    for features, value in (([1, 0], 5), ([0, 1], 7), ([2, 0], 10), ([3, 0], 15)):
        fit.add(features, {FORWARD: value})
    believed = fit.believed()
    assert believed is not None
    (part,) = believed.parts
    assert part.equations == (0, 2, 3)
    assert part.constraints == believed.solution.constraints == ((0, 1),)


def test_equations_that_were_checked_apart_are_believed_apart() -> None:
    """Each unknown was settled and checked twice; no check has seen both."""
    fit = ExactFit(2)
    for features, value in (([1, 0], 5), ([0, 1], 7), ([2, 0], 10), ([3, 0], 15), ([0, 2], 14), ([0, 5], 35)):
        fit.add(features, {FORWARD: value})
    believed = fit.believed()
    assert believed is not None
    assert [(part.equations, part.checks, part.constraints) for part in believed.parts] == [
        ((0, 2, 3), 2, ((0, 1),)),
        ((1, 4, 5), 2, ((1, 0),)),
    ]
    assert [str(value) for value in believed.solution.unknowns[FORWARD]] == ["5", "7"]
    assert believed.solution.constraints == ()


def test_a_product_of_two_lengths_that_was_never_seen_apart_is_not_foretold() -> None:
    """Source and target varied one at a time: what both together do, as in cross attention, nobody has seen."""

    def flops(source: int, target: int) -> int:
        return 10 * source + 20 * target + 3 * source * target

    finder = LawFinder([(0, 0), (0, 1), (1, 1)])
    for other in (3, 4, 6, 7, 9, 10):
        finder.add(((2, other, 5),), {FORWARD: flops(other, 5)})
        finder.add(((2, 5, other),), {FORWARD: flops(5, other)})
    assert finder.flops(((2, 8, 5),)) == {FORWARD: flops(8, 5)}
    assert finder.flops(((2, 8, 8),)) is None


WHOLE = [*TEXT, (2, 1), (2, FLAG)]
"""The same, and whether no token of the batch is padding."""

SKIPPED = ("causal_skipped", "float32")


def known(steps: list[tuple[int, int, int]], *, skips: bool) -> LawFinder:
    """After steps of so many samples and tokens, and whether they had no padding: then some of it is skipped."""
    finder = LawFinder(WHOLE)
    for batch, length, whole in steps:
        flops = {FORWARD: a_layer(batch, length)}
        if skips and whole:
            flops[SKIPPED] = batch * length * (length - 1)
        assert finder.add(whole_text(batch, length, whole), flops)
    return finder


def whole_text(batch: int, length: int, whole: int) -> tuple[tuple[int, ...], ...]:
    return ((batch, length, batch, length, -3, whole),)


PADDED = [(2, 3, 0), (2, 5, 0), (2, 8, 0), (2, 13, 0), (2, 20, 0)]


@pytest.mark.parametrize("skips", [False, True])
def test_what_padding_does_is_not_foretold_before_it_was_counted(skips: bool) -> None:
    finder = known(PADDED, skips=skips)
    assert finder.flops(whole_text(2, 10, 0)) == {FORWARD: 23_040}
    assert finder.flops(whole_text(2, 10, 1)) is None
    once = known([*PADDED, (2, 10, 1)], skips=skips)
    assert once.flops(whole_text(2, 9, 1)) is None  # one step may agree by chance
    assert once.flops(whole_text(2, 10, 0)) == {FORWARD: 23_040}


def test_where_padding_changes_nothing_two_steps_without_it_have_shown_that() -> None:
    finder = known([*PADDED, (2, 10, 1), (2, 7, 1)], skips=False)
    assert finder.flops(whole_text(2, 9, 1)) == {FORWARD: a_layer(2, 9)}


def test_where_padding_decides_what_is_skipped_both_have_laws_of_their_own() -> None:
    """Three steps settle what is skipped without padding, and two more check it; 2·10·9 = 180."""
    whole = [(2, 4, 1), (2, 6, 1), (2, 9, 1), (2, 11, 1), (2, 18, 1)]
    finder = known([*PADDED, *whole], skips=True)
    assert finder.flops(whole_text(2, 10, 1)) == {FORWARD: 23_040, SKIPPED: 180}
    assert finder.flops(whole_text(2, 10, 0)) == {FORWARD: 23_040}
    assert finder.flops(whole_text(2, 3, 1)) is None  # no step without padding was as short
    assert known([*PADDED, *whole[:4]], skips=True).flops(whole_text(2, 10, 1)) is None
    assert known([*PADDED, *whole[:4]], skips=True).flops(whole_text(2, 10, 0)) == {FORWARD: 23_040}


@pytest.mark.parametrize("first", [0, 1], ids=["the small one first", "the large one first"])
def test_of_a_step_whose_batches_have_different_forms_only_the_counted_sizes_are_known(first: int) -> None:
    """As where batches of two tasks take turns in one step: the sizes of one stand nowhere in the other."""

    def step(rows: int, others: int) -> StepKey:
        batches = ((rows, 4),), ((rows, 8), (others, 8))
        return (batches[first], batches[1 - first]), 1

    def spent(rows: int, others: int) -> int:
        return 2 * rows * 4 * 8 + 2 * (rows + others) * 8 * 3

    laws = StepLaws(note=pytest.fail)
    for rows in (2, 3, 5, 8, 13, 20):
        laws.counted(step(rows, 6), {FORWARD: spent(rows, 6)})
    assert whole(laws, step(5, 6)) == {FORWARD: 2 * 5 * 32 + 2 * 11 * 24}
    assert whole(laws, step(5, 9)) is None
    assert whole(laws, step(7, 6)) is None
    assert laws.report({step(5, 6): StepSeconds(1, 1.0)}) == "the batches of a step are of different forms"


def test_padding_is_a_flag_and_no_length() -> None:
    """It enters to the first power at most, and a sample's FLOPs do not depend on it."""
    finder = known([*PADDED, (1, 7, 1), (3, 7, 1), (4, 10, 0), (5, 9, 0)], skips=False)
    assert [(one.is_batch, one.is_flag, one.degree) for one in finder.variables] == [
        (True, False, 2), (False, False, 2), (False, True, 1),
    ]  # fmt: skip
    one = finder.per_sequence()
    assert not isinstance(one, str)
    assert [int(value) for value in one.coefficients["float32"]] == [0, 512, 64, 0]  # 2·16·16, and twice 2·16


@pytest.mark.parametrize("spent", [60, 140])
def test_a_sample_that_spends_something_else_is_explained_by_the_next_step_that_is_counted_whole(spent: int) -> None:
    """A teacher that runs before the model's forward is in a window's step, and not in a sample of it."""
    notes: list[str] = []
    key: StepKey = ((((8, 16),),), 1)

    def suspecting() -> StepLaws:
        laws = StepLaws(notes.append)
        laws.counted(key, {FORWARD: 100})
        assert not laws.wants_check
        laws.sampled(key, {FORWARD: spent})
        assert laws.believes_samples is False and whole(laws, key) is None
        assert laws.wants_check
        why = laws.report({key: StepSeconds(1, 1.0)})
        assert isinstance(why, str) and why.startswith("a step that was counted from its batch on spent something else")
        return laws

    laws = suspecting()
    laws.counted(((((8, 17),),), 1), {FORWARD: 106})  # of shapes of which nothing was foretold: it does not decide
    assert laws.wants_check and whole(laws, key) is None
    laws.counted(key, {FORWARD: 100})
    assert not laws.wants_check and whole(laws, key) == {FORWARD: 100}
    assert laws.believes_samples is False and notes == []

    laws = suspecting()
    laws.counted(key, {FORWARD: spent})
    assert not laws.wants_check and whole(laws, key) is None
    assert notes == [DEPENDS]
    assert laws.report({key: StepSeconds(1, 1.0)}) == "steps with the same batch shapes spent different FLOPs"


def test_an_optimizer_that_spends_something_else_each_time_leaves_model_flops_known() -> None:
    notes: list[str] = []
    laws = StepLaws(notes.append)
    key: StepKey = ((((8, 16),),), 1)
    optimizer = ("optimizer", "float32")
    laws.counted(key, {FORWARD: 100, optimizer: 7})
    laws.counted(key, {FORWARD: 100, optimizer: 9})
    known = laws.known(key)
    assert known is not None and not known.whole and laws.is_settled(key) and whole(laws, key) is None
    books = RunFlops(laws)
    books.book([key] * 3, [1.0] * 3)
    totals = books.totals()
    assert (totals.model_flops, totals.hardware_flops, totals.steps_predicted) == (300, None, 3)
    assert notes == [BESIDE_MODEL_DEPENDS]
    laws.counted(key, {FORWARD: 101, optimizer: 9})
    assert laws.known(key) is None and notes == [BESIDE_MODEL_DEPENDS, DEPENDS]


def test_a_counted_step_checks_what_is_foretold_only_if_it_was_foretold_and_is_so() -> None:
    def key(length: int) -> StepKey:
        return ((((1, length),),), 1)

    laws = StepLaws(lambda _: None)
    for length in (2, 3, 4):  # nothing is foretold of these: three terms, and no check
        laws.counted(key(length), {FORWARD: 5 * length**2 + 7})
    assert laws.confirmed == 0
    laws.counted(key(2), {FORWARD: 27, ("optimizer", "float32"): 0})
    assert laws.confirmed == 1
    for length in (5, 6):  # the law has not been checked twice before these were counted
        laws.counted(key(length), {FORWARD: 5 * length**2 + 7})
    assert laws.confirmed == 1
    laws.counted(key(8), {FORWARD: 5 * 8**2 + 7})
    laws.counted(key(7), {FORWARD: 5 * 7**2 + 7})
    assert laws.confirmed == 2
    laws.counted(key(7), {FORWARD: 5 * 7**2 + 8})
    assert laws.confirmed == 2


def test_books_hold_steps_of_every_kind_by_their_sizes() -> None:
    long: StepKey = ((((8, 16), (8,)),), 1)
    short: StepKey = ((((8, 3), (8,)),), 1)
    other: StepKey = ((((4,),),), 1)
    no_tensors: StepKey = (((),), 1)
    two_batches: StepKey = ((((2, 3),), ((2, 5),)), 2)
    books = RunFlops(StepLaws(lambda _: None))
    books.book([], [])
    books.book([long, other, short, no_tensors, two_batches, long], [1.0, 2.0, 4.0, 8.0, 16.0, 32.0])
    books.book([short, long], [64.0, 128.0])
    assert books.reading().by_key() == {long: 3, other: 1, short: 2, no_tensors: 1, two_batches: 1}
    books.book([long] * 3, [256.0] * 3)
    books.book([no_tensors] * 2, [512.0] * 2)
    assert books.reading().by_key() == {long: 3, no_tensors: 2}
    assert list(books.reading().keys()) == []
    assert books.seconds_by_key() == {
        long: (6, 1.0 + 32.0 + 128.0 + 768.0),
        other: (1, 2.0),
        short: (2, 4.0 + 64.0),
        no_tensors: (3, 8.0 + 1024.0),
        two_batches: (1, 16.0),
    }
    totals = books.totals()
    assert totals.keys == {long: 6, other: 1, short: 2, no_tensors: 3, two_batches: 1}
    assert totals.steps_unknown == 13


def test_a_run_that_is_never_read_keeps_few_of_its_steps() -> None:
    laws = StepLaws(lambda _: None)
    same: StepKey = ((((8, 16),),), 1)
    laws.counted(same, {FORWARD: 7})
    books = RunFlops(laws)
    for _ in range(50):
        books.book([same] * 1000, [1.0] * 1000)
    read = books.reading()
    assert len(list(read.keys())) < 25_000 and read.by_key() == {same: 50_000}
    sums = books.sums(read)
    assert sums is not None and sums.model == 7 * 50_000
    for number in range(50):
        books.book([((((8, 1000 * number + place),),), 1) for place in range(1000)], [1.0] * 1000)
    read = books.reading()
    assert len(list(read.keys())) < 25_000 and not read.whole and books.sums(read) is None
    books.book([same], [1.0])
    read = books.reading()
    assert read.by_key() == {same: 1} and read.whole


def test_books_keep_no_object_for_each_step_that_garbage_collection_looks_at() -> None:
    books = RunFlops(StepLaws(lambda _: None))
    gc.collect()
    gc.disable()
    try:
        before, _, _ = gc.get_count()
        for reading in range(10):
            books.book([((((8, 50 * reading + place),),), 1) for place in range(50)], [1.0] * 50)
            books.reading()
        after, _, _ = gc.get_count()
    finally:
        gc.enable()
    assert after - before < 500, "less than one for each of 500 steps"


def test_a_sample_of_which_only_model_flops_are_foretold_does_not_tell_whether_samples_are_whole() -> None:
    """Padded steps alone were counted. A step without padding skips something, and so does its sample, rightly."""
    laws = StepLaws(lambda sentence: None)

    def key(length: int, mark: tuple[int, ...]) -> StepKey:
        return ((((2, length), (2, length), mark),), 1)

    for batch, length, _ in PADDED:
        laws.counted(key(length, WITH_PADDING), {FORWARD: a_layer(batch, length)})
    known = laws.known(key(10, WITHOUT_PADDING))
    assert known is not None and not known.whole and not laws.is_settled(key(10, WITHOUT_PADDING))
    laws.sampled(key(10, WITHOUT_PADDING), {FORWARD: a_layer(2, 10), SKIPPED: 180})
    assert laws.believes_samples is None and not laws.wants_check
    laws.sampled(key(5, WITH_PADDING), {FORWARD: a_layer(2, 5)})
    assert laws.believes_samples is True
    assert whole(laws, key(10, WITHOUT_PADDING)) == {FORWARD: a_layer(2, 10), SKIPPED: 180}
