"""The traced step of a Lightning run: what it shows, and that the run does not notice."""

from __future__ import annotations

import importlib
import json
import os
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from lightning_flops import FlopsProfilerCallback, Profile
from lightning_flops.instrument.counting.recorded_calls import recorded_work
from lightning_flops.report.text import render_text
from lightning_flops.trace import analyze_trace, load_trace
from lightning_flops.trace.memory import module_memory_table
from lightning_flops.trace.modules import module_table
from tests.lightning.nets import BATCH, HIDDEN, IN, OUT, loader, new_gan, new_net

MakeTrainer = Callable[..., Any]

# Step 0 waits, 1 is counted, 2 and 3 settle, 4 and 5 are timed, 6 warms up.
TRACED = 7

ONE_STEP = {"active": 1}
"""A trace schedule."""


@pytest.fixture(autouse=True)
def quiet_profiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KINETO_LOG_LEVEL", "6")


def profile_of(trainer: MakeTrainer, net: Any, *, batches: int = 10, **settings: Any) -> Profile:
    if settings.get("trace", True):
        settings = {"trace_schedule": ONE_STEP, **settings}
    callback = FlopsProfilerCallback(timing_steps=2, peak_flops_per_sec=1e12, **settings)
    trainer(callback).fit(net, loader(batches))
    assert callback.profile is not None
    return callback.profile


def test_every_module_has_its_time_and_from_the_counted_flops_its_rates(root: str, trainer: MakeTrainer) -> None:
    report = profile_of(trainer, new_net(root))
    traced = report.traced
    assert traced is not None and traced.tables is not None and traced.tables.modules is not None
    assert (traced.index, traced.like_counted, traced.files) == (TRACED, True, ())
    assert [step.number for step in traced.tables.step_times.steps] == [TRACED]
    modules = {module.name: module for module in report.modules}
    for name, forward, backward in (
        ("net.0.linear", 2 * BATCH * IN * HIDDEN, 2 * BATCH * IN * HIDDEN),
        ("net.1", 2 * BATCH * HIDDEN * OUT, 2 * 2 * BATCH * HIDDEN * OUT),
    ):
        times = modules[name].times
        assert times is not None and times.backward_sec is not None
        assert times.forward_flops_per_sec == pytest.approx(forward / times.forward_sec)
        assert times.backward_flops_per_sec == pytest.approx(backward / times.backward_sec)
        assert times.forward_utilization == pytest.approx(forward / times.forward_sec / 1e12)
    root_times = modules[""].times
    assert root_times is not None
    assert root_times.forward_sec == pytest.approx(traced.tables.modules.forward_us * 1e-6 * traced.forward_scale)
    assert traced.tables.modules.optimizer_us > 0
    text = render_text(report, detailed=True)
    assert f"Step {TRACED} ran under torch.profiler" in text
    assert "bwd latency - {'Net" in text
    assert report.notes == ()


def test_the_trace_is_kept_with_modules_and_phases_as_annotations(
    root: str, trainer: MakeTrainer, tmp_path: Path
) -> None:
    folder = tmp_path / "traces"
    report = profile_of(trainer, new_net(root), trace_dir=folder, record_shapes=True, profile_memory=True)
    assert report.traced is not None
    (file,) = report.traced.files
    assert Path(file) == folder / f"rank0_step{TRACED}.pt.trace.json"
    events = json.loads(Path(file).read_text())["traceEvents"]
    annotations = {event["name"] for event in events if event.get("cat") == "user_annotation"}
    assert {
        f"ProfilerStep#{TRACED}", "module: net.0.linear", "phase: data_wait", "phase: forward", "phase: backward",
        "phase: optimizer",
    } <= annotations  # fmt: skip
    assert any("Input Dims" in event.get("args", {}) for event in events)
    loaded = load_trace(file)
    assert loaded.rank == 0  # which torch says in runs of several processes only
    assert loaded.memory is not None
    assert report.traced.tables is not None
    assert module_table(loaded) == report.traced.tables.modules
    assert module_memory_table(loaded) == report.traced.tables.module_memory
    kept = {row.name: row.self_size_increase_bytes for row in report.traced.tables.module_memory or ()}
    assert kept["net.0.linear"] == BATCH * HIDDEN * 4  # its output in float32
    text = render_text(report, detailed=True)
    assert "Memory by module" in text and "size increase" in text
    assert "net.0.linear" in text[text.index("size increase") :]
    assert "activations that a forward keeps, with its outputs:" in text and "(of the traced step)" in text


