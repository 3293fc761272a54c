"""Where shapes never change, a step is counted once more now and then, and shows whether all spend the same.

``tests/deepspeed/test_lengths.py`` has the same under DeepSpeed.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lightning_flops import profile_training
from lightning_flops.analysis.step_keys import StepKey
from lightning_flops.analysis.step_laws import StepLaws
from lightning_flops.session.checks import Checks
from lightning_flops.session.samples import SHARE, Samples
from tests.checks import (
    CONFIRMED,
    LAYERS,
    PRODUCT,
    REFUTED,
    ROWS,
    STEPS,
    WHOLE,
    WIDTH,
    Dropping,
    figures,
    generous,
    train,
)
from tests.every_step import DOORS, LOG_EVERY, SETTINGS
from tests.fake_clock import FakeNow

HERE = [door for door in DOORS if door != "DeepSpeed"]


@pytest.mark.parametrize("door", HERE)
def test_a_check_confirms_what_was_foretold(door: str, tmp_path: Path) -> None:
    trained, bare = (train(door, tmp_path, keeps=1.0, profiled=profiled) for profiled in (True, False))
    assert figures(trained.summary) == CONFIRMED
    assert (trained.losses, trained.weights) == (bare.losses, bare.weights)


@pytest.mark.parametrize("door", HERE)
def test_a_check_shows_that_chance_decides_what_runs(door: str, tmp_path: Path) -> None:
    trained, bare = (train(door, tmp_path, keeps=0.5, profiled=profiled) for profiled in (True, False))
    assert figures(trained.summary) == REFUTED
    assert (trained.losses, trained.weights) == (bare.losses, bare.weights)


def rows() -> list[torch.Tensor]:
    return [torch.randn(ROWS, WIDTH) for _ in range(2 * STEPS)]


def test_a_step_of_two_batches_is_checked_with_both() -> None:
    model = Dropping(1.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with generous(), profile_training(model, optimizer, log_every_n_steps=LOG_EVERY, **SETTINGS) as profiler:
        for index, batch in enumerate(profiler.batches(rows())):
            model(batch)["loss"].backward()
            if index % 2:
                optimizer.step()
                optimizer.zero_grad()
    assert figures(profiler.throughput) == {**CONFIRMED, "model_flops": 2 * WHOLE, "hardware_flops": 2 * WHOLE}


def test_a_teacher_that_runs_before_the_model_is_in_the_check() -> None:
    """A check begins where the step before it ends, as a window does."""
    model, teacher = Dropping(1.0), Dropping(1.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with generous(), profile_training(model, optimizer, log_every_n_steps=LOG_EVERY, **SETTINGS) as profiler:
        for batch in profiler.batches(rows()[:STEPS]):
            with torch.no_grad():
                teacher(batch)
            model(batch)["loss"].backward()
            optimizer.step()
            optimizer.zero_grad()
    found = figures(profiler.throughput)
    assert (found["counted"], found["predicted"]) == (2, STEPS - 2)
    assert found["model_flops"] == STEPS * LAYERS * 4 * PRODUCT


class Growing(torch.optim.SGD):
    """Multiplies matrices that grow, as an optimizer with a history does."""

    steps = 0

    def step(self, *args: Any, **kwargs: Any) -> Any:
        """Make one update."""
        self.steps += 1
        torch.ones(1, self.steps) @ torch.ones(self.steps, 1)
        return super().step(*args, **kwargs)


def test_of_a_run_whose_optimizer_spends_something_else_at_each_step_model_flops_are_known() -> None:
    model = Dropping(1.0)
    optimizer = Growing(model.parameters(), lr=0.01)
    with generous(), profile_training(model, optimizer, log_every_n_steps=LOG_EVERY, **SETTINGS) as profiler:
        for batch in profiler.batches(rows()[:STEPS]):
            model(batch)["loss"].backward()
            optimizer.step()
            optimizer.zero_grad()
    assert figures(profiler.throughput) == {**CONFIRMED, "hardware_flops": None}


def test_a_check_whose_step_is_left_is_made_later() -> None:
    model = Dropping(1.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    done = 0
    with generous(), profile_training(model, optimizer, log_every_n_steps=LOG_EVERY, **SETTINGS) as profiler:
        for index, batch in enumerate(profiler.batches(rows())):
            if done == 104 and index == 104:  # the check's step: the loop gives it up after its forward
                try:
                    model(batch)
                    raise KeyError
                except KeyError:
                    continue
            model(batch)["loss"].backward()
            optimizer.step()
            optimizer.zero_grad()
            done += 1
    found = figures(profiler.throughput)
    assert found["unknown"] == 0 and found["counted"] in (2, 3)
    assert found["model_flops"] == done * LAYERS * 3 * PRODUCT


def test_there_is_no_check_without_the_monitor() -> None:
    model = Dropping(1.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    begun = []
    with pytest.MonkeyPatch.context() as patches, generous():
        patches.setattr("lightning_flops.session.samples.Samples.begins", lambda samples: begun.append(samples))
        with profile_training(model, optimizer, monitor=False, **SETTINGS) as profiler:
            for batch in profiler.batches(rows()):
                model(batch)["loss"].backward()
                optimizer.step()
    assert begun == [] and profiler.throughput is None


def test_in_a_short_run_half_a_percent_is_less_than_a_check() -> None:
    model = Dropping(1.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with profile_training(model, optimizer, log_every_n_steps=LOG_EVERY, **SETTINGS) as profiler:
        for batch in profiler.batches(rows()[:STEPS]):
            model(batch)["loss"].backward()
            optimizer.step()
    assert figures(profiler.throughput)["counted"] == 1


def test_a_check_at_whose_border_the_loop_evaluates_is_made_later() -> None:
    """The evaluation of many batches is not run under the counter."""
    model = Dropping(1.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    modes: list[int] = []
    with generous(), profile_training(model, optimizer, log_every_n_steps=LOG_EVERY, **SETTINGS) as profiler:
        for index, batch in enumerate(profiler.batches(rows()[:STEPS])):
            model(batch)["loss"].backward()
            optimizer.step()
            optimizer.zero_grad()
            if index == 103:  # 104 steps are done
                model.eval()
                with torch.no_grad():
                    for one in rows()[:3]:
                        model(one)
                        modes.append(torch._C._len_torch_dispatch_stack())
                model.train()
                model.ran -= 3 * LAYERS
    assert modes == [0, 0, 0]
    assert model.ran == STEPS * LAYERS
    assert figures(profiler.throughput) == CONFIRMED


def test_time_that_is_no_steps_is_not_taken_for_the_cost_of_a_check() -> None:
    now = FakeNow()
    samples = Samples(now, share=0.5)
    samples.begins()
    now.seconds = 101.0
    samples.pause("validation")
    samples.pause("checkpoint")
    now.seconds = 400.0
    samples.go_on("validation")
    now.seconds = 401.0
    samples.go_on("checkpoint")
    now.seconds = 403.0
    samples.ends()
    assert samples.seconds == 3.0  # one before the validation, and two after the checkpoint
    assert samples.affords_from(steps_done=10) == 100.0 + (3.0 + 3.0) / 0.5
    samples.pause("epoch restart")
    now.seconds = 410.0
    samples.begins()  # inside of what is no step's
    now.seconds = 420.0
    samples.go_on("epoch restart")
    now.seconds = 421.0
    samples.ends()
    assert samples.seconds == 4.0


@pytest.mark.parametrize(
    ("done", "usual"), [(99, False), (100, False), (101, False), (102, True), (108, True), (109, False), (110, False)]
)
def test_no_check_is_made_where_people_do_what_they_do_now_and_then(done: int, usual: bool) -> None:
    assert Samples(share=SHARE).is_usual(steps_done=done) is usual


@pytest.mark.parametrize(
    ("when", "counted_at"),
    [("in step 100", 200), ("after the update of step 100", 301), ("in the hundredth step", 399)],
)
def test_work_that_comes_every_hundred_steps_makes_figures_lower_bounds(
    when: str, counted_at: int, caplog: pytest.LogCaptureFixture
) -> None:
    """A loop without epochs draws samples from a model that nobody shows to the profiler."""
    model, averaged = Dropping(1.0), Dropping(1.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    batch, steps = torch.randn(ROWS, WIDTH), 450

    def draws_samples() -> None:
        with torch.no_grad():
            for _ in range(7):
                averaged(batch)

    with generous(), profile_training(model, optimizer, log_every_n_steps=LOG_EVERY, **SETTINGS) as profiler:
        for index in range(steps):
            if when == "in step 100" and index and not index % 100:
                draws_samples()
            model(batch)["loss"].backward()
            if when == "in the hundredth step" and not (index + 1) % 100:
                draws_samples()
            optimizer.step()
            optimizer.zero_grad()
            if when == "after the update of step 100" and index and not index % 100:
                draws_samples()
    summary = profiler.throughput
    found = figures(summary)
    assert summary is not None and summary.lower_bound
    assert found["unknown"] == 0
    more = 7 * LAYERS * PRODUCT  # in the one step that was looked at
    assert found["model_flops"] == found["hardware_flops"] == steps * LAYERS * 3 * PRODUCT + more
    assert caplog.text.count("more than is foretold") == 1
    (note,) = summary.notes
    assert note in caplog.text
    assert note.startswith(f"Step {counted_at} spent 71,680 model FLOPs more than is foretold for its shapes. ")


def test_a_step_that_spends_less_at_a_round_number_is_no_lower_bound() -> None:
    model = Dropping(1.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    batch = torch.randn(ROWS, WIDTH)
    with generous(), profile_training(model, optimizer, log_every_n_steps=LOG_EVERY, **SETTINGS) as profiler:
        for index in range(250):
            model.keeps = 0.0 if index and not index % 100 else 1.0
            (model(batch)["loss"] + 0 * sum(one.sum() for one in model.parameters())).backward()
            optimizer.step()
            optimizer.zero_grad()
    summary = profiler.throughput
    assert summary is not None and not summary.lower_bound
    assert figures(summary)["model_flops"] is None


def test_an_optimizer_that_spends_more_at_round_numbers_leaves_model_flops_exact() -> None:
    class Preconditioned(torch.optim.SGD):
        """Multiplies matrices at every hundredth step alone."""

        steps = 0

        def step(self, *args: Any, **kwargs: Any) -> Any:
            """Make one update."""
            self.steps += 1
            if not self.steps % 100:
                torch.ones(4, 4) @ torch.ones(4, 4)
            return super().step(*args, **kwargs)

    model = Dropping(1.0)
    optimizer = Preconditioned(model.parameters(), lr=0.01)
    batch, steps = torch.randn(ROWS, WIDTH), 410
    with generous(), profile_training(model, optimizer, log_every_n_steps=LOG_EVERY, **SETTINGS) as profiler:
        for _ in range(steps):
            model(batch)["loss"].backward()
            optimizer.step()
            optimizer.zero_grad()
    summary = profiler.throughput
    found = figures(summary)
    assert summary is not None and not summary.lower_bound
    assert (found["model_flops"], found["hardware_flops"]) == (steps * LAYERS * 3 * PRODUCT, None)


def checked(*, share: float, counting_sec: float) -> tuple[list[int], list[int]]:
    """After how many of 35,000 steps of a second a check begins: ordinary ones, and those beside round numbers."""
    now = FakeNow()
    laws = StepLaws(lambda sentence: None)
    samples = Samples(now, share=share)
    checks = Checks(laws, samples, wanted=True)
    key: StepKey = ((((ROWS, WIDTH),),), 1)
    laws.counted(key, {("forward", "float32"): 8})
    checks.counted(steps_done=3)
    checks.window_closes([key], steps_done=4)
    made: list[int] = []
    looks: list[int] = []
    for done in range(5, 35_000):
        now.sleep(1.0)
        if checks.begins(steps_done=done):
            (looks if checks.looks_for_more else made).append(done)
            now.sleep(counting_sec)
            checks.counts(key)
            checks.ends(steps_done=done + 1)
    return made, looks


def test_each_round_number_is_looked_at_once_and_so_are_its_neighbours() -> None:
    """After the first ordinary check, and one in ten thousand steps is the rarest."""
    made, looks = checked(share=1.0, counting_sec=0.0)
    # Step 3 was counted, which is odd as 103 is: should steps take turns, it may be the same one's. 200 and 201 leave 0
    # and 1 divided by 5, and 3 and 104 the others but 2; these all leave 0 or 2 divided by 3. From 206 on 217 is the
    # first that leaves 1 and 2. After that every turn was seen.
    assert made == [104, 217, 412, 824, 1_648, 3_296, 6_592, 13_184, 26_368]
    assert looks == [200, 201, 299, 1_000, 1_001, 1_999, 10_000, 10_001, 19_999]


def test_where_few_steps_can_be_counted_the_roundest_numbers_near_are_looked_at() -> None:
    made, looks = checked(share=0.005, counting_sec=6.0)
    # The first is taken for ten steps, which are half a percent of 2,000; no step beside that is an ordinary one.
    # Each takes 6 s, so the one after n of them may begin when n + 1 are half a percent of the run: 1,200 (n + 1) s
    # after its begin, which was four steps late. In 3,592 + 12 - 4 and in 7,174 + 30 - 4 seconds ordinary ones are
    # affordable, due since 3,296 and 6,592; at 4,001 + 18 - 4 none is. Before 3,596 no number leaves 2 divided by 3,
    # and 1 or 4 divided by 5: 3, 2,002 and 3,000 leave the others.
    assert made == [2_002, 3_596, 7_174, 13_184, 26_368]
    assert looks == [3_000, 5_001, 5_999, 10_000, 10_001, 19_999]


class Turns(nn.Module):
    """Has a head for each of several steps in turn; the shapes that go in are the same, and so is the graph."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.ran = 0
        self.heads = nn.ModuleList(nn.Linear(WIDTH, width) for width in range(1, heads + 1))

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        self.ran += 1
        loss: torch.Tensor = self.heads[self.ran % len(self.heads)](batch).mean()
        return loss


@pytest.mark.parametrize("heads", [2, 3, 5])
@pytest.mark.parametrize("profile_step", [1, 2, 3])
def test_where_steps_take_turns_the_first_check_shows_it(heads: int, profile_step: int) -> None:
    model = Turns(heads)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    settings = {**SETTINGS, "profile_step": profile_step}
    with generous(), profile_training(model, optimizer, log_every_n_steps=LOG_EVERY, **settings) as profiler:
        for batch in profiler.batches([torch.ones(ROWS, WIDTH)] * 125):
            model(batch).backward()
            optimizer.step()
            optimizer.zero_grad()
    run = profiler.throughput
    assert run is not None
    assert (run.steps_counted, run.model_flops) == (2, None)


def test_checks_come_after_103_steps_and_always_twice_as_many() -> None:
    samples = Samples(share=SHARE)
    assert [samples.next_check(steps_done=done) for done in (13, 102, 103, 206, 411, 412)] == [
        *(103, 103, 206, 412, 412, 824),
    ]
