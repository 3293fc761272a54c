"""Trains, and gets a signal in one state of the run; run by test_signals.

``python -m tests.run.signal_me PROGRAM STATE SIGNAL``: *STATE* is the recorder's phase, or ``report`` or
``finish``. If the program outlives the signal, it prints how the training ended and what is left on torch.
"""

from __future__ import annotations

import gc
import os
import sys
import threading
import time
import weakref
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from lightning_flops.run import run as run_module
from lightning_flops.run.reports import Reports
from tests.left_on_torch import torch_state

STEPS, BATCH, WIDTH = 40, 4, 16
WINDOW: dict[str, Any] = {"profile_step": 8, "timing_steps": 6}

runs: list[weakref.ref[run_module.Run]] = []
within: set[str] = set()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, 2)

    def forward(self, x: Any) -> Any:
        time.sleep(0.003)
        return self.layer(x).sum()


def data() -> DataLoader[Any]:
    return DataLoader(torch.ones(STEPS * BATCH, WIDTH), batch_size=BATCH)  # type: ignore[arg-type]


def loop() -> None:
    from lightning_flops import profile_training

    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with profile_training(net, optimizer, log_dir=".", **WINDOW):
        for batch in data():
            net(batch).backward()
            optimizer.step()


def lightning() -> None:
    import lightning.pytorch as pl

    from lightning_flops import FlopsProfilerCallback
    from tests.lightning.nets import new_trainer

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = Net()

        def training_step(self, batch: Any) -> Any:
            return self.net(batch)

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    new_trainer("lightning.pytorch", ".", FlopsProfilerCallback(**WINDOW)).fit(Module(), data())


def watch(state: str, number: int) -> None:
    """Send the signal soon after the run has come into the *state*."""
    while state not in within and not is_in(state):
        time.sleep(0.0003)
    time.sleep(0.002)
    Path("sent").touch()
    os.kill(os.getpid(), number)


def is_in(state: str) -> bool:
    run = runs[-1]() if runs else None
    return run is not None and run.steps_done > 1 and run.window.recorder.state.value == state


def mark_while(kind: type, method: str, name: str) -> None:
    """Have *name* be ``within`` while *method* of *kind* runs, which takes a while."""
    original = getattr(kind, method)

    def call(*given: Any, **named: Any) -> Any:
        within.add(name)
        try:
            time.sleep(0.05)
            return original(*given, **named)
        finally:
            within.discard(name)

    setattr(kind, method, call)


def main(program: str, state: str, number: str) -> None:
    begun = run_module.Run.begin

    def begin(self: run_module.Run) -> None:
        runs.append(weakref.ref(self))
        begun(self)

    run_module.Run.begin = begin  # type: ignore[method-assign]
    mark_while(Reports, "_made", "report")
    mark_while(Reports, "finish", "finish")
    threading.Thread(target=watch, args=(state, int(number)), daemon=True).start()
    torch.optim.SGD([torch.zeros(1, requires_grad=True)])  # torch wraps the step of a class when it is first used
    before, ended = torch_state(), "itself"
    try:
        {"loop": loop, "lightning": lightning}[program]()
    except BaseException as error:
        ended = type(error).__name__
    gc.collect()
    left = [name for name, state in torch_state().items() if state != before[name]]
    sys.stdout.write(f"ended by {ended}, left {left}\n")
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
