"""``FlopsProfiler`` between a start and a stop in a loop of the user's own."""

from __future__ import annotations

import contextlib
import gc
import logging
import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from lightning_flops import FlopsProfiler, LightningFlopsError
from lightning_flops.instrument.deepspeed_groups import ParallelSizes
from tests.fake_clock import FakeNow
from tests.left_on_torch import torch_state_and_warnings
from tests.standalone.nets import FIRST, SECOND, Block, Calling, Sleeping, model_of_two, model_state


def flops_of(model: nn.Module, *args: Any) -> Any:
    profiler = FlopsProfiler(model)
    profiler.start_profile()
    model(*args)
    profiler.stop_profile()
    return profiler.get_total_flops()


def test_a_training_loop_as_deepspeed_documents_it(capsys: pytest.CaptureFixture[str]) -> None:
    model = model_of_two()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    profiler = FlopsProfiler(model)
    before, model_before = torch_state_and_warnings(), model_state(model)
    for step in range(4):
        if step == 2:
            profiler.start_profile()
        loss = model(torch.randn(2, 3)).sum()
        if step == 2:
            profiler.stop_profile()
            assert profiler.get_total_flops() == FIRST + SECOND
            assert profiler.get_total_macs() == (FIRST + SECOND) // 2
            assert profiler.get_total_params() == 3 * 5 + 5 + 5 * 7 + 7
            assert isinstance(profiler.get_total_duration(), float)
            profiler.print_model_profile(profile_step=step)
            assert (profiler.flops, profiler.macs) == (FIRST + SECOND, (FIRST + SECOND) // 2)
            assert profiler.params == 3 * 5 + 5 + 5 * 7 + 7
            profiler.end_profile()
            assert torch_state_and_warnings() == before
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert "Profile Summary at step 2:" in capsys.readouterr().out
    assert torch_state_and_warnings() == before
    assert model_state(model) == model_before


def test_a_total_is_the_forward_alone_and_the_backward_is_printed_beside_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    model = model_of_two()
    profiler = FlopsProfiler(model)
    profiler.start_profile()
    model(torch.randn(2, 3)).sum().backward()
    profiler.stop_profile()
    assert profiler.get_total_flops() == FIRST + SECOND
    profiler.print_model_profile(detailed=False)
    # The first layer's input needs no gradient: one product there, two in the second: 60 + 2 * 140.
    (printed,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("bwd flops per GPU:"))
    assert printed.split()[-2:] == ["(measured)", str(FIRST + 2 * SECOND)] == ["(measured)", "340"]


def test_a_reset_forgets_and_a_running_profiler_goes_on() -> None:
    model = model_of_two()
    profiler = FlopsProfiler(model)
    profiler.start_profile()
    model(torch.randn(2, 3))
    profiler.reset_profile()
    assert profiler.get_total_flops() == 0
    model(torch.randn(2, 3))
    assert profiler.get_total_flops() == FIRST + SECOND
    profiler.stop_profile()
    profiler.reset_profile()
    with pytest.raises(LightningFlopsError, match="start_profile"):
        profiler.get_total_flops()


def test_a_profiler_knows_whether_it_was_started() -> None:
    profiler = FlopsProfiler(model_of_two())
    before = torch_state_and_warnings()
    assert not profiler.started
    profiler.stop_profile()
    profiler.end_profile()
    profiler.start_profile()
    assert profiler.started
    profiler.stop_profile()
    profiler.stop_profile()
    assert profiler.started
    profiler.end_profile()
    profiler.end_profile()
    assert not profiler.started
    assert torch_state_and_warnings() == before


def test_two_profilers_at_once_count_each_their_own_model_and_leave_nothing() -> None:
    first, second = model_of_two(), nn.Linear(3, 4)
    one, other, same = FlopsProfiler(first), FlopsProfiler(second), FlopsProfiler(first)
    before = torch_state_and_warnings()
    one.start_profile()
    first(torch.randn(2, 3))
    other.start_profile()
    same.start_profile()
    first(torch.randn(2, 3))
    second(torch.randn(8, 3))
    one.stop_profile()  # first in, first out
    first(torch.randn(2, 3))
    other.end_profile()
    same.end_profile()
    one.end_profile()
    assert one.get_total_flops() == 2 * (FIRST + SECOND)
    assert same.get_total_flops() == 2 * (FIRST + SECOND)
    assert other.get_total_flops() == 2 * 8 * 3 * 4
    assert torch_state_and_warnings() == before


# What DeepSpeed's profiler raises at, or counts wrongly


def test_what_another_model_or_the_loss_spends_is_not_the_models(capsys: pytest.CaptureFixture[str]) -> None:
    model = nn.Linear(3, 5)
    profiler = FlopsProfiler(model)
    profiler.start_profile()
    model(torch.randn(2, 3)) @ torch.ones(5, 7)
    profiler.stop_profile()
    assert profiler.get_total_flops() == FIRST
    profiler.print_model_profile()
    assert f"FLOPs outside the model: fwd {SECOND}\n" in capsys.readouterr().out


def test_recomputed_forwards_are_neither_forward_flops_nor_forward_time(
    now: FakeNow, capsys: pytest.CaptureFixture[str]
) -> None:
    block = nn.Sequential(nn.Linear(3, 5), Sleeping(now, 1.0))

    def forward(self: Calling, x: Tensor) -> Tensor:
        return checkpoint(self.layer, x, use_reentrant=False)  # type: ignore[no-any-return]

    model = Calling(forward, block)
    profiler = FlopsProfiler(model)
    with set_checkpoint_early_stop(False):
        profiler.start_profile()
        model(torch.randn(2, 3)).sum().backward()
        profiler.stop_profile()
    assert profiler.get_total_flops() == FIRST
    assert profiler.get_total_duration() == 1.0 + 1
    profiler.print_model_profile(detailed=False)
    (printed,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("recomputed flops per GPU:"))
    assert printed.split()[-2:] == ["(measured)", str(FIRST)]


def test_a_compiled_model_is_not_compiled_again() -> None:
    compiled = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        compiled.append(graph)
        return graph.forward

    torch._dynamo.reset()
    model = model_of_two()
    fast = torch.compile(model, backend=backend)
    assert isinstance(fast, nn.Module)
    x = torch.randn(2, 3)
    expected = fast(x)
    profiler = FlopsProfiler(fast)
    for count in (True, False):
        profiler.start_profile(count=count)
        assert torch.equal(fast(x), expected)
        profiler.stop_profile()
    fast(x)
    assert len(compiled) == 1
    assert profiler.get_total_flops() == FIRST + SECOND
    torch._dynamo.reset()


def test_losses_weights_and_random_state_are_those_of_a_run_without_it() -> None:
    def train(profile: bool) -> list[Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 5), nn.Dropout(0.5), nn.BatchNorm1d(5), nn.Linear(5, 7))
        optimizer = torch.optim.Adam(model.parameters())
        profiler = FlopsProfiler(model)
        seen = []
        for step in range(4):
            if profile and step in (1, 2):
                profiler.start_profile(count=step == 1)
            loss = model(torch.randn(8, 3)).square().sum()
            loss.backward()
            if profile and step in (1, 2):
                profiler.end_profile()
            optimizer.step()
            optimizer.zero_grad()
            seen.append(loss.detach())
        return [*seen, *(tensor.clone() for tensor in model.state_dict().values()), torch.get_rng_state()]

    assert all(torch.equal(plain, profiled) for plain, profiled in zip(train(False), train(True), strict=True))


