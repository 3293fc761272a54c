"""What belongs to a step, and when its parts begin and end."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import deepspeed
import torch
from deepspeed.accelerator import get_accelerator
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.utils.data import DataLoader, TensorDataset

from lightning_flops.deepspeed import attach
from lightning_flops.instrument.timing.clocks import WallClock
from lightning_flops.run.monitor import Monitor
from lightning_flops.sinks.services import Services
from tests.deepspeed.engines import (
    BLOCK,
    SAMPLES,
    Net,
    batches,
    config,
    engine_of,
    installed,
    left_on,
    logged,
    outcome,
    train,
)
from tests.fake_clock import FakeNow

STEPS = 8


def torch_style(stage: int) -> dict[str, Any] | None:
    def step(engine: Any, batch: Tensor) -> Tensor:
        loss: Tensor = engine(batch).square().sum()
        loss.backward()  # type: ignore[no-untyped-call]
        engine.step()
        return loss

    with installed():
        engine = engine_of(config(stage=stage, accumulate=2))
        if not getattr(engine, "_support_torch_style_backward", False):
            engine.destroy()
            return None
        train(engine, 2 * STEPS, step=step)
        return outcome(engine)


def two_forwards_one_backward() -> dict[str, Any]:
    def step(engine: Any, batch: Tensor) -> Tensor:
        loss: Tensor = (engine(batch) * engine(batch + 1)).sum()
        engine.backward(loss)
        engine.step()
        return loss

    with installed():
        engine = engine_of(config())
        train(engine, STEPS, step=step)
        return outcome(engine)


class CallsItself(nn.Module):
    """Its forward calls the whole of another forward of its own, as Lightning's training_step does with self(x)."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Net()

    def forward(self, inputs: Tensor, *, again: bool = True) -> Tensor:
        result: Tensor = self(inputs, again=False) if again else self.net(inputs)
        return result


def root_called_inside_itself() -> dict[str, Any]:
    with installed():
        engine = engine_of(config(stage=1), CallsItself())
        train(engine, STEPS)
        return outcome(engine)


def no_sync() -> dict[str, Any]:
    """Three micro-batches under no_sync, the fourth with the step; the config knows of no accumulation."""
    with installed():
        engine = engine_of(config(stage=1))
        for index, batch in enumerate(batches(4 * STEPS)):
            if index % 4 < 3:
                with engine.no_sync():
                    engine.backward(engine(batch).square().sum())
            else:
                engine.backward(engine(batch).square().sum())
                engine.step()
        return outcome(engine)


def border_set_by_hand() -> dict[str, Any]:
    with installed():
        engine = engine_of(config(stage=1))
        for index, batch in enumerate(batches(3 * STEPS)):
            last = index % 3 == 2
            engine.set_gradient_accumulation_boundary(last)
            engine.backward(engine(batch).square().sum())
            if last:
                engine.step()
        return outcome(engine)


def border_left_to_the_loop() -> dict[str, Any] | None:
    settings = config(stage=1, managed_gradient_accumulation=False)
    with installed():
        engine = engine_of(settings)
        if not hasattr(type(engine), "managed_gradient_accumulation"):
            engine.destroy()
            return None
        for index, batch in enumerate(batches(3 * STEPS)):
            engine.backward(engine(batch).square().sum())
            if index % 3 == 2:
                engine.step()
        return outcome(engine, global_samples=engine.global_samples)


def skipped_updates(stage: int) -> dict[str, Any]:
    """Loss scaling finds infinite gradients in every one of these steps, and skips the update."""

    def step(engine: Any, batch: Tensor) -> Tensor:
        loss: Tensor = engine(batch).square().sum()
        engine.backward(loss)
        engine.step()
        return loss

    accelerator = get_accelerator()
    with installed(), patch.object(accelerator, "is_fp16_supported", lambda: True):  # slow on a CPU, and right
        engine = engine_of(config(stage=stage, fp16={"enabled": True, "initial_scale_power": 40, "hysteresis": 1}))
        train(engine, STEPS, step=step)
        return outcome(engine, skipped=engine.skipped_steps, steps=engine.global_steps)


