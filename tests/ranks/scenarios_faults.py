"""Lightning on two ranks where something is not as it should be on rank 1, or on both, and training must not notice."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from lightning.pytorch import Callback
from torch import distributed as torch_distributed
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.utils.data import DataLoader

from lightning_flops import FlopsProfilerCallback
from tests.lightning.footprint import footprint
from tests.lightning.nets import BATCH, Rows, loader, new_net, new_trainer

ROOT = "lightning.pytorch"
RANK = int(os.environ.get("RANK", "0"))
BATCHES = 16
SEC_FOR_ANSWERS = 10.0
"""Less than rank 0 waits for a rank that does not answer."""
WINDOW: dict[str, Any] = {"profile_step": 1, "timing_steps": 2, "trace": False}

distributed: Any = torch_distributed  # which does not say what of it is public


def train(
    *callbacks: Any, net: Any = None, data: Any = None, around: Callable[[Any], Any] | None = None, **settings: Any
) -> dict[str, Any]:
    """What a fit of all ranks is like: its losses and weights, its collectives, and what it leaves behind."""
    net = net or new_net(ROOT)
    settings = {"strategy": "ddp", "devices": int(os.environ["WORLD_SIZE"]), **settings}
    run = new_trainer(ROOT, str(Path.cwd()), *callbacks, **settings)
    torch.manual_seed(5)
    with logged() as lines, around(run) if around is not None else contextlib.nullcontext():
        run.fit(net, data or loader(2 * BATCHES))
    group = distributed.group.WORLD
    return {
        "losses": [loss.hex() for loss in getattr(net, "losses", [])],
        "weights": [weight.hex() for parameter in net.parameters() for weight in parameter.flatten().tolist()],
        "random": float(torch.rand(1)).hex(),
        "footprint": repr(footprint(run, net)),
        "collectives": sum(pg._get_sequence_number_for_group() for pg in [group]),
        "ours": our_keys(),
        "logged": lines,
        "threads": our_threads(),
    }


def profiled(*, callback: FlopsProfilerCallback | None = None, waits: bool = True, **settings: Any) -> dict[str, Any]:
    """The same with the profiler, and its profile."""
    callback = callback or FlopsProfilerCallback(**WINDOW)
    before = distributed.group.WORLD._get_sequence_number_for_group()
    result = train(callback, *[WaitsForAnswers()] * waits, **settings)
    result["collectives"] -= before
    # A collective of the test's own: the group still works.
    total = torch.tensor([RANK + 1])
    distributed.all_reduce(total)
    return {
        **result,
        "sum": total.item(),
        "profile": None if callback.profile is None else callback.profile.to_json(),
        "profiles": len(callback.profiles),
    }


def our_keys() -> list[str]:
    """What of ours is in the store once every rank is here."""
    store = distributed.distributed_c10d._get_default_store()
    distributed.barrier()
    deadline = time.monotonic() + 20.0
    while ours := [key for key in store.list_keys() if "lightning_flops" in key]:
        if time.monotonic() > deadline:
            break
        time.sleep(0.01)
    distributed.barrier()
    return ours


@contextlib.contextmanager
def logged() -> Iterator[list[str]]:
    """Every line that the package logs at INFO or above."""
    lines: list[str] = []
    ours = logging.getLogger("lightning_flops")

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(f"{record.levelname} {record.getMessage()}")

    handler, level = Handler(), ours.level
    ours.addHandler(handler)
    ours.setLevel(logging.INFO)
    try:
        yield lines
    finally:
        ours.removeHandler(handler)
        ours.setLevel(level)


class WaitsForAnswers(Callback):
    """Has rank 0 wait before its last batches, for a while at most, until nobody's answer is missing any more."""

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if RANK == 0 and batch_idx == BATCHES - 4:
            deadline = time.monotonic() + SEC_FOR_ANSWERS
            while our_threads() and time.monotonic() < deadline:
                time.sleep(0.001)


def our_threads() -> list[str]:
    """The threads of ours that run: they end when they have nothing more to do."""
    return [thread.name for thread in threading.enumerate() if "lightning_flops" in thread.name]


def on_rank_1(target: str, error: Exception) -> Any:
    """Replace *target* on rank 1 by what raises *error*."""
    return mock.patch(target, side_effect=error) if RANK == 1 else contextlib.nullcontext()


def plain() -> dict[str, Any]:
    """Without a profiler, twice: the first fit makes the process group."""
    train()
    before = distributed.group.WORLD._get_sequence_number_for_group()
    result = train()
    result["collectives"] -= before
    return result


def healthy() -> dict[str, Any]:
    return profiled()


def every() -> dict[str, Any]:
    """Windows one right after the other: a report may be pending when the next window opens."""
    return profiled(callback=FlopsProfilerCallback(profile_step=[0, 6], timing_steps=2, trace=False))


def profiler_fails() -> dict[str, Any]:
    with on_rank_1("lightning_flops.session.results.build_profile", RuntimeError("broken on purpose")):
        return profiled()


def fails_at_start() -> dict[str, Any]:
    with on_rank_1("lightning_flops.session.instruments.Recorder", RuntimeError("broken on purpose")):
        return profiled()


def cannot_pack() -> dict[str, Any]:
    with on_rank_1("lightning_flops.session.ranks.make_rank_record", ValueError("broken on purpose")):
        return profiled()


