"""SIGTERM, SIGINT and SIGKILL in every state of a run: a program ends as without us, and no file is half there."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from tests.forks import run_fork
from tests.ranks import LIGHTNING

PROGRAM = """
import gc, os, sys, threading, time
import torch
from torch.utils.data import DataLoader
from lightning_flops import profile_training
from lightning_flops.run.delivery import Delivery
from tests.left_on_torch import torch_state

state, number, within = sys.argv[1], int(sys.argv[2]), set()

def mark_while(method, name):
    original = getattr(Delivery, method)
    def call(*given, **named):
        within.add(name)
        try:
            time.sleep(0.05)
            return original(*given, **named)
        finally:
            within.discard(name)
    setattr(Delivery, method, call)

def is_in():
    run = profiler.run
    return run is not None and run.steps_done > 1 and run.window.recorder.state.value == state

def send():  # soon after the run has come into the state
    while state not in within and not is_in():
        time.sleep(0.0003)
    time.sleep(0.002)
    open("sent", "w").close()
    os.kill(os.getpid(), number)

mark_while("_make", "report")
mark_while("finish", "finish")
net = torch.nn.Linear(16, 2)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
profiler = profile_training(net, optimizer, log_dir=".", profile_step=8, timing_steps=6)
threading.Thread(target=send, daemon=True).start()
before, ended = torch_state(), "itself"
try:
    with profiler:
        for rows in DataLoader(torch.ones(400, 16), batch_size=4):
            time.sleep(0.003)
            net(rows).sum().backward()
            optimizer.step()
except BaseException as error:
    ended = type(error).__name__
gc.collect()
left = [name for name, state in torch_state().items() if state != before[name]]
print(f"ended by {ended}, left {left}", flush=True)
os._exit(0)
"""


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
@pytest.mark.parametrize("state", ["waiting", "counting", "settling", "timing", "tracing", "report", "finish"])
def test_a_signal_ends_the_program_as_without_us(state: str, number: signal.Signals, tmp_path: Path) -> None:
    arguments = ["-W", "ignore", "-c", PROGRAM, state, str(int(number))]
    done = run_fork(arguments, folder=tmp_path, imports=LIGHTNING, timeout_sec=100.0, environment={})
    assert (tmp_path / "sent").exists(), done.stderr
    if number == signal.SIGINT:
        assert done.stdout.splitlines()[-1] == "ended by KeyboardInterrupt, left []", done.stderr
    else:
        assert done.returncode == -number, done.stderr
    for path in tmp_path.rglob("lightning_flops/*"):
        assert path.suffix != ".draft" or number == signal.SIGKILL
        if path.suffix == ".json":
            json.loads(path.read_text())
