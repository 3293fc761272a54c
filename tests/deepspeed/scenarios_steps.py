"""What belongs to a step under DeepSpeed, to which part of it, and when the parts begin and end."""

from __future__ import annotations

import importlib.util
import math
from typing import Any
from unittest.mock import patch

import deepspeed
import torch
from deepspeed.accelerator import get_accelerator
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.utils.data import DataLoader, TensorDataset

from lightning_flops.deepspeed import attach
from lightning_flops.measure.recorder import Phase
from lightning_flops.measure.timing.phase_timer import WallClock
from tests.deepspeed.engines import (
    BLOCK,
    SAMPLES,
    Net,
    batches,
    config,
    engine_of,
    flops_of,
    installed,
    left_on,
    logged,
    profile_of,
    profiled,
    train,
)
from tests.deepspeed.launching import BACKWARD, FORWARD
from tests.deepspeed.scenario import Skipped, scenario
from tests.fake_clock import FakeNow
from tests.loops.nets import SlowSGD

STEPS = 8


@scenario(1, 2, 3)
def a_backward_called_on_the_loss_is_the_steps(stage: int) -> None:
    def step(engine: Any, batch: Tensor) -> Tensor:
        loss: Tensor = engine(batch).square().sum()
        loss.backward()  # type: ignore[no-untyped-call]
        engine.step()
        return loss

    with installed():
        engine = engine_of(config(stage=stage, accumulate=2))
        if not getattr(engine, "_support_torch_style_backward", False):
            engine.destroy()
            raise Skipped("this DeepSpeed knows engine.backward alone")
        train(engine, 2 * STEPS, step=step)
        profile = profile_of(engine)
    assert flops_of(profile) == (2 * FORWARD, 2 * BACKWARD)
    assert profile.timing is not None and profile.timing.backward_sec is not None and profile.timing.backward_sec > 0


@scenario()
def two_forwards_with_one_backward_are_one_micro_step() -> None:
    _, profile = profiled(STEPS, lambda engine, batch: (engine(batch) * engine(batch + 1)).sum())
    assert flops_of(profile) == (2 * FORWARD, 2 * BACKWARD)
    assert (profile.micro_steps, profile.samples) == (1, 2)


@scenario("no_sync", "set by hand", "left to the loop")
def micro_steps_are_seen_without_a_call_of_step_for_each(how: str) -> None:
    more = {"managed_gradient_accumulation": False} if how == "left to the loop" else {}
    with installed():
        engine = engine_of(config(stage=1, **more))
        if more and not hasattr(type(engine), "managed_gradient_accumulation"):
            engine.destroy()
            raise Skipped("this DeepSpeed has no managed_gradient_accumulation")
        for index, batch in enumerate(batches(3 * STEPS)):
            last = index % 3 == 2
            if how == "set by hand":
                engine.set_gradient_accumulation_boundary(last)
            if how == "no_sync" and not last:
                with engine.no_sync():
                    engine.backward(engine(batch).square().sum())
            else:
                engine.backward(engine(batch).square().sum())
            if last:
                engine.step()
        profile = profile_of(engine)
    assert (profile.micro_steps, profile.samples) == (3, 6)
    assert flops_of(profile) == (3 * FORWARD, 3 * BACKWARD)


@scenario(1, 2)
def a_step_whose_update_loss_scaling_skipped_is_a_step(stage: int) -> None:
    accelerator = get_accelerator()
    with patch.object(accelerator, "is_fp16_supported", lambda: True):  # slow on a CPU, and right
        fp16 = {"enabled": True, "initial_scale_power": 40, "hysteresis": 1}
        engine, profile = profiled(STEPS, stage=stage, fp16=fp16)
    assert (engine.global_steps, engine.skipped_steps) == (8, 8)  # gradients are infinite in every one
    assert (profile.counted_steps, profile.timed_steps) == ((2,), (5, 6))
    assert flops_of(profile) == (FORWARD, BACKWARD)
    assert [one.dtype for one in profile.dtypes] == ["float16"]


@scenario()
def a_teacher_and_a_forward_without_gradients_belong_to_the_step() -> None:
    teacher, extra = nn.Linear(8, 4).eval(), 2 * 2 * 8 * 4

    def loss_of(engine: Any, batch: Tensor) -> Tensor:
        with torch.no_grad():
            wanted = teacher(batch)
        out = engine(batch)
        with torch.no_grad():
            out_before = engine(batch)
        loss: Tensor = (out - wanted).square().sum() + out_before.sum()
        return loss

    _, profile = profiled(STEPS, loss_of)
    assert flops_of(profile) == (2 * FORWARD + extra, BACKWARD)
    assert profile.outside.forward == extra
    # The teacher runs before the engine's forward, where its time is not separate from what else the loop does.
    assert profile.timing is not None and profile.timing.forward_sec is None
    assert profile.rates.samples_per_sec is not None


