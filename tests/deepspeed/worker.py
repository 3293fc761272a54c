"""Runs every scenario of one module in one process group; a process of this program is one rank of it.

``python -m tests.deepspeed.worker MODULE FOLDER`` writes what each scenario returned, or how it failed, into
``FOLDER/rank{N}.json``.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any

import deepspeed
import torch


def main(module_name: str, folder: str) -> None:
    # Its operators for shared memory would be compiled first, for a minute; gloo does without.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    module = importlib.import_module(module_name)
    results: dict[str, Any] = {}
    for name, scenario in module.SCENARIOS.items():
        workplace = Path(folder, f"{name}-{os.environ['RANK']}")
        workplace.mkdir(parents=True)
        os.chdir(workplace)
        torch.manual_seed(0)
        try:
            results[name] = {"returned": scenario()}
        except Exception:
            results[name] = {"failed": traceback.format_exc()}
            if int(os.environ["WORLD_SIZE"]) > 1:
                break  # the other ranks may wait for this one in a collective
    Path(folder, f"rank{os.environ['RANK']}.json").write_text(json.dumps(results), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
