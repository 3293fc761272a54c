"""The window of a training loop in miniature, whose work and whose clock are the test's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from lightning_flops.measure.counting.flop_counter import FlopCounter
from lightning_flops.measure.notes import Notes
from lightning_flops.measure.recorder import Recorder
from lightning_flops.measure.timing.clocks import WallClock
from lightning_flops.measure.torch_private.needed import depth
from lightning_flops.records import PhaseFlops, PhaseSeconds, RunContext, WindowRecord
from tests.fake_clock import FakeNow
from tests.left_on_torch import torch_state

CONTEXT = RunContext(
    framework="test", framework_version="1", torch_version="2", device_type="cpu", device_name="cpu", precision="32"
)
INPUTS, SHAPES = torch.ones(4, 3), ((4, 3), (4,))


class Run:
    """A training loop in miniature: each batch waits 1 s, runs forward 2 s, backward 4 s, and the optimizer 8 s.

    Its forward has 2·4·3·2 = 48 FLOPs, and its backward as many, since the inputs need no gradient.
    """

    def __init__(
        self, *, profile_step: int = 0, timing_steps: int = 3, settle_steps: int = 2, clock: bool = True
    ) -> None:
        self.now, self.net = FakeNow(), nn.Linear(3, 2)
        self.optimizer = torch.optim.SGD(self.net.parameters())
        self.profile_step, self.steps_done = profile_step, 0
        self.notes = Notes()
        self.states: list[str] = []
        self.recorder = Recorder(
            self.net,
            timing_steps=timing_steps,
            settle_steps=settle_steps,
            clock=WallClock(self.now) if clock else None,
            new_counter=FlopCounter,
            notes=self.notes,
        )
        self.open_if_due()

    def open_if_due(self) -> None:
        if self.steps_done == self.profile_step:
            self.recorder.open(steps_done=self.steps_done)

    def part(self, name: str, seconds: float, work: Callable[[], Any]) -> Any:
        marking = self.recorder.marking
        if marking:
            self.recorder.enter(name)
        self.now.sleep(seconds)
        result = work()
        if marking:
            self.recorder.leave()
        return result

    def batch(self, *, shapes: Any = SHAPES, ends_step: bool = True, slow: float = 0.0) -> None:
        self.states.append(self.recorder.state.value)
        with self.recorder.batch_scope():
            self.part("data_wait", 1.0, lambda: INPUTS @ INPUTS.T)  # what a loader computes is not the model's work
            loss = self.part("forward", 2.0 + slow, lambda: self.net(INPUTS).sum())
            self.part("backward", 4.0, loss.backward)
            if ends_step:
                self.part("optimizer", 8.0, self.optimizer.step)
            self.recorder.end_batch(shapes=shapes, samples=4, tokens=None, ends_step=ends_step)
        self.steps_done += ends_step
        self.open_if_due()

    def close(self) -> WindowRecord:
        window = self.recorder.close(context=CONTEXT)
        assert window is not None
        return window


def test_the_counted_step_is_the_one_that_begins_after_n_steps_then_it_settles_then_it_times() -> None:
    run = Run(profile_step=2, timing_steps=3, settle_steps=2)
    for _ in range(9):
        run.batch()
    assert run.states == [
        "waiting",
        "waiting",
        "counting",
        "settling",
        "settling",
        "timing",
        "timing",
        "timing",
        "closed",
    ]
    window = run.close()
    assert [step.index for step in window.counted_steps] == [2]
    assert [step.index for step in window.timed_steps] == [5, 6, 7]
    assert window.flops.by_bucket() == {("forward", "float32"): 48, ("backward", "float32"): 48}
    assert window.counted_steps[0].flops == PhaseFlops(forward=48, backward=48)
    assert window.counted_steps[0].seconds is None
    assert window.notes == ()


def test_micro_steps_add_up_to_one_step() -> None:
    run = Run(timing_steps=1, settle_steps=1)
    for _ in range(3):
        for micro in range(4):
            run.batch(ends_step=micro == 3)
    window = run.close()
    step = window.counted_steps[0]
    assert step.flops == PhaseFlops(forward=4 * 48, backward=4 * 48)
    assert (step.micro_steps, step.samples) == (4, 16)
    assert (step.signature.forwards, step.signature.backwards, step.signature.updates) == (4, 4, 1)
    assert step.signature.batches == ("[4, 3] [4]",) * 4
    assert [timed.seconds for timed in window.timed_steps] == [
        PhaseSeconds(data_wait=4.0, forward=8.0, backward=16.0, optimizer=8.0)
    ]


def test_only_steps_of_the_counted_signature_are_timed() -> None:
    run = Run(timing_steps=3, settle_steps=2)
    for i in range(40):
        run.batch(shapes=SHAPES if i % 2 == 0 else ((1, 3), (1,)), slow=0.0 if i % 2 == 0 else 50.0)
    window = run.close()
    assert not window.variable
    assert [step.seconds and step.seconds.forward for step in window.timed_steps] == [2.0, 2.0, 2.0]
    assert [step.index for step in window.timed_steps] == [4, 6, 8]
    assert window.notes == (
        "Steps differ: only 3 of the 6 steps watched had the counted step's batch shapes and numbers of forwards, "
        "backwards and updates. FLOPs, times and rates are of such steps.",
    )


def test_signatures_keep_changing_if_too_few_of_twice_as_many_steps_are_like_the_counted_one() -> None:
    run = Run(timing_steps=20, settle_steps=2)
    said: list[str] = []
    run.notes.speak = said.append
    for i in range(70):
        run.batch(shapes=((4, 100 + i), (4,)) if i % 3 else SHAPES)
    window = run.close()
    # Of the 40 steps from 3 on, 14 are like step 0. The last 20 of these are timed, and 19 more are counted.
    assert said == ["Waiting for steps like step 0: 7 of 20 were."]
    assert run.states.count("timing") == 40
    assert window.variable
    assert [step.index for step in window.timed_steps] == list(range(23, 43))
    assert [step.index for step in window.counted_steps] == [0, *range(43, 62)]


def test_a_run_that_ends_early_reports_the_steps_it_has_and_says_so() -> None:
    run = Run(profile_step=1, timing_steps=20, settle_steps=2)
    for _ in range(7):
        run.batch()
    window = run.close()
    assert [step.index for step in window.timed_steps] == [4, 5, 6]
    assert window.notes == (
        "Training ended before the window closed.",
        "3 of the 20 steps asked for were timed: the run was too short.",
    )


def test_a_step_cut_off_in_the_middle_is_neither_counted_nor_timed() -> None:
    run = Run(timing_steps=20, settle_steps=1)
    for _ in range(4):
        run.batch()
    run.batch(ends_step=False)
    assert [step.index for step in run.close().timed_steps] == [2, 3]

    cut_off = Run()
    cut_off.batch(ends_step=False)
    assert cut_off.recorder.close(context=CONTEXT) is None


@pytest.mark.parametrize(
    ("part", "work", "mixed"),
    [
        # autograd.grad inside training_step
        ("forward", lambda net: torch.autograd.grad(net(INPUTS).sum(), [*net.parameters()]), ("forward", "backward")),
        ("optimizer", lambda net: net(INPUTS), ("forward", "optimizer")),  # a closure the loop does not see
        ("forward", lambda net: net(INPUTS), ()),
    ],
)
def test_work_of_one_phase_in_the_part_of_another_makes_their_times_inseparable(
    part: str, work: Callable[[nn.Module], Any], mixed: tuple[str, ...]
) -> None:
    run = Run(timing_steps=1, settle_steps=1)
    with run.recorder.batch_scope():
        run.part(part, 2.0, lambda: work(run.net))
        run.recorder.end_batch(shapes=SHAPES, samples=4, tokens=None, ends_step=True)
    window = run.close()
    assert window.mixed_phases == mixed
    assert any("cannot be separated" in note for note in window.notes) == bool(mixed)


def test_a_device_without_a_clock_is_counted_and_not_timed() -> None:
    run = Run(clock=False)
    run.batch()
    assert run.recorder.state.value == "closed"
    window = run.close()
    assert window.timed_steps == ()
    assert "no clock" in window.notes[0]


def test_a_window_that_is_abandoned_inside_a_backward_leaves_no_dispatch_mode_behind() -> None:
    net = nn.Linear(3, 2)
    recorder = Recorder(net, timing_steps=1, settle_steps=0, clock=None, new_counter=FlopCounter, notes=Notes())
    recorder.open(steps_done=0)
    before = torch_state()
    scope = recorder.batch_scope()
    scope.__enter__()
    loss = net(torch.ones(4, 3)).sum()
    loss.register_hook(lambda gradient: recorder.abandon())
    loss.backward()
    assert depth() == 1  # torch resets a thread's modes after every node
    scope.__exit__(None, None, None)
    assert torch_state() == before