def test_a_kept_trace_has_counter_tracks_and_is_read_to_the_same_figures(
    root: str, trainer: MakeTrainer, tmp_path: Path
) -> None:
    report = profile_of(trainer, new_net(root), trace_dir=tmp_path, record_shapes=True, profile_memory=True)
    assert report.traced is not None and report.traced.tables is not None and report.notes == ()
    (file,) = report.traced.files
    written = json.loads(Path(file).read_text())
    counters = [event for event in written["traceEvents"] if event["ph"] == "C"]
    tracks: dict[str, list[tuple[float, float]]] = {}
    for event in counters:
        assert event["name"].startswith("lightning_flops: ") and event["pid"] == os.getpid()
        (value,) = event["args"].values()
        tracks.setdefault(event["name"].removeprefix("lightning_flops: "), []).append((event["ts"], value))
    assert tracks.keys() == {"memory allocated, host"}  # nothing ran on a device
    curves = report.traced.tables.memory_curves
    assert curves is not None
    assert max(value for _, value in tracks["memory allocated, host"]) == curves[0].peak_bytes
    # Without them the file gives the same figures.
    written["traceEvents"] = [event for event in written["traceEvents"] if event["ph"] != "C"]
    (tmp_path / "without.json").write_text(json.dumps(written))
    with_them, without = (
        replace(analyze_trace(load_trace(path), formulas=recorded_work), source="")
        for path in (file, tmp_path / "without.json")
    )
    assert with_them == without and with_them.flops is not None


