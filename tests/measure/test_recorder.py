from __future__ import annotations

import pytest
import torch
from torch import nn

from lightning_flops.measure.counting.flop_counter import FlopCounter
from lightning_flops.measure.notes import Notes
from lightning_flops.measure.recorder import Recorder
from lightning_flops.measure.torch_private.needed import depth
from lightning_flops.records import FlopPhase, PhaseFlops, PhaseSeconds
from tests.left_on_torch import torch_state
from tests.measure.small_run import CONTEXT, SHAPES, Run


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
    assert window.flops == run.counter.record()
    assert run.counter.flops == {"forward": 100, "backward": 200, "recompute": 0, "optimizer": 7}
    assert window.counted_steps[0].flops == PhaseFlops(forward=100, backward=200, optimizer=7)
    assert window.counted_steps[0].seconds is None
    assert window.notes == ()


def test_micro_steps_add_up_to_one_step() -> None:
    run = Run(profile_step=0, timing_steps=1, settle_steps=1)
    for _ in range(3):
        for micro in range(4):
            run.batch(ends_step=micro == 3)
    window = run.close()
    step = window.counted_steps[0]
    assert step.flops == PhaseFlops(forward=400, backward=800, optimizer=7)
    assert (step.micro_steps, step.samples) == (4, 16)
    assert (step.signature.forwards, step.signature.backwards, step.signature.updates) == (4, 4, 1)
    assert step.signature.batches == ("[4, 3] [4]",) * 4
    assert [timed.seconds for timed in window.timed_steps] == [
        PhaseSeconds(data_wait=4.0, forward=8.0, backward=16.0, optimizer=8.0)
    ]


def test_only_steps_of_the_counted_signature_are_timed() -> None:
    run = Run(profile_step=0, timing_steps=3, settle_steps=2)
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
    run = Run(profile_step=0, timing_steps=20, settle_steps=2)
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
    run = Run(profile_step=0, timing_steps=20, settle_steps=1)
    for _ in range(4):
        run.batch()
    run.batch(ends_step=False)
    assert [step.index for step in run.close().timed_steps] == [2, 3]

    cut_off = Run(profile_step=0)
    cut_off.batch(ends_step=False)
    assert cut_off.recorder.close(context=CONTEXT) is None


@pytest.mark.parametrize(
    ("part", "work", "mixed"),
    [
        ("forward", "backward", ("forward", "backward")),  # autograd.grad inside training_step
        ("optimizer", "forward", ("forward", "optimizer")),  # a closure the loop does not see
        ("backward", "backward", ()),
    ],
)
def test_work_of_one_phase_in_the_part_of_another_makes_their_times_inseparable(
    part: str, work: FlopPhase, mixed: tuple[str, ...]
) -> None:
    run = Run(profile_step=0, timing_steps=1, settle_steps=1)
    with run.recorder.batch_scope():
        run.recorder.enter(part)
        run.part(part, 2.0, work, 50)
        run.recorder.leave()
        run.recorder.end_batch(shapes=SHAPES, samples=4, tokens=None, ends_step=True)
    window = run.close()
    assert window.mixed_phases == mixed
    assert any("cannot be separated" in note for note in window.notes) == bool(mixed)


def test_a_device_without_a_clock_is_counted_and_not_timed() -> None:
    run = Run(profile_step=0, clock=False)
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
