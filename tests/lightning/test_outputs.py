"""Where a profile shows: the run's loggers, files, the console's log, and the callback itself."""

from __future__ import annotations

import importlib
import logging
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from lightning_flops import FlopsProfilerCallback, Profile
from lightning_flops.report.text import figures, render_text
from tests.fake_clock import FakeNow
from tests.lightning.nets import BACKWARD, BATCH, FORWARD, ROOT, MakeTrainer, loader, logger_in, new_net, read_back
from tests.listening import listening
from tests.results import profile_of


def files_in(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def test_tensorboard_has_every_scalar_on_the_runs_axis_and_the_whole_text(trainer: MakeTrainer, tmp_path: Path) -> None:
    callback = FlopsProfilerCallback(
        profile_step=1, timing_steps=3, tokens_per_sample=5, peak_flops_per_sec=1e12, trace=False
    )
    trainer(callback, logger=logger_in(tmp_path), log_every_n_steps=4).fit(new_net(), loader(20))
    events = read_back(tmp_path)
    tags = {tag for tag in events.Tags()["scalars"] if tag.startswith("flops_profiler/")}
    names = (
        "fwd_flops bwd_flops bwd_flops_estimated recompute_flops iter_flops",
        "fwd_flops_per_sec bwd_flops_per_sec bwd_flops_per_sec_estimated fwd_bwd_flops_per_sec iter_flops_per_sec",
        "fwd_latency_sec bwd_latency_sec step_latency_sec iter_latency_sec data_wait_sec global_step_sec",
        "samples_per_sec iter_samples_per_sec tokens_per_sec mfu hfu params",
    )
    assert tags == {f"flops_profiler/{name}" for name in " ".join(names).split()}
    counts = {"fwd_flops": FORWARD, "bwd_flops": BACKWARD, "bwd_flops_estimated": 2 * FORWARD, "recompute_flops": 0}
    counts = {**counts, "iter_flops": FORWARD + BACKWARD, "params": 4 * 8 + 8 + 8 * 3 + 3}
    for name, value in counts.items():
        (event,) = events.Scalars(f"flops_profiler/{name}")
        # Step 0 waits, 1 is counted, 2 and 3 settle, 4 to 6 are timed. The report is made some steps later.
        assert (event.value, event.step) == (value, 6), name
    (text,) = events.Tensors("flops_profiler/profile/text_summary")
    shown = text.tensor_proto.string_val[0].decode()
    assert text.step == 6 and shown.startswith("```") and shown.rstrip().endswith("```")
    assert render_text(profile_of(callback)).strip("\n-") in shown
    # DeepSpeed's lines too, though no details were asked for.
    for label in ("fwd flops per GPU:", "fwd FLOPS per GPU = fwd flops per GPU / fwd latency:", "samples/second:"):
        assert len(re.findall(rf"^{re.escape(label)} +\d", shown, re.MULTILINE)) == 1


def slow_callback(now: FakeNow, *hooks: str) -> Any:
    """A callback whose hooks of these names take a thousand seconds."""
    base: Any = importlib.import_module(ROOT).Callback
    return type("Slow", (base,), {name: lambda self, *_: now.sleep(1000.0) for name in hooks})()


@pytest.mark.usefixtures("prompt_reports")
def test_the_monitors_rates_are_the_same_in_all_of_a_run_whichever_callback_is_slow_between_epochs(
    trainer: MakeTrainer, monitor_now: FakeNow, tmp_path: Path
) -> None:
    now = monitor_now
    profiler = FlopsProfilerCallback(profile_step=2, timing_steps=2, peak_flops_per_sec=1000.0, trace=False)
    first = slow_callback(now, "on_train_epoch_end", "on_validation_start", "on_save_checkpoint")
    last = slow_callback(now, "on_train_epoch_start", "on_train_epoch_end", "on_validation_end")
    run = trainer(
        first, profiler, last, logger=logger_in(tmp_path), log_every_n_steps=1, max_epochs=2,
        val_check_interval=4, enable_checkpointing=True,
    )  # fmt: skip
    run.fit(new_net(now=now, validates=True), loader(8), loader(1))
    events = read_back(tmp_path)
    samples = events.Scalars("flops_monitor/samples_per_sec")
    assert [event.step for event in samples] == [step for step in range(16) if step != 2]  # 2 is counted
    assert [event.value for event in samples] == pytest.approx([BATCH / 14.0] * 15)
    mfu = events.Scalars("flops_monitor/mfu")
    assert [event.step for event in mfu] == list(range(3, 16))  # from the counted step on
    assert [event.value for event in mfu] == pytest.approx([(FORWARD + BACKWARD) / 14.0 / 1000.0] * 13)
    (step_sec,) = events.Scalars("flops_profiler/global_step_sec")
    assert step_sec.value == 14.0


@pytest.mark.parametrize("shown", [False, True])
def test_lightnings_log_says_where_the_report_lies_where_the_packages_own_is_not_shown(
    trainer: MakeTrainer, tmp_path: Path, caplog: pytest.LogCaptureFixture, shown: bool,
    capfd: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    callback = FlopsProfilerCallback(timing_steps=1, trace=False)
    level = logging.INFO if shown else logging.WARNING
    with caplog.at_level(level, logger="lightning_flops"), listening(ROOT) as heard:
        trainer(callback).fit(new_net(), loader(6))
    profile = profile_of(callback)
    words = figures(profile)
    assert "FLOPs and " in words and words.endswith(" samples/s (wall clock)")
    sentence = f"FLOPs of step 1: {words}. Page: {tmp_path}/lightning_flops/profile.html"
    assert [said for said in heard if "FLOPs" in said] == ([] if shown else [sentence])
    # Where the package's own log is shown, it has the line and the text; nothing is printed.
    ours = [record.getMessage() for record in caplog.records if record.name.startswith("lightning_flops")]
    lines = [said.partition(": ")[2] for said in ours if said.startswith("profiled step")]
    assert (lines, render_text(profile) in ours) == (([words], True) if shown else ([], False))
    assert "Flops Profiler" not in capfd.readouterr().out


def test_without_a_loggers_folder_all_lies_in_ours_and_runs_keep_others(trainer: MakeTrainer, tmp_path: Path) -> None:
    base: Any = importlib.import_module(f"{ROOT}.loggers.logger").DummyLogger
    service = type("Service", (base,), {"save_dir": str(tmp_path / "service")})()
    callback = FlopsProfilerCallback(timing_steps=1, output_file=tmp_path / "new" / "folder" / "profile.log")
    trainer(callback, logger=service).fit(new_net(), loader(6))
    profile, folder = profile_of(callback), tmp_path / "lightning_flops"
    assert (tmp_path / "new" / "folder" / "profile.log").read_text() == render_text(profile)
    assert files_in(folder) == ["profile.html", "profile.json", "throughput.json"]
    assert Profile.from_json((folder / "profile.json").read_text()) == profile
    callbacks = [FlopsProfilerCallback(timing_steps=1, tag_prefix=prefix, html=False) for prefix in ("a", "b")]
    trainer(*callbacks).fit(new_net(), loader(6))
    assert [name for name in files_in(folder) if re.fullmatch("profile.*json", name)] == [
        f"profile{number}.json" for number in ("-2", "-3", "")
    ]
    assert Profile.from_json((folder / "profile.json").read_text()) == profile


def test_a_fit_that_profiled_nothing_leaves_no_file_but_throughput_that_was_asked_for_alone(
    trainer: MakeTrainer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    callback = FlopsProfilerCallback(profile_step=100)
    with caplog.at_level(logging.INFO, logger="lightning_flops"):
        trainer(callback, logger=logger_in(tmp_path, "CSVLogger")).fit(new_net(), loader(6))
    assert callback.throughput is not None
    assert [name for name in files_in(tmp_path) if name.endswith((".json", ".txt"))] == []
    assert sum("Throughput of the run" in record.getMessage() for record in caplog.records) == 1
    trainer(FlopsProfilerCallback(timer_only=True)).fit(new_net(), loader(6))
    assert [one for one in files_in(tmp_path) if one.endswith((".json", ".txt"))] == ["lightning_flops/throughput.json"]


def test_the_prefix_is_a_setting_and_so_is_whether_a_run_is_monitored(trainer: MakeTrainer, tmp_path: Path) -> None:
    callback = FlopsProfilerCallback(timing_steps=1, tag_prefix="cost/model", monitor=False)
    trainer(callback, logger=logger_in(tmp_path), log_every_n_steps=2).fit(new_net(), loader(6))
    tags = read_back(tmp_path).Tags()
    assert "cost/model/fwd_flops" in tags["scalars"]
    assert not [tag for tag in tags["scalars"] if tag.startswith("flops_monitor/")]
    assert set(tags["tensors"]) == {"cost/model/advice/text_summary", "cost/model/profile/text_summary"}
    ours = EventAccumulator(str(tmp_path / "run" / "version_0" / "lightning_flops")).Reload()
    assert ours.Tags()["tensors"] == ["cost/model/window/1"]


def test_a_slow_loader_comes_first_wherever_the_report_goes(trainer: MakeTrainer, now: FakeNow, tmp_path: Path) -> None:
    net = new_net(now=now)  # a forward takes 2 s, a backward 4 s
    net.configure_optimizers = lambda: torch.optim.SGD(net.parameters(), lr=0.01)  # takes no time
    callback = FlopsProfilerCallback(timing_steps=8)
    run = trainer(callback, logger=logger_in(tmp_path))
    run.fit(net, loader(20, on_fetch=lambda: now.sleep(6.0 / BATCH)))
    profile = profile_of(callback)
    # Of 12 s the 6 of the wait, but for 0.4 ms, which a worker takes at least to hand a batch over.
    assert profile.advice[0].rule.startswith("data_wait") and profile.advice[0].saves == pytest.approx(5.9996 / 12)
    assert "1. The step waits 6 s a batch for data (50.0%), with 0 loader workers;" in render_text(profile)
    (event,) = read_back(tmp_path).Tensors("flops_profiler/advice/text_summary")
    page = event.tensor_proto.string_val[0].decode()
    assert page.startswith("```\n1. The step waits 6 s a batch for data (50.0%)")
    kept = Profile.from_json((tmp_path / "run" / "version_0" / "lightning_flops" / "profile.json").read_text())
    assert kept.advice == profile.advice
