"""A loop of the user's in which ``torch.compile`` was given the step, the update, or what calls the model."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import pytest
import torch
import torch._dynamo.eval_frame
from torch import Tensor, nn
from torch._dynamo import utils as dynamo
from torch.utils.data import DataLoader

from lightning_flops import profile_training
from lightning_flops.instrument.torch_private import dispatch
from lightning_flops.schema.profile import Profile
from lightning_flops.schema.throughput import ThroughputSummary
from tests.loops.test_inference_modes import Counting

ROWS, IN, HIDDEN, OUT, STEPS = 8, 16, 6, 4, 60
FORWARD = 2 * ROWS * IN * HIDDEN + 2 * ROWS * HIDDEN * OUT
BACKWARD = 2 * FORWARD - 2 * ROWS * IN * HIDDEN  # the input needs no gradient
STEP = FORWARD + BACKWARD

ENDS = vars(torch._dynamo.eval_frame)["_maybe_set_eval_frame"]


@pytest.fixture(autouse=True)
def compiles_anew() -> Iterator[None]:
    torch._dynamo.reset()
    dynamo.clear_compilation_metrics()
    dynamo.counters.clear()
    yield
    torch._dynamo.reset()


class TwoLayers(nn.Module):
    """Of the user's own: torch compiles no frame of an ``nn.Sequential`` that is compiled in place and has no hook."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(IN, HIDDEN), nn.Linear(HIDDEN, OUT)

    def forward(self, rows: Tensor) -> Tensor:
        return self.second(self.first(rows).relu())  # type: ignore[no-any-return]


class Loop:
    """Trains a small network; one part of its step is compiled."""

    def __init__(self, compiled: str, backend: str) -> None:
        torch.manual_seed(0)
        self.net: nn.Module = TwoLayers()
        self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=0.01)
        if compiled:
            setattr(self, compiled, torch.compile(getattr(self, compiled), backend=backend))

    def loss(self, rows: Tensor) -> Tensor:
        return self.net(rows).square().mean()  # type: ignore[no-any-return]

    def gradients(self, rows: Tensor) -> None:
        self.loss(rows).backward()

    def update(self) -> None:
        self.optimizer.step()

    def step(self, rows: Tensor) -> None:
        self.gradients(rows)
        self.update()
        self.optimizer.zero_grad()

    def train(self) -> list[Tensor]:
        data = torch.randn(STEPS * ROWS, IN, generator=torch.Generator().manual_seed(1))
        for rows in DataLoader(data, batch_size=ROWS):  # type: ignore[arg-type]
            self.step(rows)
        return [weight.detach() for weight in self.net.parameters()]


def profiled(loop: Loop) -> tuple[list[Tensor], Profile, ThroughputSummary]:
    with profile_training(loop.net, loop.optimizer, profile_step=3, timing_steps=2, trace=False) as profiler:
        weights = loop.train()
    assert profiler.profile is not None and profiler.throughput is not None
    return weights, profiler.profile, profiler.throughput


@contextmanager
def warned() -> Iterator[set[str]]:
    """What is warned of inside, each time that it is."""
    said: set[str] = set()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield said
    said.update(str(warning.message) for warning in caught)


def compilations() -> tuple[list[str], int]:
    """The code that was compiled, each time that it was, and how often a graph broke."""
    code = [f"{one.co_filename}:{one.co_name}" for one in dynamo.get_compilation_metrics()]
    return code, sum(dynamo.counters["graph_break"].values())


@cache
def bare(compiled: str, backend: str) -> tuple[list[Tensor], set[str], tuple[list[str], int]]:
    """The weights after the same training without us, what was warned of, and what was compiled."""
    with warned() as said:
        weights = Loop(compiled, backend).train()
    found = compilations()
    torch._dynamo.reset()
    dynamo.clear_compilation_metrics()
    dynamo.counters.clear()
    return weights, said, found


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("compiled", ["net", "loss", "gradients", "update", "step"])
def test_every_step_is_known_whatever_part_of_it_is_compiled_and_nothing_is_compiled_besides(
    compiled: str, backend: str, caplog: pytest.LogCaptureFixture
) -> None:
    expected, said, compiled_alone = bare(compiled, backend)
    with warned() as said_with_us:
        weights, profile, run = profiled(Loop(compiled, backend))
    code, breaks = compilations()
    if compiled in ("update", "step"):  # torch compiles an optimizer's step that has hooks in fewer pieces
        assert len(code) <= len(compiled_alone[0]) and breaks <= compiled_alone[1]
    else:
        assert (code, breaks) == compiled_alone
    assert all(map(torch.equal, weights, expected))
    assert said_with_us <= said
    assert "profiler failed" not in caplog.text
    assert (profile.flops.forward, profile.flops.backward) == (FORWARD, BACKWARD)
    assert run.steps_counted + run.steps_by_formula + run.steps_estimated == STEPS
    assert (run.model_flops, run.steps_estimated) == (STEPS * STEP, 0)
    assert vars(torch._dynamo.eval_frame)["_maybe_set_eval_frame"] is ENDS


def test_a_model_that_is_compiled_in_place() -> None:
    alone, loop = Loop("", ""), Loop("", "")
    alone.net.compile(backend="aot_eager")
    alone.train()
    compiled_alone = compilations()
    torch._dynamo.reset()
    dynamo.clear_compilation_metrics()
    dynamo.counters.clear()
    loop.net.compile(backend="aot_eager")
    _, profile, run = profiled(loop)
    assert compilations() == compiled_alone
    assert (profile.flops.forward, profile.flops.backward) == (FORWARD, BACKWARD)
    assert (run.model_flops, run.steps_estimated) == (STEPS * STEP, 0)


# ---- torch's flag for dispatch modes, which the call of a compiled function restores


def compiled(function: Callable[[], Any]) -> Callable[[], Any]:
    """A function that was given to torch.compile, and runs *function* outside of what is compiled."""
    outside = torch.compiler.disable(function)

    def run() -> Any:
        return outside()

    return torch.compile(run, backend="eager")


def test_a_mode_that_was_pushed_in_a_compiled_call_sees_what_comes_after_it() -> None:
    mode, rows = Counting(), torch.ones(2)
    inner = compiled(lambda: dispatch.push(mode))

    def outer() -> None:
        inner()
        rows.neg()

    compiled(outer)()
    rows.neg()
    dispatch.remove(mode)
    rows.neg()
    assert mode.operators == 2
    assert vars(torch._dynamo.eval_frame)["_maybe_set_eval_frame"] is ENDS


def test_a_mode_that_was_removed_in_a_compiled_call_leaves_operators_as_they_are() -> None:
    mode = Counting()
    dispatch.push(mode)
    compiled(lambda: dispatch.remove(mode))()
    assert torch.zeros(2).add(1).tolist() == [1, 1]  # torch failed here for want of a mode
    assert mode.operators == 0
    assert vars(torch._dynamo.eval_frame)["_maybe_set_eval_frame"] is ENDS
