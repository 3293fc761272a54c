"""What the scenarios train, and how they look at what is left behind. Runs inside the launched processes."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import deepspeed
import torch
from torch import Tensor, nn
from torch.utils.data import dataloader as torch_dataloader

from lightning_flops.deepspeed import Handle, attach, install, uninstall
from lightning_flops.schema.profile import Profile
from lightning_flops.schema.ranks import RanksProfile
from tests.left_on_torch import global_hooks

SAMPLES = 2
"""Of a micro-batch."""

BLOCK: dict[str, Any] = {"enabled": True, "profile_step": 2, "timing_steps": 2, "monitor": False, "trace": False}


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


def engine_of(settings: Any, model: nn.Module | None = None, **more: Any) -> Any:
    """An engine that trains *model*, or a ``Net`` of the same weights each time, by SGD."""
    if model is None:
        torch.manual_seed(1)
        model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
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
    assert handle.profile is not None
    return handle.profile


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
    **settings: Any,
) -> tuple[Any, Profile]:
    """An engine with an enabled block that has trained, and its profile."""

    def step(engine: Any, batch: Tensor) -> Tensor:
        loss = loss_of(engine, batch)
        engine.backward(loss)
        engine.step()
        return loss

    with installed():
        engine = engine_of(config(**settings), model)
        train(engine, micro_steps, step=step)
        return engine, profile_of(engine)


def flops_of(profile: Profile) -> tuple[int, int]:
    """Forward and backward."""
    return profile.flops.forward, profile.flops.backward


def left_on(engine: Any) -> list[str]:
    """What there is of ours on *engine*, its classes, its module and torch; nothing if all is well."""
    found = [f"engine.{name}" for name, value in vars(engine).items() if _is_ours(value)]
    tables = [vars(kind) for kind in type(engine).__mro__] + [
        {f"{name}[{key}]": function for key, function in table.items()}
        for kind in type(engine).__mro__
        for name, table in vars(kind).items()
        if isinstance(table, dict)  # a pipeline's table of instructions
    ]
    # install() stays on the class when an engine is done; DeepSpeed keeps what it finds there.
    others = ("__init__", "_old_init")
    found += [name for table in tables for name, value in table.items() if name not in others and _is_ours(value)]
    for owner, name in ((torch.autograd, "backward"), (torch_dataloader._BaseDataLoaderIter, "__next__")):
        if _is_ours(getattr(owner, name)):
            found.append(f"{owner.__name__}.{name}")
    for name, hooks in global_hooks().items():
        found += [f"{name}: {hook}" for hook in hooks.values() if _is_ours(hook)]
    for module in engine.module.modules():
        found += [
            f"{name} of a module: {hook}"
            for name, hooks in vars(module).items()
            if name.endswith("_hooks") and isinstance(hooks, dict)
            for hook in hooks.values()
            if _is_ours(hook)
        ]
    if torch._C._len_torch_dispatch_stack():
        found.append("a dispatch mode")
    return found


def _is_ours(value: Any) -> bool:
    """Whether *value* is an object of ours, or a function, bound or not, whose code is."""
    function = getattr(value, "__func__", value)
    file = getattr(getattr(function, "__code__", None), "co_filename", "")
    return "/lightning_flops/" in file or type(value).__module__.startswith("lightning_flops")


@contextmanager
def logged() -> Iterator[list[str]]:
    """What the package logs inside, warnings and above."""
    lines: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    handler = Keep(level=logging.WARNING)
    package = logging.getLogger("lightning_flops")
    package.addHandler(handler)
    try:
        yield lines
    finally:
        package.removeHandler(handler)
