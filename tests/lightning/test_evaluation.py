"""``Trainer.predict``, ``test`` and ``validate``: what is counted, timed and reported of a loop that does not train."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_flops import FlopsProfilerCallback, Profile
from lightning_flops.records import PhaseFlops, PhaseSeconds
from lightning_flops.report.text import render_text
from tests.fake_clock import FakeNow
from tests.left_on_torch import torch_state
from tests.lightning.nets import (
    BATCH,
    FORWARD,
    HIDDEN,
    IN,
    LOOPS,
    OUT,
    ROOT,
    MakeTrainer,
    footprint,
    loader,
    logger_in,
    new_evaluated_net,
    read_back,
    run,
)
from tests.listening import warnings_in
from tests.results import profile_of, throughput_of

pytestmark = pytest.mark.usefixtures("prompt_reports")


def profiler(**settings: Any) -> FlopsProfilerCallback:
    return FlopsProfilerCallback(**{"trace": False, "monitor": False, **settings})


# What is counted and timed


@pytest.mark.parametrize("function", LOOPS)
def test_a_batch_is_counted_and_those_after_it_are_timed_part_by_part(
    trainer: MakeTrainer, now: FakeNow, windows: list[Any], function: str
) -> None:
    callback = profiler(profile_step=1, timing_steps=3, peak_flops_per_sec=FORWARD * 1.0)
    batches = loader(12, on_fetch=lambda: now.sleep(0.5))
    run(trainer(callback), function, new_evaluated_net(now=now), batches)
    (window,) = windows
    assert [(step.index, step.flops) for step in window.counted_steps] == [(1, PhaseFlops(forward=FORWARD))]
    assert [step.index for step in window.timed_steps] == [4, 5, 6]
    for step in window.timed_steps:
        assert step.seconds == PhaseSeconds(data_wait=BATCH * 0.5, forward=2.0)
        assert (step.samples, step.micro_steps) == (BATCH, 1)
    profile = profile_of(callback)
    assert (profile.context.loop, profile.context.framework) == (function, ROOT)
    assert profile.report_step == 7  # batches done when the window closed
    assert profile.rates.samples_per_sec == BATCH / 5.0
    assert profile.rates.forward_flops_per_sec == FORWARD / 2.0
    assert profile.rates.data_wait_ratio == 3.0 / 5.0
    assert profile.rates.mfu == pytest.approx(1.0 / 5.0, rel=1e-12)
    assert {one.name: one.own.forward for one in profile.modules if one.own.forward} == {
        "net.0.linear": 2 * BATCH * IN * HIDDEN,
        "net.1": 2 * BATCH * HIDDEN * OUT,
    }


@pytest.mark.parametrize(
    ("batches", "counted", "timed"), [(1, 0, []), (2, 1, []), (4, 1, []), (5, 1, [4]), (9, 1, [4, 5, 6])]
)
def test_a_short_loop_is_profiled_as_far_as_it_goes(
    trainer: MakeTrainer, now: FakeNow, windows: list[Any], batches: int, counted: int, timed: list[int]
) -> None:
    run(trainer(profiler(timing_steps=3)), "test", new_evaluated_net(now=now), loader(batches))
    (window,) = windows
    assert [(step.index, step.flops) for step in window.counted_steps] == [(counted, PhaseFlops(forward=FORWARD))]
    assert [step.index for step in window.timed_steps] == timed
    assert all(step.seconds == PhaseSeconds(forward=2.0) for step in window.timed_steps)
    early = "The test loop ended before the window closed."
    assert (early in window.notes) == (len(timed) < 3)


def test_a_loop_without_the_batch_that_was_asked_for_is_profiled_in_its_last_if_that_is_known(
    trainer: MakeTrainer, windows: list[Any], caplog: pytest.LogCaptureFixture
) -> None:
    for limit, last in ((None, 8), (2, 1)):
        made = trainer(profiler(profile_step=50), limit_predict_batches=limit)
        run(made, "predict", new_evaluated_net(), loader(9))
        assert [step.index for step in windows.pop().counted_steps] == [last]
    assert warnings_in(caplog) == []
    run(trainer(profiler(profile_step=50)), "predict", new_evaluated_net(), (batch for batch in loader(3)))
    assert windows == []
    assert "nothing was profiled: profile_step is 50, and this predict loop ended after 3 batch(es)" in caplog.messages


def test_a_backward_in_a_test_step_is_counted_and_has_no_time_of_its_own(trainer: MakeTrainer) -> None:
    net = new_evaluated_net()

    def attack(batch: Any, batch_idx: int) -> None:
        x = batch[0].clone().requires_grad_()
        with torch.enable_grad():
            net.net(x).sum().backward()

    net.test_step = attack
    callback = profiler(timing_steps=2)
    run(trainer(callback, inference_mode=False), "test", net, loader(8))
    profile = profile_of(callback)
    # The input needs a gradient, too: two products a layer.
    assert (profile.flops.forward, profile.flops.backward) == (FORWARD, 2 * FORWARD)
    assert profile.timing is not None
    assert (profile.timing.forward_sec, profile.timing.backward_sec) == (None, None)
    assert profile.rates.forward_backward_flops_per_sec is not None
    assert "bwd (measured)" in render_text(profile, detailed=True)


# Where the report goes


def test_reports_of_a_fit_and_of_the_loops_after_it_keep_apart(trainer: MakeTrainer, tmp_path: Path) -> None:
    callback = FlopsProfilerCallback(timing_steps=2, output_file=str(tmp_path / "flops.txt"))
    net, made = new_evaluated_net(), trainer(callback, logger=logger_in(tmp_path))
    made.fit(net, loader(10), loader(1))
    folder = tmp_path / "run" / "version_0" / "lightning_flops"
    of_fit = (folder / "profile.json").read_text(), (tmp_path / "flops.txt").read_text()
    for function in (*LOOPS, "test"):
        run(made, function, net, loader(10))
        assert profile_of(callback).context.loop == function
        assert callback.profiles == (profile_of(callback),)
    assert of_fit == ((folder / "profile.json").read_text(), (tmp_path / "flops.txt").read_text())
    parts = ("", ".predict", ".test", ".test-2", ".validate")
    assert {path.name for path in folder.glob("*.json")} == {
        f"{name}{part}.json" for name in ("profile", "throughput") for part in parts
    }
    for function in LOOPS:
        assert Profile.from_json((folder / f"profile.{function}.json").read_text()).context.loop == function
        text = (tmp_path / f"flops.{function}.txt").read_text()
        assert f"in a {function} loop on" in text and "Batch 1 counted, batches 4-5 timed." in " ".join(text.split())
        assert "bwd" not in text and "step latency" not in text and "optimizer" not in text
    board = read_back(tmp_path)
    for function in LOOPS:
        flops = board.Scalars(f"flops_profiler/{function}/fwd_flops")
        assert {(event.step, event.value) for event in flops} == {(10, float(FORWARD))}  # five more were traced
    scalars = board.Tags()["scalars"]
    assert {"flops_profiler/fwd_flops", "flops_profiler/bwd_flops"} <= set(scalars)
    assert [tag for tag in scalars if tag.count("/") > 1 and ("bwd" in tag or "step_latency" in tag)] == []
    tags = ("flops_profiler/{}/profile", "flops_profiler/{}/advice", "flops_monitor/{}/summary")
    texts = {f"{tag.format(function)}/text_summary" for function in LOOPS for tag in tags}
    assert texts <= set(board.Tags()["tensors"])


def test_throughput_is_of_the_loops_batches_from_the_first_on(trainer: MakeTrainer, monitor_now: FakeNow) -> None:
    net = new_evaluated_net(now=monitor_now)
    net.on_predict_epoch_start = lambda: monitor_now.sleep(1000.0)
    callback = FlopsProfilerCallback(timer_only=True)
    run(trainer(callback), "predict", net, loader(5, on_fetch=lambda: monitor_now.sleep(0.5)))
    summary = throughput_of(callback)
    assert callback.profile is None and summary.ips is not None
    assert (summary.batches, summary.batch_cost_sec.maximum, summary.reader_ratio) == (5, 5.0, 3.0 / 5.0)
    assert summary.ips.average == BATCH / 5.0


@pytest.mark.parametrize("function", LOOPS)
def test_an_exception_arrives_and_leaves_nothing_and_there_is_a_report(trainer: MakeTrainer, function: str) -> None:
    def outcome(*callbacks: Any) -> Any:
        steps = iter(range(10**6))

        def raises(part: str) -> None:
            if part == "layer" and next(steps) == 4:  # a batch that is timed
                raise ValueError("the user's own")

        net, made = new_evaluated_net(at=raises), trainer(*callbacks)
        before = torch_state()
        with pytest.raises(ValueError, match="the user's own"):
            run(made, function, net, loader(12))
        return torch_state() == before, footprint(made, net)

    callback = FlopsProfilerCallback(timing_steps=2)
    assert outcome(callback) == outcome()
    assert f"The {function} loop was interrupted by ValueError." in profile_of(callback).notes
