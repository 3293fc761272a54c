"""Where a profile shows: the run's loggers, files, the console's log, and the callback itself."""

from __future__ import annotations

import csv
import importlib
import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from lightning_flops import FlopsProfilerCallback, Profile
from lightning_flops.instrument.timing.clocks import WallClock
from lightning_flops.report.headline import headline
from lightning_flops.report.text import render_text
from lightning_flops.run.monitor import Monitor
from tests.fake_clock import FakeNow
from tests.lightning.nets import BACKWARD, BATCH, FORWARD, loader, new_net
from tests.lightning.tensorboard_runs import read_back, tensorboard_logger
from tests.prompt_worker import NoChecks, PromptWorker

MakeTrainer = Callable[..., Any]


def test_tensorboard_holds_every_scalar_on_the_runs_own_axis_and_the_whole_text(
    root: str, trainer: MakeTrainer, tmp_path: Path
) -> None:
    callback = FlopsProfilerCallback(
        profile_step=1, timing_steps=3, tokens_per_sample=5, peak_flops_per_sec=1e12, trace=False
    )
    trainer(callback, logger=tensorboard_logger(root, tmp_path), log_every_n_steps=4).fit(new_net(root), loader(20))
    events = read_back(tmp_path)
    tags = {tag for tag in events.Tags()["scalars"] if tag.startswith("flops_profiler/")}
    names = (
        "fwd_flops bwd_flops bwd_flops_estimated recompute_flops iter_flops",
        "fwd_flops_per_sec bwd_flops_per_sec bwd_flops_per_sec_estimated fwd_bwd_flops_per_sec iter_flops_per_sec",
        "fwd_latency_sec bwd_latency_sec step_latency_sec iter_latency_sec data_wait_sec global_step_sec",
        "samples_per_sec iter_samples_per_sec tokens_per_sec mfu hfu params",
    )
    assert tags == {f"flops_profiler/{name}" for name in " ".join(names).split()}

    def value(name: str) -> float:
        (event,) = events.Scalars(f"flops_profiler/{name}")
        # Step 0 waits, 1 is counted, 2 and 3 settle, 4 to 6 are timed; then the report comes when it is made.
        assert 6 <= event.step <= 20
        return float(event.value)

    assert value("fwd_flops") == FORWARD
    assert value("bwd_flops") == BACKWARD
    assert value("bwd_flops_estimated") == 2 * FORWARD
    assert value("iter_flops") == FORWARD + BACKWARD
    assert value("recompute_flops") == 0
    assert value("params") == 4 * 8 + 8 + 8 * 3 + 3
    profile = callback.profile
    assert profile is not None
    (text,) = events.Tensors("flops_profiler/profile/text_summary")
    shown = text.tensor_proto.string_val[0].decode()
    assert shown.startswith("```") and shown.rstrip().endswith("```")
    assert render_text(profile).strip("\n") in shown


def test_the_monitor_logs_at_the_loggers_interval_until_the_end(
    root: str, trainer: MakeTrainer, tmp_path: Path
) -> None:
    callback = FlopsProfilerCallback(profile_step=1, timing_steps=2, peak_flops_per_sec=1e12, trace=False)
    run = trainer(callback, logger=tensorboard_logger(root, tmp_path), log_every_n_steps=5, max_epochs=2)
    run.fit(new_net(root), loader(15))
    events = read_back(tmp_path)
    samples = events.Scalars("flops_monitor/samples_per_sec")
    assert [event.step for event in samples] == [4, 9, 14, 19, 24, 29]
    batches = events.Scalars("flops_monitor/batches_per_sec")
    assert [event.value for event in samples] == pytest.approx([BATCH * event.value for event in batches], rel=1e-6)
    waits = [event.value for event in events.Scalars("flops_monitor/data_wait_ratio")]
    assert all(0.0 < wait < 1.0 for wait in waits)
    # A step of these shapes is counted before the first reading.
    assert [event.step for event in events.Scalars("flops_monitor/mfu")] == [4, 9, 14, 19, 24, 29]


