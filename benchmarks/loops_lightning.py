"""Loops by Lightning's Trainer, each with its own account of what it does."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from importlib import import_module
from types import ModuleType
from typing import Any

import torch
from torch.utils.data import DataLoader

from lightning_flops import FlopsProfilerCallback

from .loops_account import BATCH, HIDDEN, IN, STEPS, Account, Rows, loader, loss_of, net, sgd, update
from .loops_own import loop


def lightning() -> ModuleType:
    """Lightning, as most programs import it."""
    return import_module("lightning.pytorch")


class Clocked(DataLoader[Any]):
    """A DataLoader whose fetches the account has a clock at, if it has an account."""

    account: Account | None = None

    def __iter__(self) -> Any:
        fetched = super().__iter__()
        return fetched if self.account is None else self.account.fetches(fetched)


def clocked(account: Account, batches: int = STEPS, size: int = BATCH, **more: Any) -> Clocked:
    """A loader of so many batches with a clock."""
    made = Clocked(Rows(account, batches * size), batch_size=size, **more)
    made.account = account
    return made


def module(account: Account, **methods: Callable[..., Any]) -> Any:
    """A LightningModule around a small net, with the account's hooks and *methods*."""

    class Net(lightning().LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.net = net()
            self.updates = 0
            self.apart = ExitStack()

        def training_step(self, rows: Any, place: int) -> Any:
            account.pause()
            account.trained(self.net, len(rows))
            return loss_of(self.net(rows))

        def configure_optimizers(self) -> Any:
            return sgd(self.net)

        def on_train_start(self) -> None:
            account.begins()

        def on_train_batch_end(self, *_: Any) -> None:
            if self.trainer.global_step > self.updates:
                account.step()
            self.updates = self.trainer.global_step

        def on_validation_start(self) -> None:
            self.apart.enter_context(account.outside())

        def on_validation_end(self) -> None:
            self.apart.close()

        def on_train_epoch_end(self) -> None:
            self.apart.enter_context(account.outside())

        def on_train_epoch_start(self) -> None:
            self.apart.close()

    for name, method in methods.items():
        setattr(Net, name, method)
    return Net()


def trainer(*callbacks: Any, **settings: Any) -> Any:
    """A quiet Trainer."""
    return lightning().Trainer(
        accelerator="cpu", devices=1, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, num_sanity_val_steps=0, callbacks=list(callbacks), **{"max_epochs": 1, **settings},
    )  # fmt: skip


def fit(account: Account, model: Any, data: Any, *callbacks: Any, validation: Any = None, **settings: Any) -> None:
    """Train *model* on *data*, profiled."""
    ours = account.by(lambda: FlopsProfilerCallback(**account.settings))
    trainer(*callbacks, *ours, **settings).fit(model, data, validation)


@loop("Lightning")
def automatic(account: Account) -> None:
    fit(account, module(account), clocked(account))


@loop("Lightning, accumulates 4, tail of 2")
def automatic_accumulates(account: Account) -> None:
    def training_step(self: Any, rows: Any, place: int) -> Any:
        account.pause(0.3)
        account.trained(self.net, len(rows))
        return loss_of(self.net(rows))

    model = module(account, training_step=training_step)
    fit(account, model, clocked(account, 10), accumulate_grad_batches=4, max_epochs=STEPS // 3)


@loop("Lightning, validates inside the epoch")
def automatic_validates(account: Account) -> None:
    def validation_step(self: Any, rows: Any, place: int) -> None:
        account.pause()
        self.net(rows)

    model = module(account, validation_step=validation_step)
    fit(account, model, clocked(account), validation=loader(account, 3, 32), val_check_interval=5)


def by_hand(account: Account, optimizers: Callable[[Any], Any]) -> Callable[..., None]:
    """A training step that does what Lightning would do."""

    def training_step(self: Any, rows: Any, place: int) -> None:
        optimizer = optimizers(self)
        account.pause()
        self.manual_backward(loss_of(self.net(rows)))
        account.trained(self.net, len(rows))
        update(optimizer)

    return training_step


def _manual(account: Account, **methods: Any) -> Any:
    methods.setdefault("on_train_batch_end", lambda self, *_: account.step())
    model = module(account, **methods)
    model.automatic_optimization = False
    return model


@loop("Lightning by hand")
def manual(account: Account) -> None:
    fit(account, _manual(account, training_step=by_hand(account, lambda one: one.optimizers())), clocked(account))


@loop("Lightning by hand, use_pl_optimizer=False")
def manual_unwrapped(account: Account) -> None:
    step = by_hand(account, lambda one: one.optimizers(use_pl_optimizer=False))
    fit(account, _manual(account, training_step=step), clocked(account))


def _manual_accumulating(account: Account, *, wrapped: bool) -> None:
    def training_step(self: Any, rows: Any, place: int) -> None:
        optimizer = self.optimizers(use_pl_optimizer=wrapped)
        account.pause(0.3)
        self.manual_backward(loss_of(self.net(rows)))
        account.trained(self.net, len(rows))
        if place % 4 == 3:
            update(optimizer)

    ends = lambda self, outputs, rows, place: account.step() if place % 4 == 3 else None  # noqa: E731
    model = _manual(account, training_step=training_step, on_train_batch_end=ends)
    fit(account, model, clocked(account, 4 * STEPS))


@loop("Lightning by hand, accumulates 4")
def manual_accumulates(account: Account) -> None:
    _manual_accumulating(account, wrapped=True)


@loop("Lightning by hand, accumulates 4, use_pl_optimizer=False")
def manual_unwrapped_accumulates(account: Account) -> None:
    _manual_accumulating(account, wrapped=False)


@loop("Lightning by hand, GAN")
def manual_gan(account: Account) -> None:
    def training_step(self: Any, rows: Any, place: int) -> None:
        og, od = self.optimizers()
        account.pause()
        self.toggle_optimizer(od)
        fake = self.net(torch.randn(BATCH, IN))
        self.manual_backward(self.critic(rows).mean() - self.critic(fake.detach()).mean())
        update(od)
        self.untoggle_optimizer(od)
        self.toggle_optimizer(og)
        self.manual_backward(self.critic(self.net(torch.randn(BATCH, IN))).mean())
        update(og)
        self.untoggle_optimizer(og)
        account.forward(self.net, BATCH)
        account.trained(self.critic, BATCH)
        account.trained(self.critic, BATCH, samples=0, micro_steps=0)
        account.trained(self.net, BATCH, samples=0, micro_steps=0)
        account.forward(self.critic, BATCH)
        account.backward(self.critic, BATCH, inputs=True, weights=False)

    def configure_optimizers(self: Any) -> Any:
        return sgd(self.net), sgd(self.critic)

    model = _manual(account, training_step=training_step, configure_optimizers=configure_optimizers)
    model.net, model.critic = net(IN, HIDDEN, IN), net(IN, HIDDEN, 1)
    fit(account, model, clocked(account))


def _combined(account: Account, mode: str) -> None:
    """Two loaders, of batches of 8 and of 24 rows: the second one ends after two thirds of the first."""

    def training_step(self: Any, given: Any, place: int) -> Any:
        batches = given if isinstance(given, (tuple, list)) else (given,)
        parts = [one for one in batches if torch.is_tensor(one)]
        account.pause()
        rows = torch.cat(parts)
        account.trained(self.net, len(rows))
        return loss_of(self.net(rows))

    combined = import_module("lightning.pytorch.utilities").CombinedLoader
    loaders = [clocked(account), clocked(account, 2 * STEPS // 3, 3 * BATCH)]
    model = module(account, training_step=training_step)
    if mode == "sequential":

        def one_of_them(self: Any, rows: Any, place: int, dataloader_idx: int = 0) -> Any:
            account.pause()
            account.trained(self.net, len(rows))
            return loss_of(self.net(rows))

        model = module(account, training_step=one_of_them)
    fit(account, model, combined(loaders, mode))


@loop("Lightning, CombinedLoader min_size")
def combined_min(account: Account) -> None:
    _combined(account, "min_size")


@loop("Lightning, CombinedLoader max_size_cycle")
def combined_cycle(account: Account) -> None:
    _combined(account, "max_size_cycle")


@loop("Lightning, CombinedLoader max_size", varies=True)
def combined_max(account: Account) -> None:
    _combined(account, "max_size")


@loop("Lightning, a dict of loaders")
def dict_of_loaders(account: Account) -> None:
    def training_step(self: Any, given: Any, place: int) -> Any:
        account.pause()
        rows = torch.cat([given["known"], given["more"]])
        account.trained(self.net, len(rows))
        return loss_of(self.net(rows))

    fit(
        account, module(account, training_step=training_step),
        {"known": clocked(account), "more": clocked(account, size=3 * BATCH)},
    )  # fmt: skip


@loop("Lightning, training_step None each third time", varies=True)
def skipped(account: Account) -> None:
    """Lightning makes no update for such a batch: it is a part of the step that the next one ends."""

    def training_step(self: Any, rows: Any, place: int) -> Any:
        account.pause()
        if place % 3 == 2:
            account.handled(0)
            return None
        account.trained(self.net, len(rows))
        return loss_of(self.net(rows))

    fit(account, module(account, training_step=training_step), clocked(account))


class Finds:
    """Makes callbacks that run a finder of Lightning's inside the fit, at the start of some epochs."""

    @staticmethod
    def rates(account: Account) -> Any:
        """The learning rate, at milestones, as its own documentation has it."""

        class FineTune(lightning().callbacks.LearningRateFinder):  # type: ignore[misc]
            def on_fit_start(self, *args: Any) -> None:
                return

            def on_train_epoch_start(self, trainer: Any, model: Any) -> None:
                if trainer.current_epoch in (0, 1):
                    _apart(account, model, lambda: self.lr_find(trainer, model))

        return FineTune(num_training_steps=5)

    @staticmethod
    def sizes(account: Account) -> Any:
        """The batch size, at milestones; it finds 8."""

        class Milestones(lightning().callbacks.BatchSizeFinder):  # type: ignore[misc]
            def on_fit_start(self, *args: Any) -> None:
                return

            def on_train_epoch_start(self, trainer: Any, model: Any) -> None:
                if trainer.current_epoch in (0, 1):
                    _apart(account, model, lambda: self.scale_batch_size(trainer, model))

        return Milestones("power", steps_per_trial=3, init_val=4, max_trials=2)


def _apart(account: Account, model: Any, find: Callable[[], None]) -> None:
    """What *find* trains is no step of the account."""
    kept, updates, apart = account.mark(), model.updates, model.apart
    model.apart = ExitStack()
    find()
    model.updates, model.apart = updates, apart
    account.back_to(kept)


def _tuned(account: Account, finder: Any) -> None:
    model = module(account, train_dataloader=lambda self: clocked(account, 2 * STEPS // 3, self.batch_size))
    model.batch_size, model.lr = BATCH, 1e-3
    fit(account, model, None, finder, max_epochs=3)


@loop("Lightning, LearningRateFinder inside the fit")
def rate_found(account: Account) -> None:
    account.settings["profile_step"] = 0  # the finder runs before this step
    _tuned(account, Finds.rates(account))


@loop("Lightning, BatchSizeFinder inside the fit")
def size_found(account: Account) -> None:
    account.settings["profile_step"] = 2 * STEPS // 3
    _tuned(account, Finds.sizes(account))


@loop("Lightning, another Trainer inside the fit")
def other_trainer(account: Account) -> None:
    """At the start of each epoch and after some batches another Trainer fits another module."""
    quiet = Account(now=account.now, sleep=account.sleep, alone=True)
    fits = [(trainer(), module(quiet), loader(quiet, 4, 32)) for _ in range(6)]

    class Probes(lightning().Callback):  # type: ignore[misc]
        def fits(self) -> None:
            other, model, data = fits.pop()
            with account.outside():
                other.fit(model, data)

        def on_train_epoch_start(self, *_: Any) -> None:
            self.fits()

        def on_train_batch_end(self, trainer: Any, model: Any, outputs: Any, rows: Any, place: int) -> None:
            if place == 5:
                self.fits()

    fit(account, module(account), clocked(account, STEPS // 3), Probes(), max_epochs=3)
