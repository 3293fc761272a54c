"""Loops of one model that people write themselves, each with its own account of what it does."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from .loops_account import (
    BATCH,
    HIDDEN,
    IN,
    OUT,
    STEPS,
    Account,
    Allowed,
    loader,
    loss_of,
    net,
    sgd,
    update,
)


class Loop(NamedTuple):
    """A loop under its name."""

    train: Callable[[Account], None]
    allowed: Allowed
    quick: bool  # it takes well under a second where nothing waits


LOOPS: dict[str, Loop] = {}


def loop(name: str, *, quick: bool = True, **allowed: bool) -> Callable[[Callable[[Account], None]], Any]:
    """Puts a loop under *name* into the list."""

    def add(train: Callable[[Account], None]) -> Callable[[Account], None]:
        LOOPS[name] = Loop(train, Allowed(**allowed), quick)
        return train

    return add


def evaluate(account: Account, model: nn.Module, batches: Iterable[torch.Tensor], *, mode: bool = True) -> None:
    """*model* is looked at, as most people write it."""
    with account.outside():
        model.train(not mode)
        with torch.no_grad():
            for rows in batches:
                model(rows)
                account.pause()
        model.train()


def learn(account: Account, model: nn.Module, rows: torch.Tensor, *, share: float = 1.0) -> None:
    """A forward and backward of *rows*, a micro-step of theirs."""
    output = model(rows)
    account.pause(share)
    loss_of(output).backward()
    account.trained(model, len(rows))


@loop("plain")
def plain(account: Account) -> None:
    model = net()
    optimizer = sgd(model)
    with account.profiled(model, optimizer):
        for rows in account.fetches(loader(account)):
            learn(account, model, rows)
            update(optimizer)
            account.step()


@loop("two workers load", quick=False)
def workers(account: Account) -> None:
    model = net()
    optimizer = sgd(model)
    with account.profiled(model, optimizer):
        for rows in account.fetches(loader(account, num_workers=2)):
            learn(account, model, rows)
            update(optimizer)
            account.step()


@loop("accumulates 4, tail of 2")
def accumulates(account: Account) -> None:
    model = net()
    optimizer = sgd(model)
    batches = 10
    with account.profiled(model, optimizer):
        for _ in range(STEPS // 3):
            for number, rows in enumerate(account.fetches(loader(account, batches)), 1):
                learn(account, model, rows, share=0.3)
                if number % 4 == 0 or number == batches:
                    update(optimizer)
                    account.step()


@loop("batch in 4 pieces")
def pieces(account: Account) -> None:
    model = net()
    optimizer = sgd(model)
    with account.profiled(model, optimizer):
        for rows in account.fetches(loader(account, size=16)):
            for piece in rows.split(4):
                learn(account, model, piece, share=0.3)
            update(optimizer)
            account.step()


@loop("GradCache")
def grad_cache(account: Account) -> None:
    """Representations of all pieces without gradients, the loss's gradient of these, each piece again with them."""
    model = net()
    optimizer = sgd(model)
    with account.profiled(model, optimizer):
        for rows in account.fetches(loader(account, size=16)):
            parts = rows.split(4)
            with torch.no_grad():
                found = [model(part) for part in parts]
            account.pause()
            outputs = torch.cat(found).requires_grad_()
            loss_of(outputs).backward()
            assert outputs.grad is not None
            for part, gradient in zip(parts, outputs.grad.split(4), strict=True):
                model(part).backward(gradient)
                account.forward(model, 4)  # in vain, the first time
                account.trained(model, 4)
            update(optimizer)
            account.step()


@loop("a loader of lists")
def lists(account: Account) -> None:
    model = net()
    optimizer = sgd(model)
    chunks = lambda rows: list(torch.stack(rows).split(4))  # noqa: E731
    with account.profiled(model, optimizer):
        for parts in account.fetches(loader(account, size=16, collate_fn=chunks)):
            for part in parts:
                learn(account, model, part, share=0.3)
            update(optimizer)
            account.step()


@loop("LBFGS", optimizer=False)
def lbfgs(account: Account) -> None:
    model = net()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=1e-3, max_iter=3)
    with account.profiled(model, optimizer):
        for rows in account.fetches(loader(account)):

            def closure(rows: torch.Tensor = rows) -> torch.Tensor:
                optimizer.zero_grad()
                account.pause(0.5)
                loss = loss_of(model(rows))
                loss.backward()
                account.trained(model, len(rows), samples=0, micro_steps=0)
                return loss

            account.handled(len(rows))
            optimizer.step(closure)
            account.step()


