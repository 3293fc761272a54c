"""One of two ranks, started by torchrun; rank 0 writes what its profile says."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch

from .here import Here
from .ranks import train_two


def main() -> int:
    """Trains on this rank's device."""
    device_type, folder, output = sys.argv[1:]
    if device_type == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    train_two(Here(device_type=device_type, small=False, folder=Path(folder)), Path(output))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
