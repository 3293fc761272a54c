"""Whether the rank that the others wait for is named, with the part of its step and the module, on two real ranks.

``make bench-stragglers`` trains a small network with DistributedDataParallel over gloo, on two ranks that are processes
of their own. Rank 1 sleeps 20 ms in each step, at one place: in a module's forward or backward, between the forward and
the backward, between the backward and the optimizer, between steps, or while its loader reads a batch. Named right is
that rank alone, with that part, and with the module, or that it is outside of its modules. Nobody sleeps in the last
program, in which nobody may be named.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator, Sequence
from importlib import import_module
from typing import Any

import torch
from torch import distributed, nn
from torch.utils.data import DataLoader, Dataset

from lightning_flops.pytorch import profile_training

from .advice_programs import FORK
from .machine import RESULTS
from .page import described, table, write_page
from .runner import answer_of, start

logger = logging.getLogger("benchmarks.stragglers")

LATE_SEC = 0.02
REST = "data wait + transfer + other"
PLACES: dict[str, tuple[str, str | None, bool]] = {
    "in a module's forward": ("forward", "2", False),
    "in a module's backward": ("backward", "2", False),
    "before the backward": ("forward", None, True),
    "before the optimizer": (REST, None, False),
    "between steps": (REST, None, False),
    "in the loader": ("data wait", None, False),
}
"""Where rank 1 sleeps: the part, the module, and whether it is outside of the part's modules."""
_NOBODY, _STEPS, _TIMEOUT_SEC = "nowhere", 45, 120


class _Slept(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, sleeps: Any) -> torch.Tensor:
        ctx.sleeps = sleeps
        sleeps("in a module's forward")
        return rows.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.sleeps("in a module's backward")
        return gradients[0], None


class _Module(nn.Module):
    def __init__(self, sleeps: Any) -> None:
        super().__init__()
        self.sleeps = sleeps

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = _Slept.apply(rows, self.sleeps)  # type: ignore[no-untyped-call]
        return result


class _Rows(Dataset[torch.Tensor]):
    def __init__(self, sleeps: Any) -> None:
        self.sleeps, self.rows = sleeps, torch.randn(64, 256)

    def __len__(self) -> int:
        return 64 * _STEPS

    def __getitems__(self, indices: list[int]) -> torch.Tensor:
        self.sleeps("in the loader")
        return self.rows


def train(place: str, rank: int, port: int) -> list[tuple[int, str | None, str | None, bool, float]]:
    """What rank 0 reports of two ranks, the second of which sleeps at *place*."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    torch.manual_seed(0)
    distributed.init_process_group("gloo")

    def sleeps(here: str) -> None:
        if rank == 1 and here == place:
            time.sleep(LATE_SEC)

    layers = (nn.Linear(256, 1024), nn.ReLU(), _Module(sleeps), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 10))
    model = nn.parallel.DistributedDataParallel(nn.Sequential(*layers))
    optimizer = torch.optim.SGD(model.parameters(), 1e-2)
    batches = DataLoader(_Rows(sleeps), batch_size=64, collate_fn=lambda rows: rows)
    fed = batches if place == "in the loader" else [torch.randn(64, 256)] * _STEPS
    with profile_training(model, optimizer) as profiler:
        for batch in fed:
            sleeps("between steps")
            loss = model(batch).square().mean()
            sleeps("before the backward")
            loss.backward()
            sleeps("before the optimizer")
            optimizer.step()
            optimizer.zero_grad()
    ranks = None if profiler.profile is None else profiler.profile.ranks
    found = () if ranks is None else ranks.stragglers
    return [(one.rank, one.part, one.module, one.outside_modules, one.late_sec) for one in found]


def run(place: str) -> Any:
    """What is found in a run of two ranks; None if it failed."""

    def both() -> Any:
        port = 20_000 + os.getpid() % 20_000
        other = FORK.Process(target=train, args=(place, 1, port))
        other.start()
        found = train(place, 0, port)
        other.join()
        return found

    answer = answer_of(both, timeout_sec=_TIMEOUT_SEC)
    logger.info("%s: %s %s", place, answer.value, answer.words)
    return answer.value


def rows_of(runs: int) -> Iterator[list[str]]:
    """A row for each place."""
    for place, (part, module, outside) in PLACES.items():
        found = [run(place) or [] for _ in range(runs)]
        right = [[one[:4] for one in each] == [(1, part, module, outside)] for each in found]
        ranks = [[one[0] for one in each] == [1] for each in found]
        late = sorted(one[4] for each in found for one in each)
        spread = f"{late[0] * 1e3:.1f} to {late[-1] * 1e3:.1f} ms" if late else "–"
        where = module or ("outside" if outside else "–")
        yield [place, part, where, f"{sum(ranks)} of {runs}", f"{sum(right)} of {runs}", spread]
    nobody = [run(_NOBODY) for _ in range(runs)]
    yield [_NOBODY, "–", "–", f"{sum(one != [] for one in nobody)} of {runs}, falsely", "–", "–"]


def page(found: Sequence[Sequence[str]]) -> list[str]:
    """The lines of the page."""
    head = ["rank 1 sleeps 20 ms", "part", "module", "rank named", "with part and module", "late by"]
    return [*described(__doc__, "torch"), *table(head, [list(row) for row in found])]


def main() -> None:
    """Run all places, and write the page."""
    options = start(__file__, __doc__, RESULTS / "stragglers.md", runs=4)
    import_module("torch._dynamo")  # once, not in each program's process
    write_page(options.output, page(list(rows_of(options.runs))))


if __name__ == "__main__":
    main()
