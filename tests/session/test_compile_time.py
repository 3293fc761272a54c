"""What torch compiles in a step that is counted is not the price of counting it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from lightning_flops import host_clock
from lightning_flops.instrument.counting.flop_counter import FlopCounter
from lightning_flops.instrument.counting.part_counter import PartCounter
from lightning_flops.instrument.window_states import CountedStep
from lightning_flops.session.samples import SHARE, Samples
from lightning_flops.session.step_flops import StepFlops
from tests.fake_clock import FakeNow
from tests.instrument.small_run import FakeCounter


def test_a_counter_tells_how_long_torch_has_compiled_while_it_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    now = FakeNow()
    monkeypatch.setattr(host_clock, "now", now)

    def slow(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        now.sleep(60.0)
        return graph.forward

    torch._dynamo.reset()
    model = nn.Linear(4, 2)
    compiled = torch.compile(model, backend=slow, dynamic=False)
    counter = FlopCounter(model)
    for rows in (3, 3, 5):  # a minute each for three rows and for five
        with counter:
            compiled(torch.ones(rows, 4))
            now.sleep(1.0)
    compiled(torch.ones(7, 4))  # uncounted
    assert counter.compile_sec == 120.0
    assert counter.total().forward == 2 * (3 + 3 + 5) * 4 * 2


def test_each_step_is_told_its_own_part_of_that() -> None:
    counter = FakeCounter()
    steps = PartCounter(counter)
    found = []
    for counter.compile_sec in (5.0, 5.0, 7.5):
        steps.step_ends()
        found.append(steps.step_compile_sec)
    assert found == [5.0, 0.0, 2.5]


@pytest.mark.parametrize("sampled", [False, True], ids=["of a window", "outside of windows"])
def test_that_time_is_none_that_counting_has_taken(sampled: bool) -> None:
    now, model = FakeNow(), nn.Linear(1, 1)
    flops = StepFlops(model, lambda _: None, updated=model.parameters, shown=True, share=SHARE, padding_counts=False)
    flops.samples = samples = Samples(now, share=SHARE)
    if sampled:
        samples.begins()
    else:
        flops.window_opens(steps_done=0)
    now.sleep(62.0)
    step = CountedStep(flops={("forward", "float32"): 16}, lower_bound=False, sampled=sampled, compile_sec=60.0)
    flops.was_counted(((((1, 1),),), 1), step)
    if sampled:
        samples.ends()
    spent = 2.0 if sampled else 0.0  # that of a window is not paid for by the samples
    assert samples.seconds == spent
    assert samples.affords_from(steps_done=1) == pytest.approx(100.0 + (spent + 2.0) / SHARE)
