"""Where the counter itself fails the user's step goes on, and the record says what failed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_flops import FlopsProfiler
from lightning_flops.measure.counting import mode
from lightning_flops.measure.counting.attribution import ThreadState
from lightning_flops.measure.counting.flop_counter import FlopCounter
from tests.left_on_torch import torch_state


class Checkpointed(nn.Module):
    """A product under a checkpoint, which repeats it for the sigmoid behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 7)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = checkpoint(lambda x: self.layer(x).sigmoid(), x, use_reentrant=False)
        return out


def fails(*args: Any, **kwargs: Any) -> Any:
    raise LookupError("no longer there")


def step(model: nn.Module) -> Callable[[], list[Tensor]]:
    x = torch.randn(3, 5)

    def gradients() -> list[Tensor]:
        model.zero_grad()
        model(x).sum().backward()
        return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]

    return gradients


def notes_of_a_step(model: nn.Module) -> tuple[str, ...]:
    """Runs a step without a counter, and the same with one."""
    run = step(model)
    expected = run()
    with FlopCounter(model) as counter:
        assert all(map(torch.equal, run(), expected))
    return counter.record().notes


@pytest.mark.parametrize(
    ("owner", "name", "where"),
    [
        (ThreadState, "push", "a module's forward pre-hook"),
        (ThreadState, "depth_of", "a module's forward hook"),
        (mode, "bytes_of", "an operator"),
    ],
)
def test_what_fails_while_a_model_runs(owner: Any, name: str, where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(owner, name, fails)
    (note, *_) = notes_of_a_step(Checkpointed())
    assert note == f"Counting failed in {where} (LookupError: no longer there); FLOPs may be missing."


@pytest.mark.parametrize("name", ["__enter__", "_install"])
def test_the_profiler_by_deepspeeds_name_raises_nothing_into_the_loop(
    name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model, before = Checkpointed(), torch_state()
    monkeypatch.setattr(FlopCounter, name, fails)
    profiler = FlopsProfiler(model)
    profiler.start_profile()
    model(torch.ones(2, 5))
    profiler.stop_profile()
    assert torch_state() == before
    profiler.end_profile()
    profiler.print_model_profile()
    assert [record.getMessage() for record in caplog.records] == [
        "the FLOPs profiler failed and is off; the program goes on: LookupError: no longer there",
        "nothing was profiled: start_profile() comes first",
    ]
