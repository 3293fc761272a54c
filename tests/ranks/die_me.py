"""Trains ranks of which one dies or raises in its window; run by test_faults.

``python -m tests.ranks.die_me HOW RANK FOLDER``: each rank that survives writes what became of it into
``FOLDER/rank{N}.json``.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from lightning_flops import FlopsProfilerCallback
from tests.lightning.nets import loader, new_net, new_trainer
from tests.ranks.scenarios_faults import RANK, ROOT, WINDOW, distributed, logged

BATCH_OF_THE_FAULT = 5
"""In the window, in its second timed step."""


class OwnError(Exception):
    """The user's."""


def main(how: str, rank: int, folder: str) -> None:
    net = new_net(ROOT)
    step = net.training_step

    def training_step(batch: Any, batch_idx: int) -> Any:
        if batch_idx == BATCH_OF_THE_FAULT and rank == RANK:
            if how == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            raise OwnError("the user's own")
        return step(batch, batch_idx)

    net.training_step = training_step
    callback = FlopsProfilerCallback(**{**WINDOW, "timing_steps": 3})
    run = new_trainer(ROOT, folder, callback, strategy="ddp", devices=int(os.environ["WORLD_SIZE"]))
    with logged() as lines:
        began = time.monotonic()
        try:
            run.fit(net, loader(60))
        except Exception as error:
            raised = type(error).__name__
        ended = time.monotonic()
    store = distributed.distributed_c10d._get_default_store()
    in_store = None
    if rank:  # else the store has died with its rank
        store.set("training's", b"still there")
        in_store = store.get("training's").decode()
    Path(folder, f"rank{RANK}.json").write_text(
        json.dumps(
            {
                "raised": raised,
                "seconds": ended - began,
                "profile": None if callback.profile is None else callback.profile.to_json(),
                "logged": lines,
                "store": in_store,
            }
        )
    )


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3])
