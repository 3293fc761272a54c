"""``python -m lightning_flops``: the same as the command ``lightning-flops``."""

import sys

from lightning_flops.cli import main

if __name__ == "__main__":
    sys.exit(main())
