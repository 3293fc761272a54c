"""TensorBoard with its own pages and our tab, whether or not the entry point is installed: folder, port."""

from __future__ import annotations

import sys

from tensorboard import default, program

from lightning_flops.tensorboard import FlopsPlugin


def main() -> None:
    """Serve until standard input ends."""
    folder, port = sys.argv[1:]
    known = [one for one in default.get_plugins() if getattr(one, "plugin_name", None) != FlopsPlugin.plugin_name]
    server = program.TensorBoard(plugins=[*known, FlopsPlugin])
    server.configure(
        argv=["", "--logdir", folder, "--port", port, "--host", "127.0.0.1", "--load_fast=false", "--reload_interval=1"]
    )
    server.launch()
    sys.stdin.read()


if __name__ == "__main__":
    main()
