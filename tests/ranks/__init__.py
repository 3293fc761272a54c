"""Starts one program on several ranks, as a launcher does, and says what each printed."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

from tests.forks import LIGHTNING, REPOSITORY, TORCH, Fork, start_fork

__all__ = [
    "DEEPSPEED",
    "DEEPSPEED_ON_CPU",
    "EVERYTHING",
    "LIGHTNING",
    "REPOSITORY",
    "environment_of_ranks",
    "run_ranks",
]

_DEEPSPEED = (
    "deepspeed",
    "deepspeed.runtime.zero.muon.muon_optimizer",  # is looked for by the first engine that shards
    "lightning_flops.deepspeed",
)
DEEPSPEED = (*TORCH, "lightning_flops", *_DEEPSPEED)
EVERYTHING = (*LIGHTNING, "pytorch_lightning", *_DEEPSPEED, "lightning_flops.transformers")
"""What ranks may find imported. Each of these is imported once, for all that ask for the same."""

DEEPSPEED_ON_CPU = {
    "DS_ACCELERATOR": "cpu",
    "CUDA_VISIBLE_DEVICES": "",
    # What DeepSpeed compiles survives the run of the tests.
    "TORCH_EXTENSIONS_DIR": str(REPOSITORY / ".cache" / "torch_extensions"),
}
"""Environment in which DeepSpeed runs without a GPU."""

_LINES_SHOWN = 60
"""So many of what each rank printed are shown when one has failed."""


def run_ranks(
    arguments: Sequence[str],
    *,
    ranks: int,
    folder: Path,
    timeout_sec: float,
    environment: Mapping[str, str] | None = None,
    ends_with: Mapping[int, int] | None = None,
    imports: tuple[str, ...] = (),
) -> list[str]:
    """Run ``python ARGUMENTS`` in *folder* as ranks 0 to *ranks* - 1 of one job on this machine.

    *environment* has variables beside those of this process and of a launcher, *ends_with* exit statuses that are not
    to be 0, by rank. Ranks find *imports* imported, as forks of a process that has imported them; with none each is a
    Python of its own.

    Returns:
        What each rank printed, both streams together.

    Raises:
        AssertionError: a rank failed or was not done in time; with the last lines of what every rank printed.
    """
    statuses_meant = [(ends_with or {}).get(rank, 0) for rank in range(ranks)]
    with contextlib.ExitStack() as undo:
        port = _held_port(undo)
        everywhere = environment_of_ranks(environment or {})
        processes: list[subprocess.Popen[bytes] | Fork] = []
        outputs: list[IO[bytes]] = []
        for rank in range(ranks):
            output = undo.enter_context(tempfile.TemporaryFile())
            outputs.append(output)
            processes.append(_start(arguments, imports, folder, everywhere, _place(rank, ranks, port), output))
            undo.callback(_end, processes[-1])
        began = time.monotonic()
        deadline = began + timeout_sec
        late = False
        while not late and any(process.poll() is None for process in processes):
            # A rank that has failed leaves the others waiting for it.
            so_far = zip((process.poll() for process in processes), statuses_meant, strict=True)
            if any(status not in (None, meant) for status, meant in so_far):
                deadline = min(deadline, time.monotonic() + 5.0)
            late = time.monotonic() > deadline
            time.sleep(0.05)
        for process in processes:
            _end(process)
        printed = [_text(output) for output in outputs]
    statuses = [process.wait() for process in processes]
    # The lines that say what went wrong come last, and a report before them may have hundreds.
    newline = "\n"
    last = newline.join(
        f"----- rank {rank}\n{newline.join(text.splitlines()[-_LINES_SHOWN:])}" for rank, text in enumerate(printed)
    )
    took_sec = time.monotonic() - began
    ended = f"exit statuses {statuses} after {took_sec:.0f} s; they had {timeout_sec:.0f} s"
    assert statuses == statuses_meant and not late, f"{ended}\n{last}"
    return printed


def environment_of_ranks(more: Mapping[str, str]) -> dict[str, str]:
    """What all ranks have in their environment, and this process or *more* gave them."""
    return {**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1", **more}


def _start(
    arguments: Sequence[str],
    imports: tuple[str, ...],
    folder: Path,
    environment: Mapping[str, str],
    place: Mapping[str, str],
    output: IO[bytes],
) -> subprocess.Popen[bytes] | Fork:
    """One rank; it leads a session, so that what it starts itself can be ended with it."""
    if imports:
        return start_fork(
            arguments, imports=imports, folder=folder, environment=environment, place=place, output=output.fileno()
        )
    return subprocess.Popen(
        [sys.executable, *arguments],
        cwd=folder,
        env={**environment, **place},
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )


def _held_port(undo: contextlib.ExitStack) -> int:
    """A port that no other process gets until *undo*: a socket is bound to it, and rank 0 may listen there anyway.

    The system gives no port that is bound to who asks for any; who asks for this one gets it if both reuse addresses.
    """
    held = undo.enter_context(socket.socket())
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind(("", 0))
    port: int = held.getsockname()[1]
    return port


def _place(rank: int, ranks: int, port: int) -> dict[str, str]:
    """Environment variables in which torchrun writes a process's place."""
    number = {"RANK": rank, "LOCAL_RANK": rank, "GROUP_RANK": 0, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
    job = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "TORCHELASTIC_RUN_ID": "tests"}
    return {name: str(value) for name, value in (number | job).items()}


def _end(process: subprocess.Popen[bytes] | Fork) -> None:
    if process.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _text(output: IO[bytes]) -> str:
    output.seek(0)
    return output.read().decode(errors="replace")
