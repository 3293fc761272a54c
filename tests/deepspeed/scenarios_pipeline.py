"""Pipelines that a rank trains for the tests; each function says what its rank saw."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from deepspeed import initialize  # bound before the hook is installed, as in many programs
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from deepspeed.runtime.pipe import p2p
from deepspeed.runtime.pipe.engine import PipelineEngine
from torch import nn

import lightning_flops.deepspeed
from lightning_flops import ProfilerConfig
from lightning_flops.instrument.timing.clocks import WallClock
from lightning_flops.run import run, window
from tests.deepspeed.engines import config, installed, left_on
from tests.fake_clock import FakeNow
from tests.prompt_worker import NoChecks

BATCH, MICRO_STEPS, IN, HIDDEN, OUT = 4, 3, 8, 16, 4
STEPS = 9
WINDOW: dict[str, Any] = {"profile_step": 1, "timing_steps": 3, "trace": False}

LOADER_SEC, FORWARD_SEC, BACKWARD_SEC, SEND_SEC, RECEIVE_SEC = 4.0, 1.0, 2.0, 0.25, 0.5
LOSS_SEC, OPTIMIZER_SEC, BETWEEN_SEC = 1.0, 8.0, 0.125


def net(stages: int, **settings: Any) -> PipelineModule:
    """Four linear layers, shared out evenly over the stages."""
    torch.manual_seed(0)
    widths = (IN, HIDDEN, HIDDEN, HIDDEN, OUT)
    layers = [LayerSpec(nn.Linear, wide, high) for wide, high in zip(widths, widths[1:], strict=False)]
    return PipelineModule(
        layers, num_stages=stages, loss_fn=nn.MSELoss(), partition_method="uniform", seed_layers=True, **settings
    )


def batches(wait: Callable[[], None] = lambda: None) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Endless batches, the same on every stage."""
    generator = torch.Generator().manual_seed(1)
    while True:
        wait()
        yield torch.randn(BATCH, IN, generator=generator), torch.randn(BATCH, OUT, generator=generator)


def engine_of(model: PipelineModule, optimizer: Any = None, **settings: Any) -> Any:
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.1)
    settings = config(block=None, accumulate=MICRO_STEPS, train_micro_batch_size_per_gpu=BATCH, **settings)
    return initialize(model=model, optimizer=optimizer, config=settings)[0]


def own_names(engine: Any) -> list[str]:
    """Attributes of the instance that its class has as well, which is what we replace, and what is left elsewhere."""
    return [*sorted(name for name in vars(engine) if hasattr(type(engine), name)), *left_on(engine)]


def attached() -> dict[str, Any]:
    """Evaluates after every other step."""
    engine = engine_of(net(2))
    before = own_names(engine)
    handle = lightning_flops.deepspeed.attach(engine, ProfilerConfig(**WINDOW))
    data, evaluation = batches(), batches()
    tapped = own_names(engine)
    for step in range(STEPS):
        engine.train_batch(data)
        if step % 2:
            engine.eval_batch(evaluation)
    handle.detach()
    assert handle.profile is not None
    return {"profile": handle.profile.to_json(), "left": own_names(engine) == before, "tapped": tapped != before}


def one_stage() -> dict[str, Any]:
    """A pipeline module whose only stage is the whole model, on ranks that see different data."""
    engine = engine_of(net(1))
    handle = lightning_flops.deepspeed.attach(engine, ProfilerConfig(**WINDOW))
    data = batches()
    for _ in range(STEPS):
        engine.train_batch(data)
    handle.detach()
    assert handle.profile is not None
    return {"profile": handle.profile.to_json()}


def four_stages() -> dict[str, Any]:
    """Two stages in the middle, which load no data."""
    engine = engine_of(net(4))
    before = own_names(engine)
    handle = lightning_flops.deepspeed.attach(engine, ProfilerConfig(**WINDOW, tokens_per_sample=7))
    tapped = own_names(engine)
    data = batches()
    for _ in range(STEPS):
        engine.train_batch(data)
    handle.detach()
    assert handle.profile is not None
    return {"profile": handle.profile.to_json(), "left": own_names(engine) == before, "tapped": tapped != before}


def two_pipelines() -> dict[str, Any]:
    """Two stages, each on two ranks that see different data; a block in the config, which names a file."""
    shared = Path("..", "shared").resolve()
    block = {"enabled": True, **WINDOW, "output_file": f"{shared}/flops.txt", "all_ranks": True}
    monitor = {"enabled": True, "output_path": str(shared), "job_name": "logs"}
    with installed():
        engine = engine_of(net(2), flops_profiler=block, csv_monitor=monitor)
    data = batches()
    for _ in range(STEPS):
        engine.train_batch(data)
    handle = lightning_flops.deepspeed.attach(engine)
    handle.detach()  # the run is over
    torch.distributed.barrier()  # until every rank has written
    files = sorted(str(path.relative_to(shared)) for path in shared.rglob("*") if path.suffix in (".json", ".txt"))
    assert handle.profile is not None
    return {"profile": handle.profile.to_json(), "files": files}


def tied() -> dict[str, Any]:
    """A weight that the first layer and the last one share."""
    layers = [TiedLayerSpec("shared", nn.Linear, IN, IN, bias=False), LayerSpec(nn.Linear, IN, IN)]
    layers += [LayerSpec(nn.Linear, IN, IN), TiedLayerSpec("shared", nn.Linear, IN, IN, bias=False)]
    engine = engine_of(PipelineModule(layers, num_stages=2, loss_fn=_sum_of_squares, partition_method="uniform"))
    handle = lightning_flops.deepspeed.attach(engine, ProfilerConfig(**WINDOW))
    data = batches()
    for _ in range(STEPS):
        engine.train_batch(data)
    handle.detach()
    assert handle.profile is not None
    return {"profile": handle.profile.to_json()}


