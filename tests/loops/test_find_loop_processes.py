"""``lightning-flops run`` of programs that train in processes which they start themselves."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
BATCH, WIDE, NARROW = 4, 16, 8
FORWARD = 2 * BATCH * WIDE * NARROW
BACKWARD = FORWARD  # of one layer the gradients of its weights alone

LOOP = f"""
import atexit, multiprocessing, os, sys, time
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

def later(steps):
    while multiprocessing.parent_process().is_alive() and not os.path.exists("over"):
        time.sleep(0.01)
    train(steps)

class Own(multiprocessing.get_context("spawn").Process):
    def __init__(self, steps):
        super().__init__()
        self.steps = steps

    def run(self):
        train(self.steps)

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
    elif how == "own_run":
        process = Own(steps)
        process.start()
        process.join()
    elif how == "in_the_middle":  # of the counted step; the child goes on when this process has come to its end
        net = nn.Linear({2 * WIDE}, {NARROW})
        optimizer = torch.optim.SGD(net.parameters(), 0.01)
        for step in range(steps):
            if step == 4:
                net(torch.ones({BATCH}, {2 * WIDE}))
                multiprocessing.get_context("fork").Process(target=later, args=(steps,)).start()
            net(torch.ones({BATCH}, {2 * WIDE})).sum().backward()
            optimizer.step()
        atexit.register(lambda: open("over", "w").close())
    else:
        of_torch.start_processes(of_rank, (steps,), nprocs=1, start_method=how)
"""


def run(folder: Path, temporary: Path, *arguments: str) -> str:
    """What the program says under our command; it ends as it ends by itself."""
    (folder / "train.py").write_text(LOOP, encoding="utf-8")
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


def flops_of(folder: Path) -> list[tuple[int, int]]:
    """The forward and backward FLOPs of each profile that was written, in their order."""
    logs = folder / "lightning_flops_logs"
    profiles = [
        json.loads(path.read_text(encoding="utf-8")) for path in sorted(logs.glob("profile*.json"), reverse=True)
    ]
    return [(one["flops"]["forward"], one["flops"]["backward"]) for one in profiles]


@pytest.mark.parametrize("how", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_a_loop_in_a_process_that_the_program_starts_is_profiled(how: str, tmp_path: Path, temporary: Path) -> None:
    said = run(tmp_path, temporary, how, "12")
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
    assert list(temporary.glob("lightning_flops*")) == []


def test_a_report_of_a_daemon_is_not_followed_by_a_line_that_says_that_there_is_none(
    tmp_path: Path, temporary: Path
) -> None:
    said = run(tmp_path, temporary, "pool", "12")
    assert said.count("lightning-flops: FLOPs of step 4: ") == 1
    assert said.splitlines()[-1].startswith("lightning-flops: what was profiled ran in process ")


@pytest.mark.slow
def test_a_process_whose_class_has_a_run_of_its_own_is_followed(tmp_path: Path, temporary: Path) -> None:
    said = run(tmp_path, temporary, "own_run", "12")
    assert flops_of(tmp_path) == [(FORWARD, BACKWARD)]
    assert "what was profiled ran in process" in said.splitlines()[-1]


@pytest.mark.slow
def test_a_process_that_is_forked_in_the_middle_of_a_loop_has_a_report_of_its_own_loop_alone(
    tmp_path: Path, temporary: Path
) -> None:
    """It leaves the loop that was being counted to the process before, and trains on when that is at its end."""
    said = run(tmp_path, temporary, "in_the_middle", "12")
    # The counted step of the process before has two forwards, of a layer twice as wide.
    assert flops_of(tmp_path) == [(4 * FORWARD, 2 * BACKWARD), (FORWARD, BACKWARD)]
    assert said.count("lightning-flops: FLOPs of step 4: ") == 2
    assert "nothing was profiled" not in said
    assert list(temporary.glob("lightning_flops*")) == []


@pytest.mark.slow
def test_a_loop_that_is_too_short_in_such_a_process_is_not_passed_over_silently(
    tmp_path: Path, temporary: Path
) -> None:
    said = run(tmp_path, temporary, "fork", "2")
    (line,) = [line for line in said.splitlines() if "nothing was profiled in process" in line]
    assert line.endswith(": training ended after 2 step(s), while its loop was being recognized")
    assert said.splitlines()[-1] == "lightning-flops: nothing was profiled: no optimizer took a step in this process"


@pytest.mark.slow
@pytest.mark.parametrize("how", ["fabric", "fabric_spawn"])
def test_the_ranks_that_fabric_starts_are_all_in_the_report(how: str, tmp_path: Path, temporary: Path) -> None:
    said = run(tmp_path, temporary, how, "12")
    profile = json.loads((tmp_path / "lightning_flops_logs" / "profile.json").read_text(encoding="utf-8"))
    assert profile["ranks"]["answered"] == 2
    assert profile["ranks"]["flops"]["forward"] == 2 * FORWARD
    assert said.count("lightning-flops: FLOPs of step ") == 1
    assert "RANKS ANSWERED" not in said
