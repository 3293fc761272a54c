"""FLOPs that go by the lengths of the sequences in a batch."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from lightning_flops.analysis.law import FLAG, LONGEST, SQUARES, TOKENS, TRAINED, LawFinder, Sizes
from lightning_flops.records import BatchTokens

AXES = [(0, 0), (0, 1), (1, 1), (1, FLAG), (2, 1), (2, TOKENS), (2, SQUARES), (2, LONGEST)]
"""One tensor of rows x width, whether nothing of it is padding, and its sequences."""

FORWARD = ("forward", "float32")


def padded(lengths: Sequence[int], width: int) -> tuple[Sizes, ...]:
    """A batch with a row for each sequence."""
    squares = sum(one**2 for one in lengths)
    whole = int(min(lengths) == width)
    return ((len(lengths), width, -3, whole, -11, sum(lengths), squares, max(lengths)),)


def unpadded(lengths: Sequence[int], width: int) -> dict[tuple[str, str], int]:
    """A linear layer over all places, attention over each sequence alone, and a causal mask on it."""
    pairs = sum(one**2 for one in lengths)
    above = sum(one * (one - 1) // 2 for one in lengths)
    return {FORWARD: 32 * len(lengths) * width + 12 * pairs, ("causal_skipped", "float32"): 12 * above}


def counted(*steps: tuple[Sequence[int], int]) -> LawFinder:
    finder = LawFinder(AXES)
    for lengths, width in steps:
        assert finder.add(padded(lengths, width), unpadded(lengths, width))
    return finder


ROWS = [((5, 3), 8), ((8, 2), 8), ((7, 7), 8), ((1, 6), 8), ((4, 4), 8), ((2, 3), 8), ((6, 5), 8)]
"""Of one width, so only the lengths tell what they spend."""


def test_rows_of_one_width_differ_by_their_sequences() -> None:
    finder = counted(*ROWS)
    assert finder.flops(padded((6, 2), 8)) == unpadded((6, 2), 8)
    # 1 + 9 pairs are fewer than any counted step had: they add up, and each sequence is none too long.
    assert finder.flops(padded((1, 3), 8)) == unpadded((1, 3), 8)
    assert finder.varies and finder.goes_by_sequences


def test_a_sequence_longer_than_all_that_were_counted_is_not_foretold() -> None:
    """An attention with a window would go by another number from some length on."""
    finder = counted(*[step for step in ROWS if max(step[0]) < 8])
    assert finder.flops(padded((7, 2), 8)) == unpadded((7, 2), 8)
    assert finder.flops(padded((8, 2), 8)) is None


def test_a_step_of_another_width_is_not_foretold_before_widths_vary() -> None:
    finder = counted(*ROWS)
    assert finder.flops(padded((6, 2), 9)) is None


def test_widths_and_numbers_of_rows_vary_as_well() -> None:
    others = [((9, 4), 10), ((3, 3, 8), 9), ((9, 9, 1), 12), ((2, 6, 4), 7), ((4, 9, 6), 10), ((8, 3, 3), 11)]
    finder = counted(*ROWS, *others)
    assert finder.flops(padded((5, 6, 2), 9)) == unpadded((5, 6, 2), 9)
    one = finder.per_sequence()
    assert not isinstance(one, str)
    # Of each token 32, and of each pair 12.
    tokens = BatchTokens(27, 13, None, 3, 25 + 36 + 4, 6)
    assert one.flops(tokens) == {"float32": 32 * 13 + 12 * (25 + 36 + 4)}


def test_lengths_that_decide_nothing_are_left_out_once_three_steps_have_shown_it() -> None:
    """A mask of blocks that never changes: numbers in tensors tell what is spent, and it is always the same."""
    finder = LawFinder(AXES)
    for number, (lengths, width) in enumerate(ROWS[:3]):
        assert finder.flops(padded((6, 2), 8)) is None, number
        assert finder.add(padded(lengths, width), {FORWARD: 1000})
    assert finder.flops(padded((6, 2), 8)) == finder.flops(padded((8, 8 - 1), 8)) == {FORWARD: 1000}
    assert not finder.varies and not finder.goes_by_sequences


def test_the_same_lengths_again_show_nothing() -> None:
    finder = LawFinder(AXES)
    for _ in range(9):
        finder.add(padded((5, 3), 8), {FORWARD: 1000})
    assert finder.flops(padded((6, 2), 8)) is None


@pytest.mark.parametrize("window", [4, 6])
def test_a_window_on_attention_is_never_foretold_wrongly(window: int) -> None:
    """Each token attends to so many before it at most: longer sequences spend less than their squares."""

    def spent(lengths: Sequence[int], width: int) -> dict[tuple[str, str], int]:
        pairs = sum(sum(min(place + 1, window) for place in range(one)) for one in lengths)
        return {FORWARD: 32 * len(lengths) * width + 12 * pairs}

    finder = LawFinder(AXES)
    for lengths, width in ROWS:
        foretold = finder.flops(padded(lengths, width))
        assert foretold in (None, spent(lengths, width))
        finder.add(padded(lengths, width), spent(lengths, width))
    for lengths in ((3, 5), (7, 1), (6, 6), (8, 8)):
        assert finder.flops(padded(lengths, 8)) in (None, spent(lengths, 8))


def test_dense_attention_over_padded_rows_keeps_its_law() -> None:
    """Its FLOPs go by the width, whatever the lengths are."""

    def dense(rows: int, width: int) -> dict[tuple[str, str], int]:
        return {FORWARD: rows * (32 * width + 12 * width**2)}

    steps = [((5, 3), 8), ((8, 2), 9), ((7, 7), 11), ((1, 6), 10), ((4, 9), 13), ((2, 3), 7)]
    finder = LawFinder(AXES)
    for lengths, width in steps:
        finder.add(padded(lengths, width), dense(len(lengths), width))
    assert finder.flops(padded((2, 12), 12)) == dense(2, 12)
    assert not finder.goes_by_sequences


def labelled(tokens: int) -> tuple[Sizes, ...]:
    """A batch of one shape, so many of whose tokens are trained on."""
    return ((4, 12, -12, tokens),)


def of_heads(*tokens: int, most: int = 99) -> LawFinder:
    """Counted steps of a model whose head is computed for the trained tokens, and for so many at *most*."""
    finder = LawFinder([(0, 0), (0, 1), (1, 1), (1, TRAINED)])
    for number in tokens:
        assert finder.add(labelled(number), {FORWARD: 500 + 32 * min(number, most)})
    return finder


def test_more_trained_tokens_than_in_any_counted_step_are_not_foretold() -> None:
    """A head may be computed for so many tokens at most. Below, nothing is known to end."""
    finder = of_heads(5, 9, 14, 8, most=20)
    assert finder.flops(labelled(11)) == {FORWARD: 500 + 32 * 11}
    assert finder.flops(labelled(2)) == {FORWARD: 500 + 32 * 2}
    assert finder.flops(labelled(21)) is None
    sums, outside = finder.add_up([[(4, 4), (12, 12), (-12, -12), (11, 21)]], [3, 1])
    assert (sums, outside) == ({FORWARD: 3 * (500 + 32 * 11)}, {1})


def test_trained_tokens_that_decide_nothing_may_be_any_number_once_three_have_shown_it() -> None:
    finder = LawFinder([(0, 0), (0, 1), (1, 1), (1, TRAINED)])
    said = []
    for number in (5, 9, 14):
        finder.add(labelled(number), {FORWARD: 500})
        said.append(finder.flops(labelled(40)))
    assert said == [None, None, {FORWARD: 500}]


def test_two_numbers_of_tokens_are_no_straight_line() -> None:
    """Scores between all tokens of a batch go by the square of their number: two numbers agree with any law.

    The squares of lengths, which decide nothing, make each of these steps a new one.
    """

    def spent(lengths: Sequence[int]) -> dict[tuple[str, str], int]:
        return {FORWARD: 12 * sum(lengths) ** 2}

    finder = LawFinder(AXES)
    for lengths in ((4, 6), (5, 5), (3, 7), (2, 4), (1, 5), (3, 3)):
        finder.add(padded(lengths, 8), spent(lengths))
    assert finder.flops(padded((2, 8), 8)) in (None, spent((2, 8)))  # ten, as counted
    assert finder.flops(padded((4, 4), 8)) is None
