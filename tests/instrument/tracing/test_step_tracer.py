"""A step under torch.profiler: what is recorded of it, and that training does not change."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.autograd.profiler as autograd_profiler
from torch import nn
from torch.nn.modules import module as torch_module
from torch.profiler import ProfilerActivity, profile, schedule
from torch.utils.checkpoint import checkpoint

from lightning_flops.instrument.tracing.step_tracer import StepTracer
from lightning_flops.records import StepSignature, TracedStepRecord
from lightning_flops.schema.trace_steps import ModuleRow, ModuleTable
from lightning_flops.sinks.trace_file import keep_trace
from lightning_flops.trace import analyze_trace, load_trace
from lightning_flops.trace.modules import module_table

CPU = torch.device("cpu")
SIGNATURE = StepSignature(batches=("2x4",), forwards=1, backwards=1, updates=1)


@pytest.fixture(autouse=True)
def quiet_profiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KINETO_LOG_LEVEL", "6")


class Net(nn.Module):
    """Two layers; the second is checkpointed if asked."""

    def __init__(self, *, reentrant: bool | None = None) -> None:
        super().__init__()
        self.first = nn.Linear(4, 3)
        self.second = nn.Sequential(nn.Linear(3, 3), nn.Tanh())
        self.reentrant = reentrant

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.first(inputs)
        if self.reentrant is None:
            outputs = self.second(hidden)
        else:
            outputs = checkpoint(self.second, hidden, use_reentrant=self.reentrant)
        assert isinstance(outputs, torch.Tensor)
        return outputs


class Slow(torch.autograd.Function):
    """Passes its input on, and takes a known while for it in the backward."""

    @staticmethod
    def forward(ctx: Any, inputs: torch.Tensor, seconds: float, spent: list[float]) -> torch.Tensor:
        ctx.seconds, ctx.spent = seconds, spent
        return inputs.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        begun = time.perf_counter()
        while time.perf_counter() - begun < ctx.seconds:
            pass
        ctx.spent.append(time.perf_counter() - begun)
        return gradients[0], None, None


class SlowBlock(nn.Module):
    """A block whose backward takes a known while."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds
        self.spent: list[float] = []

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs = Slow.apply(inputs, self.seconds, self.spent)  # type: ignore[no-untyped-call]
        assert isinstance(outputs, torch.Tensor)
        return outputs


def train_step(tracer: StepTracer, model: nn.Module) -> None:
    tracer.enter("forward")
    loss = model(torch.ones(2, 4)).sum()
    tracer.leave()
    tracer.enter("backward")
    loss.backward()
    tracer.leave()


def traced(model: nn.Module, **settings: Any) -> tuple[StepTracer, TracedStepRecord]:
    """One step of *model*, traced."""
    tracer = StepTracer(model, device=CPU, **settings)
    tracer.warm_up()
    train_step(tracer, model)
    tracer.start(6)
    train_step(tracer, model)
    record = tracer.stop(SIGNATURE)
    assert tracer.lost is None
    assert record is not None
    return tracer, record


def table_of(record: TracedStepRecord) -> ModuleTable:
    table = module_table(load_trace(record.path))
    assert table is not None
    return table


def names_in(record: TracedStepRecord) -> list[str]:
    """The names of its host events, by their beginning."""
    events = json.loads(Path(record.path).read_text())["traceEvents"]
    host = [event for event in events if event.get("cat") in ("cpu_op", "user_annotation")]
    return [event["name"] for event in sorted(host, key=lambda event: event["ts"])]


def rows(table: ModuleTable) -> dict[str, ModuleRow]:
    return {row.name: row for row in table.rows}


@contextmanager
def nothing_left() -> Iterator[None]:
    """Nothing of torch's that a tracer touches is another one afterwards."""

    def footprint() -> dict[str, Any]:
        return {
            "hooks": [
                list(getattr(torch_module, name))
                for name in (
                    "_global_forward_pre_hooks",
                    "_global_forward_hooks",
                    "_global_forward_hooks_always_called",
                )
            ],
            "prepare": autograd_profiler._prepare_profiler,  # type: ignore[attr-defined]
            "enable": autograd_profiler._enable_profiler,  # type: ignore[attr-defined]
            "steps": dict(autograd_profiler.KinetoStepTracker._step_dict),
            "log level": os.environ.get("KINETO_LOG_LEVEL"),
            "profiling": torch._C._autograd._profiler_enabled(),
        }

    before = footprint()
    assert not before["profiling"]
    yield
    assert footprint() == before


