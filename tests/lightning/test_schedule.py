"""Several windows in one fit, and none: when they open, what each reports, and what the run's end sums up."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from lightning_flops import FlopsProfilerCallback, Profile
from lightning_flops.report.text import render_text
from lightning_flops.schema.profile import Spread, ThroughputSummary
from tests.fake_clock import FakeNow
from tests.lightning.nets import BATCH, MakeTrainer, Rows, batch_flops, loader, logger_in, new_net, read_back
from tests.listening import warnings_in
from tests.results import throughput_of

pytestmark = pytest.mark.usefixtures("prompt_reports")


def test_a_list_of_steps_opens_one_window_after_the_other(trainer: MakeTrainer, now: FakeNow, tmp_path: Path) -> None:
    net = new_net(now=now)
    backward = net.backward
    steps: list[Any] = []

    def slower_each_step(loss: Any) -> None:
        backward(loss)
        now.sleep(float(len(steps)))
        steps.append(loss)

    net.backward = slower_each_step
    text = tmp_path / "flops.txt"
    text.write_text("of another fit")
    given: dict[str, Any] = {"timing_steps": 2, "trace": False, "monitor": False, "output_file": text}
    callback = FlopsProfilerCallback(profile_step=[8, 1], **given)
    trainer(callback, logger=logger_in(tmp_path)).fit(net, loader(16))
    first, second = callback.profiles
    assert callback.profile == second
    assert (first.profile_step, first.counted_steps, first.timed_steps) == (1, (1,), (4, 5))
    assert (second.profile_step, second.counted_steps, second.timed_steps) == (8, (8,), (11, 12))
    assert first.flops.forward == second.flops.forward == batch_flops().forward
    assert first.flops.backward == second.flops.backward == batch_flops().backward
    # Each report stands at its own step of the run, and the drift between them shows.
    drift = read_back(tmp_path).Scalars("flops_profiler/bwd_latency_sec")
    assert [(event.step, event.value) for event in drift] == [(5, 4.0 + 4.5), (12, 4.0 + 11.5)]
    kept = tmp_path / "run" / "version_0" / "lightning_flops" / "profile.json"
    assert Profile.from_json(kept.read_text()) == second
    assert "Step 8 counted, " in text.read_text()


def test_windows_open_again_and_again(trainer: MakeTrainer) -> None:
    callback = FlopsProfilerCallback(profile_step=1, every=6, timing_steps=1, trace=False, monitor=False)
    trainer(callback).fit(new_net(), loader(20))
    assert [profile.counted_steps for profile in callback.profiles] == [(1,), (7,), (13,), (19,)]
    # A step settles between the counted and the timed one; after step 19, which is counted, training ends.
    assert [profile.timed_steps for profile in callback.profiles] == [(3,), (9,), (15,), ()]


def test_listed_steps_that_cannot_be_profiled_are_named(trainer: MakeTrainer, caplog: pytest.LogCaptureFixture) -> None:
    callback = FlopsProfilerCallback(profile_step=[0, 2, 3, 50], timing_steps=1, trace=False)
    trainer(callback).fit(new_net(), loader(12))
    first, second = callback.profiles  # the second opens at the very step at which the first one closed
    assert (first.profile_step, second.profile_step) == (0, 3)
    sentence = "profile_step lists 2, too: it was not profiled, because this window was still open."
    assert sentence in first.notes and not any("lists" in note for note in second.notes)
    assert warnings_in(caplog) == [sentence, "step 50 was not profiled: this fit ended after 12 step(s)"]


def test_timer_only_reports_times_alone(
    trainer: MakeTrainer, monitor_now: FakeNow, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    net = new_net(now=monitor_now)
    callback = FlopsProfilerCallback(timer_only=True)
    run = trainer(callback, logger=logger_in(tmp_path), log_every_n_steps=4)
    with caplog.at_level(logging.INFO, logger="lightning_flops"):
        run.fit(net, loader(12, on_fetch=lambda: monitor_now.sleep(0.5)))
    assert (len(net.losses), callback.profiles, warnings_in(caplog)) == (12, (), [])
    # Each batch: six rows of half a second, then forward 2, backward 4 and optimizer 8.
    events = read_back(tmp_path)
    shares = events.Scalars("flops_monitor/data_wait_ratio")
    assert [event.step for event in shares] == [3, 7, 11]
    assert [event.value for event in shares] == pytest.approx([3 / 17] * 3)
    assert not [tag for tag in events.Tags()["scalars"] if tag.startswith("flops_profiler/")]
    summary = throughput_of(callback)
    assert summary.batches == 12
    assert summary.reader_cost_sec == Spread(average=3.0, maximum=3.0, minimum=3.0)
    assert summary.batch_cost_sec == Spread(average=17.0, maximum=17.0, minimum=17.0)
    assert summary.ips == Spread(average=BATCH / 17, maximum=BATCH / 17, minimum=BATCH / 17)
    assert render_text(summary) in [r.getMessage() for r in caplog.records]
    (text,) = events.Tensors("flops_monitor/summary/text_summary")
    assert render_text(summary) in text.tensor_proto.string_val[0].decode()
    kept = tmp_path / "run" / "version_0" / "lightning_flops" / "throughput.json"
    assert ThroughputSummary.from_json(kept.read_text()) == summary


def test_the_summary_is_of_plain_training_batches(trainer: MakeTrainer, monitor_now: FakeNow) -> None:
    callback = FlopsProfilerCallback(profile_step=2, timing_steps=2)
    run = trainer(callback, val_check_interval=4, max_epochs=2)
    run.fit(new_net(now=monitor_now, validates=True), loader(8), loader(1))
    summary = throughput_of(callback)
    assert summary.batches == 16 - 1 - 6  # one counted, one of warm-up, five traced
    assert summary.batch_cost_sec == Spread(average=14.0, maximum=14.0, minimum=14.0)


def test_an_interrupted_run_has_a_summary_of_what_its_steps_got(trainer: MakeTrainer, monitor_now: FakeNow) -> None:
    net = new_net(now=monitor_now)
    step = net.training_step

    def training_step(batch: Any, batch_idx: int) -> Any:
        if batch_idx == 25:
            raise ValueError("the user's own")
        x, y = batch.pop("x"), batch.pop("y")
        batch["twice"] = torch.cat([x, x])  # a batch that is changed
        return step((x, y), batch_idx)

    net.training_step = training_step
    data = Rows(30 * BATCH)
    rows = [dict(zip("xy", data[at], strict=True)) for at in range(len(data))]
    callback = FlopsProfilerCallback(profile_step=1, timing_steps=1, trace=False)
    with pytest.raises(ValueError, match="the user's own"):
        trainer(callback).fit(net, DataLoader(rows, batch_size=BATCH))  # type: ignore[arg-type]
    summary = throughput_of(callback)
    assert summary.batches == 24  # one was counted
    assert summary.ips == Spread(average=BATCH / 14, maximum=BATCH / 14, minimum=BATCH / 14)
