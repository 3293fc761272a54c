"""What the scenarios train, and how they look at what is left behind. Runs inside the launched processes."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import deepspeed
import torch
from torch import Tensor, nn
from torch.utils.data import dataloader as torch_dataloader

from lightning_flops.deepspeed import Handle, attach, install, uninstall
from lightning_flops.schema.profile import Profile
from lightning_flops.schema.trace import RanksProfile
from tests.left_on_objects import is_ours, left_on_object
from tests.left_on_torch import global_hooks
from tests.listening import listening
from tests.results import profile_of as its_profile

SAMPLES = 2
"""Of a micro-batch."""

WINDOW: dict[str, Any] = {"timing_steps": 2, "monitor": False, "trace": False, "lines": False}
BLOCK: dict[str, Any] = {"enabled": True, "profile_step": 2, **WINDOW}


class Net(nn.Module):
    """Two layers, and a product right in the root's forward.

    A sample costs 2·8·8 FLOPs in the root, 2·8·16 in ``first`` and 2·16·4 in ``second`` forward. Backward, each costs
    that for its weights; ``first`` and ``second`` cost it once more for their inputs, the root's input needs nothing.
    """

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Parameter(torch.randn(8, 8) / 8)
        self.first = nn.Linear(8, 16)
        self.second = nn.Linear(16, 4)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden: Tensor = self.second(torch.relu(self.first(inputs @ self.mix)))
        return hidden


def config(*, stage: int = 0, accumulate: int = 1, block: Any = BLOCK, **more: Any) -> dict[str, Any]:
    """A DeepSpeed config for ``Net``; without a block if *block* is None."""
    return {
        "train_micro_batch_size_per_gpu": SAMPLES,
        "gradient_accumulation_steps": accumulate,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 1000,
        **({} if block is None else {"flops_profiler": block}),
        **more,
    }


def engine_of(settings: Any, model: nn.Module | None = None, optimizer: Any = None, **more: Any) -> Any:
    """An engine that trains *model*, or a ``Net`` of the same weights each time, by SGD unless it gets an optimizer."""
    if model is None:
        torch.manual_seed(1)
        model = Net()
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.1)
    return deepspeed.initialize(model=model, optimizer=optimizer, config=settings, **more)[0]


@contextmanager
def installed() -> Iterator[None]:
    """The hook, for a while."""
    install()
    try:
        yield
    finally:
        uninstall()


def batches(number: int, *, seed: int = 7) -> list[Tensor]:
    """The same micro-batches each time, other ones on another rank."""
    generator = torch.Generator().manual_seed(seed + 100 * deepspeed.comm.get_rank())
    return [torch.randn(SAMPLES, 8, generator=generator) for _ in range(number)]


def train(engine: Any, micro_steps: int, *, step: Callable[[Any, Tensor], Tensor] | None = None) -> list[str]:
    """Train for so many micro-steps; returns the losses to the last bit."""
    losses = []
    kind = next(engine.module.parameters()).dtype
    for batch in batches(micro_steps):
        if step is None:
            loss = engine(batch.to(kind)).square().sum()
            engine.backward(loss)
            engine.step()
        else:
            loss = step(engine, batch.to(kind))
        losses.append(loss.detach().float().item().hex())
    return losses


def weights(engine: Any) -> list[str]:
    """The model's parameters to the last bit, gathered where they are sharded."""
    with deepspeed.zero.GatheredParameters(list(engine.module.parameters())):
        return [value.hex() for one in engine.module.parameters() for value in one.detach().float().flatten().tolist()]


def profile_of(engine: Any, handle: Handle | None = None) -> Profile:
    """The profile of a run that is over; nothing of ours is left on the engine then."""
    handle = attach(engine) if handle is None else handle
    handle.detach()  # the run is over: rank 0 waits for what the others still have to say
    assert left_on(engine) == []
    return its_profile(handle)


def job_of(profile: Profile) -> RanksProfile | None:
    """What the first rank's profile says of the job, once all ranks have answered; the others' say nothing of it."""
    if deepspeed.comm.get_rank():
        assert profile.ranks is None
        return None
    assert profile.ranks is not None
    assert {profile.ranks.world_size, profile.ranks.answered} == {deepspeed.comm.get_world_size()}
    return profile.ranks


def profiled(
    micro_steps: int,
    loss_of: Callable[[Any, Tensor], Tensor] = lambda engine, batch: engine(batch).square().sum(),
    *,
    model: nn.Module | None = None,
    after_step: Callable[[Any, Tensor], object] = lambda engine, batch: None,
    prepare: Callable[[Any], object] = lambda engine: None,
    **settings: Any,
) -> tuple[Any, Profile]:
    """An engine with an enabled block that has trained, and its profile."""

    def step(engine: Any, batch: Tensor) -> Tensor:
        loss = loss_of(engine, batch)
        engine.backward(loss)
        engine.step()
        after_step(engine, batch)
        return loss

    with installed():
        engine = engine_of(config(**settings), model)
        prepare(engine)
        train(engine, micro_steps, step=step)
        return engine, profile_of(engine)


def flops_of(profile: Profile) -> tuple[int, int]:
    """Forward and backward."""
    return profile.flops.forward, profile.flops.backward


def left_on(engine: Any) -> list[str]:
    """What there is of ours on *engine*, its classes, its module and torch; nothing if all is well."""
    # install() stays on the class when an engine is done; DeepSpeed keeps what it finds there.
    found = [name for name in left_on_object(engine) if not name.endswith(("__init__", "_old_init"))]
    owners: dict[str, Mapping[Any, Any]] = {
        "torch.autograd": {"backward": torch.autograd.backward},
        "loaders": {"next": torch_dataloader._BaseDataLoaderIter.__next__},
        **global_hooks(),
    }
    for kind in type(engine).__mro__:  # a pipeline's table of instructions
        owners |= {f"{kind.__name__}.{name}": table for name, table in vars(kind).items() if isinstance(table, dict)}
    for name, module in engine.module.named_modules():
        tables = (table for table in vars(module) if table.endswith("_hooks"))
        owners |= {f"{table} of {name}": vars(module)[table] for table in tables if vars(module)[table]}
    found += [f"{owner}[{key}]" for owner, table in owners.items() for key, value in table.items() if is_ours(value)]
    return found + ["a dispatch mode"] * torch._C._len_torch_dispatch_stack()


def logged() -> AbstractContextManager[list[str]]:
    """What the package logs inside, warnings and above."""
    return listening("lightning_flops", level=logging.WARNING)
