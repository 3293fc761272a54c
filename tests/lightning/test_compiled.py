"""Compiled modules stay compiled: counted on their compiled path, never recompiled, same losses bit for bit."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from lightning_flops import FlopsProfilerCallback
from tests.lightning.nets import MakeTrainer, batch_flops, loader, new_net


def compiled(net: Any, what: str, backend: str) -> Any:
    """*net*, of which *what* is compiled; for a fit, which takes the whole."""
    if what == "a submodule":
        net.net = torch.compile(net.net, backend=backend)
    elif what == "a block in place":
        net.net[0].compile(backend=backend)
    elif what == "the step":
        net.training_step = torch.compile(net.training_step, backend=backend)
    return torch.compile(net, backend=backend) if what == "the whole" else net


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.timeout(300)
# A kernel takes seconds to compile, so most are traced, and run operator by operator.
@pytest.mark.parametrize(
    ("what", "backend"),
    [("the whole", "inductor"), *((one, "aot_eager") for one in ("a submodule", "a block in place", "the step"))],
)
def test_a_compiled_model_is_counted_as_it_runs_not_recompiled(trainer: MakeTrainer, what: str, backend: str) -> None:
    def train(*callbacks: Any) -> tuple[list[float], int, int]:
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        net = new_net()
        torch.manual_seed(11)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the compiler's own
            trainer(*callbacks).fit(compiled(net, what, backend), loader(10))
        stats = torch._dynamo.utils.counters["stats"]
        return net.losses, stats["unique_graphs"], sum(torch._dynamo.utils.counters["graph_break"].values())

    plain_losses, plain_graphs, plain_breaks = train()
    callback = FlopsProfilerCallback(profile_step=3, timing_steps=2)
    losses, graphs, breaks = train(callback)
    assert plain_graphs > 0
    assert (graphs, breaks) == (plain_graphs, plain_breaks)
    assert losses == plain_losses
    assert callback.profile is not None
    total = callback.profile.flops
    assert (total.forward, total.backward) == (batch_flops().forward, batch_flops().backward)
