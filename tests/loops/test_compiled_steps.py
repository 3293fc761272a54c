"""A loop of the user's in which ``torch.compile`` was given the step, the update, or what calls the model."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from functools import cache

import pytest
import torch
import torch._dynamo.eval_frame
from torch import Tensor, nn
from torch._dynamo import utils as dynamo
from torch.utils.data import DataLoader

from lightning_flops import profile_training
from lightning_flops.schema.profile import Profile, ThroughputSummary
from tests.results import profile_of, throughput_of

ROWS, IN, HIDDEN, OUT, STEPS = 8, 16, 6, 4, 120
FORWARD = 2 * ROWS * IN * HIDDEN + 2 * ROWS * HIDDEN * OUT
BACKWARD = 2 * FORWARD - 2 * ROWS * IN * HIDDEN  # the input needs no gradient
STEP = FORWARD + BACKWARD

ENDS = vars(torch._dynamo.eval_frame)["_maybe_set_eval_frame"]


@pytest.fixture(autouse=True)
def compiles_anew() -> Iterator[None]:
    torch._dynamo.reset()
    dynamo.clear_compilation_metrics()
    yield
    torch._dynamo.reset()


class Loop:
    """Trains a small network; one part of its step is compiled."""

    def __init__(self, compiled: str, backend: str) -> None:
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(IN, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, OUT))
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

    def train(self, after_step: Callable[[], object] = lambda: None) -> list[Tensor]:
        data = torch.randn(STEPS * ROWS, IN, generator=torch.Generator().manual_seed(1))
        for rows in DataLoader(data, batch_size=ROWS):  # type: ignore[arg-type]
            self.step(rows)
            after_step()
        return [weight.detach() for weight in self.net.parameters()]


def profiled(loop: Loop, *, notified: bool) -> tuple[list[Tensor], Profile, ThroughputSummary]:
    with profile_training(loop.net, loop.optimizer, profile_step=3, timing_steps=2, trace=False) as profiler:
        weights = loop.train(profiler.step if notified else lambda: None)
    return weights, profile_of(profiler), throughput_of(profiler)


@cache
def bare(compiled: str, backend: str) -> tuple[list[Tensor], set[str]]:
    """The weights after the same training without us, and what was warned of."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        weights = Loop(compiled, backend).train()
    torch._dynamo.reset()
    return weights, {str(warning.message) for warning in caught}


@pytest.mark.parametrize("notified", [False, True])
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("compiled", ["loss", "gradients", "update", "step"])
def test_every_step_is_known_whatever_part_of_it_is_compiled(
    compiled: str, backend: str, notified: bool, caplog: pytest.LogCaptureFixture
) -> None:
    expected, said = bare(compiled, backend)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        weights, profile, run = profiled(Loop(compiled, backend), notified=notified)
    assert all(map(torch.equal, weights, expected))
    assert {str(warning.message) for warning in caught} <= said
    assert "profiler failed" not in caplog.text
    assert (profile.flops.forward, profile.flops.backward) == (FORWARD, BACKWARD)
    assert run.steps_counted > 1
    assert run.model_flops == STEPS * STEP
    compiled_files = {str(one.co_filename) for one in dynamo.get_compilation_metrics()}
    assert compiled_files and not [file for file in compiled_files if "/lightning_flops/" in file]
    assert vars(torch._dynamo.eval_frame)["_maybe_set_eval_frame"] is ENDS


@pytest.mark.parametrize("in_place", [False, True])
def test_the_step_in_which_the_model_is_compiled_is_like_the_others(in_place: bool) -> None:
    loop = Loop("", "")
    if in_place:
        loop.net.compile(backend="aot_eager")
    else:
        loop.net = torch.compile(loop.net, backend="aot_eager")  # type: ignore[assignment]
    _, profile, run = profiled(loop, notified=False)
    assert (profile.flops.forward, profile.flops.backward) == (FORWARD, BACKWARD)
    assert (run.steps_estimated, run.model_flops) == (0, STEPS * STEP)


def test_a_model_that_is_compiled_after_the_profiler_has_begun_has_its_flops() -> None:
    loop = Loop("", "aot_eager")
    with profile_training(loop.net, loop.optimizer, profile_step=2, timing_steps=2, trace=False) as profiler:
        loop.net = torch.compile(loop.net, backend="aot_eager")  # type: ignore[assignment]
        for rows in DataLoader(torch.ones(ROWS * 12, IN), batch_size=ROWS):  # type: ignore[arg-type]
            loop.step(rows)
    profile = profile_of(profiler)
    assert (profile.modules[0].total.forward, profile.modules[0].total.backward) == (FORWARD, BACKWARD)
    assert (profile.samples, dict(profile.uncounted)) == (ROWS, {})
