"""``FlopsProfiler`` between a start and a stop in a loop of the user's own."""

from __future__ import annotations

import gc
import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from lightning_flops import FlopsProfiler, LightningFlopsError
from lightning_flops.records import ParallelSizes
from tests.fake_clock import FakeNow
from tests.left_on_torch import torch_state_and_warnings
from tests.standalone.nets import FIRST, PARAMS, SECOND, Block, Calling, Sleeping, model_of_two, model_state


def started(model: nn.Module, *more: Any) -> FlopsProfiler:
    profiler = FlopsProfiler(model, *more)
    profiler.start_profile()
    return profiler


def printed_by(profiler: FlopsProfiler, capsys: pytest.CaptureFixture[str], **settings: Any) -> list[str]:
    """The lines of its report, without the spaces that align them."""
    profiler.print_model_profile(**settings)
    return [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]


def test_a_training_loop_as_deepspeed_documents_it(capsys: pytest.CaptureFixture[str]) -> None:
    model, same = model_of_two(), model_of_two()
    same.load_state_dict(model.state_dict())
    optimizer, other = (torch.optim.SGD(one.parameters(), lr=0.1) for one in (model, same))
    profiler = FlopsProfiler(model)
    before, model_before = torch_state_and_warnings(), model_state(model)
    for step in range(4):
        rows = torch.randn(2, 3)
        same(rows).sum().backward()
        other.step()
        other.zero_grad()
        if step == 2:
            profiler.start_profile()
        loss = model(rows).sum()
        if step == 2:
            profiler.stop_profile()
            assert profiler.get_total_flops() == FIRST + SECOND
            assert profiler.get_total_macs() == (FIRST + SECOND) // 2
            assert profiler.get_total_params() == PARAMS
            assert isinstance(profiler.get_total_duration(), float)
            profiler.print_model_profile(profile_step=step)
            assert (profiler.flops, profiler.macs) == (FIRST + SECOND, (FIRST + SECOND) // 2)
            profiler.end_profile()
            assert torch_state_and_warnings() == before
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert "Profile Summary at step 2:" in capsys.readouterr().out
    assert (torch_state_and_warnings(), model_state(model)) == (before, model_before)
    assert all(map(torch.equal, model.parameters(), same.parameters()))


def test_a_total_is_the_forward_of_the_model_alone_and_the_rest_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    model = model_of_two()
    profiler = started(model)
    (model(torch.randn(2, 3)) @ torch.ones(7, 4)).sum().backward()
    profiler.stop_profile()
    assert profiler.get_total_flops() == FIRST + SECOND
    lines = printed_by(profiler, capsys)
    # The first layer's input needs no gradient: one product there, two in the second, one outside of the model.
    outside = 2 * 2 * 7 * 4
    (backward,) = (line for line in lines if line.startswith("bwd flops per GPU:"))
    assert backward.endswith(f"(measured) {FIRST + 2 * SECOND}")
    assert any(line.startswith(f"FLOPs outside the model: fwd {outside}") for line in lines)


def test_a_reset_forgets_and_a_running_profiler_goes_on() -> None:
    model = model_of_two()
    profiler = started(model)
    model(torch.randn(2, 3))
    profiler.reset_profile()
    assert profiler.get_total_flops() == 0
    model(torch.randn(2, 3))
    assert profiler.get_total_flops() == FIRST + SECOND
    profiler.stop_profile()
    profiler.reset_profile()
    for read in (profiler.get_total_flops, profiler.get_total_macs, profiler.get_total_duration):
        with pytest.raises(LightningFlopsError, match="nothing was profiled: start_profile"):
            read()
    assert profiler.get_total_params() == PARAMS


def test_two_profilers_at_once_count_each_their_own_model_and_leave_nothing() -> None:
    first, second = model_of_two(), nn.Linear(3, 4)
    before = torch_state_and_warnings()
    one = started(first)
    first(torch.randn(2, 3))
    other, same = started(second), started(first)
    first(torch.randn(2, 3))
    second(torch.randn(8, 3))
    one.stop_profile()  # first in, first out
    first(torch.randn(2, 3))
    for profiler in (other, same, one):
        profiler.end_profile()
    assert one.get_total_flops() == same.get_total_flops() == 2 * (FIRST + SECOND)
    assert other.get_total_flops() == 2 * 8 * 3 * 4
    assert torch_state_and_warnings() == before


def test_recomputed_forwards_are_no_forward_flops_nor_time(now: FakeNow, capsys: pytest.CaptureFixture[str]) -> None:
    block = nn.Sequential(nn.Linear(3, 5), Sleeping(now, 1.0))
    model = Calling(lambda self, x: checkpoint(self.layer, x, use_reentrant=False), block)
    with set_checkpoint_early_stop(False):
        profiler = started(model)
        model(torch.randn(2, 3)).sum().backward()
        profiler.stop_profile()
    assert (profiler.get_total_flops(), profiler.get_total_duration()) == (FIRST, 1.0 + 1)
    lines = printed_by(profiler, capsys, detailed=False)
    assert f"recomputed flops per GPU: (measured) {FIRST}" in lines


# ---- errors


class Boom(Exception):
    pass


def raising(self: Calling, x: Tensor) -> Tensor:
    assert self.layer is not None
    if self.layer(x).shape[0] > 2:
        raise Boom
    return x


def test_after_a_forward_that_raised_stopping_leaves_nothing_on_torch_or_model() -> None:
    model = nn.Sequential(Calling(raising, nn.Linear(3, 5)))
    before, model_before = torch_state_and_warnings(), model_state(model)
    profiler = started(model)
    model(torch.randn(2, 3))
    with pytest.raises(Boom):
        model(torch.randn(8, 3))
    profiler.stop_profile()
    assert torch_state_and_warnings() == before
    assert model_state(model) == model_before
    assert profiler.get_total_flops() == 2 * 2 * 3 * 5 + 2 * 8 * 3 * 5  # up to the error
    profiler.start_profile()
    model(torch.randn(2, 3))
    profiler.end_profile()
    assert profiler.get_total_flops() == FIRST
    assert torch_state_and_warnings() == before


def test_a_profiler_that_is_dropped_detaches_from_torch() -> None:
    model = model_of_two()
    before, profiler = torch_state_and_warnings(), [started(model)]
    model(torch.randn(2, 3))
    profiler.clear()
    gc.collect()
    assert torch_state_and_warnings() == before


# ---- time


def test_a_modules_latency_is_its_own_and_of_those_inside(now: FakeNow, capsys: pytest.CaptureFixture[str]) -> None:
    model = Block(now, Sleeping(now, 4.0), Block(now, Sleeping(now, 8.0)))
    profiler = started(model)
    profiler.start_profile(count=False)
    model(torch.ones(2, 3))
    profiler.stop_profile()
    # No forward was counted, one was timed: no honest latency.
    assert profiler.get_total_duration() is None
    profiler.start_profile()
    model(torch.ones(2, 3))
    profiler.start_profile(count=False)
    now.sleep(100.0)  # between forwards
    model(torch.ones(2, 3))
    profiler.stop_profile()
    assert profiler.get_total_duration() == 1 + 4 + (1 + 8 + 2) + 2
    assert profiler.get_total_duration(as_string=True) == "18 s"
    profiler.print_model_profile()
    latencies = re.findall(r"<fwd latency (.*?) fwd latency", capsys.readouterr().out.split("\nBlock(\n")[1])
    # The whole; all layers; the first; the second, its layers, and the one in them.
    seconds = ["18 s, 100.00%", "15 s, 83.33%", "4 s, 22.22%", "11 s, 61.11%", "8 s, 44.44%", "8 s, 44.44%"]
    assert latencies[:6] == seconds


def test_an_ignored_modules_work_is_that_of_the_module_around_it(now: FakeNow) -> None:
    model = Block(now, Sleeping(now, 4.0), nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 7)), nn.Linear(7, 4))
    profiler = FlopsProfiler(model)
    profiler.start_profile(ignore_list=[nn.Linear, Sleeping])
    model(torch.randn(2, 3))
    profiler.start_profile(count=False)
    model(torch.randn(2, 3))
    profiler.stop_profile()
    whole = FIRST + SECOND + 2 * 2 * 7 * 4
    assert (profiler.get_total_flops(), profiler.get_total_duration()) == (whole, 1 + 4 + 2)
    entries = {module.name: module for module in profiler._profile().modules}
    flops = {name: module.total.forward for name, module in entries.items() if module.total.forward}
    assert flops == {"": whole, "layers": whole, "layers.1": FIRST + SECOND}
    times = entries["layers"].times
    assert entries["layers.0"].times is None and times is not None and times.forward_sec == 4.0