def test_a_step_is_recorded_with_its_number_its_phases_and_every_module() -> None:
    with nothing_left():
        _tracer, record = traced(Net())
    assert (record.index, record.signatures) == (6, (SIGNATURE,))
    assert [name for name in names_in(record) if name.startswith(("module: ", "phase: ", "ProfilerStep#"))] == [
        "ProfilerStep#6",
        "phase: forward",
        "module: first",
        "module: second",
        "module: second.0",
        "module: second.1",
        "phase: backward",
    ]
    found = rows(table_of(record))
    assert all(row.calls == 1 for row in found.values())
    for name in ("first", "second.0", "second.1"):
        assert found[name].own_forward_us > 0
        assert found[name].own_backward_us > 0


@pytest.mark.parametrize("setting", ["record_shapes", "profile_memory"])
def test_what_is_asked_for_stands_in_the_file(setting: str) -> None:
    _tracer, record = traced(Net(), **{setting: True})
    report = analyze_trace(load_trace(record.path))
    assert (report.operators_by_shape is not None) == (setting == "record_shapes")
    assert (report.memory_curves is not None) == (setting == "profile_memory")


def test_the_file_goes_with_the_tracer_and_the_kept_one_has_annotations(tmp_path: Path) -> None:
    tracer, record = traced(Net())
    kept = keep_trace(record.path, str(tmp_path / "traces"), rank=3, step=6)
    again = keep_trace(record.path, str(tmp_path / "traces"), rank=3, step=6)
    assert [Path(path).name for path in (kept, again)] == ["rank3_step6.pt.trace.json", "rank3_step6.pt.trace-2.json"]
    original, annotated = Path(record.path).read_text(), Path(kept).read_text()
    assert annotated == Path(again).read_text()
    assert '"cat": "user_annotation"' in annotated
    # Six marks and nothing else became annotations.
    assert annotated.count('"user_annotation"') - original.count('"user_annotation"') == 6
    assert annotated.replace('"user_annotation"', '"cpu_op"') == original.replace('"user_annotation"', '"cpu_op"')
    assert module_table(load_trace(kept)) == module_table(load_trace(record.path))
    del tracer
    assert not Path(record.path).exists()


@pytest.mark.parametrize("reentrant", [None, True, False], ids=["plain", "reentrant", "non-reentrant"])
def test_blocks_of_known_backward_cost_get_it_back(reentrant: bool | None) -> None:
    model = Net(reentrant=reentrant)
    long, short = SlowBlock(0.030), SlowBlock(0.003)
    model.first = nn.Sequential(nn.Linear(4, 3), long)  # type: ignore[assignment]
    model.second = nn.Sequential(nn.Linear(3, 3), short)
    _tracer, record = traced(model)
    table = table_of(record)
    for name, block in (("first.1", long), ("second.1", short)):
        # The block clocks itself inside its node, so the node's time is at least that; the rest of the backward
        # bounds it from above.
        assert rows(table)[name].own_backward_us >= block.spent[-1] * 1e6
    own = sum(row.own_backward_us for row in table.rows)
    assert own <= table.backward_us
    others = own - rows(table)["first.1"].own_backward_us - rows(table)["second.1"].own_backward_us
    assert others < rows(table)["first.1"].own_backward_us


@pytest.mark.parametrize("reentrant", [True, False])
def test_what_a_checkpoint_repeats_is_backward_and_no_second_call(reentrant: bool) -> None:
    _tracer, record = traced(Net(reentrant=reentrant))
    assert names_in(record).count("module: second.0") == 2
    found = rows(table_of(record))
    assert found["second.0"].calls == 1


def test_a_step_of_several_batches_is_one_step() -> None:
    model = Net()
    tracer = StepTracer(model, device=CPU)
    tracer.warm_up()
    for _ in range(2):
        tracer.start(9)
        train_step(tracer, model)
    record = tracer.stop(SIGNATURE)
    assert record is not None
    assert names_in(record).count("ProfilerStep#9") == 1
    assert rows(table_of(record))["first"].calls == 2


def test_an_error_of_the_users_leaves_no_mark_open_and_nothing_on_torch() -> None:
    class Failing(nn.Module):
        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            raise KeyError("the user's own")

    model = Net()
    tracer = StepTracer(model, device=CPU)
    with nothing_left():
        tracer.warm_up()
        tracer.start(0)
        model.second = nn.Sequential(Failing())
        tracer.enter("forward")
        with pytest.raises(KeyError, match="the user's own"):
            model(torch.ones(2, 4))
        tracer.leave()
        model.second = nn.Sequential(nn.Linear(3, 3))
        train_step(tracer, model)
        record = tracer.stop(SIGNATURE)
    assert record is not None
    table = table_of(record)
    assert table.unattributed_forward_us == 0
    assert rows(table)["first"].calls == 2


