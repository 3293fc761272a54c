"""A small training of Lightning and one of transformers, with something that a hook does, or a dataset."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.data import DataLoader

from lightning_flops import FlopsProfilerCallback, FlopsProfilerTrainerCallback

from .advice_parts import CLOCK, Samples, Step, WholeBatches, perceptron

_STEPS, _BATCH, _WIDTH, _TIMED = 130, 64, 384, 40


class Hook(NamedTuple):
    """What is done where: in a callback's hook, in ``training_step``, or as each sample is loaded (``load``)."""

    name: str
    cause: Callable[..., object]


class _Ends:
    """The last steps, by when each ended, and what the clock had then."""

    def __init__(self) -> None:
        self.ends: list[tuple[float, float]] = []

    def mark(self) -> None:
        """A step ends here."""
        self.ends.append((time.perf_counter(), CLOCK.seconds))

    def steps(self) -> list[Step]:
        """Those after the window."""
        pairs = list(pairwise(self.ends))[-_TIMED:]
        return [Step(after[0] - before[0], after[1] - before[1]) for before, after in pairs]


def _samples(hook: Hook | None) -> Samples:
    """Whole batches, or samples one by one, of which each takes what the *hook* does to load it."""
    load = None if hook is None or hook.name != "load" else hook.cause
    samples = WholeBatches(bool, _WIDTH) if load is None else Samples(load, _WIDTH)
    samples.rows = samples.rows.repeat(3, 1)[: _STEPS * _BATCH]
    return samples


def _batch(rows: Any) -> torch.Tensor:
    return rows if isinstance(rows, torch.Tensor) else torch.stack(rows)


class Lightning:
    """A fit."""

    samples = _BATCH

    def __init__(self, hook: Hook | None = None, workers: int | None = None) -> None:
        """Without what the *hook* does if it is given *workers*, but for a dataset."""
        self.hook = hook if workers is None or (hook is not None and hook.name == "load") else None
        self.workers = workers

    def fit(self) -> tuple[Any, list[Step]]:
        """The profile, and the steps after its window."""
        import lightning  # a fork of it alone needs it

        hook, ends = self.hook, _Ends()

        class Net(lightning.LightningModule):
            def __init__(self) -> None:
                super().__init__()
                self.net = perceptron(nn.ReLU, layers=6, width=_WIDTH)

            def training_step(self, batch: torch.Tensor) -> torch.Tensor:
                loss = self.net(batch).square().mean()
                if hook is not None and hook.name == "training_step":
                    hook.cause(self)
                return loss  # type: ignore[no-any-return]

            def configure_optimizers(self) -> Any:
                return torch.optim.SGD(self.parameters(), lr=1e-4, fused=True)

        class Ends(lightning.Callback):
            def on_train_batch_end(self, *_: Any) -> None:
                ends.mark()

        class Slow(lightning.Callback):
            def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
                self._at("on_train_batch_end", module)

            def on_train_batch_start(self, trainer: Any, module: Any, *_: Any) -> None:
                self._at("on_train_batch_start", module)

            def on_before_optimizer_step(self, trainer: Any, module: Any, *_: Any) -> None:
                self._at("on_before_optimizer_step", module)

            def _at(self, name: str, module: Any) -> None:
                if hook is not None and hook.name == name:
                    hook.cause(module)

        with tempfile.TemporaryDirectory() as folder:
            profiler = FlopsProfilerCallback(profile_step=3, html=False)
            trainer = lightning.Trainer(
                max_epochs=1, accelerator="cpu", default_root_dir=folder, enable_progress_bar=False, logger=True,
                enable_model_summary=False, enable_checkpointing=False, callbacks=[profiler, Slow(), Ends()],
            )  # fmt: skip
            loader = DataLoader(
                _samples(hook), batch_size=_BATCH, collate_fn=_batch, num_workers=self.workers or 0,
                persistent_workers=bool(self.workers),
            )  # fmt: skip
            trainer.fit(Net(), loader)
        return profiler.profile, ends.steps()


class Transformers(Lightning):
    """A training of transformers' Trainer."""

    def fit(self) -> tuple[Any, list[Step]]:
        """The profile, and the steps after its window."""
        import transformers  # a fork of it alone needs it

        hook, ends = self.hook, _Ends()

        class Net(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.net = perceptron(nn.ReLU, layers=6, width=_WIDTH)

            def forward(self, rows: torch.Tensor) -> dict[str, torch.Tensor]:
                return {"loss": self.net(rows).square().mean()}

        class Slow(transformers.TrainerCallback):
            def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
                if hook is not None and hook.name == "on_step_end":
                    hook.cause(model)
                ends.mark()

        with tempfile.TemporaryDirectory() as folder:
            profiler = FlopsProfilerTrainerCallback(profile_step=3, html=False)
            arguments = transformers.TrainingArguments(
                folder, per_device_train_batch_size=_BATCH, num_train_epochs=1, report_to=[], disable_tqdm=True,
                use_cpu=True, save_strategy="no", logging_steps=1000, optim="adamw_torch_fused",
                dataloader_num_workers=self.workers or 0 if hook is not None else 0,
            )  # fmt: skip
            trainer = transformers.Trainer(
                Net(), arguments, data_collator=lambda rows: {"rows": _batch(rows)}, train_dataset=_samples(hook),
                callbacks=[profiler, Slow()],
            )  # fmt: skip
            trainer.train()
        return profiler.profile, ends.steps()
