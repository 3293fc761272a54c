"""Compiles, once and before any test, the operators of DeepSpeed's that its engines use on a CPU.

Tests that run side by side would each wait for the one that compiles it. torch marks a folder in which it compiles with
a file, and whoever finds that file waits for it to go; a run that was killed leaves it for ever.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from tests.ranks import DEEPSPEED_ON_CPU


def main() -> None:
    """Compile what is not compiled yet."""
    os.environ.update(DEEPSPEED_ON_CPU)
    folder = Path(DEEPSPEED_ON_CPU["TORCH_EXTENSIONS_DIR"])
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "compiling").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)  # let go when this process ends, however it ends
        for left in folder.glob("*/lock"):
            left.unlink(missing_ok=True)
        from deepspeed.ops.op_builder.cpu import FusedAdamBuilder, ShareMemCommBuilder

        for builder in (FusedAdamBuilder(), ShareMemCommBuilder()):
            builder.load(verbose=False)


if __name__ == "__main__":
    main()
