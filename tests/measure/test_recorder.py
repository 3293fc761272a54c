"""A window that is abandoned where no loop of a test abandons it."""

from __future__ import annotations

import torch
from torch import nn

from lightning_flops.measure.counting.flop_counter import FlopCounter
from lightning_flops.measure.notes import Notes
from lightning_flops.measure.recorder import Recorder
from lightning_flops.measure.torch_private.needed import depth
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
