"""The traced step of a Lightning run: what it shows, and what is said where there is none."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from lightning_flops import FlopsProfilerCallback, Profile
from lightning_flops.report.text import render_text
from lightning_flops.trace.modules import module_table
from lightning_flops.trace.read import load_trace
from tests import results
from tests.lightning.nets import BATCH, HIDDEN, IN, OUT, ROOT, MakeTrainer, loader, new_net

# Step 0 waits, 1 is counted, 2 and 3 settle, 4 and 5 are timed, 6 warms up.
TRACED = 7
ONE_STEP = {"active": 1}
"""A trace schedule."""


@pytest.fixture(autouse=True)
def quiet_profiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KINETO_LOG_LEVEL", "6")


def profile_of(
    trainer: MakeTrainer, net: Any, *, batches: int = 10, of_trainer: Any = None, **settings: Any
) -> Profile:
    if settings.get("trace", True):
        settings = {"trace_schedule": ONE_STEP, **settings}
    callback = FlopsProfilerCallback(timing_steps=2, peak_flops_per_sec=1e12, **settings)
    trainer(callback, **(of_trainer or {})).fit(net, loader(batches))
    return results.profile_of(callback)


def test_every_module_has_its_time_and_from_the_counted_flops_its_rates(trainer: MakeTrainer) -> None:
    report = profile_of(trainer, new_net())
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
    assert f"Step {TRACED} ran under torch.profiler" in text and "bwd latency - {'Net" in text
    assert report.notes == ()


def test_a_kept_trace_has_modules_phases_tracks_and_the_same_figures(trainer: MakeTrainer, tmp_path: Path) -> None:
    folder = tmp_path / "traces"
    report = profile_of(trainer, new_net(), trace_dir=folder, record_shapes=True, profile_memory=True)
    assert report.traced is not None and report.traced.tables is not None and report.notes == ()
    (file,) = report.traced.files
    assert file == str(folder / f"rank0_step{TRACED}.pt.trace.json")
    events = json.loads(Path(file).read_text())["traceEvents"]
    names = {event["name"] for event in events}
    assert {
        f"ProfilerStep#{TRACED}", "module: net.0.linear", "phase: data_wait", "phase: forward", "phase: backward",
        "phase: optimizer",
    } <= names  # fmt: skip
    assert any("Input Dims" in event.get("args", {}) for event in events)
    loaded = load_trace(file)
    assert loaded.rank == 0  # which torch says in runs of several processes only
    assert loaded.memory
    assert module_table(loaded) == report.traced.tables.modules
    allocated = {row.name: row.self_allocation_bytes for row in report.traced.tables.memory or ()}
    assert allocated["aten::addmm"] == BATCH * (HIDDEN + OUT) * 4  # both outputs in float32
    text = render_text(report, detailed=True)
    assert "aten::addmm" in text[text.index("size increase") :]


def test_a_trace_that_cannot_be_kept_is_said_and_the_tables_are_there(
    trainer: MakeTrainer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("in the way")
    report = profile_of(trainer, new_net(), trace_dir=tmp_path / "file")
    assert report.traced is not None and report.traced.tables is not None
    assert report.traced.files == ()
    (note,) = report.notes
    assert note.startswith("The trace was not kept: ") and note in caplog.messages


def test_a_run_that_ends_before_the_traced_step_says_so(trainer: MakeTrainer) -> None:
    report = profile_of(trainer, new_net(), batches=TRACED)
    assert report.timing is not None and report.traced is None
    assert report.notes == ("Training ended before all was traced that was to be.",)
    assert not torch._C._autograd._profiler_enabled()


@pytest.mark.parametrize("lightnings", [False, True])
def test_beside_a_users_profiler_no_step_is_traced(trainer: MakeTrainer, tmp_path: Path, lightnings: bool) -> None:
    if lightnings:
        kind = importlib.import_module(f"{ROOT}.profilers").PyTorchProfiler
        own = kind(dirpath=tmp_path, filename="own", export_to_chrome=False)
        report = profile_of(trainer, new_net(), batches=14, of_trainer={"profiler": own})
    else:
        with profile(activities=[ProfilerActivity.CPU]) as recorded:
            report = profile_of(trainer, new_net())
        assert recorded.key_averages()
    assert report.traced is None
    assert report.notes[-1].endswith("and torch runs one profiler at a time.")


def test_a_schedule_of_several_cycles_keeps_every_trace(trainer: MakeTrainer, tmp_path: Path) -> None:
    schedule = {"wait": 1, "warmup": 1, "active": 2, "repeat": 2}
    report = profile_of(trainer, new_net(), batches=16, trace_dir=tmp_path, trace_schedule=schedule)
    assert report.traced is not None and report.traced.tables is not None
    # Timed up to step 5; the cycles are 6-9 and 10-13, their last two steps are kept.
    assert [step.number for step in report.traced.tables.step_times.steps] == [12, 13]
    assert report.traced.index == 12