def checkpointed() -> dict[str, Any]:
    """Every layer recomputed in the backward, as DeepSpeed's pipelines do it."""
    engine = engine_of(net(2, activation_checkpoint_interval=1))
    handle = lightning_flops.deepspeed.attach(engine, ProfilerConfig(**WINDOW))
    data = batches()
    for _ in range(STEPS):
        engine.train_batch(data)
    handle.detach()
    assert handle.profile is not None
    return {"profile": handle.profile.to_json()}


def same_bits() -> dict[str, Any]:
    """Losses and weights of a run without the hook, with it and a block that is off, and with it on."""

    def train(**settings: Any) -> tuple[list[float], list[list[float]], list[str]]:
        engine = engine_of(net(2), **settings)
        data = batches()
        losses = [float(engine.train_batch(data)) for _ in range(STEPS)]
        if settings.get("flops_profiler", {}).get("enabled"):
            lightning_flops.deepspeed.attach(engine).detach()
        return losses, [weight.flatten().tolist() for weight in engine.module.parameters()], own_names(engine)

    runs = [train()]
    with installed():
        runs.append(train(flops_profiler={"enabled": False, **WINDOW}))
        runs.append(train(flops_profiler={"enabled": True, **WINDOW, "trace": True}))
    return {"losses": [run[0] for run in runs], "weights": [run[1] for run in runs], "names": [run[2] for run in runs]}


def interrupted() -> dict[str, Any]:
    """An optimizer that raises in a step that is timed."""

    class Failing(torch.optim.SGD):
        steps = 0

        def step(self, *args: Any, **kwargs: Any) -> Any:
            self.steps += 1
            if self.steps == 6:
                raise FloatingPointError("the user's own")
            return super().step(*args, **kwargs)

    model = net(2)
    engine = engine_of(model, Failing(model.parameters(), lr=0.1))
    before = own_names(engine)
    handle = lightning_flops.deepspeed.attach(engine, ProfilerConfig(**WINDOW))
    data = batches()
    raised = ""
    for _ in range(STEPS):
        try:
            engine.train_batch(data)
        except FloatingPointError as error:
            raised = str(error)
            break
    assert handle.profile is not None
    return {"raised": raised, "left": own_names(engine) == before, "profile": handle.profile.to_json()}


class _Slow(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inputs: torch.Tensor, now: FakeNow) -> torch.Tensor:
        ctx.now = now
        now.sleep(FORWARD_SEC)
        return inputs.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        ctx.now.sleep(BACKWARD_SEC)
        return gradients[0], None


def timed() -> dict[str, Any]:
    """Every part of a step takes a time of its own, by a clock of the test's; an evaluation after every step."""
    now = FakeNow()

    class Slow(nn.Linear):
        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = _Slow.apply(super().forward(inputs), now)  # type: ignore[no-untyped-call]
            return result

    class SlowOptimizer(torch.optim.SGD):
        def step(self, *args: Any, **kwargs: Any) -> Any:
            now.sleep(OPTIMIZER_SEC)
            return super().step(*args, **kwargs)

    layers = [LayerSpec(Slow, IN, IN), LayerSpec(Slow, IN, OUT)]
    model = PipelineModule(layers, num_stages=2, loss_fn=nn.MSELoss(), partition_method="uniform")
    with (
        _replaced(window, "clock_for", lambda original: lambda device: WallClock(now)),
        _replaced(run, "Monitor", lambda monitor: lambda: monitor(now)),
        _replaced(run, "StepFlops", lambda original: NoChecks),
        _replaced(p2p, "send", lambda send: _slow(send, now, SEND_SEC)),
        _replaced(p2p, "recv", lambda receive: _slow(receive, now, RECEIVE_SEC)),
        _replaced(PipelineEngine, "_aggregate_total_loss", lambda share: _slow(share, now, LOSS_SEC)),
    ):
        engine = engine_of(model, SlowOptimizer(model.parameters(), lr=0.1))
        handle = lightning_flops.deepspeed.attach(engine, ProfilerConfig(**WINDOW))
        data, evaluation = batches(lambda: now.sleep(LOADER_SEC)), batches(lambda: now.sleep(LOADER_SEC))
        for _ in range(STEPS):
            engine.train_batch(data)
            engine.eval_batch(evaluation)
            now.sleep(BETWEEN_SEC)
        handle.detach()
    assert handle.profile is not None and handle.throughput is not None
    return {"profile": handle.profile.to_json(), "throughput": handle.throughput.to_json()}


def never_reached() -> dict[str, Any]:
    """A run that ends before the step to profile."""
    engine = engine_of(net(2))
    warnings: list[str] = []
    listener = logging.Handler()
    listener.emit = lambda record: warnings.append(record.getMessage())  # type: ignore[method-assign]
    package = logging.getLogger("lightning_flops")
    package.addHandler(listener)
    handle = lightning_flops.deepspeed.attach(engine, ProfilerConfig(profile_step=50))
    engine.train_batch(batches())
    handle.detach()
    package.removeHandler(listener)
    return {"warnings": warnings, "profile": handle.profile}


@contextlib.contextmanager
def _replaced(target: Any, name: str, make: Callable[[Any], Any]) -> Iterator[None]:
    original = getattr(target, name)
    setattr(target, name, make(original))
    try:
        yield
    finally:
        setattr(target, name, original)


def _slow(function: Callable[..., Any], now: FakeNow, seconds: float) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        now.sleep(seconds)
        return function(*args, **kwargs)

    return run


def _sum_of_squares(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return outputs.square().sum()
