"""A window that is abandoned where no loop of a test abandons it."""

from __future__ import annotations

import torch
from torch import nn

from lightning_flops.measure.counting.flop_counter import FlopCounter
from lightning_flops.measure.notes import Notes
from lightning_flops.measure.recorder import Phase, Recorder
from lightning_flops.measure.timing.phase_timer import WallClock
from lightning_flops.measure.torch_private.needed import depth
from tests.fake_clock import FakeNow
from tests.left_on_torch import torch_state


def test_a_window_that_is_abandoned_inside_a_backward_leaves_no_dispatch_mode_behind() -> None:
    net = nn.Linear(3, 2)
    recorder = Recorder(net, timing_steps=1, settle_steps=0, clock=None, new_counter=FlopCounter, notes=Notes())
    recorder.open(steps_done=0)
    before = torch_state()
    with recorder.batch_scope():
        loss = net(torch.ones(4, 3)).sum()
        loss.register_hook(lambda gradient: recorder.abandon())
        loss.backward()
        assert depth() == 1  # torch resets a thread's modes after every node
    assert torch_state() == before


def test_steps_that_are_left_alone_are_no_more_than_are_timed() -> None:
    net, recorder_clock = nn.Linear(3, 2), WallClock(FakeNow())
    recorder = Recorder(
        net, timing_steps=2, settle_steps=0, clock=recorder_clock, new_counter=FlopCounter, notes=Notes()
    )
    recorder.open(steps_done=0)
    recorder.settle_for(50)
    idle = []
    for _ in range(4):
        with recorder.batch_scope():
            net(torch.ones(4, 3)).sum().backward()
            recorder.end_batch(shapes=((4, 3),), samples=4, tokens=None, ends_step=True)
        idle.append(recorder.state is Phase.SETTLING)
    recorder.abandon()
    assert idle == [True, True, False, False]  # after the counted one, after each of two, and while one is timed