def damaged() -> dict[str, Any]:
    patch = mock.patch("lightning_flops.session.ranks.pack", return_value=b"no record") if RANK else None
    with patch or contextlib.nullcontext():
        return profiled()


def cannot_merge() -> dict[str, Any]:
    with mock.patch("lightning_flops.session.ranks.with_ranks", side_effect=ValueError("broken on purpose")):
        return profiled()


def no_store() -> dict[str, Any]:
    with mock.patch("lightning_flops.session.rank_exchange.store_getter", lambda: None):
        callback = FlopsProfilerCallback(**WINDOW)
        with mock.patch(__name__ + ".our_keys", lambda: []):
            return profiled(callback=callback)


def manual_net(updates: Callable[[int], bool]) -> Any:
    """A net that updates after those batches alone of which *updates* says so."""
    net = new_net(ROOT)
    net.automatic_optimization = False

    def training_step(batch: Any, batch_idx: int) -> None:
        optimizer = net.optimizers()
        loss = nn.functional.mse_loss(net.net(batch[0]), batch[1])
        optimizer.zero_grad()
        net.manual_backward(loss)
        if updates(batch_idx):
            optimizer.step()

    net.training_step = training_step
    return net


def beside_plain(
    callback: FlopsProfilerCallback, *, net: Callable[[], Any], waits: bool = True, **settings: Any
) -> dict[str, Any]:
    """A fit with the profiler, and beside it the same without."""
    before = distributed.group.WORLD._get_sequence_number_for_group()
    plain = train(net=net(), **settings)
    plain["collectives"] -= before
    return {**profiled(callback=callback, net=net(), waits=waits, **settings), "plain": plain}


def silent() -> dict[str, Any]:
    """Rank 1 sends nothing before its fit ends, because its window never closes: it never updates."""
    callback = FlopsProfilerCallback(**WINDOW, ranks_timeout_sec=0.05)
    return beside_plain(callback, net=lambda: manual_net(lambda batch_idx: RANK == 0))


def skips_steps() -> dict[str, Any]:
    """Rank 1 updates after every other batch: its window closes later."""
    return beside_plain(
        FlopsProfilerCallback(**WINDOW),
        net=lambda: manual_net(lambda batch_idx: RANK == 0 or batch_idx % 2 == 1),
        waits=False,
    )


class Joined(Callback):
    """Has the ranks that are out of batches answer the collectives of the others."""

    def __init__(self) -> None:
        self.join: Any = None

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.join = Join([trainer.strategy.model])
        self.join.__enter__()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self.join.__exit__(None, None, None)


def uneven(*batches: int) -> dict[str, Any]:
    """Each rank has so many *batches*: one has fewer, and so ends first."""
    data = DataLoader(Rows(batches[RANK] * BATCH), batch_size=BATCH)
    return beside_plain(
        FlopsProfilerCallback(**WINDOW),
        net=lambda: new_net(ROOT),
        data=data,
        use_distributed_sampler=False,
        around=joined,
    )


@contextlib.contextmanager
def joined(run: Any) -> Iterator[None]:
    run.callbacks.append(Joined())
    # A broadcast before every batch, of which Join knows nothing.
    run.fit_loop.epoch_loop._broadcast_sigterm_tensor = lambda: None
    yield


def ends_before_its_window() -> dict[str, Any]:
    return uneven(BATCHES, 1)


def ends_in_its_window() -> dict[str, Any]:
    return uneven(BATCHES, 5)


def ends_first_on_rank_0() -> dict[str, Any]:
    return uneven(1, BATCHES)


def other_settings() -> dict[str, Any]:
    """Rank 1 was told of another step."""
    return profiled(callback=FlopsProfilerCallback(**{**WINDOW, "profile_step": 3 if RANK else 1}), waits=False)


def all_ranks() -> dict[str, Any]:
    shared = Path("..", "shared").resolve()
    traced = {**WINDOW, "trace": True, "trace_dir": shared / "traces"}
    callback = FlopsProfilerCallback(**traced, all_ranks=True, output_file=shared / "flops.txt")
    result = profiled(callback=callback, default_root_dir=str(shared / f"logs{RANK}"))
    distributed.barrier()
    return {**result, "files": sorted(str(path.relative_to(shared)) for path in shared.rglob("*") if path.is_file())}


def rank_0_alone_writes() -> dict[str, Any]:
    shared = Path("..", "shared2").resolve()
    traced = {**WINDOW, "trace": True, "trace_dir": shared / "traces"}
    result = profiled(callback=FlopsProfilerCallback(**traced), default_root_dir=str(shared / f"logs{RANK}"))
    distributed.barrier()
    return {**result, "files": sorted(str(path.relative_to(shared)) for path in shared.rglob("*") if path.is_file())}


SCENARIOS = {
    scenario.__name__: scenario
    for scenario in (
        plain,
        healthy,
        every,
        profiler_fails,
        fails_at_start,
        cannot_pack,
        damaged,
        cannot_merge,
        no_store,
        silent,
        skips_steps,
        ends_before_its_window,
        ends_in_its_window,
        ends_first_on_rank_0,
        other_settings,
        all_ranks,
        rank_0_alone_writes,
    )
}
