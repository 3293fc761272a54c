"""Runs every scenario of one module in one process; started on several ranks, it is one of them.

``python -m tests.ranks.worker MODULE FOLDER`` writes what each scenario returned, or how it failed, into
``FOLDER/rank{N}.json``; with ``MODULE:NAME,NAME`` those of these names alone run.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any

import torch

from lightning_flops.run import window
from tests.idle_machine import unwatched


def run_scenarios(module_name: str, folder: str) -> None:
    """Run each function in the module's ``SCENARIOS``, in a folder and from a seed of its own."""
    module_name, _, names = module_name.partition(":")
    scenarios = importlib.import_module(module_name).SCENARIOS
    rank = os.environ["RANK"]
    watching: Any = window
    watching.ProcessorWatch = unwatched
    results: dict[str, Any] = {}
    for name in names.split(",") if names else scenarios:
        workplace = Path(folder, f"{name}-{rank}")
        workplace.mkdir(parents=True)
        os.chdir(workplace)
        torch.manual_seed(0)
        try:
            results[name] = {"returned": scenarios[name]()}
        except Exception:
            results[name] = {"failed": traceback.format_exc()}
            if int(os.environ["WORLD_SIZE"]) > 1:
                break  # the other ranks may wait for this one in a collective
    Path(folder, f"rank{rank}.json").write_text(json.dumps(results), encoding="utf-8")


if __name__ == "__main__":
    run_scenarios(sys.argv[1], sys.argv[2])
