"""``lightning-flops run``: torch's global hooks find the loop of a program that knows nothing of the profiler."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lightning_flops import Profile, ProfilerConfig
from lightning_flops.adapters.run_program import LoopFinder
from lightning_flops.run.reports import OUTCOMES, Outcomes
from tests.fake_clock import FakeNow
from tests.forks import BEFORE_LIGHTNING, run_fork
from tests.left_on_objects import left_on_object
from tests.left_on_torch import torch_state
from tests.loops.nets import BACKWARD, BATCH, FORWARD, MIDDLE, NARROW, WIDE, Net, SlowSGD, loader, loss_of
from tests.ranks import LIGHTNING
from tests.seams import WORDS


@pytest.fixture(autouse=True)
def in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def said() -> Iterator[list[str]]:
    """What the command would say, in a process in which nothing was profiled before."""
    before = vars(OUTCOMES).copy()
    vars(OUTCOMES).update(vars(Outcomes()))
    yield []
    vars(OUTCOMES).update(before)


def found(said: list[str], train: Callable[[], object], **settings: Any) -> LoopFinder:
    finder = LoopFinder(
        ProfilerConfig(timing_steps=2, trace=False, html=False, **settings), log_dir=None, announce=said.append
    )
    finder.begin()
    try:
        train()
    finally:
        finder.end(None)
    return finder


def only(finder: LoopFinder) -> Profile:
    assert finder.run is not None and finder.run.reports.profile is not None
    return finder.run.reports.profile


def trains(net: nn.Module, optimizer: torch.optim.Optimizer, now: FakeNow, steps: int = 14) -> Callable[[], None]:
    def train() -> None:
        for rows in loader(steps, now):
            loss_of(net(rows), now).backward()
            optimizer.step()
            optimizer.zero_grad()

    return train


def test_a_loop_of_torch_is_found_at_its_first_update(now: FakeNow, said: list[str]) -> None:
    net = Net(now)
    torch.optim.SGD(
        net.parameters()
    )  # from here on torch calls hooks of the parent's step as well as of the subclass's
    optimizer = SlowSGD(net.parameters(), now)
    before = torch_state()
    profile = only(found(said, trains(net, optimizer, now)))
    assert (profile.flops.forward, profile.flops.backward, profile.samples) == (FORWARD, BACKWARD, BATCH)
    assert profile.modules[0].type_name == "Net"
    assert said[0].startswith(f"FLOPs of step {profile.profile_step}: ")
    assert (left_on_object(net), left_on_object(optimizer), torch_state() == before) == ([], [], True)


def test_the_step_that_was_asked_for_is_profiled(now: FakeNow, said: list[str]) -> None:
    net = Net(now)
    finder = found(said, trains(net, SlowSGD(net.parameters(), now), now), profile_step=8)
    assert only(finder).counted_steps == (8,)


def test_the_outermost_module_that_is_called_is_the_loops(now: FakeNow, said: list[str]) -> None:
    inner = nn.Sequential(nn.Linear(WIDE, MIDDLE), nn.ReLU(), nn.Linear(MIDDLE, NARROW))
    whole, teacher = nn.Sequential(inner, nn.Dropout(0.0)), nn.Linear(WIDE, NARROW)
    optimizer = SlowSGD(inner.parameters(), now)

    def train() -> None:
        for rows in loader(14, now):
            with torch.no_grad():
                wanted = teacher(rows)
            (whole(rows) - wanted).square().mean().backward()
            optimizer.step()

    profile = only(found(said, train))
    assert [one.name for one in profile.modules if one.depth <= 1] == ["", "0", "1"]
    assert profile.flops.forward == FORWARD + 2 * BATCH * WIDE * NARROW


def test_a_framework_that_profiles_has_the_loop(now: FakeNow, said: list[str]) -> None:
    net = Net(now)
    OUTCOMES.runs = 1
    assert found(said, trains(net, SlowSGD(net.parameters(), now), now)).run is None


def test_a_loop_that_is_not_recognized_changes_nothing(now: FakeNow, said: list[str]) -> None:
    weight = nn.Parameter(torch.ones(WIDE, NARROW))
    optimizer = SlowSGD([weight], now)
    before = torch_state()

    def train() -> None:
        for rows in loader(4, now):
            (rows @ weight).sum().backward()
            optimizer.step()

    finder = found(said, train)
    assert (finder.run, finder.updated, said, torch_state() == before) == (None, True, [], True)


def test_a_failure_while_a_loop_is_looked_for_is_one_warning(
    now: FakeNow, said: list[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(*_: object, **__: object) -> None:
        raise RuntimeError(WORDS)

    monkeypatch.setattr("lightning_flops.adapters.run_program.frame_of", fails)
    net = Net(now)
    before = torch_state()
    found(said, trains(net, SlowSGD(net.parameters(), now), now))
    assert caplog.text.count(WORDS) == 1 and torch_state() == before


PLAIN = """
import torch
from torch import nn
net = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
optimizer = torch.optim.AdamW(net.parameters())
for _ in range(14):
    net(torch.randn(8, 16)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""

FABRIC = """
import torch
from lightning.fabric import Fabric
from lightning.fabric.loggers import CSVLogger
from torch import nn
fabric = Fabric(accelerator="cpu", devices=1, loggers=CSVLogger("logs"))
net = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
net, optimizer = fabric.setup(net, torch.optim.AdamW(net.parameters()))
for _ in range(14):
    fabric.backward(net(torch.randn(8, 16)).square().mean())
    optimizer.step()
    optimizer.zero_grad()
"""

ACCELERATE = """
import torch
from accelerate import Accelerator
from torch import nn
accelerator = Accelerator(cpu=True)
net = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
net, optimizer = accelerator.prepare(net, torch.optim.AdamW(net.parameters()))
for _ in range(14):
    accelerator.backward(net(torch.randn(8, 16)).square().mean())
    optimizer.step()
    optimizer.zero_grad()
"""

TRAINER = """
from torch import nn
from torch.utils.data import Dataset
import torch
from transformers import Trainer, TrainingArguments

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
    def forward(self, rows):
        return {"loss": self.body(rows).square().mean()}

rows = [{"rows": torch.randn(16)} for _ in range(8 * 14)]
arguments = TrainingArguments("out", use_cpu=True, per_device_train_batch_size=8, num_train_epochs=1, report_to=[],
                              save_strategy="no", disable_tqdm=True)
Trainer(Net(), arguments, train_dataset=rows).train()
"""

PROGRAMS = {
    "plain": (PLAIN, "torch", "lightning_flops/profile.json"),
    "fabric": (FABRIC, "torch", "lightning_flops/profile.json"),
    "accelerate": (ACCELERATE, "torch", "lightning_flops/profile.json"),
    "trainer": (TRAINER, "transformers", "out/lightning_flops/profile.json"),
}


@pytest.mark.parametrize("kind", PROGRAMS)
def test_an_unchanged_program_is_profiled_and_a_line_says_so(kind: str, in_a_folder: Path) -> None:
    program, framework, file = PROGRAMS[kind]
    Path("train.py").write_text(program)
    arguments = ["-m", "lightning_flops", "run", "--timing-steps", "2", "--trace", "false", "train.py"]
    # One of them has to import torch itself, one a framework that we wait for.
    imports = {"plain": (), "fabric": LIGHTNING}.get(kind, BEFORE_LIGHTNING)
    ended = run_fork(arguments, folder=in_a_folder, imports=imports, environment={"CUDA_VISIBLE_DEVICES": ""})
    assert ended.returncode == 0, ended.stderr
    profile = Profile.from_json(Path(file).read_text())
    assert (profile.flops.forward, profile.flops.backward, profile.context.framework) == (FORWARD, BACKWARD, framework)
    said = [one for one in (ended.stderr + ended.stdout).splitlines() if "FLOPs of step" in one]
    assert any(file in one for one in said) and all("22.53 KFLOPs" in one for one in said)