class SAM(torch.optim.Optimizer):
    """Sharpness-aware minimization around another optimizer, as its most used implementation has it."""

    def __init__(self, weights: Any, base: Any, rho: float = 0.05, **more: Any) -> None:
        super().__init__(weights, {"rho": rho, **more})
        self.base_optimizer = base(self.param_groups, **more)
        self.param_groups = self.base_optimizer.param_groups

    @torch.no_grad()
    def first_step(self) -> None:
        for group in self.param_groups:
            for weight in group["params"]:
                self.state[weight]["old"] = weight.clone()
                weight.add_(weight.grad, alpha=group["rho"])
        self.zero_grad()

    @torch.no_grad()
    def second_step(self) -> None:
        for group in self.param_groups:
            for weight in group["params"]:
                weight.copy_(self.state[weight]["old"])
        self.base_optimizer.step()
        self.zero_grad()

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.first_step()
        torch.enable_grad()(closure)()
        self.second_step()


@loop("SAM, the optimizer inside given")
def sam(account: Account) -> None:
    model = net()
    optimizer = SAM(model.parameters(), torch.optim.SGD, lr=1e-3)
    with account.profiled(model, optimizer.base_optimizer):
        for rows in account.fetches(loader(account)):
            learn(account, model, rows, share=0.5)
            optimizer.first_step()
            account.pause(0.5)
            loss_of(model(rows)).backward()
            account.trained(model, len(rows), samples=0, micro_steps=0)
            optimizer.second_step()
            account.step()


@loop("SAM by a closure")
def sam_closure(account: Account) -> None:
    model = net()
    optimizer = SAM(model.parameters(), torch.optim.SGD, lr=1e-3)
    with account.profiled(model, optimizer):
        for rows in account.fetches(loader(account)):

            def closure(rows: torch.Tensor = rows) -> torch.Tensor:
                account.pause(0.5)
                loss = loss_of(model(rows))
                loss.backward()
                account.trained(model, len(rows), samples=0, micro_steps=0)
                return loss

            account.handled(len(rows))
            closure()
            optimizer.step(closure)
            account.step()


class Both:
    """One object for Muon and AdamW, with the two methods that a loop calls."""

    def __init__(self, *optimizers: Any) -> None:
        self.optimizers = optimizers

    def step(self) -> None:
        for one in self.optimizers:
            one.step()

    def zero_grad(self) -> None:
        for one in self.optimizers:
            one.zero_grad()


@loop("Muon + AdamW in one object")
def muon(account: Account) -> None:
    model = net(IN, HIDDEN, OUT)
    wide = [one.weight for one in model if isinstance(one, nn.Linear)]
    rest = [one.bias for one in model if isinstance(one, nn.Linear)]
    optimizer = Both(torch.optim.Muon(wide, lr=1e-3), torch.optim.AdamW(rest, lr=1e-3))
    # Five turns of Newton and Schulz on a matrix of m rows, n columns: three products of m*m*n and m*m*m, m <= n.
    turns = [sorted(one.shape) for one in wide]
    products = sum(5 * (2 * 2 * m * m * n + 2 * m * m * m) for m, n in turns)
    with account.profiled(model, optimizer):
        for rows in account.fetches(loader(account)):
            learn(account, model, rows)
            update(optimizer)
            account.computed(optimizer=products)
            account.step()


@loop("GradScaler that skips", varies=True)
def scaler(account: Account) -> None:
    model = net()
    optimizer = sgd(model)
    scale = torch.amp.GradScaler("cpu", init_scale=1024.0)
    with account.profiled(model, optimizer):
        for number, rows in enumerate(account.fetches(loader(account))):
            skips = number == 8  # the next update has the samples of both
            account.pause()
            scale.scale(loss_of(model(rows)) * (float("inf") if skips else 1.0)).backward()
            account.trained(model, len(rows))
            scale.step(optimizer)
            scale.update()
            optimizer.zero_grad()
            if not skips:
                account.step()


def ahead(batches: Iterable[Any]) -> Iterator[Any]:
    """*batches*, each fetched before the one before it is handed out."""
    iterator = iter(batches)
    following = next(iterator, None)
    while following is not None:
        now, following = following, next(iterator, None)
        yield now


@loop("a generator that fetches ahead")
def prefetches(account: Account) -> None:
    model = net()
    optimizer = sgd(model)
    with account.profiled(model, optimizer):
        for rows in ahead(account.fetches(loader(account))):
            learn(account, model, rows)
            update(optimizer)
            account.step()