# Errors


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
    profiler = FlopsProfiler(model)
    profiler.start_profile()
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


def test_a_profiler_that_an_error_leaves_behind_takes_itself_off_torch() -> None:
    model = model_of_two()
    before = torch_state_and_warnings()

    def step() -> None:
        profiler = FlopsProfiler(model)
        profiler.start_profile()
        model(torch.randn(2, 3))
        raise Boom

    with contextlib.suppress(Boom):
        step()
    gc.collect()
    assert torch_state_and_warnings() == before


def test_nothing_to_read_before_the_first_start_is_an_error_that_says_so() -> None:
    profiler = FlopsProfiler(model_of_two())
    for read in (profiler.get_total_flops, profiler.get_total_macs, profiler.get_total_duration):
        with pytest.raises(LightningFlopsError, match="nothing was profiled: start_profile"):
            read()
    assert profiler.get_total_params() == 3 * 5 + 5 + 5 * 7 + 7


def test_nothing_to_print_is_a_warning_for_loops_that_print_on_ranks_that_profile_nothing(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    profiler = FlopsProfiler(model_of_two())
    with caplog.at_level(logging.WARNING):
        profiler.print_model_profile()
        profiler.print_model_aggregated_profile()
    assert caplog.text.count("nothing was profiled") == 2
    assert capsys.readouterr().out == ""


# Time


def test_a_modules_latency_is_its_own_and_that_of_the_modules_inside(
    now: FakeNow, capsys: pytest.CaptureFixture[str]
) -> None:
    model = Block(now, Sleeping(now, 4.0), Block(now, Sleeping(now, 8.0)))
    profiler = FlopsProfiler(model)
    profiler.start_profile()
    profiler.start_profile(count=False)
    model(torch.ones(2, 3))
    profiler.stop_profile()
    # No forward was counted, one was timed: no honest latency.
    assert profiler.get_total_duration() is None
    profiler.start_profile()
    model(torch.ones(2, 3))
    profiler.start_profile(count=False)
    model(torch.ones(2, 3))
    profiler.stop_profile()
    assert profiler.get_total_duration() == 1 + 4 + (1 + 8 + 2) + 2
    assert profiler.get_total_duration(as_string=True) == "18 s"
    profiler.print_model_profile()
    tree = capsys.readouterr().out.split("\nBlock(\n")[1]
    latencies = re.findall(r"<fwd latency (.*?) fwd latency", tree)
    # The whole; all layers; the first; the second, its layers, and the one in them.
    assert latencies[:6] == [
        "18 s, 100.00%",
        "15 s, 83.33%",
        "4 s, 22.22%",
        "11 s, 61.11%",
        "8 s, 44.44%",
        "8 s, 44.44%",
    ]


def test_a_latency_taken_while_counting_is_said_to_be_an_upper_bound(
    now: FakeNow, capsys: pytest.CaptureFixture[str]
) -> None:
    model = nn.Sequential(nn.Linear(3, 5), Sleeping(now, 3.0))
    profiler = FlopsProfiler(model)

    note = "Latencies were taken while counting"
    profiler.start_profile()
    model(torch.randn(2, 3))
    profiler.stop_profile()
    assert profiler.get_total_duration() == 4.0
    profiler.print_model_profile(detailed=False)
    assert note in capsys.readouterr().out
    profiler.start_profile(count=False)
    model(torch.randn(2, 3))
    profiler.stop_profile()
    assert profiler.get_total_duration() == 3.0
    profiler.print_model_profile(detailed=False)
    assert note not in capsys.readouterr().out
    assert profiler.get_total_flops() == FIRST


def test_time_between_forwards_is_nobodys(now: FakeNow) -> None:
    model = Sleeping(now, 2.0)
    profiler = FlopsProfiler(model)
    profiler.start_profile()
    for _ in range(3):
        now.sleep(100)
        model(torch.ones(1))
    now.sleep(100)
    profiler.stop_profile()
    assert profiler.get_total_duration() == 3 * (2.0 + 1)


# Ignored modules


def test_an_ignored_modules_work_is_that_of_the_module_around_it(now: FakeNow) -> None:
    model = Block(now, Sleeping(now, 4.0), nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 7)), nn.Linear(7, 4))
    profiler = FlopsProfiler(model)
    profiler.start_profile(ignore_list=[nn.Linear, Sleeping])
    model(torch.randn(2, 3))
    profiler.start_profile(count=False)
    model(torch.randn(2, 3))
    profiler.stop_profile()
    third = 2 * 2 * 7 * 4
    assert profiler.get_total_flops() == FIRST + SECOND + third
    assert profiler.get_total_duration() == 1 + 4 + 2
    entries = {module.name: module for module in profiler._profile().modules}
    assert {name: module.total.forward for name, module in entries.items()} == {
        "": FIRST + SECOND + third,
        "layers": FIRST + SECOND + third,
        "layers.0": 0,
        "layers.1": FIRST + SECOND,
        "layers.1.0": 0,
        "layers.1.1": 0,
        "layers.2": 0,
    }
    assert entries["layers.0"].times is None
    times = entries["layers"].times
    assert times is not None and times.forward_sec == 4.0


