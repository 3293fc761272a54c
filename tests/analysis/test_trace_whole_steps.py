"""Which marks of the profiler are whole steps, and what is said of the others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from torch.profiler import ProfilerActivity, profile, schedule

from lightning_flops.trace import analyze_trace, load_trace
from lightning_flops.trace.columns import Trace
from tests.analysis.trace_events import Event, data_loader, operator, step, trace

FORWARD = ("aten::mm", "aten::relu", "aten::addmm")
BACKWARD = ("autograd::engine::evaluate_function: AddmmBackward0", "autograd::engine::evaluate_function: MmBackward0")
OPTIMIZER = ("aten::_foreach_add_",) * 6
MICRO = FORWARD + BACKWARD
WHOLE = MICRO + OPTIMIZER


def marked(*steps: Sequence[str]) -> Trace:
    """A trace with these operators in each mark, from number 1 on."""
    events: list[Event] = []
    for number, names in enumerate(steps, 1):
        events += (step(number, 1000 * number, 1000), data_loader(1000 * number, 5))
        events += [operator(name, 1000 * number + 10 * place, 5) for place, name in enumerate(names, 1)]
    return trace(*events)


def said(loaded: Trace) -> tuple[tuple[int | None, ...], tuple[str, ...]]:
    """The numbers of the steps, and the notes."""
    return loaded.steps.numbers, analyze_trace(loaded).notes


def test_steps_with_the_same_calls_are_whole() -> None:
    assert said(marked(WHOLE, WHOLE)) == ((1, 2), ())
    assert said(marked(FORWARD, FORWARD, FORWARD)) == ((1, 2, 3), ())
    assert said(marked(WHOLE)) == ((1,), ())
    assert said(marked((), (), ())) == ((1, 2, 3), ())


def left_out(number: int, calls: str, others: int) -> str:
    return f"Step {number} is left out: {calls} ran in it, and {others} or more in the others."


def test_an_edge_with_less_than_half_the_backward_of_any_other_is_no_step() -> None:
    assert said(marked(WHOLE, WHOLE, ())) == ((1, 2), (left_out(3, "no call", 2),))
    assert said(marked(WHOLE, WHOLE, (*FORWARD, "aten::argmax"))) == ((1, 2), (left_out(3, "no call", 2),))
    assert said(marked(FORWARD, WHOLE)) == ((2,), (left_out(1, "no call", 2),))
    assert said(marked(WHOLE + BACKWARD, WHOLE + BACKWARD, WHOLE[:4])) == ((1, 2), (left_out(3, "1 calls", 4),))
    # Half of it may be a step.
    assert said(marked(WHOLE, WHOLE, WHOLE[:4])) == ((1, 2, 3), ())
    # Where one in the middle has none, the loop has such steps.
    assert said(marked(WHOLE, FORWARD, WHOLE, FORWARD)) == ((1, 2, 3, 4), ())
    assert said(marked(WHOLE, (), WHOLE)) == ((1, 2, 3), ())


def test_without_a_backward_all_operators_tell() -> None:
    assert said(marked((), FORWARD, ())) == ((2,), (left_out(1, "no call", 3), left_out(3, "no call", 3)))
    assert said(marked(FORWARD, FORWARD[:1])) == ((1,), (left_out(2, "1 calls", 3),))


@pytest.mark.parametrize("steps", [(MICRO, WHOLE, MICRO, WHOLE), (WHOLE, MICRO, WHOLE, MICRO)])
def test_steps_of_gradient_accumulation_are_whole(steps: tuple[Sequence[str], ...]) -> None:
    assert said(marked(*steps)) == ((1, 2, 3, 4), ())


@pytest.mark.parametrize(
    ("active", "steps", "top", "after", "numbers", "odd"),
    [
        (3, 9, False, False, (2, 3, 4), ()),
        (9, 5, False, False, (2, 3, 4), (5,)),  # the loop ends before the schedule
        (9, 5, False, True, (2, 3, 4), (5,)),  # and then the model is evaluated
        (9, 5, True, False, (2, 3, 4, 5), ()),  # step() at the top of the loop
    ],
)
def test_what_torch_marks_in_loops_that_end_early_or_step_first(
    active: int, steps: int, top: bool, after: bool, numbers: tuple[int, ...], odd: tuple[int, ...], tmp_path: Path
) -> None:
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def train() -> None:
        model(torch.ones(3, 4)).sum().backward()
        optimizer.step()

    end: Callable[[], object] = (lambda: model(torch.ones(3, 4)).argmax()) if after else (lambda: None)
    file = tmp_path / "trace.json"
    with profile(
        activities=[ProfilerActivity.CPU],
        schedule=schedule(wait=1, warmup=1, active=active, repeat=1),
        on_trace_ready=lambda profiler: profiler.export_chrome_trace(str(file)),
    ) as profiler:
        for _ in range(steps):
            if top:
                profiler.step()
            train()
            if not top:
                profiler.step()
        end()
    found = load_trace(file).steps
    assert (found.numbers, tuple(int(mark.split()[1]) for mark in found.odd)) == (numbers, odd)
