"""What a run says of its steps' FLOPs, held to what each step costs by hand."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable
from inspect import unwrap
from typing import NamedTuple

import pytest

from lightning_flops.analysis.step_flops import CountSchedule, StepFlops, StepSums, UnprofiledFlops, seed_of_run
from lightning_flops.measure.batches import HIDDEN_SHAPE
from lightning_flops.records import BatchTokens, Shapes
from tests.analysis.in_memory import known

STEP_SEC = 0.1
SEED_OF_RUN = unwrap(seed_of_run)


class Step(NamedTuple):
    """One step of a run."""

    batches: tuple[Shapes, ...]
    forward: int
    tokens: BatchTokens | None = None
    data_dependent: bool = False


class Ran(NamedTuple):
    """A whole run."""

    sums: StepSums
    truth: int  # model FLOPs of all its steps
    counted: int  # how many were counted
    added_sec: float  # what counting added after the free ones

    @property
    def covered(self) -> bool:
        """Whether what the sums say of their error is true."""
        flops = known(self.sums.model_flops)
        return abs(flops - self.truth) <= known(self.sums.flops_error) * flops + 1


def counted(flops: StepFlops, step: Step, *, drawn: bool = False, seconds: float = STEP_SEC) -> None:
    """*step* was counted."""
    flops.counted(
        step.batches,
        (step.tokens,) * len(step.batches),
        1,
        {("forward", "float32"): step.forward, ("backward", "float32"): 2 * step.forward},
        seconds=seconds,
        random=drawn,
        data_dependent=step.data_dependent,
        lower_bound=False,
    )


def simulate(
    steps: Iterable[Step],
    *,
    seed: int = 0,
    cost: float = 3.0,
    each: Callable[[UnprofiledFlops | None], None] | None = None,
) -> Ran:
    """Run *steps*: the backward costs twice the forward, a counted step *cost* more usual steps.

    The *seed* is that of the checks; *each* gets a reading after every fiftieth step.
    """
    flops = StepFlops(seed=seed)
    truth = number_counted = 0
    for number, step in enumerate(steps, 1):
        tokens = (step.tokens,) * len(step.batches)
        drawn = flops.schedule.draws_check()
        truth += 3 * step.forward
        if drawn or flops.wants(step.batches[0], tokens[0]):
            number_counted += 1
            counted(flops, step, drawn=drawn, seconds=STEP_SEC * (1 + cost))
        else:
            flops.ran(step.batches, tokens, 1, seconds=STEP_SEC)
        if each is not None and number % 50 == 0:
            each(flops.reading())
    return Ran(known(flops.totals()), truth, number_counted, max(0, number_counted - 8) * cost * STEP_SEC)


def rows(batch: int, length: int) -> tuple[Shapes, ...]:
    """One batch of token ids and labels."""
    return (((batch, length), (batch, length)),)


def generator(seed: int) -> random.Random:
    """Of a run's sizes: independent of the generator that draws checks."""
    return random.Random(f"sizes {seed}")


FIXED = (((8, 64),),)
HIDDEN = ((HIDDEN_SHAPE,),)


def layer(batch: int, length: int) -> int:
    """Products of every token, and attention of each to all."""
    return batch * (5_000 * length + 64 * length**2)


# ---- exact


@pytest.mark.parametrize("cost", [0.3, 5.0, 100.0])
def test_a_short_last_batch_is_exact_from_the_second_log_step_on(cost: float) -> None:
    """1,000 samples in batches of 128, 40 epochs; 77 FLOPs a sample, and 5 of the whole batch."""
    sizes = [*[128] * 7, 104] * 40
    readings: list[UnprofiledFlops | None] = []
    run = simulate([Step((((size, 10),),), 77 * size + 5) for size in sizes], cost=cost, each=readings.append)
    assert (run.sums.model_flops, run.sums.flops_error, run.sums.steps_estimated) == (run.truth, None, 0)
    assert run.truth == 3 * 40 * (1_000 * 77 + 8 * 5)
    assert [known(one).estimated_ratio for one in readings] == [0.0] * 6


@pytest.mark.parametrize("cost", [0.3, 5.0, 100.0])
def test_two_batch_sizes_at_random_are_exact(cost: float) -> None:
    """The cube of the batch is nothing that elements tell."""
    for seed in range(5):
        sizes = generator(seed).choices((32, 48), k=2_000)
        run = simulate([Step((((size, 10),),), size**3) for size in sizes], seed=seed, cost=cost)
        assert (run.sums.model_flops, run.sums.flops_error, run.sums.steps_counted) == (run.truth, None, 2_000)