# ---- what an engine knows


class Engine:
    """The part of a DeepSpeed engine that a profiler asks; seconds of its timers are in milliseconds."""

    world_size = 8

    def train_micro_batch_size_per_gpu(self) -> int:
        return 16

    def gradient_accumulation_steps(self) -> int:
        return 1

    def wall_clock_breakdown(self) -> bool:
        return True

    def timers(self, name: str) -> Any:
        class Timer:
            def elapsed(self, reset: bool = True) -> float:
                assert not reset
                return {"bwd": 4000.0, "step": 2000.0}[name]

        return Timer()


def test_an_engine_knows_sizes_and_the_latencies_of_its_step_and_measured_rates_stand_below_the_estimated_ones(
    now: FakeNow, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = ParallelSizes(dp_size=4, tp_size=2)
    monkeypatch.setattr("lightning_flops.adapters.standalone.parallel_sizes", lambda engine: sizes)
    block = Calling(lambda self, x: checkpoint(self.layer, x, use_reentrant=False), nn.Linear(3, 5))
    model = nn.Sequential(block, Sleeping(now, 2.0), nn.Linear(5, 7))
    with set_checkpoint_early_stop(False):
        profiler = started(model, Engine())
        model(torch.randn(2, 3)).sum().backward()
        profiler.start_profile(count=False)
        model(torch.randn(2, 3)).sum().backward()
        profiler.end_profile()
    lines = printed_by(profiler, capsys, detailed=False)
    # Forward 60 + 140 in 2 s; backward 60 + 2 * 140, and 60 recomputed, in 4 s; the optimizer takes 2 s. 16 samples on
    # each of 4 ranks that see different data, in 8 s.
    assert {
        "world size: 8",
        "data parallel size: 4",
        "model parallel size: 2",
        "batch size per GPU: 16",
        "fwd flops of model = fwd flops per GPU * mp_size: 400",
        "bwd latency: 4 s",
        "step latency: 2 s",
        "iter latency: 8 s",
        "samples/second: 8.00",
    } <= set(lines)
    assert [line for line in lines if "FLOPS per GPU =" in line][1:] == [
        "bwd FLOPS per GPU = 2 * fwd flops per GPU / bwd latency: (estimated) 100 FLOPS",
        "bwd FLOPS per GPU = bwd+recomputed flops / bwd latency: (measured) 100 FLOPS",
        "fwd+bwd FLOPS per GPU = 3 * fwd flops per GPU / (fwd+bwd latency): (estimated) 100 FLOPS",
        "fwd+bwd FLOPS per GPU = fwd+bwd+recomputed flops / (fwd+bwd latency): (measured) 100 FLOPS",
        "FLOPS per GPU = 3 * fwd flops per GPU / iter latency: (estimated) 75 FLOPS",
        "FLOPS per GPU = hardware flops per GPU / iter latency: (measured) 75 FLOPS",
    ]


def test_on_a_device_without_a_clock_a_model_is_counted_without_latency(capsys: pytest.CaptureFixture[str]) -> None:
    model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 7)).to("meta")
    profiler = started(model)
    model(torch.ones(2, 3, device="meta"))
    profiler.stop_profile()
    assert (profiler.get_total_flops(), profiler.get_total_duration()) == (FIRST + SECOND, None)
    assert profiler.get_total_duration(as_string=True) == "n/a"
    lines = printed_by(profiler, capsys)
    assert {"fwd latency: n/a", "fwd FLOPS per GPU = fwd flops per GPU / fwd latency: n/a"} <= set(lines)
    assert any("(0): Linear(20, 32.26% Params, 30 MACs, 30.00% MACs, fwd 60, 30.00% FLOPs," in line for line in lines)
    assert any("- Latencies are n/a: this package has no clock for this device" in line for line in lines)