def frozen_helpers() -> dict[str, Any]:
    """A teacher in evaluation mode before the engine's forward, and a no-grad forward of the engine itself after it."""
    teacher = nn.Linear(8, 4).eval()

    def step(engine: Any, batch: Tensor) -> Tensor:
        with torch.no_grad():
            wanted = teacher(batch)
        out = engine(batch)
        with torch.no_grad():
            out_before = engine(batch)
        loss: Tensor = (out - wanted).square().sum() + out_before.sum()
        engine.backward(loss)
        engine.step()
        return loss

    with installed():
        engine = engine_of(config())
        train(engine, STEPS, step=step)
        return outcome(engine)


def product_in_the_loss() -> dict[str, Any]:
    """What runs between the engine's forward and the backward is forward time, and forward FLOPs."""

    def step(engine: Any, batch: Tensor) -> Tensor:
        out = engine(batch)
        loss: Tensor = (out @ out.T).square().sum()
        engine.backward(loss)
        engine.step()
        return loss

    with installed():
        engine = engine_of(config())
        train(engine, STEPS, step=step)
        return outcome(engine)


def evaluation(how: str) -> dict[str, Any]:
    """Three evaluation forwards after every step."""

    def step(engine: Any, batch: Tensor) -> Tensor:
        loss: Tensor = engine(batch).square().sum()
        engine.backward(loss)
        engine.step()
        if how == "engine":
            engine.eval()
        else:
            engine.module.eval()
        with torch.no_grad():
            for _ in range(3):
                engine(batch)
        if how == "engine":
            engine.train()
        else:
            engine.module.train()
        return loss

    with installed():
        engine = engine_of(config())
        train(engine, STEPS, step=step)
        return outcome(engine)


def checkpoints() -> dict[str, Any]:
    """One is saved after every step, and loaded once, which sets the engine's own number of steps back."""
    with installed():
        engine = engine_of(config(stage=1))
        for index, batch in enumerate(batches(STEPS)):
            engine.backward(engine(batch).square().sum())
            engine.step()
            engine.save_checkpoint("checkpoints", tag=f"after_{index}")
            if index == 3:
                engine.load_checkpoint("checkpoints", tag="after_0")
        return outcome(engine, global_steps=engine.global_steps)


def two_engines() -> dict[str, Any]:
    """They take turns, as the two networks of a GAN do; each one's step holds a step of the other."""
    with installed():
        first, second = engine_of(config(stage=1)), engine_of(config(stage=2))
        for batch in batches(STEPS):
            for engine in (first, second):
                engine.backward(engine(batch).square().sum())
                engine.step()
        handles = {"first": attach(first), "second": attach(second)}
        attach(second).detach()
        return {"first": outcome(first, handles["first"]), "second": outcome(second, handles["second"])}


def trained_in_eval_mode() -> dict[str, Any]:
    with installed():
        engine = engine_of(config())
        engine.eval()
        train(engine, STEPS)
        return outcome(engine)


def first_step() -> dict[str, Any]:
    with installed():
        engine = engine_of(config(accumulate=2, block={**BLOCK, "profile_step": 0}))
        train(engine, 2 * STEPS)
        return outcome(engine)


def attached_in_the_middle() -> dict[str, Any]:
    """Attached after one of two micro-steps: the step that is half over is nobody's."""
    engine = engine_of(config(accumulate=2, block=None))
    train(engine, 1)
    handle = attach(engine, {**BLOCK, "profile_step": 0})
    train(engine, 2 * STEPS + 1)
    return outcome(engine, handle)