def lengths(numbers: random.Random) -> Step:
    """A random batch size and length."""
    sizes = numbers.randint(1, 8), numbers.randint(8, 128)
    return Step(rows(*sizes), layer(*sizes))


@pytest.mark.parametrize("cost", [0.3, 5.0, 100.0])
def test_random_lengths_and_batch_sizes_follow_the_formula(cost: float) -> None:
    for seed in range(20):
        numbers = generator(seed)
        run = simulate([lengths(numbers) for _ in range(300)], seed=seed, cost=cost)
        # Beyond the sizes that were counted the formula is an estimate.
        exact = 0.0 if not run.sums.steps_estimated else None
        assert (run.sums.model_flops, run.sums.flops_error) == (run.truth, exact)
        assert run.sums.steps_by_formula > 50


def test_packed_sequences_follow_the_formula_of_their_lengths() -> None:
    """Rows of 256 tokens, whose sequences each attend to themselves: 5,000 R + 64 Q, and R is 256 in each of 4 rows."""

    def step(numbers: random.Random) -> Step:
        squares = sum(part**2 + (256 - part) ** 2 for part in (numbers.randint(8, 128) for _ in range(4)))
        return Step(rows(4, 256), 5_000 * 1024 + 64 * squares, BatchTokens(1024, 1024, squares))

    for seed in range(5):
        numbers = generator(seed)
        run = simulate([step(numbers) for _ in range(400)], seed=seed)
        assert (run.sums.model_flops, run.sums.flops_error) == (run.truth, 0.0)
        assert run.sums.steps_by_formula > 350


def test_useful_flops_are_those_of_the_lengths_without_padding() -> None:
    """The model pays for every place of B x S; without padding it would pay for R tokens and Q pairs."""
    numbers, steps, useful = generator(0), [], 0
    for _ in range(400):
        real = [numbers.randint(8, 128) for _ in range(numbers.randint(2, 6))]
        real[0] += real[0] == real[1]
        batch, longest = len(real), max(real)
        squares = sum(length**2 for length in real)
        tokens = BatchTokens(batch * longest, sum(real), squares)
        steps.append(Step(rows(batch, longest), layer(batch, longest), tokens))
        useful += 3 * (5_000 * sum(real) + 64 * squares)
    flops = StepFlops()
    for step in steps[:30]:
        counted(flops, step)
    for step in steps:
        flops.ran(step.batches, (step.tokens,), 1, seconds=STEP_SEC)
    unprofiled = known(flops.totals()).unprofiled
    assert unprofiled.useful_by_dtype == {"float32": useful}
    assert unprofiled.by_dtype == {"float32": 3 * sum(step.forward for step in steps)}


# ---- estimates, and their error


def dropped(numbers: random.Random) -> int:
    """How many of twelve layers a step has that leaves each of them out once in five times."""
    return sum(numbers.random() > 0.2 for _ in range(12))