def monitored_run(
    monkeypatch: pytest.MonkeyPatch, root: str, trainer: MakeTrainer, tmp_path: Path, *callbacks: Any, **settings: Any
) -> EventAccumulator:
    """A run in which a step takes 14 s of a fake clock, 2 forward, 4 backward, 8 optimizer, and nothing else does."""
    now = FakeNow()
    monkeypatch.setattr("lightning_flops.run.window.clock_for", lambda device: WallClock(now))
    monkeypatch.setattr("lightning_flops.run.run.Monitor", lambda **given: Monitor(now, **given))
    monkeypatch.setattr("lightning_flops.run.reports.Worker", PromptWorker)
    monkeypatch.setattr("lightning_flops.run.run.StepFlops", NoChecks)
    profiler = FlopsProfilerCallback(profile_step=2, timing_steps=2, peak_flops_per_sec=1000.0, trace=False)
    slow = [make(now) for make in callbacks]
    run = trainer(slow[0], profiler, slow[1], logger=tensorboard_logger(root, tmp_path), **settings)
    validates = "val_check_interval" in settings
    run.fit(new_net(root, now=now, validates=validates), loader(8), loader(1) if validates else None)
    return read_back(tmp_path)


def slow_callback(root: str, **seconds: float) -> Callable[[FakeNow], Any]:
    """A callback whose hooks of these names take so long."""
    base: Any = importlib.import_module(root).Callback

    def make(now: FakeNow) -> Any:
        hooks = {name: (lambda self, *_, sec=sec: now.sleep(sec)) for name, sec in seconds.items()}
        return type("Slow", (base,), hooks)()

    return make


