"""Which marks of the profiler are whole steps, and what is said of the others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from torch.profiler import ProfilerActivity, profile, schedule

from lightning_flops.trace import analyze_trace, load_trace
from lightning_flops.trace.columns import Trace
from tests.analysis.trace_events import Event, data_loader, kernel, launch, operator, step, trace

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


def test_a_mark_in_which_nothing_ran_is_no_step() -> None:
    nothing = "is left out: no operator ran in it, and no kernel was launched."
    assert said(marked(WHOLE, WHOLE, ())) == ((1, 2), (f"Step 3 {nothing}",))
    assert said(marked((), WHOLE)) == ((2,), (f"Step 1 {nothing}",))
    assert said(marked((), FORWARD, ())) == ((2,), (f"Step 1 {nothing}", f"Step 3 {nothing}"))
    assert said(marked(WHOLE, (), WHOLE)) == ((1, 2, 3), ())


def test_a_mark_without_a_backward_is_no_step_of_training() -> None:
    without = "is left out: it has no backward, and the others have one."
    assert said(marked(WHOLE, WHOLE, (*FORWARD, "aten::argmax"))) == ((1, 2), (f"Step 3 {without}",))
    assert said(marked(FORWARD, WHOLE)) == ((2,), (f"Step 1 {without}",))
    # Where one in the middle has none, the loop has such steps.
    assert said(marked(WHOLE, FORWARD, WHOLE, FORWARD)) == ((1, 2, 3, 4), ())
    assert said(marked(WHOLE, WHOLE, FORWARD, (*FORWARD, "aten::argmax"))) == ((1, 2, 3, 4), ())


def test_a_mark_that_ends_or_begins_in_a_backward_is_no_step() -> None:
    end = "Step 3 is left out: it has the first 4 of step 1's 11 calls, and no more."
    assert said(marked(WHOLE, WHOLE, WHOLE[:4])) == ((1, 2), (end,))
    assert said(marked(WHOLE, WHOLE[:4])) == ((1,), (end.replace("3", "2", 1),))
    begin = "Step 1 is left out: it has the last 7 of step 2's 11 calls, and no more."
    assert said(marked(WHOLE[4:], WHOLE)) == ((2,), (begin,))


@pytest.mark.parametrize("steps", [(MICRO, WHOLE, MICRO, WHOLE), (WHOLE, MICRO, WHOLE, MICRO)])
def test_steps_of_gradient_accumulation_are_whole(steps: tuple[Sequence[str], ...]) -> None:
    assert said(marked(*steps)) == ((1, 2, 3, 4), ())


def test_two_steps_of_gradient_accumulation_are_whole_and_the_doubt_is_said() -> None:
    first = "Step 1 is taken for whole, though step 2 has 11 calls, and it 5."
    assert said(marked(MICRO, WHOLE)) == ((1, 2), (first,))
    second = "Step 2 is taken for whole, though it has the first 5 of step 1's 11 calls, and no more."
    assert said(marked(WHOLE, MICRO)) == ((1, 2), (second,))


def test_the_little_that_some_steps_do_alone_cuts_no_step() -> None:
    logs = (*FORWARD, "aten::item")
    doubt = "is taken for whole, though it has the first 3 of step 1's 4 calls, and no more."
    assert said(marked(logs, FORWARD)) == ((1, 2), (f"Step 2 {doubt}",))
    zeroes = ("aten::zero_", *WHOLE)
    doubt = "is taken for whole, though it has the last 11 of step 2's 12 calls, and no more."
    assert said(marked(WHOLE, zeroes, zeroes)) == ((1, 2, 3), (f"Step 1 {doubt}",))


def test_the_first_part_of_an_inference_is_no_step() -> None:
    cut = "Step 2 is left out: it has the first 1 of step 1's 3 calls, and no more."
    assert said(marked(FORWARD, FORWARD[:1])) == ((1,), (cut,))


def test_stubs_at_both_ends_are_left_out_whatever_they_call() -> None:
    few = "it has 1 calls of operators or kernels, and those between the first and the last 3 or more"
    stub = ("aten::empty",)
    assert said(marked(stub, FORWARD, stub)) == ((2,), (f"Step 1 is left out: {few}.", f"Step 3 is left out: {few}."))
    # Of training something of a backward is in it, so it may be a step.
    odd = (BACKWARD[0],)
    few = "it has 1 calls of operators or kernels, and those between the first and the last 11 or more"
    assert said(marked(WHOLE, WHOLE, odd)) == ((1, 2, 3), (f"Step 3 is taken for whole, though {few}.",))


def test_of_two_marks_without_a_backward_neither_is_known_to_be_cut() -> None:
    doubt = "Step 2 is taken for whole, though step 1 has 3 calls, and it 1."
    assert said(marked(FORWARD, ("aten::empty",))) == ((1, 2), (doubt,))


def test_threads_that_do_not_train_call_what_they_like() -> None:
    events = []
    for number, copies in ((1, (0, 30)), (2, (20, 90)), (3, (50,))):
        at = 1000 * number
        events += [step(number, at, 1000), *(operator(name, at + 10 * i, 5) for i, name in enumerate(FORWARD, 1))]
        events += [operator(name, at + 10 * i, 5, thread=3) for i, name in enumerate(BACKWARD, 10)]
        events += [operator("aten::pin_memory", at + moment, 1, thread=2) for moment in copies]
    assert said(trace(*events)) == ((1, 2, 3), ())
    events.append(step(4, 4000, 100))
    events += [operator(name, 4000 + 10 * i, 5) for i, name in enumerate(FORWARD, 1)]
    events.append(operator(BACKWARD[0], 4090, 5, thread=3))
    cut = "Step 4 is left out: it has the first 4 of step 1's 5 calls, and no more."
    assert said(trace(*events)) == ((1, 2, 3), (cut,))


def test_where_another_thread_does_all_its_calls_tell() -> None:
    events = [step(1, 1000, 1000), step(2, 2000, 1000), operator("aten::mm", 1100, 5, thread=2)]
    assert said(trace(*events))[0] == (1,)


def test_without_operators_kernels_tell_by_the_order_of_their_launches() -> None:
    names, events = ("gemm", "relu", "gemm", "add"), []
    for number, count in ((1, 4), (2, 4), (3, 1)):
        events.append(step(number, 1000 * number, 1000))
        for place, name in enumerate(names[:count]):
            which = 10 * number + place
            events += [launch(which, 1000 * number + place), kernel(which, 1000 * number + 200 - place, 1, name=name)]
    cut = "Step 3 is left out: it has the first 1 of step 1's 4 calls, and no more."
    assert said(trace(*events)) == ((1, 2), (cut,))


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
    assert (found.numbers, tuple(mark.number for mark in found.odd)) == (numbers, odd)
