"""Where the reports of a loop go: a folder, a writer, the trackers of accelerate, the loggers of Fabric."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from lightning.fabric import Fabric
from lightning.fabric.loggers.csv_logs import CSVLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils.tensorboard import SummaryWriter

from lightning_flops import Profile, profile_training
from lightning_flops.pytorch import TrainingProfiler
from tests.fake_clock import FakeNow
from tests.left_on_objects import left_on_object
from tests.loops.nets import BACKWARD, BATCH, FORWARD, Net, SlowSGD, loader, loss_of
from tests.results import profile_of, throughput_of

SETTINGS: dict[str, Any] = {"profile_step": 1, "timing_steps": 2, "trace": False}
SCALARS = ("flops_profiler/fwd_flops", "flops_profiler/bwd_flops", "flops_monitor/samples_per_sec")


pytestmark = pytest.mark.usefixtures("no_checks")


def train(now: FakeNow, **given: Any) -> TrainingProfiler:
    net = Net(now)
    optimizer = SlowSGD(net.parameters(), now)
    with profile_training(net, optimizer, **{**SETTINGS, **given}) as profiler:
        for rows in loader(12, now):
            loss_of(net(rows), now).backward()
            optimizer.step()
    return profiler


def test_a_folder_gets_tensorboards_files_and_ours(now: FakeNow, tmp_path: Path) -> None:
    profiler = train(now, log_dir=tmp_path, log_every_n_steps=4, initial_step=100)
    ours = tmp_path / "lightning_flops"
    assert Profile.from_json((ours / "profile.json").read_text()) == profile_of(profiler)
    assert json.loads((ours / "throughput.json").read_text())["batches"] == 11
    assert (ours / "profile.html").exists()
    events = EventAccumulator(str(tmp_path)).Reload()
    (forward,) = events.Scalars("flops_profiler/fwd_flops")
    assert forward.value == FORWARD
    assert [event.step for event in events.Scalars("flops_monitor/samples_per_sec")] == [104, 108, 112]


def test_a_run_too_short_to_be_profiled_has_its_throughput_in_tensorboard_alone(now: FakeNow, tmp_path: Path) -> None:
    train(now, log_dir=tmp_path, profile_step=50)
    (file,) = tmp_path.rglob("*")
    tags = EventAccumulator(str(file)).Reload().Tags()
    assert (tags["scalars"], tags["tensors"]) == ([], ["flops_monitor/summary/text_summary"])


def test_a_summary_writer_gets_scalars_and_text_and_throughput_alone_is_a_file(now: FakeNow, tmp_path: Path) -> None:
    with SummaryWriter(str(tmp_path)) as writer:
        train(now, writer=writer, log_every_n_steps=4)
    events = EventAccumulator(str(tmp_path)).Reload()
    assert set(SCALARS) <= set(events.Tags()["scalars"])
    assert "flops_profiler/profile/text_summary" in events.Tags()["tensors"]
    assert (tmp_path / "lightning_flops" / "profile.json").exists()
    profiler = train(now, timer_only=True, log_dir=tmp_path / "timed")
    assert profiler.profile is None and throughput_of(profiler).batches == 12
    assert [one.name for one in (tmp_path / "timed" / "lightning_flops").iterdir()] == ["throughput.json"]


@pytest.mark.skipif(not Path("/proc/self/fdinfo").exists(), reason="needs a folder in which nobody can make a file")
def test_a_folder_that_cannot_be_written_is_one_warning(now: FakeNow, caplog: pytest.LogCaptureFixture) -> None:
    """A thread that raised would fail the test, too."""
    with caplog.at_level(logging.WARNING, "lightning_flops"):
        profiler = train(now, log_dir="/proc/self/fdinfo", log_every_n_steps=1)
    said = [one.getMessage() for one in caplog.records if one.levelno >= logging.WARNING]
    assert ["the FLOPs report was not written: " in one for one in said].count(True) == 1
    assert not [one for one in said if "did not take" in one]
    assert profile_of(profiler).flops.forward == FORWARD


def test_a_working_directory_that_was_removed_takes_nothing_from_the_run(
    now: FakeNow, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    gone = tmp_path / "gone"
    gone.mkdir()
    os.chdir(gone)
    gone.rmdir()
    with caplog.at_level(logging.WARNING, "lightning_flops"):
        train(now, log_dir=tmp_path / "logs")
    assert not [one.getMessage() for one in caplog.records if "failed" in one.getMessage()]
    names = {one.name for one in (tmp_path / "logs" / "lightning_flops").iterdir()}
    assert {"profile.json", "profile.html", "throughput.json"} <= names


def test_a_function_gets_scalars_and_their_step(now: FakeNow) -> None:
    calls: list[tuple[dict[str, float], int]] = []
    train(now, writer=lambda scalars, step: calls.append((scalars, step)), log_every_n_steps=4)
    name = "flops_profiler/fwd_flops"
    assert [scalars[name] for scalars, _ in calls if name in scalars] == [FORWARD]
    name, step_sec = "flops_monitor/samples_per_sec", 0.5 + 2.0 + 32.0 + 4.0 + 8.0
    rates = {step: scalars[name] for scalars, step in calls if name in scalars}
    assert rates == pytest.approx(dict.fromkeys((4, 8, 12), BATCH / step_sec))


# ---- accelerate


@pytest.fixture
def accelerator() -> Iterator[Callable[..., Accelerator]]:
    # a transformers Trainer of another test in this process leaves accelerate's state behind
    AcceleratorState._reset_state(reset_partial_state=True)
    made: list[Accelerator] = []

    def make(**given: Any) -> Accelerator:
        made.append(Accelerator(cpu=True, **given))
        return made[-1]

    yield make
    for one in made:
        one.end_training()
        one.free_memory()
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()  # a loop may have ended within an accumulation


def test_a_loop_of_accelerate_accumulates_and_its_trackers_get_the_scalars(
    now: FakeNow, tmp_path: Path, accelerator: Callable[..., Accelerator]
) -> None:
    accelerate = accelerator(gradient_accumulation_steps=2, log_with="tensorboard", project_dir=str(tmp_path))
    accelerate.init_trackers("run")
    net = Net(now)
    given = SlowSGD(net.parameters(), now)
    model, optimizer, data = accelerate.prepare(net, given, loader(16, now))
    with profile_training(model, optimizer, accelerator=accelerate, **SETTINGS, log_every_n_steps=2) as profiler:
        for rows in data:
            with accelerate.accumulate(model):
                accelerate.backward(loss_of(model(rows), now))
                optimizer.step()
                optimizer.zero_grad()
    profile = profile_of(profiler)
    assert (profile.flops.forward, profile.flops.backward) == (2 * FORWARD, 2 * BACKWARD)
    assert (profile.samples, profile.micro_steps, profile.context.accumulate) == (2 * BATCH, 2, 2)
    assert profile.context.framework == "accelerate" and profile.modules[0].type_name == "Net"
    assert left_on_object(model) == left_on_object(given) == []
    accelerate.end_training()
    (folder,) = {one.parent for one in tmp_path.rglob("events.*") if "lightning_flops" not in str(one)}
    assert set(SCALARS) <= set(EventAccumulator(str(folder)).Reload().Tags()["scalars"])


# ---- Fabric


def test_a_loop_of_fabric_and_its_logger(now: FakeNow, tmp_path: Path) -> None:
    logger = CSVLogger(str(tmp_path), name="run", version=0)
    fabric = Fabric(accelerator="cpu", devices=1, loggers=[logger])
    net = Net(now)
    given = SlowSGD(net.parameters(), now)
    model, optimizer = fabric.setup(net, given)
    data: Any = fabric.setup_dataloaders(loader(12, now))
    with profile_training(model, optimizer, fabric=fabric, **SETTINGS, log_every_n_steps=4) as profiler:
        for rows in data:
            fabric.backward(loss_of(model(rows), now))
            optimizer.step()
            optimizer.zero_grad()
    profile = profile_of(profiler)
    assert (profile.flops.forward, profile.flops.backward, profile.samples) == (FORWARD, BACKWARD, BATCH)
    assert (profile.context.framework, profile.context.precision) == ("lightning.fabric", "32-true")
    assert (profile.context.run_word, profile.context.whose_loop) == ("run", "the loop itself")
    assert profile.modules[0].type_name == "Net"
    assert left_on_object(model) == left_on_object(given) == []
    logger.finalize("success")
    folder = tmp_path / "run" / "version_0"
    header = (folder / "metrics.csv").read_text().splitlines()[0].split(",")
    assert set(SCALARS) <= set(header)
    assert (folder / "lightning_flops" / "profile.json").exists()


def test_tokens_of_a_run_are_those_of_all_of_its_samples(now: FakeNow) -> None:
    found = throughput_of(train(now, timer_only=True, tokens_per_sample=7))
    assert found.tokens_per_sec is not None and found.ips is not None
    assert found.tokens_per_sec == pytest.approx(7 * found.ips.average)
