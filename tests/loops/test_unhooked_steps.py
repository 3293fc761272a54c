"""Short steps that run without hooks, by a clock in the test's hands: a forward takes longer for each hook on it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_flops import Profile, profile_training
from lightning_flops.pytorch import TrainingProfiler
from tests.analysis.in_memory import known
from tests.fake_clock import FakeNow

STEP_SEC, HOOK_SEC, AWAY_SEC = 2.0**-10, 2.0**-11, 2.0**-4  # powers of two: their sums are exact
TIMED = 16
FIRST = 1 + 1 + 2 + TIMED  # before it are one that is not profiled, one counted, two left alone, and those with hooks
STEPS, ROWS, WIDTH = FIRST + TIMED, 4, 8
FLOPS = 4 * ROWS * WIDTH * WIDTH  # of a step: a forward, and the gradient of a matrix, as the rows need none
NOTE = "{} steps, or batches without one, ran without hooks, to time them, and are in no figure of the run."


class Hooked(nn.Linear):
    """It takes longer with hooks, and notes how many it has in each step."""

    def __init__(self, now: FakeNow, step_sec: float) -> None:
        super().__init__(WIDTH, WIDTH)
        self._now, self._step_sec = now, step_sec
        self.hooks: list[int] = []

    def forward(self, rows: Tensor) -> Tensor:
        """One step's."""
        self.hooks.append(len(self._forward_hooks) + len(self._forward_pre_hooks))
        self._now.sleep(self._step_sec + self.hooks[-1] * HOOK_SEC)
        return super().forward(rows)


Does = Callable[[int, TrainingProfiler, FakeNow], object]


def trained(
    now: FakeNow,
    does: Does = lambda *_: None,
    *,
    step_sec: float = STEP_SEC,
    steps: int = STEPS,
    profiled: bool = True,
    **settings: Any,
) -> tuple[Hooked, Any]:
    """The model and the profiler of a loop that *does* something after each of its steps."""
    torch.manual_seed(0)
    net, data = Hooked(now, step_sec), torch.randn(steps * ROWS, WIDTH)
    optimizer = torch.optim.AdamW(net.parameters())
    asked = {"profile_step": 1, "timing_steps": TIMED, "trace": False, "lines": False, **settings}
    profiler = profile_training(net, optimizer, **asked)
    with profiler if profiled else nullcontext():
        for step, rows in enumerate(DataLoader(data, batch_size=ROWS)):  # type: ignore[arg-type]
            net(rows).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            does(step, profiler, now)
    return net, profiler


def times_of(profile: Profile | None) -> tuple[float, int, int]:
    """Seconds of a step, how many were timed as a whole, and how many without hooks."""
    timing = known(known(profile).timing)
    return timing.global_step_sec, timing.whole_steps, timing.unhooked_steps


