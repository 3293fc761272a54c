"""A small regression net and the loops it is trained in, for either import root.

``Linear(4, 8)`` and ``Linear(8, 3)`` on batches of 6. A multiply-add is two FLOPs. The first layer's input needs no
gradient, so its backward is one product and the second layer's is two.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from lightning_flops.records import PhaseFlops
from tests.fake_clock import FakeNow
from tests.left_on_objects import written_on
from tests.left_on_torch import global_hooks

MakeTrainer = Callable[..., Any]
"""Makes a Trainer with the given callbacks and settings: the fixture ``trainer``."""

ROOTS = ("lightning.pytorch", "pytorch_lightning")
ROOT = ROOTS[0]
LOOPS = ("predict", "test", "validate")  # that do not train
BATCH, IN, HIDDEN, OUT = 6, 4, 8, 3
FORWARD = 2 * BATCH * (IN * HIDDEN + HIDDEN * OUT)
BACKWARD = 2 * BATCH * (IN * HIDDEN + 2 * HIDDEN * OUT)


def batch_flops(batch: int = BATCH, times: int = 1) -> PhaseFlops:
    """FLOPs of *times* micro-steps with *batch* samples each."""
    return PhaseFlops(forward=times * FORWARD // BATCH * batch, backward=times * BACKWARD // BATCH * batch)


class Rows(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """*length* rows, always the same; fetching one may take time."""

    def __init__(self, length: int, *, on_fetch: Callable[[], None] | None = None) -> None:
        generator = torch.Generator().manual_seed(7)
        self.x = torch.randn(length, IN, generator=generator)
        self.y = torch.randn(length, OUT, generator=generator)
        self.on_fetch = on_fetch

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        if self.on_fetch is not None:
            self.on_fetch()
        return self.x[index], self.y[index]


def loader(batches: int, *, extra: int = 0, on_fetch: Callable[[], None] | None = None, **more: Any) -> DataLoader[Any]:
    """*batches* batches of 6, and a last one of *extra*."""
    return DataLoader(Rows(batches * BATCH + extra, on_fetch=on_fetch), batch_size=BATCH, **more)


def nothing(part: str) -> None:
    """In place of what wants to know which part of its step a net has reached."""


class SlowSGD(torch.optim.SGD):
    """SGD that takes eight seconds of the fake clock."""

    now: FakeNow | None = None
    at: Callable[[str], None] = staticmethod(nothing)

    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        if self.now is not None:
            self.now.sleep(8.0)
        self.at("update")
        return loss


class Block(nn.Module):
    """One layer; a class of ours, because ``Module.compile`` passes over torch's own."""

    def __init__(self, rows: int, columns: int) -> None:
        super().__init__()
        self.linear = nn.Linear(rows, columns)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.dropout(self.linear(x).relu(), 0.25, self.training)


def trunk() -> nn.Sequential:
    """The two layers."""
    return nn.Sequential(Block(IN, HIDDEN), nn.Linear(HIDDEN, OUT))


@cache
def net_class(root: str, *, validates: bool = False) -> Any:
    """A LightningModule of import root *root*: a forward takes 2 s of *now*, a backward 4 s, the optimizer 8 s."""
    base: Any = importlib.import_module(root).LightningModule

    class Net(base):  # type: ignore[misc]
        def __init__(self, *, now: FakeNow | None, at: Callable[[str], None], manual: bool) -> None:
            super().__init__()
            self.net = trunk()
            self.losses: list[float] = []
            self.now, self.at = now, at
            self.automatic_optimization = not manual
            if at is not nothing:
                self.net[0].register_forward_hook(lambda *_: at("layer"))

        def sleep(self, seconds: float) -> None:
            if self.now is not None:
                self.now.sleep(seconds)

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor | None:
            x, y = batch
            self.at("step")
            self.sleep(2.0)
            loss = nn.functional.mse_loss(self.net(x), y)
            self.at("loss")
            if self.at is not nothing:
                loss.register_hook(lambda _: self.at("backward"))  # type: ignore[no-untyped-call]
            if self.automatic_optimization:
                return loss
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
            return None

        def backward(self, loss: torch.Tensor, *args: Any, **kwargs: Any) -> None:
            self.losses.append(loss.item())
            super().backward(loss, *args, **kwargs)
            self.sleep(4.0)

        def configure_optimizers(self) -> Any:
            sgd = SlowSGD(self.parameters(), lr=0.01)
            sgd.now, sgd.at = self.now, self.at
            return sgd

    def validation_step(self: Any, batch: Any, batch_idx: int) -> None:
        self.sleep(1000.0)
        self.net(batch[0])

    name = f"Net{ROOTS.index(root)}{'Validating' * validates}"
    more = {"validation_step": validation_step} if validates else {}
    # A pickle finds it by its name.
    globals()[name] = type(name, (Net,), {"__module__": __name__, "__qualname__": name, **more})
    return globals()[name]


