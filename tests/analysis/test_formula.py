"""An exact polynomial of a batch's sizes, held to models whose FLOPs are worked out by hand."""

from __future__ import annotations

import random

import pytest

from lightning_flops.analysis.formula import Formula, Sizes
from tests.models_by_hand import MODELS, ByHand

KEY = ("forward", "float32")


def fitted(steps: dict[tuple[int, ...], int]) -> Formula:
    """A fit of steps of one batch each."""
    fit = Formula()
    for sizes, flops in steps.items():
        fit.add(Sizes((sizes,)), {KEY: flops})
    return fit


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
def test_a_model_by_hand(model: ByHand) -> None:
    """With thirty counted steps, the formula is exact for all further steps of sizes between them, or there is none."""
    numbers = random.Random(7)
    fits: dict[tuple[int, ...], Formula] = {}
    exact = 0
    for step in range(330):
        drawn = model.sizes(numbers)
        sizes, kind = (drawn[:2], drawn[2:]) if model.name == "GPT-2 with padding" else (drawn, ())
        flops = {(bucket, "float32"): value for bucket, value in model.cost(*drawn)._asdict().items() if value}
        fit = fits.setdefault(kind, Formula())
        axes = Sizes(((*sizes, *sizes),))  # two tensors of the same shape
        if step < 30:
            fit.add(axes, flops)
        elif fit.covers(axes):
            assert fit.flops(axes) == flops
            exact += 1
    assert (exact > 200) == model.has_formula


def test_two_more_steps_must_agree() -> None:
    """B x (3 S + S^2) has two terms, in a family of three."""
    steps: dict[tuple[int, ...], int] = {(2, 8): 176, (3, 16): 912, (1, 12): 180, (4, 20): 1840}
    assert fitted(steps).solved is None
    formula = fitted({**steps, (5, 9): 540})
    assert formula.flops(Sizes(((5, 10),))) == {KEY: 5 * (30 + 100)}


def test_a_step_that_disagrees_ends_the_formula() -> None:
    fit = fitted({(b, s): b * (3 * s + s * s) for b, s in [(2, 8), (3, 16), (1, 12), (4, 20), (5, 9)]})
    assert fit.solved is not None
    fit.add(Sizes(((7, 11),)), {KEY: 1})
    assert fit.solved is None


def test_sizes_between_counted_ones_are_covered_in_their_common_distance() -> None:
    """Lengths that were all padded to eights say nothing of nines."""
    sizes = [(2, 8), (3, 16), (1, 40), (4, 64), (5, 24)]
    formula = fitted({(b, s): b * (3 * s + s * s) for b, s in sizes})
    assert formula.covers(Sizes(((2, 32),)))
    assert not formula.covers(Sizes(((2, 33),)))
    assert not formula.covers(Sizes(((2, 72),)))
    assert not formula.covers(Sizes(((6, 32),)))
    assert formula.flops(Sizes(((6, 72),))) == {KEY: 6 * (3 * 72 + 72 * 72)}, "an estimate there"


def test_a_size_that_never_varied_is_part_of_what_is_known() -> None:
    formula = fitted({(4, s, 3): s * 12 for s in (1, 2, 5, 7, 9)})
    assert formula.flops(Sizes(((4, 6, 2),))) is None


def test_useful_flops_put_tokens_in_the_place_of_places() -> None:
    """B x (5 S + S^2 + 11): without padding 5 R + Q + 11 B."""
    sizes = [(2, 8), (3, 16), (1, 12), (4, 20), (5, 9), (6, 7)]
    formula = fitted({(b, s): b * (5 * s + s * s + 11) for b, s in sizes})
    assert formula.useful(Sizes(((3, 10),), 20, 150)) == {KEY: 100 + 150 + 33}
    fixed = fitted({(4, s): 4 * (5 * s + s * s + 11) for s in (8, 16, 9, 20, 12)})
    assert fixed.useful(Sizes(((4, 10),), 20, 150)) == {KEY: 100 + 150 + 44}
