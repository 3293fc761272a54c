"""``lightning-flops run`` around a DeepSpeed program that has no word of ours, by every launcher.

The program imports ``initialize`` by name before anything, reads its config by ``args.deepspeed_config``, and takes the
``--local_rank`` that DeepSpeed's launcher passes.
"""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from lightning_flops import Profile
from tests.deepspeed.launching import INSTALLED
from tests.forks import BEFORE_LIGHTNING, run_fork
from tests.ranks import DEEPSPEED, DEEPSPEED_ON_CPU, REPOSITORY

pytestmark = [pytest.mark.skipif(not INSTALLED, reason="needs deepspeed"), pytest.mark.timeout(200)]

BATCH, IN, HIDDEN, OUT, ACCUMULATED = 8, 16, 32, 4, 2
FORWARD = ACCUMULATED * 2 * BATCH * (IN * HIDDEN + HIDDEN * OUT)
BACKWARD = ACCUMULATED * 2 * BATCH * (IN * HIDDEN + 2 * HIDDEN * OUT)  # the input needs no gradient

PROGRAM = f"""
import argparse
import os
import sys

import torch
from deepspeed import add_config_arguments, init_distributed, initialize, ops

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank", type=int, default=-1)
    parser.add_argument("--steps", type=int)
    options = add_config_arguments(parser).parse_args()
    ops.__compatible_ops__["deepspeed_shm_comm"] = False  # a minute to compile
    init_distributed(dist_backend="gloo", verbose=False)
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear({IN}, {HIDDEN}), torch.nn.ReLU(), torch.nn.Linear({HIDDEN}, {OUT}))
    engine, *_ = initialize(args=options, model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    for _ in range(options.steps):
        loss = engine(torch.ones({BATCH}, {IN})).square().mean()
        engine.backward(loss)
        engine.step()
    arguments = [one for one in sys.argv[1:] if not one.startswith("--local_rank")]
    line = f"printed by {{engine.global_rank}} of {{engine.world_size}}: {{loss.item()!r}} {{arguments}}"
    print(line + "\\n", end="", flush=True)
    sys.exit(int(os.environ.get("EXIT_STATUS", "0")))
"""

CONFIG = {
    "train_micro_batch_size_per_gpu": BATCH,
    "gradient_accumulation_steps": ACCUMULATED,
    "zero_allow_untested_optimizer": True,
    "zero_optimization": {"stage": 1},
    "flops_profiler": {
        "enabled": True,
        "profile_step": 1,
        "output_file": "flops.txt",
        "timing_steps": 2,
        "trace": False,
    },
}

ARGUMENTS = ["train.py", "--deepspeed_config", "ds_config.json", "--steps", "16"]
OURS = ["-m", "lightning_flops", "run", *ARGUMENTS]
LAUNCHER = ["-m", "deepspeed.launcher.runner", "--num_gpus", "2", "--master_port"]
ALONE = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}


@pytest.fixture
def free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def start(
    folder: Path,
    *arguments: str,
    imports: tuple[str, ...] = BEFORE_LIGHTNING,
    place: Mapping[str, str] | None = None,
    config: Mapping[str, object] = CONFIG,
) -> tuple[int, list[str]]:
    """Run the program in *folder*; returns the exit status and what its ranks printed. What was logged is in a file."""
    folder.mkdir()
    (folder / "train.py").write_text(PROGRAM)
    (folder / "ds_config.json").write_text(json.dumps(config))
    given = {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}", **DEEPSPEED_ON_CPU}
    if place:  # no launcher, so nothing that looks for a Python of its own
        done = run_fork(arguments, folder=folder, imports=imports, environment={**given, **place})
    else:
        given = {**os.environ, **given, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, *arguments]
        done = subprocess.run(command, cwd=folder, env=given, capture_output=True, text=True, timeout=150)
    (folder / "logged.txt").write_text(done.stderr)
    printed = sorted(re.findall(r"printed by .*", done.stdout))
    assert printed, done.stdout + done.stderr
    return done.returncode, printed


def check_reports(folder: Path) -> None:
    """One report of the counted step, from rank 0, by us."""
    assert "Profile Summary at step " in (folder / "flops.txt").read_text()
    (path,) = folder.rglob("profile*.json")
    profile = Profile.from_json(path.read_text())
    assert profile.profile_step == 1
    assert (profile.flops.forward, profile.flops.backward) == (FORWARD, BACKWARD)
    assert (profile.micro_steps, len(profile.timed_steps)) == (ACCUMULATED, 2)


def test_a_program_under_deepspeeds_launcher_is_profiled(tmp_path: Path, free_port: str) -> None:
    status, printed = start(tmp_path / "run", *LAUNCHER, free_port, "--module", *OURS[1:])
    assert status == 0
    assert [line.partition(":")[0] for line in printed] == ["printed by 0 of 2", "printed by 1 of 2"]
    assert all(line.endswith(str(ARGUMENTS[1:])) for line in printed)
    check_reports(tmp_path / "run")


def test_alone_a_program_ends_with_its_own_status_and_the_same_loss(tmp_path: Path, free_port: str) -> None:
    place = {**ALONE, "MASTER_PORT": free_port, "EXIT_STATUS": "3"}
    off = {**CONFIG, "flops_profiler": {"enabled": False}}
    plain = start(tmp_path / "plain", *ARGUMENTS, imports=DEEPSPEED, place=place, config=off)
    assert start(tmp_path / "run", *OURS, place=place) == plain
    assert plain[0] == 3
    check_reports(tmp_path / "run")
    # Most of the report is written after the last step.
    assert "nothing was profiled" not in (tmp_path / "run/logged.txt").read_text()
