"""Lightning's DeepSpeedStrategy, which refuses to run without a GPU; the double here differs in the device alone."""

from __future__ import annotations

import importlib
from typing import Any

import torch


def strategy(root: str, config: dict[str, Any], *, ranks: int) -> Any:
    """DeepSpeedStrategy of *root*, on the CPU."""
    base: Any = importlib.import_module(f"{root}.strategies").DeepSpeedStrategy

    class DeepSpeedOnCpu(base):  # type: ignore[misc]
        @property
        def root_device(self) -> torch.device:
            return torch.device("cpu", self.local_rank)

        def setup_environment(self) -> None:
            self.parallel_devices = [torch.device("cpu", rank) for rank in range(ranks)]
            super(base, self).setup_environment()

    return DeepSpeedOnCpu(config=config, process_group_backend="gloo")