def floored(batch: int, length: int, stride: int) -> Step:
    """A step whose convolution leaves one of so many frames: no polynomial tells how many are left."""
    return Step(rows(batch, length), batch * (5_000 * (length // stride) + 640 * (length // stride) ** 2))


def dropped_lengths(numbers: random.Random, number: int) -> Step:
    step = lengths(numbers)
    return step._replace(forward=dropped(numbers) * step.forward)


KINDS: dict[str, Callable[[random.Random, int], Step]] = {
    "layer drop": lambda numbers, _: Step(FIXED, 3_000 + 1_000 * dropped(numbers)),
    # Of 512 tokens some are dropped.
    "router": lambda numbers, _: Step(
        FIXED, 100_000 + 300 * min(512, max(0, int(numbers.gauss(410, 51)))), data_dependent=True
    ),
    "two losses in turns": lambda _, number: Step(FIXED, 10_000 if number % 2 else 16_000),
    "batches in which no tensor is seen": lambda numbers, _: Step(HIDDEN, numbers.randint(2_000, 9_000)),
    "frames": lambda numbers, _: floored(numbers.randint(1, 8), numbers.randint(20, 200), 4),
    "a picture at the first of each hundred steps": lambda _, number: Step(FIXED, 10_000 + 5_000 * (number % 100 == 0)),
    "a picture at the last of each hundred steps": lambda _, number: Step(FIXED, 10_000 + 5_000 * (number % 100 == 99)),
    "seven lengths": lambda numbers, _: floored(16, numbers.choice((64, 96, 128, 192, 256, 384, 512)), 5),
    "layer drop and random lengths": dropped_lengths,
    # Every step computes on 8 to 32 of the 32 features that its batch has.
    "drawn sizes": lambda numbers, _: Step(FIXED, 1_000 * numbers.randint(8, 32), data_dependent=True),
}
SEEDS = 100


def is_true(run: Ran, steps: list[Step]) -> bool:
    """Whether what the run says of its error holds: the interval, or how many steps may differ from the others."""
    if run.sums.flops_error:
        return run.covered
    usual = {step.batches: step.forward for step in reversed(steps)}
    differ = sum(step.forward != usual[step.batches] for step in steps)
    return min(differ, len(steps) - differ) <= 3 / run.sums.checks * len(steps)


@pytest.mark.parametrize("steps", [60, 300, pytest.param(2_000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", KINDS)
def test_the_interval_covers_the_truth(kind: str, steps: int) -> None:
    true = 0
    for seed in range(SEEDS):
        numbers = generator(seed)
        run_of = [KINDS[kind](numbers, number) for number in range(steps)]
        run = simulate(run_of, seed=seed)
        assert run.sums.flops_error != 0.0 and run.sums.checks >= 3
        true += is_true(run, run_of)
    assert true >= 0.9 * SEEDS


# Steps of one shape whose costs vary in ways that a formula of shapes cannot know, and (last) new shapes with a chance.
VARYING: dict[str, Callable[[random.Random, int, int], Step]] = {
    "one in twenty costs three times": lambda numbers, _, __: Step(
        FIXED, 1_000 * (3 if numbers.random() < 0.05 else 1)
    ),
    "one in a hundred, twenty times": lambda numbers, _, __: Step(
        FIXED, 1_000 * (20 if numbers.random() < 0.01 else 1)
    ),
    "every 16th, three times": lambda _, number, __: Step(FIXED, 1_000 * (1 if number % 16 else 3)),
    "layer drop": lambda numbers, _, __: Step(FIXED, 1_000 - 50 * sum(numbers.random() < 0.2 for _ in range(12))),
    "twice from nine tenths on": lambda _, number, of: Step(FIXED, 1_000 * (1 + (number >= 0.9 * of))),
    "drift": lambda _, number, of: Step(FIXED, int(1_000 * (1 + number / of))),
    "lognormal": lambda numbers, _, __: Step(FIXED, int(1_000 * numbers.lognormvariate(0, 1))),
    "three times in the first tenth": lambda _, number, of: Step(FIXED, 1_000 * (1 if number >= 0.1 * of else 3)),
    "lengths, and a third more of some": lambda numbers, _, __: some_more(numbers),
}


def some_more(numbers: random.Random) -> Step:
    """A length that is new, and in three of ten steps a third more than its formula says."""
    length, more = numbers.randint(16, 512), numbers.random() < 0.3
    return Step((((8, length),),), int(8 * length * (100 + 0.3 * length + 30 * more)))


@pytest.mark.slow
@pytest.mark.parametrize("kind", VARYING)
def test_no_step_that_was_not_counted_is_called_exact_and_intervals_hold(kind: str) -> None:
    """Of 200 runs of 1,500 steps with twelve checks: an interval holds the truth in 93% of those that have one."""
    covered, runs = list[bool](), 200
    for seed in range(runs):
        numbers = generator(seed)
        run = simulate([VARYING[kind](numbers, number, 1_500) for number in range(1_500)], seed=seed, cost=1.5)
        assert run.sums.flops_error != 0.0 and run.sums.checks_seed == seed
        if run.sums.flops_error is not None:
            covered.append(run.covered)
    assert covered and sum(covered) >= 0.93 * len(covered)


def test_checks_that_all_agree_prove_nothing_of_steps_that_none_met() -> None:
    """One step of 300 costs twenty times as much, and no check met it: there is no error to tell, and it is not 0."""
    steps = [Step(FIXED, 10_000)] * 299 + [Step(FIXED, 200_000)]
    run = simulate(steps)
    assert run.sums.flops_error is None and run.sums.checks >= 3 and known(run.sums.model_flops) < run.truth


def test_other_runs_draw_other_steps_and_ranks_of_a_job_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    def drawn(seed: int) -> list[int]:
        schedule = CountSchedule(seed)
        return [step for step in range(200) if schedule.draws_check()]

    assert len({tuple(drawn(SEED_OF_RUN(1))) for _ in range(5)}) == 5
    monkeypatch.setenv("MASTER_PORT", "29500")
    assert drawn(SEED_OF_RUN(8)) == drawn(SEED_OF_RUN(8))
    one = SEED_OF_RUN(8)
    monkeypatch.setenv("MASTER_PORT", "29501")
    assert SEED_OF_RUN(8) != one


def test_what_is_logged_follows_a_run_that_changes() -> None:
    """Layers are unfrozen after 10,000 of 20,000 steps: 16 checks later all that is logged is of the new steps."""
    readings: list[UnprofiledFlops | None] = []
    steps = [Step(FIXED, 10_000)] * 10_000 + [Step(FIXED, 16_000)] * 10_000
    run = simulate(steps, cost=0.5, each=readings.append)
    assert known(readings[199]).by_dtype["float32"] in (49 * 30_000, 50 * 30_000)
    assert known(readings[-1]).by_dtype["float32"] in (49 * 48_000, 50 * 48_000)
    assert run.covered


def test_three_equal_differences_are_no_interval_of_no_width() -> None:
    """Of 256 elements one step was counted; three random ones of 512 cost 1,000 more than twice as much."""
    flops = StepFlops()
    counted(flops, Step((((4, 64),),), 10_000))
    for size in (8, 16, 32):
        counted(flops, Step((((size, 64),),), 2_500 * size + 1_000), drawn=True)
    flops.ran((((7, 64),),), (None,), 1, seconds=STEP_SEC)
    assert known(known(flops.totals()).flops_error) > 0


def test_with_two_checks_the_error_is_not_known() -> None:
    flops = StepFlops()
    for drawn in (False, True, True):
        counted(flops, Step(FIXED, 10_000), drawn=drawn)
    flops.ran(FIXED, (None,), 1, seconds=STEP_SEC)
    sums = known(flops.totals())
    assert (sums.flops_error, sums.checks, sums.model_flops) == (None, 2, 4 * 30_000)


def test_what_was_predicted_before_the_formula_leaves_no_error() -> None:
    """The first checks were predicted by the nearest shape, and wrongly. The formula that came later is exact."""
    flops = StepFlops()
    early = [(2, 8), (3, 100), (7, 30)]
    for one in (*early, (1, 128), (8, 8), (8, 128), (1, 8), (5, 64)):
        counted(flops, Step(rows(*one), layer(*one)), drawn=one in early)
    flops.ran(rows(4, 50), (None,), 1, seconds=STEP_SEC)
    sums = known(flops.totals())
    assert (sums.flops_error, sums.unprofiled.by_dtype) == (0.0, {"float32": 3 * layer(4, 50)})


def test_data_dependent_steps_are_estimates_even_where_every_check_agrees() -> None:
    run = simulate([Step(FIXED, 10_000, data_dependent=True)] * 300)
    assert (run.sums.model_flops, run.sums.flops_error) == (run.truth, None)
    assert (run.sums.steps_counted, run.sums.steps_estimated) == (run.counted, 300 - run.counted)


def test_before_a_step_was_counted_there_is_nothing_to_say() -> None:
    flops = StepFlops()
    flops.ran(FIXED, (None,), 1, seconds=STEP_SEC)
    assert flops.reading() is None and flops.totals() is None
    counted(flops, Step(FIXED, 10_000))
    sums = known(flops.totals())
    assert (sums.steps_counted, sums.model_flops) == (2, 2 * 30_000)


def test_hardware_flops_are_those_of_all_phases() -> None:
    flops = StepFlops()
    key = FIXED, (None,), 1
    spent = {
        ("forward", "bfloat16"): 100,
        ("backward", "bfloat16"): 200,
        ("recompute", "bfloat16"): 50,
        ("optimizer", "float32"): 7,
    }
    flops.counted(*key, spent, seconds=1.0, random=False, data_dependent=False, lower_bound=True)
    flops.ran(*key, seconds=1.0)
    sums = known(flops.totals())
    assert (sums.hardware_flops, sums.model_flops, sums.lower_bound) == (2 * 357, 600, True)


def test_accumulated_batches_add_up() -> None:
    """Four batches a step, of two lengths each time; only the first one's shape is known when a step begins."""
    numbers = generator(0)
    steps = []
    for _ in range(300):
        sizes = [(4, numbers.randint(8, 64)) for _ in range(4)]
        steps.append(Step(tuple(rows(*one)[0] for one in sizes), sum(layer(*one) for one in sizes)))
    run = simulate(steps)
    assert (run.sums.model_flops, run.sums.flops_error) == (run.truth, None)


# ---- cost


@pytest.mark.parametrize("cost", [0.1, 1.0, 30.0])
def test_counting_adds_half_a_percent_to_a_long_run_and_goes_on_to_the_end(cost: float) -> None:
    half, run = (simulate([Step(FIXED, 10_000)] * steps, cost=cost) for steps in (10_000, 20_000))
    assert run.added_sec <= 0.005 * 20_000 * STEP_SEC + cost * STEP_SEC
    assert run.sums.checks > half.sums.checks
    assert run.counted <= 700


def test_ever_new_shapes_are_kept_as_a_sum() -> None:
    flops = StepFlops()
    counted(flops, Step((((1, 1),),), 10))
    for size in range(1, 10_001):
        flops.ran((((1, size),),), (None,), 1, seconds=STEP_SEC)
    sums = known(flops.totals())
    assert sums.steps_counted + sums.steps_estimated == 10_001
    assert sums.model_flops == 30 + 30 * sum(range(1, 10_001))


def test_the_global_random_state_is_not_touched() -> None:
    before = random.getstate()
    simulate([Step(FIXED, 10_000)] * 100)
    assert random.getstate() == before


def test_profiled_steps_are_in_the_sum_of_the_run_and_in_no_rate() -> None:
    flops = StepFlops()
    key = FIXED, (None,), 1
    for forward in (10_000, 16_000, 16_000, 10_000):
        counted(flops, Step(FIXED, forward), drawn=True)
    for profiled in (True, False, False):
        flops.ran(*key, seconds=STEP_SEC, profiled=profiled)
    sums = known(flops.totals())
    assert sums.steps_counted + sums.steps_estimated == 7
    assert sums.unprofiled.by_dtype == {"float32": 2 * 3 * 13_000}, "as the mean of the checks"
    assert sums.model_flops == 4 * 3 * 13_000 + 3 * 3 * 13_000


def test_the_interval_of_three_checks_is_students_with_one_farther_draw() -> None:
    """Checks that miss 0, 0 and 3,000 of a step's FLOPs: a mean of 1,000, squares of 6,000,000, and of one draw more at
    the farther end, 3,000, another 4,000,000. Student's t of two degrees of freedom is 4.303."""
    flops = StepFlops()
    for cost, drawn in ((10_000, False), (10_000, True), (10_000, True), (11_000, True)):
        counted(flops, Step(FIXED, cost, data_dependent=True), drawn=drawn)
    for _ in range(10):
        flops.ran(FIXED, (None,), 1, seconds=STEP_SEC)
    sums = known(flops.totals())
    assert sums.model_flops == 10 * 31_000 + 3 * 30_000 + 33_000
    half_width = 4.303 * math.sqrt(10_000_000 / 3) / math.sqrt(3)
    assert sums.flops_error == pytest.approx(
        10 * half_width / known(sums.model_flops), rel=0.04
    )  # as far as t is expanded


def test_steps_of_one_shape_are_held_apart_by_whether_they_have_padding() -> None:
    """A kernel that skips masked work costs less where a token is padding: 8,000 of 10,000."""
    flops, whole, padded = StepFlops(), BatchTokens(8, 8, 64), BatchTokens(8, 6, 36)
    counted(flops, Step(FIXED, 8_000, padded))
    counted(flops, Step(FIXED, 10_000, whole))
    for _ in range(10):
        flops.ran(FIXED, (whole,), 1, seconds=STEP_SEC)
    assert known(flops.totals()).model_flops == 3 * (8_000 + 11 * 10_000)


@pytest.mark.parametrize(("size", "data_dependent", "gives"), [(4, False, 12), (16, False, 48), (4, True, None)])
def test_a_formula_gives_the_flops_of_one_step(size: int, data_dependent: bool, gives: int | None) -> None:
    flops = StepFlops()
    for rows in (2, 6, 8):
        counted(flops, Step((((rows, 5),),), forward=3 * rows, data_dependent=data_dependent))
    found, is_beyond = flops.by_formula((((size, 5),),), (None,), 1)
    assert found == (gives and {("forward", "float32"): gives, ("backward", "float32"): 2 * gives})
    assert is_beyond is (size > 8)
    assert flops.by_formula((((size, 5), (7,)),), (None,), 1) == (None, True)  # of another form
