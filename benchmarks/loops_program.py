"""Loops of the benchmark as programs that know nothing of the profiler, which ``lightning-flops run`` profiles.

``python -m benchmarks.loops_program NAME ACCOUNT`` trains one, and writes its own account to the file ACCOUNT.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import torch

from lightning_flops import Profile
from lightning_flops.schema.profile import ThroughputSummary

from . import loops_libraries as loops_libraries, loops_lightning as loops_lightning, loops_models as loops_models
from .loops_account import Account, Step
from .loops_own import LOOPS, Loop, loop
from .machine import ROOT

OWN = "plain", "accumulates 4, tail of 2", "GAN: D then G, [D, G] given", "teacher first", "validates inside an epoch"
UNDER_RUN = (*OWN, "Lightning", "transformers", "DeepSpeed's engine, accumulates 2")


def under_run(account: Account, name: str) -> None:
    """The account of the program *name*, and what ``lightning-flops run`` has written of it."""
    if account.alone:
        LOOPS[name].train(account)
        return
    settings = [f"--{key.replace('_', '-')}={json.dumps(value)}" for key, value in account.settings.items()]
    command = [sys.executable, "-m", "lightning_flops", "run", "--log-dir", "logs", *settings]
    done = subprocess.run(
        [*command, "-m", "benchmarks.loops_program", name, "account.json"],
        env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError(done.stderr.strip().splitlines()[-1])
    account.steps = [Step(**one) for one in json.loads(Path("account.json").read_text())]
    found = {name: next(Path().rglob(f"{name}.json"), None) for name in ("profile", "throughput")}
    profile, throughput = found["profile"], found["throughput"]
    account.run = SimpleNamespace(
        profile=None if profile is None else Profile.load(profile),
        throughput=None if throughput is None else ThroughputSummary.from_json(throughput.read_text()),
    )


def _put(name: str, program: Loop) -> None:
    allowed = asdict(program.allowed) | {"first_unseen": name in OWN}
    loop(f"lightning-flops run: {name}", quick=False, **allowed)(lambda account: under_run(account, name))


for _name in UNDER_RUN:
    _put(_name, LOOPS[_name])


def main() -> None:
    """Train the loop that the command line names."""
    name, file = sys.argv[1:]
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    account = Account(alone=True)
    LOOPS[name].train(account)
    Path(file).write_text(json.dumps([asdict(one) for one in account.steps]))


if __name__ == "__main__":
    main()
