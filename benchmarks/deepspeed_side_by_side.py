"""Runs each program of ``deepspeed_rows`` with DeepSpeed's own profiler and with this one, and writes what both print.

``python -m benchmarks.deepspeed_side_by_side`` replaces the grey boxes of ``results/deepspeed_side_by_side.md``: what
the two commands printed, less the lines that a row is not about; a box says where it leaves any out. The FLOPs that
this project reports are compared with those worked out by hand, and a difference stops the script.
"""

from __future__ import annotations

import json
import re
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from tests.ranks import DEEPSPEED_ON_CPU, environment_of_ranks

from .deepspeed_rows import ROWS
from .machine import ONE_THREAD, ROOT, ran_in_words

PAGE = ROOT / "benchmarks" / "results" / "deepspeed_side_by_side.md"
BEGIN = "<!-- From here on, benchmarks/deepspeed_side_by_side.py writes the boxes. -->"
LEFT_OUT = "[...]"


def excerpt(text: str, patterns: Iterable[str], *, block: str | None = None) -> str:
    """The lines of *text* that match one of *patterns*, and ``[...]`` where others are left out.

    From a line that matches *block* to the next that is only a closing parenthesis, every line is kept.
    """
    kept: list[str] = []
    inside = False
    for line in (line.rstrip() for line in text.splitlines()):
        inside = inside or (block is not None and re.search(block, line) is not None)
        if inside or any(re.search(pattern, line) for pattern in patterns):
            kept.append(line)
            inside = inside and line != ")"
        elif not kept or kept[-1] != LEFT_OUT:
            kept.append(LEFT_OUT)
    return "\n".join(kept)


def command_of(name: str, *, ours: bool) -> list[str]:
    """What runs the program *name* in Python, with DeepSpeed's own profiler or with ours."""
    return [*(["-m", "lightning_flops", "run"] if ours else []), "-m", "benchmarks.deepspeed_rows", name]


def run_row(name: str, *, ours: bool, folder: Path) -> tuple[int, str]:
    """Exit status and output of rank 0 of the program *name*, which writes its files to *folder*."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    job = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(ROWS[name].ranks)}
    environment = environment_of_ranks({**ONE_THREAD, **DEEPSPEED_ON_CPU, "PYTHONWARNINGS": "ignore", **job})
    processes, command = [], [sys.executable, *command_of(name, ours=ours)]
    for rank in range(ROWS[name].ranks):
        variables = {**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        with (folder / f"output{rank}.txt").open("wb") as output:
            processes.append(subprocess.Popen(command, cwd=folder, env=variables, stdout=output, stderr=output))
    for process in processes:
        with suppress(subprocess.TimeoutExpired):
            process.wait(timeout=240)
        process.kill()  # if it still runs, which shows in its exit status
        process.wait()
    return processes[0].returncode, (folder / "output0.txt").read_text(errors="replace")


def boxes(name: str) -> str:
    """Both commands of a row with what they printed, and the count."""
    row, lines = ROWS[name], []
    for ours in (False, True):
        with tempfile.TemporaryDirectory() as folder:
            status, output = run_row(name, ours=ours, folder=Path(folder))
            if ours:
                profiles = [json.loads(path.read_text()) for path in Path(folder).rglob("profile.json")]
                found = profiles[0]["flops"]["forward"] if profiles else None
                if status != 0 or found != row.flops:
                    raise SystemExit(f"{name}: {found} FLOPs, by hand {row.flops}; status {status}\n{output}")
            else:
                output = "\n".join(line for line in output.splitlines() if "frame.py" not in line)
        who = "with this profiler" if ours else "with DeepSpeed's own"
        lines += [f"`{' '.join(['python', *command_of(name, ours=ours)])}`, {who}, exit status {status}:", ""]
        lines += ["```text", excerpt(output, row.keep, block=row.block), "```", ""]
    if row.flops is not None:
        lines += [f"`profile.json` has {row.flops:,} forward FLOPs in the step, as by hand.", ""]
    return "\n".join(lines)


def main() -> None:
    """Run every row and write the page, or print the boxes of those that the command line names."""
    if sys.argv[1:]:
        print("\n".join(boxes(name) for name in sys.argv[1:]))
        return
    before, begin, written = PAGE.read_text().partition(BEGIN)
    written = re.sub(r"\A\n\n.*\n", lambda _: f"\n\n{ran_in_words(('torch', 'deepspeed', 'lightning'))}\n", written)
    for name in ROWS:
        print(name, flush=True)
        old = rf"^`python -m benchmarks\.deepspeed_rows {name}`.*?(?=\n## |\Z)"
        written, count = re.subn(old, lambda _, name=name: boxes(name), written, flags=re.DOTALL | re.MULTILINE)  # type: ignore[misc]
        if count != 1:
            raise SystemExit(f"{PAGE.name} has {count} sections for {name}")
    PAGE.write_text(before + begin + written)


if __name__ == "__main__":
    main()