def test_a_trace_is_kept_if_its_counter_tracks_cannot_be_made(
    root: str, trainer: MakeTrainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise ArithmeticError("no track")

    monkeypatch.setattr("lightning_flops.run.results.counter_tracks_of", fail)
    report = profile_of(trainer, new_net(root), trace_dir=tmp_path)
    assert report.notes == ("The kept trace has no counter tracks: no track.",)
    assert report.traced is not None and len(load_trace(report.traced.files[0])) > 0


def test_a_trace_that_cannot_be_kept_is_said_and_the_tables_are_there(
    root: str, trainer: MakeTrainer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("in the way")
    report = profile_of(trainer, new_net(root), trace_dir=tmp_path / "file")
    assert report.traced is not None and report.traced.tables is not None
    assert report.traced.files == ()
    (note,) = report.notes
    assert note.startswith("The trace was not kept: ")
    assert note in caplog.messages


@pytest.mark.parametrize("make", [new_net, new_gan], ids=["automatic", "manual"])
def test_losses_weights_and_random_state_are_the_same_with_everything_recorded(
    root: str, trainer: MakeTrainer, make: Callable[..., Any]
) -> None:
    def train(*callbacks: Any) -> tuple[Any, Any, Any]:
        net = make(root)
        torch.manual_seed(11)
        trainer(*callbacks).fit(net, loader(10))
        return [p.detach().clone() for p in net.parameters()], getattr(net, "losses", None), torch.get_rng_state()

    weights, losses, random_state = train()
    callback = FlopsProfilerCallback(
        trace_schedule=ONE_STEP, timing_steps=2, record_shapes=True, profile_memory=True, with_stack=True
    )
    traced_weights, traced_losses, traced_random_state = train(callback)
    assert callback.profile is not None and callback.profile.traced is not None
    assert all(map(torch.equal, weights, traced_weights))
    assert losses == traced_losses
    assert torch.equal(random_state, traced_random_state)


def test_with_accumulation_the_traced_step_holds_all_its_batches(root: str, trainer: MakeTrainer) -> None:
    callback = FlopsProfilerCallback(trace_schedule=ONE_STEP, timing_steps=2)
    trainer(callback, accumulate_grad_batches=3).fit(new_net(root), loader(30))
    assert callback.profile is not None and callback.profile.traced is not None
    tables = callback.profile.traced.tables
    assert tables is not None and tables.modules is not None
    assert len(tables.step_times.steps) == 1
    assert {row.name: row.calls for row in tables.modules.rows}["net.1"] == 3


@pytest.mark.parametrize("batches", [TRACED, TRACED + 1])
def test_a_run_that_ends_before_or_in_the_traced_step_reports_what_there_is(
    root: str, trainer: MakeTrainer, batches: int
) -> None:
    report = profile_of(trainer, new_net(root), batches=batches)
    assert report.timing is not None
    if batches == TRACED:
        assert report.traced is None
        assert report.notes == ("Training ended before all was traced that was to be.",)
    else:
        assert report.traced is not None
        assert report.notes == ()
    assert not torch._C._autograd._profiler_enabled()


def test_beside_the_users_profiler_modules_are_timed_by_a_clock(
    root: str, trainer: MakeTrainer, caplog: pytest.LogCaptureFixture
) -> None:
    callback = FlopsProfilerCallback(trace_schedule=ONE_STEP, timing_steps=2)
    with profile(activities=[ProfilerActivity.CPU]) as own:
        trainer(callback).fit(new_net(root), loader(10))
    assert own.key_averages()
    report = callback.profile
    assert report is not None and report.traced is not None
    assert report.traced.tables is None
    assert report.notes == (
        "Another profiler recorded the counted step: its trace has the counter's own work in that step, which takes "
        "longer there than the others.",
        "No step was traced: another profiler is running, and torch runs one profiler at a time.",
    )
    times = {module.name: module.times for module in report.modules}["net.0.linear"]
    assert times is not None
    assert times.forward_sec > 0
    assert times.backward_sec is None
    assert "No profiler could run." in render_text(report, detailed=True)


def test_lightnings_own_profiler_goes_before_ours(root: str, trainer: MakeTrainer, tmp_path: Path) -> None:
    profilers = importlib.import_module(f"{root}.profilers")
    own = profilers.PyTorchProfiler(dirpath=tmp_path, filename="own", export_to_chrome=False)
    callback = FlopsProfilerCallback(trace_schedule=ONE_STEP, timing_steps=2)
    trainer(callback, profiler=own).fit(new_net(root), loader(14))
    assert callback.profile is not None and callback.profile.traced is not None
    assert callback.profile.traced.tables is None
    assert [note for note in callback.profile.notes if "torch runs one profiler at a time" in note]


def test_without_a_trace_the_window_closes_with_the_timed_steps(root: str, trainer: MakeTrainer) -> None:
    report = profile_of(trainer, new_net(root), batches=6, trace=False)
    assert report.traced is None
    assert report.notes == ()


def test_a_schedule_of_several_cycles_keeps_every_trace(root: str, trainer: MakeTrainer, tmp_path: Path) -> None:
    schedule = {"wait": 1, "warmup": 1, "active": 2, "repeat": 2}
    report = profile_of(trainer, new_net(root), batches=16, trace_dir=tmp_path, trace_schedule=schedule)
    assert report.traced is not None and report.traced.tables is not None
    # Timed up to step 5; the cycles are 6-9 and 10-13, their last two steps are kept.
    assert sorted(Path(file).name for file in report.traced.files) == [
        "rank0_step12.pt.trace.json", "rank0_step8.pt.trace.json"
    ]  # fmt: skip
    assert [step.number for step in report.traced.tables.step_times.steps] == [12, 13]
    assert report.traced.index == 12


@pytest.mark.parametrize("recorded", [True, False])
def test_a_profiler_of_the_users_that_records_the_counted_step_is_named_in_a_note(
    root: str, trainer: MakeTrainer, recorded: bool
) -> None:
    callback = FlopsProfilerCallback(profile_step=2, timing_steps=1, trace=False, monitor=False)
    net, run = new_net(root), trainer(callback)
    # Step 2 is counted: a profiler around the fit records it, one that ends before it does not.
    with ExitStack() as profiled:
        profiled.enter_context(profile(activities=[ProfilerActivity.CPU]))
        if not recorded:
            net.on_train_batch_start = lambda batch, batch_idx: profiled.close() if batch_idx == 1 else None
        run.fit(net, loader(8))
    assert callback.profile is not None and callback.profile.flops.forward == 2 * BATCH * (IN * HIDDEN + HIDDEN * OUT)
    notes = [note for note in callback.profile.notes if note.startswith("Another profiler recorded the counted step")]
    assert len(notes) == (1 if recorded else 0)