def test_the_time_of_short_steps_is_of_those_without_hooks_which_are_counted_and_no_others(now: FakeNow) -> None:
    net, profiler = trained(now)
    assert net.hooks == [2] * FIRST + [0] * (TIMED // 2) + [2] * (TIMED // 2)
    assert not (net._forward_hooks or net._forward_pre_hooks)
    assert times_of(profiler.profile) == (STEP_SEC, 8, 8)
    text = " ".join(str(profiler.profile).split())
    assert "Step 1 counted, steps 4-11 timed by parts, 8 more as a whole, 8 without hooks." in text
    assert (
        "8 more ran without our hooks: if these took less, all times are scaled to them." in text
        and "too long" not in text
    )
    run = known(profiler.throughput)
    assert run.notes == (NOTE.format(8),)
    assert (run.batch_cost_sec.average, known(run.ips).average) == (
        STEP_SEC + 2 * HOOK_SEC,
        ROWS / (STEP_SEC + 2 * HOOK_SEC),
    )
    assert run.model_flops == (STEPS - 8) * FLOPS
    alone, _ = trained(now, profiled=False)
    assert torch.equal(net.weight, alone.weight)


def test_steps_that_are_long_or_not_all_alike_keep_their_hooks(now: FakeNow) -> None:
    more: Any = DataLoader(torch.ones(STEPS))  # type: ignore[arg-type]

    def leaves_some_out(step: int, profiler: TrainingProfiler, now: FakeNow) -> None:
        if step % 3 == 0:
            with profiler.outside_of_steps():
                pass

    def fetches_more(step: int, profiler: TrainingProfiler, now: FakeNow) -> None:
        if step % 3 == 0:
            next(iter(more))

    for does, step_sec in (((lambda *_: None), 16 * STEP_SEC), (leaves_some_out, STEP_SEC), (fetches_more, STEP_SEC)):
        net, profiler = trained(now, does, step_sec=step_sec)
        assert net.hooks == [2] * STEPS
        assert times_of(profiler.profile) == (step_sec + 2 * HOOK_SEC, 8, 0)


def test_what_steps_do_not_have_is_not_heard_either_and_in_no_time(now: FakeNow) -> None:
    """After the fifth step without hooks the loop rests, and takes a gradient that no step has."""

    def rests(step: int, profiler: TrainingProfiler, now: FakeNow) -> None:
        if step == FIRST + 4:
            with profiler.outside_of_steps():
                now.sleep(AWAY_SEC)
            one = torch.ones(1, requires_grad=True)
            torch.autograd.grad(one.sum(), one)
            torch.compile(torch.neg, backend="eager")(one)  # our hooks are out of the compiler's sight

    net, profiler = trained(now, rests)
    assert net.hooks == [2] * FIRST + [0] * 8 + [2] * 8
    assert times_of(profiler.profile) == (STEP_SEC, 8, 8)
    run = known(profiler.throughput)
    assert (run.batch_cost_sec.average, run.model_flops) == (STEP_SEC + 2 * HOOK_SEC, (STEPS - 8) * FLOPS)


@pytest.mark.parametrize("error", [None, ValueError])
def test_a_run_that_ends_meanwhile_has_all_its_steps_and_its_report(
    now: FakeNow, error: type[Exception] | None
) -> None:
    ended: list[TrainingProfiler] = []

    def ends(step: int, profiler: TrainingProfiler, now: FakeNow) -> None:
        ended[:] = [profiler]
        if step == FIRST + 4:
            raise error or StopIteration

    with pytest.raises(error or StopIteration):
        trained(now, ends)
    (profiler,) = ended
    # Nothing was heard of a step after them: they may have had other batches.
    assert times_of(profiler.profile) == (STEP_SEC + 2 * HOOK_SEC, 8, 0)
    run = known(profiler.throughput)
    assert run.model_flops == FIRST * FLOPS and run.notes[-1] == NOTE.format(5)


def test_each_window_has_such_steps(now: FakeNow) -> None:
    net, profiler = trained(now, profile_step=[1, FIRST + TIMED], steps=2 * STEPS)
    assert [times_of(one) for one in profiler.profiles] == [(STEP_SEC, 8, 8)] * 2
    # The second one opens where its setting says: those that went without hooks are steps of the run.
    assert [step for step, hooks in enumerate(net.hooks) if not hooks] == [
        *range(FIRST, FIRST + 8),
        *range(FIRST + TIMED + FIRST - 1, FIRST + TIMED + FIRST - 1 + 8),
    ]


def test_a_phase_that_begins_in_them_and_ends_later_is_over_then(now: FakeNow) -> None:
    """An evaluation some steps after it is no part of a step."""
    net = Hooked(now, STEP_SEC)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    settings: dict[str, Any] = {"profile_step": 1, "timing_steps": TIMED, "trace": False, "lines": False}
    data: Any = torch.ones(STEPS * ROWS, WIDTH)
    with profile_training(net, optimizer, **settings) as profiler:
        phase = profiler.phase("sorting")
        for step, rows in enumerate(DataLoader(data, batch_size=ROWS)):
            net(rows).sum().backward()
            if step == FIRST + 2:
                phase.__enter__()
            elif step == FIRST + 8 + 2:
                phase.__exit__(None, None, None)
            optimizer.step()
            if step > FIRST + 8 + 2:
                net.eval()
                with torch.no_grad():
                    for held_out in DataLoader(data, batch_size=4 * ROWS):
                        net(held_out)
                net.train()
    assert known(profiler.throughput).model_flops == (STEPS - 8) * FLOPS


def test_steps_on_pieces_of_a_batch_keep_their_hooks(now: FakeNow) -> None:
    """What is left of the batch could not be followed."""
    net = Hooked(now, STEP_SEC)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    settings: dict[str, Any] = {"profile_step": 1, "timing_steps": TIMED, "trace": False, "lines": False}
    with profile_training(net, optimizer, **settings):
        for rows in DataLoader(torch.ones(4 * 64 * ROWS, WIDTH), batch_size=64 * ROWS):  # type: ignore[arg-type]
            for piece in rows.split(ROWS):
                net(piece).sum().backward()
                optimizer.step()
    assert set(net.hooks) == {2}


def test_a_window_that_has_timed_all_that_was_asked_for_is_complete(now: FakeNow) -> None:
    """The run ends with the last step that was timed as a whole, or while steps run without hooks."""
    for steps in (FIRST, FIRST + 3):
        _, profiler = trained(now, steps=steps)
        assert not any("ended before" in note for note in known(profiler.profile).notes)


@pytest.mark.parametrize("kind", ["two optimizers", "fetched ahead"])
def test_steps_that_do_not_end_by_themselves_and_batches_fetched_ahead_keep_their_hooks(
    kind: str, now: FakeNow
) -> None:
    net, other = Hooked(now, STEP_SEC), nn.Linear(WIDTH, WIDTH)
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1) for one in (net, other)]
    settings: dict[str, Any] = {"profile_step": 1, "timing_steps": TIMED, "trace": False, "lines": False}
    data: Any = DataLoader(torch.ones(STEPS * ROWS, WIDTH), batch_size=ROWS)  # type: ignore[arg-type]

    def ahead() -> Any:
        batches = iter(data)
        held = next(batches)
        for batch in batches:
            yield held
            held = batch

    both = kind == "two optimizers"
    models: Any = {"net": net, "other": other} if both else net
    with profile_training(models, optimizers if both else optimizers[:1], **settings):
        for rows in data if both else ahead():
            (other(net(rows)) if both else net(rows)).sum().backward()
            for optimizer in optimizers if both else optimizers[:1]:
                optimizer.step()
    assert set(net.hooks) == {2}


def test_updates_that_the_loop_leaves_out_are_none_of_these_steps(now: FakeNow) -> None:
    net = Hooked(now, STEP_SEC)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    settings: dict[str, Any] = {"profile_step": 1, "timing_steps": TIMED, "trace": False, "lines": False}

    def step(rows: Tensor) -> None:
        net(rows).sum().backward()
        optimizer.step()

    with profile_training(net, optimizer, **settings) as profiler:
        for number, rows in enumerate(DataLoader(torch.ones(STEPS * ROWS, WIDTH), batch_size=ROWS)):  # type: ignore[arg-type]
            step(rows)
            if number == FIRST + 2:
                with profiler.outside_of_steps("probe"):
                    for _ in range(20):
                        step(rows)
    assert times_of(profiler.profile) == (STEP_SEC, 8, 8)
    assert known(profiler.throughput).model_flops == (STEPS - 8) * FLOPS