@loop("two loaders zipped")
def zipped(account: Account) -> None:
    model = net()
    optimizer = sgd(model)
    with account.profiled(model, optimizer):
        known, more = account.fetches(loader(account)), account.fetches(loader(account, size=3 * BATCH))
        for some, others in zip(known, more, strict=False):
            learn(account, model, torch.cat([some, others]))
            update(optimizer)
            account.step()


@loop("two loaders, two losses")
def two_losses(account: Account) -> None:
    model = net()
    optimizer = sgd(model)
    with account.profiled(model, optimizer):
        known, more = account.fetches(loader(account)), account.fetches(loader(account, size=3 * BATCH))
        for some, others in zip(known, more, strict=False):
            account.pause()
            (loss_of(model(some)) + loss_of(model(others))).backward()
            account.trained(model, len(some))
            account.trained(model, len(others), micro_steps=0)
            update(optimizer)
            account.step()


@loop("two views of a batch")
def views(account: Account) -> None:
    model = net()
    optimizer = sgd(model)
    with account.profiled(model, optimizer):
        for rows in account.fetches(loader(account)):
            account.pause()
            one, other = (model(rows + 0.1 * torch.randn_like(rows)) for _ in range(2))
            functional.mse_loss(one, other).backward()
            account.trained(model, len(rows))
            account.trained(model, len(rows), samples=0, micro_steps=0)
            update(optimizer)
            account.step()


@loop("no loader", no_wait=True)
def no_loader(account: Account) -> None:
    model = net()
    optimizer = sgd(model)
    with account.profiled(model, optimizer):
        for _ in range(STEPS):
            learn(account, model, torch.randn(BATCH, IN))
            update(optimizer)
            account.step()


@loop("no loader, accumulates, evaluates each tenth", no_wait=True)
def nano(account: Account) -> None:
    """NanoGPT's loop."""
    model = net()
    optimizer = sgd(model)
    with account.profiled(model, optimizer):
        for number in range(STEPS):
            if number % 10 == 9:
                evaluate(account, model, [torch.randn(BATCH, IN)] * 3)
            for _ in range(4):
                learn(account, model, torch.randn(BATCH, IN), share=0.3)
            update(optimizer)
            account.step()


@loop("batches of its own, shown")
def shown(account: Account) -> None:
    model = net()
    optimizer = sgd(model)

    def stream() -> Iterator[torch.Tensor]:
        for _ in range(STEPS):
            account.fetch_pause()
            yield torch.randn(BATCH, IN)

    with account.profiled(model, optimizer) as profiler:
        for rows in account.fetches(stream() if profiler is None else profiler.batches(stream())):
            learn(account, model, rows)
            update(optimizer)
            account.step()


@loop("no optimizer, steps marked")
def marked(account: Account) -> None:
    model = net()
    with account.profiled(model) as profiler:
        for rows in account.fetches(loader(account)):
            learn(account, model, rows)
            with torch.no_grad():
                for weight in model.parameters():
                    assert weight.grad is not None
                    weight.sub_(weight.grad, alpha=1e-3)
                    weight.grad = None
            if profiler is not None:
                profiler.step()
            account.step()


@loop("updates in the backward")
def in_backward(account: Account) -> None:
    model = net()
    optimizers = {weight: torch.optim.SGD([weight], lr=1e-3) for weight in model.parameters()}
    for weight in optimizers:
        weight.register_post_accumulate_grad_hook(lambda weight: update(optimizers[weight]))
    with account.profiled(model, [*optimizers.values()]):
        for rows in account.fetches(loader(account)):
            learn(account, model, rows)
            account.step()