# What an engine knows


class Engine:
    """The part of a DeepSpeed engine that a profiler asks; seconds of its timers are in milliseconds."""

    world_size = 8

    def __init__(self, *, breakdown: bool = True, accumulate: int = 1) -> None:
        self.breakdown = breakdown
        self.accumulate = accumulate

    def train_micro_batch_size_per_gpu(self) -> int:
        return 16

    def gradient_accumulation_steps(self) -> int:
        return self.accumulate

    def wall_clock_breakdown(self) -> bool:
        return self.breakdown

    def timers(self, name: str) -> Any:
        class Timer:
            def elapsed(self, reset: bool = True) -> float:
                assert not reset
                return {"bwd": 4000.0, "step": 2000.0}[name]

        return Timer()


@pytest.fixture
def four_ranks_of_data_two_of_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "lightning_flops.adapters.standalone.parallel_sizes", lambda engine: ParallelSizes(dp_size=4, tp_size=2)
    )


def printed_with(
    engine: Engine, now: FakeNow, capsys: pytest.CaptureFixture[str], factor: float = 0.0
) -> dict[str, str]:
    model = nn.Sequential(nn.Linear(3, 5), Sleeping(now, 2.0))
    profiler = FlopsProfiler(model, engine, factor)
    profiler.start_profile()
    model(torch.randn(2, 3))
    profiler.start_profile(count=False)
    model(torch.randn(2, 3))
    profiler.end_profile()
    profiler.print_model_profile(detailed=False)
    lines = [line.split(":") for line in capsys.readouterr().out.splitlines()]
    return {parts[0]: parts[1].strip() for parts in lines if len(parts) == 2 and parts[1].strip()}