def test_the_monitors_rates_are_the_same_before_during_and_after_the_window(
    root: str, trainer: MakeTrainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    idle = slow_callback(root)
    events = monitored_run(
        monkeypatch, root, trainer, tmp_path, idle, idle, log_every_n_steps=1, max_epochs=2, val_check_interval=4
    )
    samples = events.Scalars("flops_monitor/samples_per_sec")
    assert [event.step for event in samples] == [step for step in range(16) if step != 2]  # 2 is counted
    assert [event.value for event in samples] == pytest.approx([BATCH / 14.0] * 15)
    mfu = events.Scalars("flops_monitor/mfu")
    assert [event.step for event in mfu] == list(range(3, 16))  # from the counted step on
    assert [event.value for event in mfu] == pytest.approx([(FORWARD + BACKWARD) / 14.0 / 1000.0] * 13)


def test_what_runs_between_epochs_is_no_training_whichever_callback_comes_first(
    root: str, trainer: MakeTrainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = slow_callback(root, on_train_epoch_end=1000.0, on_validation_start=1000.0, on_save_checkpoint=1000.0)
    last = slow_callback(root, on_train_epoch_start=1000.0, on_train_epoch_end=1000.0, on_validation_end=1000.0)
    events = monitored_run(
        monkeypatch, root, trainer, tmp_path, first, last,
        log_every_n_steps=1, max_epochs=3, val_check_interval=4, enable_checkpointing=True,
    )  # fmt: skip
    samples = events.Scalars("flops_monitor/samples_per_sec")
    assert [event.value for event in samples] == pytest.approx([BATCH / 14.0] * 23)
    (step_sec,) = events.Scalars("flops_profiler/global_step_sec")
    assert step_sec.value == 14.0


def test_without_monitor_nothing_is_tapped_once_the_window_is_closed(
    root: str, trainer: MakeTrainer, tmp_path: Path
) -> None:
    callback = FlopsProfilerCallback(timing_steps=1, monitor=False, trace=False)
    run, seen = trainer(callback, logger=tensorboard_logger(root, tmp_path), log_every_n_steps=1), []
    net = new_net(root)
    net.on_train_batch_end = lambda *args: seen.append(hasattr(run.profiler.start, "__wrapped__"))
    run.fit(net, loader(8))
    assert seen == [True, False, True, *[False] * 5]  # step 1 is counted, 2 settles, 3 is timed
    assert [tag for tag in read_back(tmp_path).Tags()["scalars"] if tag.startswith("flops_monitor/")] == []


def test_csv_gets_the_scalars_and_the_folder_of_its_logs_gets_text_and_json(
    root: str, trainer: MakeTrainer, tmp_path: Path
) -> None:
    callback = FlopsProfilerCallback(timing_steps=1, trace=False)
    csv_logger = importlib.import_module(f"{root}.loggers").CSVLogger(tmp_path, name="run", version=0)
    trainer(callback, logger=csv_logger).fit(new_net(root), loader(8))
    folder = tmp_path / "run" / "version_0"
    with (folder / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    (row,) = [row for row in rows if row.get("flops_profiler/fwd_flops")]
    assert float(row["flops_profiler/fwd_flops"]) == FORWARD
    assert 3 <= int(row["step"]) <= 8  # a batch after the report is made, or the end of the fit
    assert callback.profile is not None
    ours = folder / "lightning_flops"
    assert (ours / "profile.txt").read_text() == render_text(callback.profile)
    assert Profile.from_json((ours / "profile.json").read_text()) == callback.profile


def test_runs_that_share_a_folder_keep_each_others_profiles(root: str, trainer: MakeTrainer, tmp_path: Path) -> None:
    callbacks = [FlopsProfilerCallback(timing_steps=1, tag_prefix=prefix) for prefix in ("a", "b")]
    trainer(*callbacks).fit(new_net(root), loader(6))
    trainer(FlopsProfilerCallback(timing_steps=1)).fit(new_net(root), loader(6))
    assert sorted(path.name for path in (tmp_path / "lightning_flops").glob("profile*.json")) == [
        "profile-2.json",
        "profile-3.json",
        "profile.json",
    ]


def test_output_file_is_the_same_text(root: str, trainer: MakeTrainer, tmp_path: Path) -> None:
    callback = FlopsProfilerCallback(timing_steps=1, output_file=tmp_path / "new" / "folder" / "profile.log")
    trainer(callback).fit(new_net(root), loader(6))
    assert callback.profile is not None
    assert (tmp_path / "new" / "folder" / "profile.log").read_text() == render_text(callback.profile)


def test_a_file_that_cannot_be_written_is_one_warning_naming_it_and_the_rest_still_goes_out(
    root: str, trainer: MakeTrainer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    callback = FlopsProfilerCallback(timing_steps=1, output_file=tmp_path / "file" / "profile.txt")
    net = new_net(root)
    trainer(callback, logger=tensorboard_logger(root, tmp_path)).fit(net, loader(8))
    assert len(net.losses) == 8
    warnings = [
        r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING and "profile.txt" in r.getMessage()
    ]
    assert len(warnings) == 1
    assert callback.profile is not None
    assert "flops_profiler/fwd_flops" in read_back(tmp_path).Tags()["scalars"]
    assert json.loads((tmp_path / "run" / "version_0" / "lightning_flops" / "profile.json").read_text())


def test_the_console_is_the_packages_log_and_nothing_is_printed(
    root: str, trainer: MakeTrainer, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    callback = FlopsProfilerCallback(timing_steps=1)
    with caplog.at_level(logging.INFO, logger="lightning_flops"):
        trainer(callback).fit(new_net(root), loader(6))
    assert callback.profile is not None
    assert render_text(callback.profile) in [
        r.getMessage() for r in caplog.records if r.name.startswith("lightning_flops")
    ]
    assert "Flops Profiler" not in capfd.readouterr().out


@pytest.mark.parametrize("shown", [False, True])
def test_lightnings_log_says_where_the_report_lies_where_the_packages_own_is_not_shown(
    root: str, trainer: MakeTrainer, tmp_path: Path, caplog: pytest.LogCaptureFixture, shown: bool
) -> None:
    heard: list[str] = []
    listener = logging.Handler()
    listener.emit = lambda record: heard.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger(root).addHandler(listener)
    try:
        with caplog.at_level(logging.INFO if shown else logging.WARNING, logger="lightning_flops"):
            callback = FlopsProfilerCallback(timing_steps=1, trace=False)
            trainer(callback).fit(new_net(root), loader(6))
    finally:
        logging.getLogger(root).removeHandler(listener)
    assert callback.profile is not None
    words = headline(callback.profile)
    assert "FLOPs and " in words and " samples/s. n/a: MFU: no dense peak is known for float32 on " in words
    figures, _, _ = words.partition(". n/a: MFU")
    sentence = f"FLOPs of step 1: {figures}. Page: {tmp_path}/lightning_flops/profile.html"
    assert len(sentence) <= 200 or len(str(tmp_path)) > 80
    assert [said for said in heard if "FLOPs" in said] == ([] if shown else [sentence])
    # Where the package's own log is shown, its line has them.
    ours = [record.getMessage() for record in caplog.records if record.getMessage().startswith("profiled step")]
    assert [said.partition(": ")[2] for said in ours] == ([words] if shown else [])


def files_in(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def test_without_any_logger_everything_lies_in_one_folder_of_ours(
    root: str, trainer: MakeTrainer, tmp_path: Path
) -> None:
    callback = FlopsProfilerCallback(timing_steps=1)
    trainer(callback).fit(new_net(root), loader(6))
    assert callback.profile is not None
    folder = tmp_path / "lightning_flops"
    assert files_in(tmp_path) == [
        f"lightning_flops/{name}" for name in ("profile.html", "profile.json", "profile.txt", "throughput.json")
    ]
    assert Profile.from_json((folder / "profile.json").read_text()) == callback.profile
    assert (folder / "profile.txt").read_text() == render_text(callback.profile)


def test_a_logger_without_a_folder_for_each_run_is_no_place_for_files(
    root: str, trainer: MakeTrainer, tmp_path: Path
) -> None:
    base: Any = importlib.import_module(f"{root}.loggers.logger").DummyLogger
    service = type("Service", (base,), {"save_dir": str(tmp_path / "service")})()
    callback = FlopsProfilerCallback(timing_steps=1, monitor=False, html=False)
    trainer(callback, logger=service).fit(new_net(root), loader(6))
    assert files_in(tmp_path) == ["lightning_flops/profile.json", "lightning_flops/profile.txt"]


def test_a_fit_that_profiled_nothing_leaves_no_file_and_a_line_of_the_log(
    root: str, trainer: MakeTrainer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    callback = FlopsProfilerCallback(profile_step=100)
    csv_logger = importlib.import_module(f"{root}.loggers").CSVLogger(tmp_path, name="run", version=0)
    with caplog.at_level(logging.INFO, logger="lightning_flops"):
        trainer(callback, logger=csv_logger).fit(new_net(root), loader(6))
        trainer(callback).fit(new_net(root), loader(6))
    assert callback.throughput is not None
    assert [name for name in files_in(tmp_path) if name.endswith((".json", ".txt"))] == []
    assert sum("Throughput of the run" in record.getMessage() for record in caplog.records) == 2


def test_throughput_that_was_asked_for_alone_has_its_file(root: str, trainer: MakeTrainer, tmp_path: Path) -> None:
    trainer(FlopsProfilerCallback(timer_only=True)).fit(new_net(root), loader(6))
    assert files_in(tmp_path) == ["lightning_flops/throughput.json"]


def test_the_prefix_is_a_setting(root: str, trainer: MakeTrainer, tmp_path: Path) -> None:
    callback = FlopsProfilerCallback(timing_steps=1, tag_prefix="cost/model")
    trainer(callback, logger=tensorboard_logger(root, tmp_path)).fit(new_net(root), loader(6))
    tags = read_back(tmp_path).Tags()
    assert "cost/model/fwd_flops" in tags["scalars"]
    assert sorted(tag.removesuffix("/text_summary") for tag in tags["tensors"]) == [
        "cost/model/advice",
        "cost/model/profile",
        "flops_monitor/summary",
    ]
    assert tags["images"] == []
    ours = EventAccumulator(str(tmp_path / "run" / "version_0" / "lightning_flops")).Reload()
    assert ours.Tags()["tensors"] == ["cost/model/window/1"]
