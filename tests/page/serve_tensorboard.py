"""TensorBoard with the plugins that it finds itself, our tab by the installed entry point among them: folder, port."""

from __future__ import annotations

import sys

from tensorboard import default, program


def main() -> None:
    """Serve until standard input ends."""
    folder, port = sys.argv[1:]
    server = program.TensorBoard(plugins=default.get_plugins())
    server.configure(
        argv=["", "--logdir", folder, "--port", port, "--host", "127.0.0.1", "--load_fast=false", "--reload_interval=1"]
    )
    server.launch()
    sys.stdin.read()


if __name__ == "__main__":
    main()