@scenario()
def the_loss_between_forward_and_backward_is_forward() -> None:
    def loss_of(engine: Any, batch: Tensor) -> Tensor:
        out: Tensor = engine(batch)
        return (out @ out.T).square().sum()

    product = 2 * 2 * 2 * 4
    _, profile = profiled(STEPS, loss_of)
    assert flops_of(profile) == (FORWARD + product, BACKWARD + 2 * product)
    assert profile.timing is not None and profile.timing.forward_sec is not None


@scenario("engine", "module")
def an_evaluation_between_steps_is_in_no_figure(how: str) -> None:
    def evaluate(engine: Any, batch: Tensor) -> None:
        evaluated = engine if how == "engine" else engine.module
        evaluated.eval()
        with torch.no_grad():
            for _ in range(3):
                engine(batch)
        evaluated.train()

    _, profile = profiled(STEPS, after_step=evaluate)
    assert (flops_of(profile), profile.samples) == ((FORWARD, BACKWARD), 2)
    assert profile.timing is not None and profile.timing.excluded_sec["validation"] > 0


@scenario()
def a_checkpoint_between_steps_is_in_no_figure() -> None:
    steps = iter(range(STEPS))

    def save(engine: Any, batch: Tensor) -> None:
        index = next(steps)
        engine.save_checkpoint("checkpoints", tag=f"after_{index}")
        if index == 3:
            engine.load_checkpoint("checkpoints", tag="after_0")

    engine, profile = profiled(STEPS, after_step=save, stage=1)
    assert engine.global_steps == 8 - 3  # after step 3 it was set back to 1
    assert (profile.counted_steps, profile.timed_steps) == ((2,), (5, 6))  # steps as they ran
    assert flops_of(profile) == (FORWARD, BACKWARD)
    assert profile.timing is not None and profile.timing.excluded_sec["checkpoint"] > 0


@scenario()
def a_step_holds_what_another_engine_does_in_it() -> None:
    """The two engines take turns, as the two networks of a GAN do."""
    with installed():
        engines = [engine_of(config(stage=1)), engine_of(config(stage=2))]
        for batch in batches(STEPS):
            for engine in engines:
                engine.backward(engine(batch).square().sum())
                engine.step()
        handles = [attach(engine) for engine in engines]
        for handle in handles:
            handle.detach()
    for engine, handle in zip(engines, handles, strict=True):
        profile = profile_of(engine, handle)
        assert flops_of(profile) == (2 * FORWARD, 2 * BACKWARD)
        assert (profile.modules[0].total.forward, profile.modules[0].total.backward) == (FORWARD, BACKWARD)
        assert (profile.outside.forward, profile.outside.backward) == (FORWARD, BACKWARD)


@scenario()
def a_step_that_was_half_over_at_the_start_is_left_out() -> None:
    engine = engine_of(config(accumulate=2, block=None))
    train(engine, 1)
    handle = attach(engine, {**BLOCK, "profile_step": 0})
    train(engine, 2 * STEPS + 1)
    profile = profile_of(engine, handle)
    assert (profile.counted_steps, profile.micro_steps, profile.samples) == ((0,), 2, 4)
    assert flops_of(profile) == (2 * FORWARD, 2 * BACKWARD)


@scenario()
def a_compiled_engine_counts_the_same_and_is_not_compiled_again() -> None:
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
    assert engine.is_compiled and graphs == plain_graphs > 0
    assert flops_of(profile_of(engine)) == (FORWARD, BACKWARD)


@scenario()
def what_the_engine_multiplies_for_the_update_is_the_optimizers() -> None:
    """Muon's products run in the engine, behind the backward, and not in a torch optimizer's step."""
    if importlib.util.find_spec("deepspeed.runtime.zero.muon") is None:
        raise Skipped("this DeepSpeed has no Muon")
    model = Net()
    settings = config(stage=1, optimizer={"type": "Muon", "params": {"lr": 0.02, "ns_method": "standard"}})
    settings["zero_optimization"]["reduce_scatter"] = False
    with installed():
        engine = deepspeed.initialize(model=model, model_parameters=list(model.parameters()), config=settings)[0]
        train(engine, STEPS)
        profile = profile_of(engine)
    assert flops_of(profile) == (FORWARD, BACKWARD)
    # Muon iterates five times over each matrix of m x n, m <= n: two products of m·m·n and one of m·m·m.
    assert profile.flops.optimizer == sum(5 * (2 * (2 * m * m * n) + 2 * m**3) for m, n in ((8, 8), (8, 16), (4, 16)))
    assert profile.flops.model == FORWARD + BACKWARD


class SlowRows(TensorDataset):
    """So many rows; a batch of them takes *sec*."""

    def __init__(self, rows: int, sec: float, now: FakeNow) -> None:
        super().__init__(torch.randn(rows, 8))
        self._row_sec, self._now = sec / SAMPLES, now

    def __getitem__(self, index: Any) -> Any:
        self._now.sleep(self._row_sec)
        return super().__getitem__(index)  # type: ignore[no-untyped-call]