@pytest.mark.parametrize("steps", ["nothing", "warm up", "start", "start and enter"])
def test_giving_up_anywhere_leaves_nothing_and_records_nothing(steps: str) -> None:
    model = Net()
    tracer = StepTracer(model, device=CPU)
    with nothing_left():
        if steps != "nothing":
            tracer.warm_up()
        if steps.startswith("start"):
            tracer.start(0)
            model(torch.ones(2, 4))
        if steps.endswith("enter"):
            tracer.enter("forward")
        tracer.give_up()
        tracer.give_up()
        assert tracer.stop(SIGNATURE) is None


def events_of(profiler: Any) -> list[str]:
    return [event.key for event in profiler.key_averages()]


def test_a_profiler_that_runs_already_is_left_alone() -> None:
    model = Net()
    tracer = StepTracer(model, device=CPU)
    with profile(activities=[ProfilerActivity.CPU]) as users:
        tracer.warm_up()
        tracer.start(0)
        train_step(tracer, model)
        assert tracer.stop(SIGNATURE) is None
    assert "aten::addmm" in events_of(users)
    assert tracer.lost == "No step was traced: another profiler is running, and torch runs one profiler at a time."


def test_a_profiler_that_waits_for_its_turn_is_left_alone() -> None:
    model = Net()
    tracer = StepTracer(model, device=CPU)
    with profile(
        activities=[ProfilerActivity.CPU], schedule=schedule(wait=1, warmup=1, active=1, repeat=1), acc_events=True
    ) as users:
        for _ in range(3):
            tracer.warm_up()
            tracer.start(0)
            train_step(tracer, model)
            tracer.stop(SIGNATURE)
            users.step()
        tracer.give_up()
    assert "aten::addmm" in events_of(users)
    assert tracer.lost is not None and "a torch.profiler.profile is set up in this run" in tracer.lost


@pytest.mark.parametrize("moment", ["warming", "recording"])
@pytest.mark.parametrize(
    "users_profiler",
    [
        lambda: profile(activities=[ProfilerActivity.CPU]),
        lambda: autograd_profiler.profile(use_kineto=True),
    ],
    ids=["torch.profiler", "autograd.profiler"],
)
def test_a_profiler_that_is_set_up_meanwhile_takes_over(users_profiler: Callable[[], Any], moment: str) -> None:
    model = Net()
    tracer = StepTracer(model, device=CPU)
    with nothing_left():
        tracer.warm_up()
        if moment == "recording":
            tracer.start(0)
        with users_profiler() as users:
            train_step(tracer, model)
        tracer.start(1)
        train_step(tracer, model)
        assert tracer.stop(SIGNATURE) is None
    names = events_of(users)
    assert "aten::addmm" in names
    assert not any(name.startswith("module: ") for name in names)
    assert tracer.lost is not None and "another profiler was set up meanwhile" in tracer.lost


def test_a_failure_of_torchs_profiler_is_said_and_reaches_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("CUPTI_ERROR_INSUFFICIENT_PRIVILEGES")

    monkeypatch.setattr(torch.profiler.profiler._KinetoProfile, "start_trace", broken)
    tracer = StepTracer(Net(), device=CPU)
    with nothing_left():
        tracer.warm_up()
        tracer.start(0)
        assert tracer.stop(SIGNATURE) is None
    assert tracer.lost == (
        "No step was traced: torch.profiler failed (RuntimeError: CUPTI_ERROR_INSUFFICIENT_PRIVILEGES)."
    )


@pytest.mark.filterwarnings("ignore:CUDA is not available")
@pytest.mark.skipif(torch.cuda.is_available(), reason="shows what is said where the device does not take part")
def test_a_device_that_leaves_no_events_is_said_and_the_hosts_are_kept() -> None:
    model = Net()
    tracer = StepTracer(model, device=torch.device("cuda"))
    with nothing_left():
        tracer.warm_up()
        train_step(tracer, model)
        tracer.start(3)
        train_step(tracer, model)
        assert tracer.stop(SIGNATURE) is not None
    assert tracer.lost == (
        "The trace has no event of the cuda device (it may not be permitted here): kernels and device times of modules "
        "are n/a."
    )


def test_gradients_and_random_numbers_are_the_same_bit_for_bit() -> None:
    def gradients(*, trace: bool) -> list[torch.Tensor]:
        torch.manual_seed(5)
        model = nn.Sequential(Net(reentrant=True), nn.Dropout(0.5))
        tracer = StepTracer(model, device=CPU, record_shapes=True, profile_memory=True)
        if trace:
            tracer.warm_up()
            tracer.start(0)
        train_step(tracer, model)
        if trace:
            assert tracer.stop(SIGNATURE) is not None
        tracer.give_up()
        return [torch.rand(3), *(p.grad for p in model.parameters() if p.grad is not None)]

    assert all(map(torch.equal, gradients(trace=False), gradients(trace=True)))
