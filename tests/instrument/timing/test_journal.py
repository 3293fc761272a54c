"""What operators and module calls write down is added up whenever it is asked for, and whenever it grows long."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lightning_flops.analysis.flop_counts import FlopCounts
from lightning_flops.instrument.counting import counting_mode, thread_state
from lightning_flops.instrument.counting.flop_counter import FlopCounter
from lightning_flops.records import PhaseFlops

BATCH, WIDTH = 4, 8
PRODUCT = 2 * BATCH * WIDTH * WIDTH
CALLS = 12
FLOAT_BYTES = 4


def chain() -> nn.Sequential:
    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(CALLS)))


def step(model: nn.Module) -> None:
    # The input needs no gradient: the first layer has one product less backward than the others.
    model(torch.ones(BATCH, WIDTH)).sum().backward()


@pytest.mark.parametrize("longest", [1, 20, 1 << 14])
def test_counts_do_not_depend_on_how_often_they_are_added_up(longest: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(counting_mode, "_LONG_JOURNAL", longest)
    model = chain()
    counter = FlopCounter(model)
    with counter:
        step(model)
    total = counter.total()
    assert (total.forward, total.backward) == (CALLS * PRODUCT, (2 * CALLS - 1) * PRODUCT)
    record = counter.record()
    assert record.module_calls == {"": 1} | dict.fromkeys((name for name, _ in model.named_modules() if name), 1)
    for index in range(CALLS):
        forward, backward = (
            sum(cell.flops for cell in record.cells if cell.module == f"{index}.0" and cell.phase == phase)
            for phase in ("forward", "backward")
        )
        assert (forward, backward) == (PRODUCT, (2 if index else 1) * PRODUCT)
        (tanh,) = (cell for cell in record.cells if cell.module == f"{index}.1" and cell.phase == "forward")
        numbers = BATCH * WIDTH * FLOAT_BYTES
        assert (tanh.calls, tanh.bytes_read, tanh.bytes_written) == (1, numbers, numbers)


def test_what_is_counted_so_far_can_be_asked_for_at_any_time() -> None:
    model = nn.Linear(WIDTH, WIDTH)
    counter = FlopCounter(model)
    with counter:
        loss = model(torch.ones(BATCH, WIDTH)).sum()
        assert (counter.total().forward, counter.total().backward) == (PRODUCT, 0)
        seen: list[int] = []

        def look(_: torch.Tensor) -> None:
            seen.append(counter.total().forward)

        model.bias.register_post_accumulate_grad_hook(look)  # type: ignore[no-untyped-call]
        loss.backward()
        assert (counter.total().forward, counter.total().backward) == (PRODUCT, PRODUCT)
    assert seen == [PRODUCT]


def test_calls_that_were_forgotten_before_their_backward_are_said_to_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(counting_mode, "_LONG_JOURNAL", 1)
    monkeypatch.setattr(thread_state, "_LONGEST_TABLE", 8)  # two a block: of twelve blocks the last few are remembered
    model = chain()
    with FlopCounter(model) as counter:
        step(model)
    counts = FlopCounts(counter.record())
    assert counts.total == PhaseFlops(forward=CALLS * PRODUCT, backward=(2 * CALLS - 1) * PRODUCT)
    (note,) = counts.notes
    assert "the earliest calls were forgotten" in note
    own = counts.own_by_module()
    assert own[f"{CALLS - 1}.0"] == PhaseFlops(forward=PRODUCT, backward=2 * PRODUCT)
    assert own["0.0"] == PhaseFlops(forward=PRODUCT)
    # What has no module is the root's, whose own forward multiplies nothing.
    remembered = sum(flops.backward for name, flops in own.items() if name)
    assert own[""] == PhaseFlops(backward=counts.backward - remembered)
