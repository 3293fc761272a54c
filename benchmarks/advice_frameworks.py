"""A small training of Lightning and one of transformers, with something that a hook does, or a dataset."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from itertools import islice, pairwise
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.data import DataLoader

from lightning_flops import FlopsProfilerCallback, FlopsProfilerTrainerCallback

from .advice_parts import CLOCK, PAIRS, Samples, Step, WholeBatches, in_turns, perceptron

_BATCH, _WIDTH = 64, 384
_PROFILED, _LEFT_OUT, _BLOCK = 90, 8, 20
"""Steps of the profiled fit, and of a block of steps that is timed, whose first ones are left out."""


class Hook(NamedTuple):
    """What is done where: in a callback's hook, in ``training_step``, or as each sample is loaded (``load``)."""

    name: str
    cause: Callable[..., object]


class _Fit:
    """When each step of a fit ended, what the clock had then, and what the hook does in it."""

    def __init__(self, hook: Hook | None, *, in_turns: bool) -> None:
        self.hook, self.in_turns, self.ends = hook, in_turns, list[tuple[float, float]]()
        self.mark()

    def mark(self) -> None:
        """A step ends here."""
        self.ends.append((time.perf_counter(), CLOCK.seconds))

    def does(self, name: str, module: Any) -> None:
        """What the hook of this *name* does: where blocks run in turns, in those with the cause."""
        block = (len(self.ends) - 1) // _BLOCK
        if self.hook is not None and self.hook.name == name and not (self.in_turns and (block + 1) // 2 % 2):
            self.hook.cause(module)

    def steps(self) -> list[Step]:
        """All of them, the first with what came before it."""
        return [Step(after[0] - before[0], after[1] - before[1]) for before, after in pairwise(self.ends)]


def _samples(hook: Hook | None, steps: int) -> Samples:
    """Whole batches, or samples one by one, of which each takes what the *hook* does to load it."""
    load = None if hook is None or hook.name != "load" else hook.cause
    samples = WholeBatches(bool, _WIDTH) if load is None else Samples(load, _WIDTH)
    samples.rows = samples.rows.repeat(6, 1)[: steps * _BATCH]
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

    def profile(self) -> Any:
        """That of a fit."""
        return self.fit(_PROFILED, is_profiled=True)[0]

    def beside(self, other: Lightning) -> Iterator[tuple[list[Step], list[Step]]]:
        """Blocks of its steps and of the *other's*, in turns; in one fit where a hook can stop."""
        if other.hook is not None:
            return in_turns(self._block, other._block)
        steps = iter(self.fit(2 * PAIRS * _BLOCK, in_turns=True)[1])
        return in_turns(*[lambda: list(islice(steps, _BLOCK))[_LEFT_OUT:]] * 2)

    def _block(self) -> list[Step]:
        return self.fit(_BLOCK)[1][_LEFT_OUT:]

    def fit(self, steps: int, *, is_profiled: bool = False, in_turns: bool = False) -> tuple[Any, list[Step]]:
        """The profile, if there is one, and the steps."""
        import lightning  # a fork of it alone needs it

        hook, fit = self.hook, _Fit(self.hook, in_turns=in_turns)

        class Net(lightning.LightningModule):
            def __init__(self) -> None:
                super().__init__()
                self.net = perceptron(nn.ReLU, layers=6, width=_WIDTH)

            def training_step(self, batch: torch.Tensor) -> torch.Tensor:
                loss = self.net(batch).square().mean()
                fit.does("training_step", self)
                return loss  # type: ignore[no-any-return]

            def configure_optimizers(self) -> Any:
                return torch.optim.SGD(self.parameters(), lr=1e-4, fused=True)

        class Ends(lightning.Callback):
            def on_train_batch_end(self, *_: Any) -> None:
                fit.mark()

        class Slow(lightning.Callback):
            def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
                fit.does("on_train_batch_end", module)

            def on_train_batch_start(self, trainer: Any, module: Any, *_: Any) -> None:
                fit.does("on_train_batch_start", module)

            def on_before_optimizer_step(self, trainer: Any, module: Any, *_: Any) -> None:
                fit.does("on_before_optimizer_step", module)

        with tempfile.TemporaryDirectory() as folder:
            profiler = FlopsProfilerCallback(profile_step=3, html=False)
            trainer = lightning.Trainer(
                max_epochs=1, accelerator="cpu", default_root_dir=folder, enable_progress_bar=False, logger=True,
                enable_model_summary=False, enable_checkpointing=False,
                callbacks=[*[profiler][:is_profiled], Slow(), Ends()],
            )  # fmt: skip
            loader = DataLoader(
                _samples(hook, steps), batch_size=_BATCH, collate_fn=_batch, num_workers=self.workers or 0,
                persistent_workers=bool(self.workers),
            )  # fmt: skip
            trainer.fit(Net(), loader)
        return profiler.profile, fit.steps()


class Transformers(Lightning):
    """A training of transformers' Trainer."""

    def fit(self, steps: int, *, is_profiled: bool = False, in_turns: bool = False) -> tuple[Any, list[Step]]:
        """The profile, if there is one, and the steps."""
        import transformers  # a fork of it alone needs it

        hook, fit = self.hook, _Fit(self.hook, in_turns=in_turns)

        class Net(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.net = perceptron(nn.ReLU, layers=6, width=_WIDTH)

            def forward(self, rows: torch.Tensor) -> dict[str, torch.Tensor]:
                return {"loss": self.net(rows).square().mean()}

        class Slow(transformers.TrainerCallback):
            def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
                fit.does("on_step_end", model)
                fit.mark()

        with tempfile.TemporaryDirectory() as folder:
            profiler = FlopsProfilerTrainerCallback(profile_step=3, html=False)
            arguments = transformers.TrainingArguments(
                folder, per_device_train_batch_size=_BATCH, num_train_epochs=1, report_to=[], disable_tqdm=True,
                use_cpu=True, save_strategy="no", logging_steps=1000, optim="adamw_torch_fused",
                dataloader_num_workers=self.workers or 0 if hook is not None else 0,
            )  # fmt: skip
            trainer = transformers.Trainer(
                Net(), arguments, data_collator=lambda rows: {"rows": _batch(rows)},
                train_dataset=_samples(hook, steps), callbacks=[*[profiler][:is_profiled], Slow()],
            )  # fmt: skip
            trainer.train()
        return profiler.profile, fit.steps()
