"""Two identical runs compared, many times, beside a busy process: how often a gate fails that should not.

``python -m benchmarks.compare_pairs 50`` trains the same small network twice for each pair, each time in a new process,
beside one that only counts, and holds the two runs to the conditions of a CI job. Nothing has changed, so no gate
should fail. In a last pair the second network is eight times as wide. Writes ``results/compare.md``.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import os
import subprocess
import sys
import tempfile
from collections import Counter, deque
from pathlib import Path

from lightning_flops import compare_profiles
from lightning_flops.analysis.compare_rules import judge, parse_condition
from lightning_flops.errors import ComparisonError
from lightning_flops.sinks.profile_files import read_profile

from .machine import machine_in_words

GATES = (
    "global_step_sec > 1.05", "samples_per_sec < 0.95", "data_wait_ratio > 1.5", "cpu_time_sec > 1.1",
    "hardware_flops > 1", "params > 1",
)  # fmt: skip
OUTCOMES = ("passes", "inconclusive", "not known", "fails")
RESULT = Path(__file__).parent / "results" / "compare.md"
PROGRAM = """
import sys, torch
from lightning_flops import profile_training
width = int(sys.argv[2])
model = torch.nn.Sequential(torch.nn.Linear(32, width), torch.nn.ReLU(), torch.nn.Linear(width, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
with profile_training(model, optimizer, profile_step=5, log_dir=sys.argv[1]):
    for batch in torch.utils.data.DataLoader(torch.randn(2048, 32), batch_size=32):
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
"""


def outcomes(*widths: int) -> list[tuple[str, str]]:
    """Each gate, and what it came to for two runs of a network of these widths."""
    with tempfile.TemporaryDirectory() as folder:
        for run, width in enumerate(widths):
            subprocess.run([sys.executable, "-c", PROGRAM, f"{folder}/{run}", str(width)], check=True)
        comparison = compare_profiles(*(read_profile(f"{folder}/{run}")[0] for run in (0, 1)))
    found = []
    for gate in GATES:
        try:
            one = judge(comparison, parse_condition(gate))
            found.append((gate, "inconclusive" if one.inconclusive else "fails" if one.holds else "passes"))
        except ComparisonError:
            found.append((gate, "not known"))
    return found


def main() -> None:
    """Measure, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("pairs", type=int, nargs="?", default=50)
    pairs = parser.parse_args().pairs
    busy = multiprocessing.Process(target=deque, args=(itertools.count(), 0), daemon=True)
    busy.start()
    seen = Counter(itertools.chain.from_iterable(outcomes(4096, 4096) for _ in range(pairs)))
    wider = dict(outcomes(4096, 8 * 4096))
    busy.terminate()
    rows = [f"| `{gate}` | {' | '.join(str(seen[gate, one]) for one in OUTCOMES)} | {wider[gate]} |" for gate in GATES]
    head = f"| gate | {' | '.join(OUTCOMES)} | eight times as wide |\n|---|{'---|' * (len(OUTCOMES) + 1)}"
    words = f"{machine_in_words()}; {pairs} pairs beside a busy process, at a load of {os.getloadavg()[2]:.0f} in all."
    RESULT.write_text("\n".join((f"# {__doc__.splitlines()[0]}", "", words, "", head, *rows, "")))


if __name__ == "__main__":
    main()