@scenario("engine's", "user's", "none")
def every_second_is_in_its_part(loader: str) -> None:
    """Seconds: a batch 1, forward 2, loss 4, backward 8, optimizer 16, the rest of a micro-step 32; two micro-steps."""
    now = FakeNow()

    class Slow(Net):
        def forward(self, inputs: Tensor) -> Tensor:
            now.sleep(2 if self.training else 512)
            return super().forward(inputs)

    model = Slow()
    data = SlowRows(4 * SAMPLES * STEPS, 1, now)
    with installed(), patch("lightning_flops.run.window.clock_for", lambda device: WallClock(now)):
        engine, _, own_loader, _ = deepspeed.initialize(
            model=model,
            optimizer=SlowSGD(model.parameters(), now, 16),
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
        profile = profile_of(engine)
    timing = profile.timing
    assert timing is not None
    # Every other step there is an evaluation, and 32 s more after it.
    wait, elsewhere = 2 * 1, 2 * 32 + 32 / 2
    expected: dict[str, float] = {"forward": 2 * (2 + 4), "backward": 2 * 8, "optimizer": 16}
    if loader == "none":  # a wait that cannot be seen is not available
        expected["data wait + transfer + other"] = elsewhere
        assert (profile.rates.data_wait_ratio, timing.data_wait_sec, timing.reader_sec) == (None, None, None)
        assert any("could not be seen" in note for note in profile.notes)
    else:  # workers of the engine's are processes, whose clocks are theirs
        expected |= {"data wait": wait if loader == "user's" else 0, "transfer + other": elsewhere}
    assert {part.name: part.mean_sec for part in timing.parts} == expected
    assert dict(timing.excluded_sec) == {"validation": 64 + 512 + 128}
    if loader == "user's":
        assert timing.iter_sec == 12 + 16 + 16
        assert profile.rates.iter_samples_per_sec == 4 / 44
        assert profile.rates.forward_flops_per_sec == 2 * FORWARD / 12
        assert profile.rates.backward_flops_per_sec == 2 * BACKWARD / 16
        assert profile.rates.samples_per_sec == 4 / (wait + 12 + 16 + 16 + elsewhere)


@scenario("forward", "backward", "optimizer")
def after_an_exception_nothing_is_left(where: str) -> None:
    """Step 2 is counted; the window is closed before step 8, when the monitor alone is on. Step 23 has no hooks."""
    failing = ""

    def fail(place: str) -> None:
        if failing == place:
            raise RuntimeError(place)

    class Fails(Net):
        def forward(self, inputs: Tensor) -> Tensor:
            fail("forward")
            return super().forward(inputs)

    class FailsSgd(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            fail("optimizer")
            return super().step(closure)

    for at, timing_steps in ((2, BLOCK["timing_steps"]), (8, BLOCK["timing_steps"]), (23, 16)):
        failing, model = "", Fails()
        block = {**BLOCK, "monitor": True, "timing_steps": timing_steps}
        with installed(), logged() as lines, patch("lightning_flops.measure.recorder._SHORT_SEC", math.inf):
            engine = engine_of(config(block=block), model, FailsSgd(model.parameters(), lr=0.1))
            handle = attach(engine)
            try:
                for (batch,) in DataLoader(TensorDataset(torch.randn((at + 2) * SAMPLES, 8)), batch_size=SAMPLES):
                    failing = where if engine.global_steps == at else ""
                    state = handle.run.window.recorder.state
                    loss = engine(batch).square().sum()
                    loss.register_hook(lambda _: fail("backward"))
                    engine.backward(loss)
                    engine.step()
            except RuntimeError as error:
                assert str(error) == where
            else:
                raise AssertionError("nothing was raised")
        assert (left_on(engine), handle.profile is None) == ([], at == 2)
        assert at == 8 or sum("RuntimeError" in line for line in lines) == 1, lines
        assert (state is Phase.UNHOOKED) is (at == 23)


@scenario()
def an_engine_that_is_destroyed_while_steps_run_without_hooks_has_its_report() -> None:
    """Steps 21 to 28 would have none; step 2 is counted."""
    with installed(), patch("lightning_flops.measure.recorder._SHORT_SEC", math.inf):
        engine = engine_of(config(block={**BLOCK, "monitor": True, "timing_steps": 16}))
        handle = attach(engine)
        train(engine, 24)
        assert handle.run.window.recorder.state is Phase.UNHOOKED
        engine.destroy()
    assert handle.profile is not None and handle.profile.counted_steps == (2,)
    assert handle.throughput is not None
    assert handle.throughput.notes[-1].startswith("3 steps, or batches without one, ran without hooks")