@pytest.mark.usefixtures("four_ranks_of_data_two_of_weights")
def test_an_engine_tells_sizes_and_the_latencies_of_its_step(now: FakeNow, capsys: pytest.CaptureFixture[str]) -> None:
    # 60 FLOPs in 2 s forward, 4 s backward, 2 s step.
    printed = printed_with(Engine(), now, capsys)
    assert printed["world size"] == "8"
    assert printed["data parallel size"] == "4"
    assert printed["model parallel size"] == "2"
    assert printed["batch size per GPU"] == "16"
    assert printed["fwd flops of model = fwd flops per GPU * mp_size"] == "120"
    assert printed["bwd latency"] == "4 s"
    assert printed["bwd FLOPS per GPU = 2 * fwd flops per GPU / bwd latency"] == "(estimated) 30 FLOPS"
    assert printed["fwd+bwd FLOPS per GPU = 3 * fwd flops per GPU / (fwd+bwd latency)"] == "(estimated) 30 FLOPS"
    assert printed["step latency"] == "2 s"
    assert printed["iter latency"] == "8 s"
    assert printed["FLOPS per GPU = 3 * fwd flops per GPU / iter latency"] == "(estimated) 22.5 FLOPS"
    assert printed["samples/second"] == "8.00"  # 16 on each of the 4 ranks that see different data, in 8 s


@pytest.mark.parametrize("engine", [Engine(breakdown=False), Engine(accumulate=4)])
def test_latencies_that_the_engine_does_not_have_for_one_forward_are_not_printed(
    engine: Engine, now: FakeNow, capsys: pytest.CaptureFixture[str]
) -> None:
    assert not [label for label in printed_with(engine, now, capsys) if "bwd" in label and "=" in label]


def test_where_a_backward_was_counted_its_measured_rates_stand_below_the_estimated_ones(
    now: FakeNow, capsys: pytest.CaptureFixture[str]
) -> None:
    def block(self: Calling, x: Tensor) -> Tensor:
        return checkpoint(self.layer, x, use_reentrant=False)  # type: ignore[no-any-return]

    model = nn.Sequential(Calling(block, nn.Linear(3, 5)), Sleeping(now, 2.0), nn.Linear(5, 7))
    profiler = FlopsProfiler(model, Engine())
    with set_checkpoint_early_stop(False):
        profiler.start_profile()
        model(torch.randn(2, 3)).sum().backward()
        profiler.start_profile(count=False)
        model(torch.randn(2, 3)).sum().backward()
        profiler.end_profile()
    profiler.print_model_profile(detailed=False)
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines() if "FLOPS per GPU =" in line]
    # Forward 60 + 140 in 2 s; backward 60 + 2 * 140, and 60 recomputed, in 4 s; the optimizer takes 2 s.
    assert lines[1:] == [
        "bwd FLOPS per GPU = 2 * fwd flops per GPU / bwd latency: (estimated) 100 FLOPS",
        "bwd FLOPS per GPU = bwd+recomputed flops / bwd latency: (measured) 100 FLOPS",
        "fwd+bwd FLOPS per GPU = 3 * fwd flops per GPU / (fwd+bwd latency): (estimated) 100 FLOPS",
        "fwd+bwd FLOPS per GPU = fwd+bwd+recomputed flops / (fwd+bwd latency): (measured) 100 FLOPS",
        "FLOPS per GPU = 3 * fwd flops per GPU / iter latency: (estimated) 75 FLOPS",
        "FLOPS per GPU = hardware flops per GPU / iter latency: (measured) 75 FLOPS",
    ]


# Devices


def test_a_model_on_a_device_without_a_clock_is_counted_and_its_latency_is_not_available(
    capsys: pytest.CaptureFixture[str],
) -> None:
    model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 7)).to("meta")
    profiler = FlopsProfiler(model)
    profiler.start_profile()
    model(torch.ones(2, 3, device="meta"))
    profiler.stop_profile()
    assert profiler.get_total_flops() == FIRST + SECOND
    assert profiler.get_total_duration() is None
    assert profiler.get_total_duration(as_string=True) == "n/a"
    profiler.print_model_profile()
    printed = capsys.readouterr().out
    assert "fwd latency:" + " " * 60 + "n/a\n" in printed
    assert "fwd FLOPS per GPU = fwd flops per GPU / fwd latency:" + " " * 20 + "n/a\n" in printed
    assert "(0): Linear(20, 32.26% Params, 30 MACs, 30.00% MACs, fwd 60, 30.00% FLOPs," in printed
    assert "- Latencies are n/a: this package has no clock for this device" in printed
