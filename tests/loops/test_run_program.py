"""``lightning-flops run``: the loop of a program that knows nothing of the profiler is found and profiled."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from lightning_flops import Profile, ProfilerConfig
from lightning_flops.adapters.run_program import LoopFinder
from lightning_flops.run.delivery import Outcomes
from lightning_flops.schema.profile import ThroughputSummary
from tests.fake_clock import FakeNow
from tests.forks import BEFORE_LIGHTNING, run_fork
from tests.left_on_torch import torch_state
from tests.lightning import nets as lightning_nets
from tests.loops import nets
from tests.ranks import LIGHTNING
from tests.seams import WORDS

ROWS, IN, OUT = 8, 16, 4
FORWARD = 2 * ROWS * IN * OUT
BACKWARD = FORWARD  # the rows need no gradient

BEGIN = f"""
import sys
import torch
from torch.utils.data import DataLoader
torch.manual_seed(0)
data = DataLoader(torch.randn(30 * {ROWS}, {IN}), batch_size={ROWS})
net = torch.nn.Linear({IN}, {OUT})
optimizer = torch.optim.AdamW(net.parameters())
"""
TRAIN = """
for rows in data:
    net(rows).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""
SHOW = "print(sys.argv, [weight.tolist() for weight in net.parameters()])\n"
GAN = f"""
critic = torch.nn.Linear({OUT}, 1)
critics = torch.optim.AdamW(critic.parameters())
for rows in data:
    critic(net(rows).detach()).mean().backward()
    critics.step()
    critics.zero_grad()
    critic(net(rows)).mean().neg().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


class Ended:
    """How a program ended under the command, and what it left in its folder."""

    def __init__(
        self,
        folder: Path,
        program: str,
        *options: str,
        arguments: Sequence[str] = (),
        imports: tuple[str, ...] = LIGHTNING,
        **environment: str,
    ) -> None:
        (folder / "train.py").write_text(program)
        done = run_fork(
            ["-m", "lightning_flops", "run", *options, "train.py", *arguments],
            folder=folder,
            imports=imports,
            environment={"CUDA_VISIBLE_DEVICES": "", **environment},
        )
        self.status, self.out, self.err = done.returncode, done.stdout, done.stderr
        self.reports = sorted(folder.rglob("profile*.json"))

    @property
    def profile(self) -> Profile:
        (report,) = self.reports
        return Profile.from_json(report.read_text())


def test_a_loop_is_profiled_in_the_program_as_it_is(tmp_path: Path) -> None:
    # So few that none runs without hooks, in no figure of the run.
    ended = Ended(tmp_path, BEGIN + TRAIN + SHOW, "--timing-steps", "8", arguments=["--epochs", "3"])
    assert ended.status == 0, ended.err
    alone = run_fork(["train.py", "--epochs", "3"], folder=tmp_path, imports=LIGHTNING, environment={})
    assert ended.out == alone.stdout  # its arguments, and its weights
    profile = ended.profile
    assert (profile.flops.forward, profile.flops.backward, profile.samples) == (FORWARD, BACKWARD, ROWS)
    assert (profile.modules[0].type_name, profile.context.framework) == ("Linear", "torch")
    assert ended.err.startswith("lightning-flops: FLOPs of step 1: ")
    assert "Page: lightning_flops/profile.html\n" in ended.err
    run = ThroughputSummary.from_json((tmp_path / "lightning_flops" / "throughput.json").read_text())
    # The first step is that by which the loop is found.
    assert run.model_flops == 29 * (FORWARD + BACKWARD)


def test_of_a_gan_the_first_optimizer_and_its_model_are_profiled(tmp_path: Path) -> None:
    profile = Ended(tmp_path, BEGIN + GAN).profile
    # Steps of the critic's: all that is computed from one of its updates to the next.
    critic = 2 * ROWS * OUT
    assert profile.flops.forward == 2 * (FORWARD + critic)
    assert profile.modules[0].total.forward == 2 * critic
    assert profile.outside.forward == 2 * FORWARD


def test_an_exception_of_the_programs_is_its_own_and_there_is_a_report(tmp_path: Path) -> None:
    ended = Ended(tmp_path, BEGIN + TRAIN + "1 / 0\n")
    assert ended.status == 1
    assert ended.err.splitlines()[-1] == "ZeroDivisionError: division by zero"
    assert ended.profile.flops.forward == FORWARD
    early = Ended(tmp_path, BEGIN + "1 / 0\n")
    assert "nothing was profiled: ZeroDivisionError ended the program before an optimizer made a step\n" in early.err


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        (BEGIN, "no optimizer made a step in this process: put `with lightning_flops.profile_training("),
        (BEGIN + "optimizer.step()\n", "no module that was called owns what its optimizers update"),
        (BEGIN + "data = list(data)[:1]\n" + TRAIN, "profile_step is 1, and this run ended after 1 step(s)"),
    ],
)
def test_where_nothing_was_profiled_it_is_said_why_and_what_to_write(program: str, reason: str, tmp_path: Path) -> None:
    ended = Ended(tmp_path, program)
    assert (ended.status, ended.reports) == (0, [])
    assert reason in ended.err


def test_the_environment_switches_it_off(tmp_path: Path) -> None:
    ended = Ended(tmp_path, BEGIN + TRAIN, LIGHTNING_FLOPS="0")
    assert ended.reports == []
    assert ended.err == "lightning-flops: nothing was profiled: LIGHTNING_FLOPS is 0 in the environment\n"


def test_a_profiler_of_the_programs_own_goes_before(tmp_path: Path) -> None:
    own = (
        "from lightning_flops import profile_training\n"
        "with profile_training(net, optimizer, profile_step=3, timing_steps=2, log_dir='own'):\n"
    )
    ended = Ended(tmp_path, BEGIN + own + TRAIN.strip().replace("\n", "\n    ").replace("for", "    for", 1) + "\n")
    assert ended.status == 0, ended.err
    assert ended.reports == [tmp_path / "own" / "lightning_flops" / "profile.json"]
    assert ended.profile.counted_steps == (3,)
    assert "FLOPs of step 3: " in ended.err


def test_two_ranks_under_torchrun_have_one_report(tmp_path: Path) -> None:
    program = (
        BEGIN
        + "torch.distributed.init_process_group('gloo')\n"
        + "net = torch.nn.parallel.DistributedDataParallel(net)\n"
        + TRAIN
        + "torch.distributed.destroy_process_group()\n"
    )
    (tmp_path / "train.py").write_text(program)
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = run_fork(
        [*launcher, "-m", "lightning_flops", "run", "--timing-steps", "2", "train.py"],
        folder=tmp_path,
        imports=LIGHTNING,
        environment={"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    (report,) = tmp_path.rglob("profile*.json")
    profile = Profile.from_json(report.read_text())
    assert (profile.context.world_size, profile.flops.forward) == (2, FORWARD)
    assert (profile.modules[0].type_name, profile.context.strategy) == ("Linear", "DistributedDataParallel")
    assert done.stderr.count("lightning-flops: FLOPs of step") == 1


# ---- other frameworks, whose programs are not changed either

TRAINER = """
from pathlib import Path
from tests.transformers.tiny import ROWS, Rows, new_net_trainer
new_net_trainer(Path("out"), rows=Rows(14 * ROWS)).train()
"""
FIT = """
from lightning.pytorch.loggers import CSVLogger
from tests.lightning.nets import loader, new_net, new_trainer
new_trainer("lightning.pytorch", "root", logger={logger}).fit(new_net(), loader(30))
"""
FIT_WITH_LOGGER = FIT.format(logger="CSVLogger('logs', name='run', version=0)")
HAND = (2 * 4 * 4 * 3, 2 * 4 * 4 * 3, "192 FLOPs")  # a layer of 4 x 3, on batches of 4
HAND_OF_FIT = (lightning_nets.FORWARD, lightning_nets.BACKWARD, "1.63 KFLOPs")
PROGRAMS = {
    "trainer": (TRAINER, [], "transformers", "out/lightning_flops", HAND),
    "fit": (FIT.format(logger=False), [], lightning_nets.ROOT, "lightning_flops", HAND_OF_FIT),
    "fit with a logger": (FIT_WITH_LOGGER, [], lightning_nets.ROOT, "logs/run/version_0/lightning_flops", HAND_OF_FIT),
    "fit with a folder": (
        FIT.format(logger=False), ["--log-dir", "reports"], lightning_nets.ROOT, "reports/lightning_flops", HAND_OF_FIT,
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", PROGRAMS)
def test_a_program_of_another_framework_is_profiled_and_a_line_says_so(kind: str, tmp_path: Path) -> None:
    program, options, framework, folder, (forward, backward, words) = PROGRAMS[kind]
    ended = Ended(tmp_path, program, "--timing-steps", "2", "--trace", "false", *options, imports=BEFORE_LIGHTNING)
    assert ended.status == 0, ended.err
    assert ended.reports == [tmp_path / folder / "profile.json"]
    flops = ended.profile.flops
    assert (flops.forward, flops.backward, ended.profile.context.framework) == (forward, backward, framework)
    (line,) = [one for one in (ended.err + ended.out).splitlines() if "FLOPs of step" in one]
    assert line.endswith(f"Page: {folder}/profile.html") and words in line


def test_a_failure_while_a_loop_is_looked_for_is_one_warning_and_nothing_is_left(
    now: FakeNow, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(*_: object, **__: object) -> None:
        raise RuntimeError(WORDS)

    monkeypatch.setattr("lightning_flops.adapters.run_program.OUTCOMES", Outcomes())
    monkeypatch.setattr("lightning_flops.adapters.run_program.frame_of", fails)
    net = nets.Net(now)
    optimizer = nets.SlowSGD(net.parameters(), now)
    before, finder = torch_state(), LoopFinder(ProfilerConfig(), log_dir=None)
    finder.begin()
    for rows in nets.loader(14, now):
        nets.loss_of(net(rows), now).backward()
        optimizer.step()
    finder.end(None)
    assert caplog.text.count(WORDS) == 1 and finder.updated and torch_state() == before