def compiled() -> dict[str, Any]:
    """The same run twice, without a block and with one; how often torch compiled something in each."""

    def graphs_of(block: Any) -> tuple[Any, int]:
        torch._dynamo.reset()
        counters.clear()
        engine = engine_of(config(block=block))
        engine.compile(backend="aot_eager")
        train(engine, STEPS)
        return engine, counters["stats"]["unique_graphs"]

    plain, plain_graphs = graphs_of(None)
    plain.destroy()
    with installed():
        engine, graphs = graphs_of(BLOCK)
    return outcome(engine, compiled=engine.is_compiled, graphs=graphs, plain_graphs=plain_graphs)


def muon() -> dict[str, Any] | None:
    """Its products run in the engine, behind the backward, and not in a torch optimizer's step."""
    if importlib.util.find_spec("deepspeed.runtime.zero.muon") is None:
        return None
    model = Net()
    settings = config(stage=1, optimizer={"type": "Muon", "params": {"lr": 0.02, "ns_method": "standard"}})
    settings["zero_optimization"]["reduce_scatter"] = False
    with installed():
        engine = deepspeed.initialize(model=model, model_parameters=list(model.parameters()), config=settings)[0]
        train(engine, STEPS)
        return outcome(engine)


def on_a_fake_clock(loader: str) -> dict[str, Any]:
    """Every part takes a time of its own: 1 to wait, 2 forward, 4 loss, 8 backward, 16 optimizer, 32 elsewhere."""
    now = FakeNow()

    class Slow(Net):
        def forward(self, inputs: Tensor) -> Tensor:
            now.sleep(2 if self.training else 512)
            return super().forward(inputs)

    class SlowSgd(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            now.sleep(16)
            return super().step(closure)

    class Dataset(TensorDataset):
        def __getitem__(self, index: Any) -> Any:
            now.sleep(1 / SAMPLES)
            return super().__getitem__(index)  # type: ignore[no-untyped-call]

    model = Slow()
    data = Dataset(torch.randn(4 * SAMPLES * STEPS, 8))
    with installed(), patch("lightning_flops.run.window.clock_for", lambda device: WallClock(now)):
        engine, _, own_loader, _ = deepspeed.initialize(
            model=model,
            optimizer=SlowSgd(model.parameters(), lr=0.1),
            config=config(stage=1, accumulate=2),
            training_data=data if loader == "engine's" else None,
        )
        given: Any = own_loader if loader == "engine's" else DataLoader(data, batch_size=SAMPLES)
        if loader == "none":
            given = [list(data[index : index + SAMPLES]) for index in range(0, len(data), SAMPLES)]
        for index, (batch,) in enumerate(given):
            loss = engine(batch).square().sum()
            now.sleep(4)
            loss.register_hook(lambda _: now.sleep(8))
            if index % 2:
                engine.backward(loss)
            else:
                loss.backward()
            engine.step()
            now.sleep(32)
            if index % 4 == 3:
                engine.eval()
                now.sleep(64)
                with torch.no_grad():
                    engine(batch)
                now.sleep(128)
                engine.train()
                now.sleep(32)
    profile = attach(engine).profile
    timing = profile.timing if profile is not None else None
    parts = {} if timing is None else {part.name: part.mean_sec for part in timing.parts}
    return outcome(engine, parts=parts, excluded={} if timing is None else dict(timing.excluded_sec))


def monitored_wait() -> dict[str, Any]:
    """No window opens. A batch takes 1 s to wait for and 3 s to train; an evaluation waits 64 s for its own."""
    now = FakeNow()

    class Slow(TensorDataset):
        def __init__(self, batches: int, sec: float) -> None:
            super().__init__(torch.randn(batches * SAMPLES, 8))
            self.sec = sec

        def __getitem__(self, index: Any) -> Any:
            now.sleep(self.sec / SAMPLES)
            return super().__getitem__(index)  # type: ignore[no-untyped-call]

    readings: list[dict[str, float]] = []
    with (
        installed(),
        patch("lightning_flops.run.run.Monitor", lambda: Monitor(now)),
        patch.object(Services, "write_scalars", lambda sink, scalars, *, step: readings.append(scalars)),
    ):
        engine = engine_of({**config(block={**BLOCK, "profile_step": 100, "monitor": True}), "steps_per_print": 4})
        for (batch,) in DataLoader(Slow(STEPS, 1), batch_size=SAMPLES):
            loss = engine(batch).square().sum()
            engine.backward(loss)
            now.sleep(3)
            engine.step()
            if engine.global_steps == 2:
                engine.eval()
                with torch.no_grad():
                    for (held_out,) in DataLoader(Slow(1, 64), batch_size=SAMPLES):
                        engine(held_out)
                engine.train()
        handle = attach(engine)
        handle.detach()
    assert handle.throughput is not None and handle.throughput.reader_cost_sec is not None
    return {
        "readings": readings,
        "reader_sec": handle.throughput.reader_cost_sec.average,
        "reader_ratio": handle.throughput.reader_ratio,
        "left": left_on(engine),
    }


def interrupted(where: str, *, at: int = 2) -> dict[str, Any]:
    """Step *at* raises; the loop catches it and looks around. Step 2 is counted, the window is closed before step 8."""
    failing = SimpleNamespace(now=False)

    class Fails(Net):
        def forward(self, inputs: Tensor) -> Tensor:
            if failing.now and where == "forward":
                raise RuntimeError("forward")
            return super().forward(inputs)

    class FailsSgd(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            if failing.now and where == "optimizer":
                raise RuntimeError("optimizer")
            return super().step(closure)

    def fail(grad: Tensor) -> Tensor:
        raise RuntimeError("backward")

    model = Fails()
    raised = None
    with installed(), logged() as lines:
        engine = deepspeed.initialize(
            model=model,
            optimizer=FailsSgd(model.parameters(), lr=0.1),
            config=config(block={**BLOCK, "monitor": True}),
        )[0]
        handle = attach(engine)
        try:
            for batch in DataLoader(TensorDataset(torch.randn((at + 2) * SAMPLES, 8)), batch_size=SAMPLES):
                failing.now = engine.global_steps == at
                loss = engine(batch[0]).square().sum()
                if failing.now and where == "backward":
                    loss.register_hook(fail)
                engine.backward(loss)
                engine.step()
                failing.now = engine.global_steps == at
        except RuntimeError as error:
            raised = str(error)
    left = left_on(engine)
    failing.now = False
    return {"raised": raised, "left": left, "logged": lines, "no profile": handle.profile is None}


SCENARIOS: dict[str, Callable[[], Any]] = {
    **{f"torch_style_{stage}": functools.partial(torch_style, stage) for stage in (1, 2, 3)},
    "two_forwards_one_backward": two_forwards_one_backward,
    "root_called_inside_itself": root_called_inside_itself,
    "no_sync": no_sync,
    "border_set_by_hand": border_set_by_hand,
    "border_left_to_the_loop": border_left_to_the_loop,
    **{f"skipped_updates_{stage}": functools.partial(skipped_updates, stage) for stage in (1, 2)},
    "frozen_helpers": frozen_helpers,
    "product_in_the_loss": product_in_the_loss,
    **{f"evaluation_{how}": functools.partial(evaluation, how) for how in ("engine", "module")},
    "checkpoints": checkpoints,
    "two_engines": two_engines,
    "trained_in_eval_mode": trained_in_eval_mode,
    "first_step": first_step,
    "attached_in_the_middle": attached_in_the_middle,
    "compiled": compiled,
    "muon": muon,
    **{f"clock_{loader}": functools.partial(on_a_fake_clock, loader) for loader in ("engine's", "user's", "none")},
    "monitored_wait": monitored_wait,
    **{f"interrupted_{where}": functools.partial(interrupted, where) for where in ("forward", "backward", "optimizer")},
    **{
        f"interrupted_later_{where}": functools.partial(interrupted, where, at=8)
        for where in ("forward", "backward", "optimizer")
    },
}
