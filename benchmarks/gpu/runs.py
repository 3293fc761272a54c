"""Fits of Lightning that the parts look at."""

from __future__ import annotations

import contextlib
import gc
import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_flops import FlopsProfilerCallback, Profile

from .here import Here

FIRST_STEP = 3
"""The step that is counted: what a first step sets up is over then."""
SETTLES = 2
"""Steps that are left alone after the counted one, without a data loader's workers."""


class Net(LightningModule):
    """A model, its loss and AdamW; it keeps the losses, on the device.

    Args:
        model: what is trained.
        loss: of the model's output and the batch.
    """

    def __init__(self, model: nn.Module, loss: Callable[[Any, Any], Tensor] | None = None) -> None:
        """Keeps them."""
        super().__init__()
        self.model = model
        self.loss = loss or (lambda output, batch: output.float().square().mean())
        self.losses: list[Tensor] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """A forward and a loss."""
        loss = self.loss(self.model(batch), batch)
        self.losses.append(loss.detach())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW, in one kernel where the device has it."""
        return torch.optim.AdamW(self.parameters(), lr=1e-4, fused=next(self.parameters()).is_cuda)


@dataclass(slots=True, kw_only=True)
class Fit:
    """A fit that is over."""

    net: Net
    callback: FlopsProfilerCallback | None
    log: list[str] = field(default_factory=list)
    """What this project warned of."""

    @property
    def profile(self) -> Profile:
        """What the profiler measured.

        Raises:
            RuntimeError: there is no profile.
        """
        if self.callback is None or self.callback.profile is None:
            raise RuntimeError(f"the fit left no profile; the profiler warned: {self.log or 'of nothing'}")
        return self.callback.profile


def profiler(here: Here, **settings: Any) -> FlopsProfilerCallback:
    """The callback, with what keeps a run short, and *settings*."""
    given: dict[str, Any] = {"profile_step": FIRST_STEP, "timing_steps": 5, "trace": False, "monitor": False}
    return FlopsProfilerCallback(**{**given, "html": False, "detailed": False, **settings})


def fit(
    here: Here,
    net: Net,
    batches: Sequence[Any],
    callback: FlopsProfilerCallback | None = None,
    *callbacks: Callback,
    loader: DataLoader[Any] | None = None,
    hear: Callable[[str], None] | None = None,
    **settings: Any,
) -> Fit:
    """One epoch over *batches*, or over *loader*.

    Args:
        here: where.
        net: what is trained.
        batches: each is a batch.
        callback: the profiler, or none.
        callbacks: others.
        loader: in place of *batches*.
        hear: is told every warning; without it there are none.
        settings: of the Trainer.
    """
    done = Fit(net=net, callback=callback)
    trainer = Trainer(
        **{
            "accelerator": "gpu" if here.on_gpu else "cpu",
            "devices": 1,
            "max_epochs": 1,
            "logger": False,
            "enable_checkpointing": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "default_root_dir": str(here.folder),
            "callbacks": [*([] if callback is None else [callback]), *callbacks],
            **settings,
        }
    )
    with heard(done.log), warnings.catch_warnings():
        warnings.simplefilter("ignore" if hear is None else "always")
        if hear is not None:
            listener = hear
            warnings.showwarning = lambda message, *_: listener(str(message))
        trainer.fit(net, loader or DataLoader(batches, batch_size=None))  # type: ignore[arg-type]
    here.settle()
    return done


@contextlib.contextmanager
def heard(log: list[str]) -> Iterator[None]:
    """Inside, what this project warns of is kept in *log*."""
    handler = _Kept(log)
    logger = logging.getLogger("lightning_flops")
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)


class _Kept(logging.Handler):
    def __init__(self, log: list[str]) -> None:
        super().__init__(logging.WARNING)
        self._log = log

    def emit(self, record: logging.LogRecord) -> None:
        self._log.append(record.getMessage())


class Layers(nn.Module):
    """Layers one after the other; torch's compiler passes over a Sequential of its own."""

    def __init__(self, *parts: nn.Module) -> None:
        """Keeps them."""
        super().__init__()
        self.parts = nn.ModuleList(parts)

    def forward(self, x: Tensor) -> Tensor:
        """What the last one returns."""
        for part in self.parts:
            x = part(x)
        return x


def layers(here: Here, width: int, number: int) -> nn.Module:
    """Linear layers of one width, with GELU between them, made on the device."""
    with here.device:
        return Layers(*(part for _ in range(number) for part in (nn.Linear(width, width), nn.GELU())))


def forget(here: Here) -> None:
    """Give back what earlier fits held of the device's memory."""
    gc.collect()
    if here.on_gpu:
        torch.cuda.empty_cache()