class Checkpointed(nn.Module):
    """A part whose forward is repeated in the backward, reentrantly or not, and a head."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.part, self.head, self.reentrant = net(IN, HIDDEN, IN), net(IN, OUT), reentrant

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        done = checkpoint(self.part, rows.requires_grad_(), use_reentrant=self.reentrant)
        found: torch.Tensor = self.head(done)
        return found


def _checkpointed(account: Account, *, reentrant: bool) -> None:
    model = Checkpointed(reentrant)
    optimizer = sgd(model)
    with account.profiled(model, optimizer):
        for rows in account.fetches(loader(account)):
            account.pause()
            loss_of(model(rows)).backward()
            account.forward(model, len(rows))
            account.backward(model, len(rows), inputs=True)
            # One that is not reentrant stops at the last layer's input, which is all that the backward still needs.
            account.computed(recompute=2 * len(rows) * IN * HIDDEN * (2 if reentrant else 1))
            account.handled(len(rows))
            update(optimizer)
            account.step()


@loop("checkpoint, reentrant")
def reentrant(account: Account) -> None:
    _checkpointed(account, reentrant=True)


@loop("checkpoint, not reentrant")
def not_reentrant(account: Account) -> None:
    _checkpointed(account, reentrant=False)


@loop("validates between epochs")
def between_epochs(account: Account) -> None:
    model = net()
    optimizer = sgd(model)
    held_out = loader(account, 3, 32)
    with account.profiled(model, optimizer):
        for _ in range(4):
            for rows in account.fetches(loader(account, 8)):
                learn(account, model, rows)
                update(optimizer)
                account.step()
            evaluate(account, model, held_out)


@loop("validates inside an epoch")
def inside_epochs(account: Account) -> None:
    model = net()
    optimizer = sgd(model)
    held_out = loader(account, 3, 32)
    with account.profiled(model, optimizer):
        for number, rows in enumerate(account.fetches(loader(account)), 1):
            learn(account, model, rows)
            update(optimizer)
            account.step()
            if number % 5 == 0:
                evaluate(account, model, held_out)


@loop("saves, which it says")
def saves(account: Account) -> None:
    model = net()
    optimizer = sgd(model)
    with account.profiled(model, optimizer) as profiler:
        for number, rows in enumerate(account.fetches(loader(account)), 1):
            learn(account, model, rows)
            update(optimizer)
            account.step()
            if number % 5 == 0:
                says = contextlib.nullcontext() if profiler is None else profiler.outside_of_steps("checkpoint")
                with account.outside(), says:
                    account.pause(3)


@loop("breaks early")
def breaks(account: Account) -> None:
    model = net()
    optimizer = sgd(model)
    with account.profiled(model, optimizer):
        for _ in range(6):
            for number, rows in enumerate(account.fetches(loader(account, 10)), 1):
                learn(account, model, rows)
                update(optimizer)
                account.step()
                if number == 5:
                    break


@loop("halves a batch that failed", varies=True)
def retried(account: Account) -> None:
    model = net()
    optimizer = sgd(model)

    class Fails(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model, self.fails = model, False

        def forward(self, rows: torch.Tensor) -> torch.Tensor:
            if self.fails and len(rows) == BATCH:
                raise RuntimeError("out of memory")
            found: torch.Tensor = self.model(rows)
            return found

    whole = Fails()
    with account.profiled(whole, optimizer):
        for number, rows in enumerate(account.fetches(loader(account))):
            whole.fails = number % 8 == 6
            try:
                learn(account, whole, rows)
            except RuntimeError:
                for half in rows.chunk(2):
                    learn(account, whole, half, share=0.5)
            update(optimizer)
            account.step()


@loop("compiled before", quick=False)
def compiled_before(account: Account) -> None:
    model = net()
    optimizer = sgd(model)
    compiled: Any = torch.compile(model, backend="aot_eager")
    with account.profiled(compiled, optimizer):
        for rows in account.fetches(loader(account)):
            learn(account, compiled, rows)
            update(optimizer)
            account.step()


@loop("compiled after", quick=False)
def compiled_after(account: Account) -> None:
    model = net()
    optimizer = sgd(model)
    with account.profiled(model, optimizer):
        compiled: Any = torch.compile(model, backend="aot_eager")
        for rows in account.fetches(loader(account)):
            learn(account, compiled, rows)
            update(optimizer)
            account.step()


@loop("truncated backpropagation")
def truncated(account: Account) -> None:
    """Sequences of 12 in three chunks with an update each: each handles all rows."""
    model = net()
    optimizer = sgd(model)
    sequences = DataLoader(TensorDataset(torch.randn(STEPS * BATCH // 3, 12, IN)), batch_size=BATCH)
    with account.profiled(model, optimizer):
        for (rows,) in account.fetches(sequences):
            for chunk in rows.split(4, 1):
                account.pause()
                loss_of(model(chunk)).backward()
                account.trained(model, 4 * BATCH, samples=BATCH)
                update(optimizer)
                account.step()


@loop("DistributedDataParallel, no_sync", quick=False)
def no_sync(account: Account) -> None:
    store: Any = torch.distributed.HashStore()  # type: ignore[attr-defined]
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        model = nn.parallel.DistributedDataParallel(net())
        optimizer = sgd(model)
        with account.profiled(model, optimizer):
            for number, rows in enumerate(account.fetches(loader(account, 4 * STEPS)), 1):
                with contextlib.nullcontext() if number % 4 == 0 else model.no_sync():
                    learn(account, model, rows, share=0.3)
                if number % 4 == 0:
                    update(optimizer)
                    account.step()
    finally:
        torch.distributed.destroy_process_group()
