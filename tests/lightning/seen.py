"""What a run looks like from outside: pickled, copied and walked through, in every hook of a callback.

Everything here can be found by its name, as what is pickled must be.
"""

from __future__ import annotations

import copy
import gc
import importlib
import io
import pickle
import sys
import types
from collections.abc import Callable
from typing import Any

import cloudpickle
import torch
from torch import nn
from torch.utils.data import DataLoader

from lightning_flops import FlopsProfilerCallback
from tests.left_on_objects import is_ours
from tests.lightning.nets import BATCH, ROOTS, Rows, trunk
from tests.made_of import made_of

HOOKS = (
    "setup on_fit_start on_sanity_check_start on_sanity_check_end on_train_start on_train_epoch_start "
    "on_train_batch_start on_before_zero_grad on_before_backward on_after_backward on_before_optimizer_step "
    "on_train_batch_end on_validation_start on_validation_epoch_start on_validation_batch_start "
    "on_validation_batch_end on_validation_epoch_end on_validation_end on_train_epoch_end on_save_checkpoint "
    "on_train_end teardown"
).split()


class Net:
    """Half of a LightningModule: two linear layers, trained by SGD."""

    def __init__(self) -> None:
        super().__init__()
        self.net = trunk()
        self.losses: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = nn.functional.mse_loss(self.net(batch[0]), batch[1])
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.net(batch[0])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01, momentum=0.9)  # type: ignore[attr-defined]


class ManualNet(Net):
    """The same, trained by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer: Any = self.optimizers()  # type: ignore[attr-defined]
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))  # type: ignore[attr-defined]
        optimizer.step()


class Data:
    """Half of a LightningDataModule whose workers are given one of its own methods."""

    def __init__(self, batches: int, **loading: Any) -> None:
        super().__init__()
        self.batches = batches
        self.loading = loading

    def collate(self, rows: list[Any]) -> Any:
        return torch.utils.data.default_collate(rows)

    def _loader(self, batches: int) -> Any:
        return DataLoader(Rows(batches * BATCH), batch_size=BATCH, collate_fn=self.collate, **self.loading)

    def train_dataloader(self) -> Any:
        return self._loader(self.batches)

    def val_dataloader(self) -> Any:
        return self._loader(1)


class Probe:
    """Half of a Callback that looks at the run in every hook; *look* gets the hook's name, Trainer and module."""

    def __init__(self, look: Any) -> None:
        super().__init__()
        self.look = look

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "look": None}  # a copy does not look


class Nobody:
    """Half of a Callback that does nothing, in the place of the profiler."""


def _probing(hook: str) -> Any:
    def probe(self: Any, trainer: Any, pl_module: Any, *args: Any, **kwargs: Any) -> None:
        if self.look is not None:
            self.look(hook, trainer, pl_module)

    return probe


for _hook in HOOKS:
    setattr(Probe, _hook, _probing(_hook))


HALVES = {
    Net: "LightningModule",
    ManualNet: "LightningModule",
    Data: "LightningDataModule",
    Probe: "Callback",
    Nobody: "Callback",
}
"""Each half and the class that it is made whole with."""


def __getattr__(name: str) -> Any:
    """The class of that name, made when it is asked for: a worker process imports one root, and that takes seconds."""
    for root in ROOTS:
        for half, base in HALVES.items():
            if name == name_of(half, root):
                kind = type(name, (half, getattr(importlib.import_module(root), base)), {"__module__": __name__})
                return globals().setdefault(name, kind)
    raise AttributeError(name)


def name_of(half: type, root: str) -> str:
    """Name of the class made of *half* for *root*."""
    return half.__name__ + "".join(part.title() for part in root.replace(".", "_").split("_"))


def new(half: type, root: str, *args: Any, **kwargs: Any) -> Any:
    """One of the class made of *half* for *root*."""
    return getattr(sys.modules[__name__], name_of(half, root))(*args, **kwargs)


# ---- looking


def whole(trainer: Any, module: Any) -> dict[str, Any]:
    """What somebody may pickle or copy, bound methods of each among it."""
    strategy, epoch_loop = trainer.strategy, trainer.fit_loop.epoch_loop
    return {
        "trainer": trainer,
        "module": module,
        "data": trainer.datamodule,
        "methods": [
            trainer.fit,
            trainer.save_checkpoint,
            module.training_step,
            trainer.datamodule.collate,
            strategy.training_step,
            strategy.batch_to_device,
            strategy.optimizer_step,
            strategy.precision_plugin.backward,
            epoch_loop.run,
            epoch_loop.advance,
            epoch_loop._on_before_fetch,
            *(optimizer.zero_grad for optimizer in trainer.optimizers),
        ],
    }


class _Pickler(pickle.Pickler):
    def persistent_id(self, thing: Any) -> Any:
        return "ours" if isinstance(thing, (FlopsProfilerCallback, Nobody)) else None


class _CloudPickler(cloudpickle.Pickler):  # type: ignore[misc]
    def persistent_id(self, thing: Any) -> Any:
        return "ours" if isinstance(thing, (FlopsProfilerCallback, Nobody)) else None


class _Unpickler(pickle.Unpickler):
    def persistent_load(self, token: Any) -> Any:
        return token


def pickled(thing: Any) -> Any:
    return _through(_Pickler, thing)


def cloudpickled(thing: Any) -> Any:
    return _through(_CloudPickler, thing)


def _through(pickler: Any, thing: Any) -> Any:
    stream = io.BytesIO()
    pickler(stream).dump(thing)
    assert b"lightning_flops" not in stream.getvalue()
    stream.seek(0)
    return _Unpickler(stream).load()


WAYS: dict[str, Callable[[Any], Any]] = {"pickle": pickled, "cloudpickle": cloudpickled, "deepcopy": copy.deepcopy}


def outcome(way: str, thing: Any) -> Any:
    """What comes of pickling or copying *thing*: what the copy is made of, or the error."""
    try:
        copied = WAYS[way](thing)
    except AssertionError:
        raise
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return made_of(copied, known_as=_known_as)


def _known_as(thing: Any) -> str | None:
    """The profiler, or who is in its place, is one and the same."""
    token = isinstance(thing, str) and thing == "ours"
    return "ours" if token or isinstance(thing, (FlopsProfilerCallback, Nobody)) else None


_RUNS_TESTS = ("_pytest", "execnet", "pluggy", "pytest", "xdist")


def ours_within(thing: Any) -> list[str]:
    """What there is of this package in the memory that *thing* holds, but for the callbacks and what they hold.

    A tapped method that somebody has kept is bound to its object, and pickles and copies as the class's own.
    """
    pending, seen, found = [thing], set[int](), []
    while pending:
        one = pending.pop()
        if id(one) in seen or isinstance(one, (type, types.ModuleType, FlopsProfilerCallback)):
            continue
        seen.add(id(one))
        if type(one).__module__.partition(".")[0] in _RUNS_TESTS:
            continue  # a handler of the log leads to it, and it knows every module of the tests
        if isinstance(one, types.FunctionType):
            if is_ours(one):
                found.append(one.__qualname__)
            pending += [cell.cell_contents for cell in one.__closure__ or () if cell != types.CellType()]
        elif isinstance(one, types.MethodType):
            pending.append(one.__self__)
        elif is_ours(one):
            found.append(type(one).__qualname__)
        elif not isinstance(one, types.FrameType):
            pending += gc.get_referents(one)
    return found