def new_net(
    root: str = ROOT,
    *,
    now: FakeNow | None = None,
    at: Callable[[str], None] = nothing,
    validates: bool = False,
    manual: bool = False,
) -> Any:
    """A net of ``net_class``, always with the same weights; *at* hears which part of its step it has reached."""
    torch.manual_seed(3)
    return net_class(root, validates=validates)(now=now, at=at, manual=manual)


def new_gan(root: str = ROOT, *, now: FakeNow | None = None) -> Any:
    """Manual optimization with two optimizers: each batch trains *critic*, then *generator*, on the same input."""

    class Gan(net_class(root)):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__(now=now, at=nothing, manual=True)
            self.critic, self.generator = self.net, trunk()
            del self.net

        def training_step(self, batch: Any, batch_idx: int) -> None:
            x, y = batch
            for net, optimizer in zip((self.critic, self.generator), self.optimizers(), strict=True):
                self.sleep(2.0)
                loss = nn.functional.mse_loss(net(x), y)
                optimizer.zero_grad()
                self.manual_backward(loss)
                optimizer.step()

        def configure_optimizers(self) -> Any:
            both = [SlowSGD(net.parameters(), lr=0.01) for net in (self.critic, self.generator)]
            for sgd in both:
                sgd.now = now
            return both

    torch.manual_seed(3)
    return Gan()


def new_evaluated_net(*, now: FakeNow | None = None, at: Callable[[str], None] = nothing) -> Any:
    """``new_net`` with a predict, a test and a validation step of 2 s each."""

    class Evaluated(net_class(ROOT)):  # type: ignore[misc]
        def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            self.at("transfer")
            return batch

        def predict_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            self.at("step")
            self.sleep(2.0)
            result: torch.Tensor = self.net(batch[0])
            return result

        def test_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            loss = nn.functional.mse_loss(self.predict_step(batch, batch_idx), batch[1])
            self.log("loss", loss)
            return loss

        validation_step = test_step

        def on_predict_batch_end(self, *args: Any) -> None:
            self.at("batch end")

        on_test_batch_end = on_validation_batch_end = on_predict_batch_end

    torch.manual_seed(3)
    return Evaluated(now=now, at=at, manual=False)


def run(trainer: Any, function: str, net: Any, loaders: Any) -> Any:
    """Call *function* of *trainer*, quietly."""
    quiet = {} if function == "predict" else {"verbose": False}
    return getattr(trainer, function)(net, loaders, **quiet)


def new_trainer(root: str, tmp_path: Any, *callbacks: Any, **kwargs: Any) -> Any:
    """A quiet Trainer on the CPU that writes below *tmp_path* only."""
    module: ModuleType = importlib.import_module(root)
    settings: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": 1,
        **dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False),
        "default_root_dir": tmp_path,
        "max_epochs": 1,
        "callbacks": list(callbacks),
    }
    return module.Trainer(**{**settings, **kwargs})


def footprint(run: Any, net: Any) -> dict[str, Any]:
    """Everything of a trainer, its loops, its strategy, a model and torch that a profiler might write on."""
    fit_loop = run.fit_loop
    objects = {
        "trainer": run,
        "strategy": run.strategy,
        "precision": run.strategy.precision_plugin,
        "epoch loop": fit_loop.epoch_loop,
        "validation loop": fit_loop.epoch_loop.val_loop,
        "predict loop": run.predict_loop,
        "test loop": run.test_loop,
        "validate loop": run.validate_loop,
        "automatic": fit_loop.epoch_loop.automatic_optimization,
        "manual": fit_loop.epoch_loop.manual_optimization,
    }
    return {
        **written_on(objects, net),
        "global hooks": {table: len(hooks) for table, hooks in global_hooks().items()},
        "dispatch modes": torch._C._len_torch_dispatch_stack(),
    }


def logger_in(folder: Path | str, kind: str = "TensorBoardLogger", root: str = ROOT) -> Any:
    """A logger of Lightning's own, whose files lie in ``run/version_0`` of *folder*."""
    return getattr(importlib.import_module(f"{root}.loggers"), kind)(folder, name="run", version=0)


def read_back(folder: Path) -> Any:
    """What the run's TensorBoard logger has written."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    return EventAccumulator(str(folder / "run" / "version_0")).Reload()
