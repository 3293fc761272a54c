"""``lightning-flops run`` of programs that train in processes which they start themselves."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from lightning_flops.doors import fabric_launch

REPOSITORY = Path(__file__).parents[2]
BATCH, WIDE, NARROW = 4, 16, 8
FORWARD = 2 * BATCH * WIDE * NARROW
BACKWARD = FORWARD  # of one layer the gradients of its weights alone

LOOP = f"""
import multiprocessing, os, sys
import torch
from torch import nn, multiprocessing as of_torch

def train(steps):
    net = nn.Linear({WIDE}, {NARROW})
    optimizer = torch.optim.SGD(net.parameters(), 0.01)
    for rows in torch.utils.data.DataLoader(torch.ones(steps * {BATCH}, {WIDE}), batch_size={BATCH}, num_workers=1):
        net(rows).sum().backward()
        optimizer.step()

def of_rank(rank, steps):
    train(steps)

def of_daemon(steps):
    net = nn.Linear({WIDE}, {NARROW})
    optimizer = torch.optim.SGD(net.parameters(), 0.01)
    for _ in range(steps):
        net(torch.ones({BATCH}, {WIDE})).sum().backward()
        optimizer.step()

def on_fabric(fabric):
    net = nn.Linear({WIDE}, {NARROW})
    net, optimizer = fabric.setup(net, torch.optim.SGD(net.parameters(), 0.01))
    for rows in [torch.ones({BATCH}, {WIDE})] * 12:
        fabric.backward(net(rows).sum())
        optimizer.step()

if __name__ == "__main__":
    how, steps = sys.argv[1], int(sys.argv[2])
    if "fabric" in how:
        from lightning.fabric import Fabric
    if how == "fabric":
        fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp")
        fabric.launch()
        on_fabric(fabric)
    elif how == "fabric_spawn":
        Fabric(accelerator="cpu", devices=2, strategy="ddp_spawn").launch(on_fabric)
    elif how == "pool":
        with multiprocessing.get_context("fork").Pool(1) as pool:
            pool.map(of_daemon, [steps])
    else:
        of_torch.start_processes(of_rank, (steps,), nprocs=1, start_method=how)
"""


def run(folder: Path, *arguments: str) -> str:
    """What the program says under our command; it ends as it ends by itself."""
    (folder / "train.py").write_text(LOOP, encoding="utf-8")
    temporary = folder / "temporary"
    temporary.mkdir()
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "lightning_flops",
            "run",
            "--timing-steps",
            "2",
            "--trace",
            "false",
            "train.py",
            *arguments,
        ],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1", "TMPDIR": str(temporary)},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    return done.stderr


@pytest.mark.parametrize("how", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_a_loop_in_a_process_that_the_program_starts_is_profiled(how: str, tmp_path: Path) -> None:
    said = run(tmp_path, how, "12")
    profile = json.loads((tmp_path / "lightning_flops_logs" / "profile.json").read_text(encoding="utf-8"))
    assert (profile["flops"]["forward"], profile["flops"]["backward"]) == (FORWARD, BACKWARD)
    # With the end of the process, which does not come back to the command, the run's throughput is known.
    assert (tmp_path / "lightning_flops_logs" / "throughput.json").exists()
    assert said.count("lightning-flops: FLOPs of step 4: ") == 1
    last = said.splitlines()[-1]
    assert re.fullmatch(
        r"lightning-flops: what was profiled ran in process \d+, which the program started; the lines above say where "
        "the reports are",
        last,
    )
    assert "nothing was profiled" not in said
    assert list((tmp_path / "temporary").glob("lightning_flops*")) == []


def test_a_report_of_a_daemon_is_not_followed_by_a_line_that_says_that_there_is_none(tmp_path: Path) -> None:
    said = run(tmp_path, "pool", "12")
    assert said.count("lightning-flops: FLOPs of step 4: ") == 1
    assert said.splitlines()[-1].startswith("lightning-flops: what was profiled ran in process ")


def test_a_loop_that_is_too_short_in_such_a_process_is_not_passed_over_silently(tmp_path: Path) -> None:
    said = run(tmp_path, "fork", "2")
    (line,) = [line for line in said.splitlines() if "nothing was profiled in process" in line]
    assert line.endswith(": training ended after 2 step(s), while its loop was being recognized")
    assert said.splitlines()[-1] == "lightning-flops: nothing was profiled: no optimizer took a step in this process"


@pytest.mark.parametrize("how", ["fabric", pytest.param("fabric_spawn", marks=pytest.mark.slow)])
def test_the_ranks_that_fabric_starts_are_all_in_the_report(how: str, tmp_path: Path) -> None:
    said = run(tmp_path, how, "12")
    profile = json.loads((tmp_path / "lightning_flops_logs" / "profile.json").read_text(encoding="utf-8"))
    assert profile["ranks"]["answered"] == 2
    assert profile["ranks"]["flops"]["forward"] == 2 * FORWARD
    assert said.count("lightning-flops: FLOPs of step ") == 1
    assert "RANKS ANSWERED" not in said


@pytest.mark.parametrize("name", fabric_launch.LAUNCHERS)
def test_the_names_of_fabrics_that_make_command_lines_are_there(name: str) -> None:
    launcher = pytest.importorskip(name)
    assert launcher._basic_subprocess_cmd() and callable(launcher._hydra_subprocess_cmd)
