"""One ``Trainer.fit`` under the profiler: where Lightning's loop is tapped."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from lightning_flops.doors.lightning_context import (
    fit_output,
    is_lightnings_own,
    last_step_of_development_run,
    loader_iterators,
    loader_workers,
    run_context,
    settle_steps,
)
from lightning_flops.doors.lightning_deepspeed import engine_of
from lightning_flops.instrument.batches import tensor_shapes
from lightning_flops.instrument.patches import untapped
from lightning_flops.instrument.timing.loader_queue import LoaderQueue, backlogs_of
from lightning_flops.session.run_profiler import RunProfiler
from lightning_flops.session.taps import guarded
from lightning_flops.text.printable import package_logger

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer
    from torch import nn

    from lightning_flops.config import ProfilerConfig
    from lightning_flops.instrument.patches import Patches
    from lightning_flops.instrument.timing.loader_queue import Feed
    from lightning_flops.records import RunContext
    from lightning_flops.schema.profile import Profile

logger = package_logger(__name__)

_BATCHES_COMPARED = 10
"""So many batches at least are looked at before and after their step, which may change what it is given."""


class FitProfiler(RunProfiler):
    """The profiler inside one fit, on one rank. Made by ``start``; inert after ``take_out``."""

    def __init__(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        *,
        config: ProfilerConfig,
        publish: Callable[[Profile], None],
        hear_starts: Callable[[bool], None],
        asked_for: bool = True,
    ) -> None:
        super().__init__(
            pl_module, config=config, publish=publish, rank=trainer.global_rank, world_size=trainer.world_size
        )
        self._trainer = trainer
        self._module = pl_module
        self._engine = engine_of(trainer)
        self._hooks: list[Any] = []
        self._in_strategy_step = False
        self._raw_updates = 0
        self._raw_depth = 0
        self._context: RunContext | None = None
        self._hear_starts = hear_starts
        self._asked_for = asked_for
        self._hears_starts = True
        self._batches_compared = 0
        self._batches_change = False
        self._last_global_step = 0
        self._optimizer_steps: Callable[[], int] = lambda: 0

    @classmethod
    def start(
        cls,
        trainer: Trainer,
        pl_module: LightningModule,
        *,
        config: ProfilerConfig,
        publish: Callable[[Profile], None],
        hear_starts: Callable[[bool], None],
        asked_for: bool = True,
    ) -> FitProfiler | None:
        """Tap *trainer*'s loop for the fit that begins now.

        Args:
            trainer: about to run its first batch.
            pl_module: the root of the module tree.
            config: the settings.
            publish: gets each profile when its window has closed.
            hear_starts: told whether ``batch_starts`` must be called; as long as it is not, it must.
            asked_for: somebody wrote the profiler into the program, or its config.

        Returns:
            None if it cannot even be made, which is a warning.
        """
        try:
            fit = cls(trainer, pl_module, config=config, publish=publish, hear_starts=hear_starts, asked_for=asked_for)
        except Exception as error:  # the border to the training loop, as in ``guarded``
            logger.warning("this fit is not profiled: %s: %s", type(error).__name__, error)
            return None
        try:
            fit._begin()
        except BaseException:  # the user's Ctrl-C: nobody knows of this fit yet
            fit.take_out()
            raise
        return fit

    @guarded
    def _begin(self) -> None:
        trainer = self._trainer
        self._context = run_context(trainer)
        profile_step = self._config.next_profile_step(steps_done=0)
        last = last_step_of_development_run(trainer)
        if last is not None and profile_step is not None and profile_step > last:
            logger.info("fast_dev_run: profile_step is %d in place of %d", last, profile_step)
            profile_step = last
        epoch_loop = trainer.fit_loop.epoch_loop
        self._optimizer_steps = self._step_counter()
        self._last_global_step = self._optimizer_steps()
        self._whole_run.replace(epoch_loop, "_on_before_fetch", self._around_fetch_start)
        self._whole_run.replace(epoch_loop, "_on_after_fetch", self._around_fetch_end)
        self._whole_run.replace(epoch_loop, "run", self._around_epoch)
        self._whole_run.replace(epoch_loop, "on_run_start", self._around_epoch_start)
        self._whole_run.replace(epoch_loop.val_loop, "run", self._outside_of_steps("validation"))
        self._whole_run.replace(trainer, "save_checkpoint", self._outside_of_steps("checkpoint"))
        if not self._module.automatic_optimization:
            # A user may step an optimizer that Lightning does not wrap; torch's own hooks see every one.
            self._hooks.append(register_optimizer_step_pre_hook(self._raw_step_begins))
            self._hooks.append(register_optimizer_step_post_hook(self._raw_step_ends))
        if self._monitor is not None:
            self._monitor.exclude("epoch restart")  # until the first epoch's first batch
        self._start(
            profile_step=profile_step,
            settle_steps=settle_steps(trainer),
            device=trainer.strategy.root_device,
            output=fit_output(trainer, self._config, asked_for=self._asked_for),
            dp_size=self._context.dp_size,
        )

    def _step_counter(self) -> Callable[[], int]:
        """Says how many optimizer attempts there were until now."""
        if (engine := self._engine) is not None:
            # DeepSpeed accumulates across epochs, where Lightning starts anew.
            return lambda: int(engine.global_steps)
        # What trainer.global_step is made of; that property asks its way through five objects, and this is asked
        # after every batch of the run.
        epoch_loop = self._trainer.fit_loop.epoch_loop
        if self._module.automatic_optimization:
            progress = epoch_loop.automatic_optimization.optim_progress.optimizer.step.total
        else:
            progress = epoch_loop.manual_optimization.optim_step_progress.total
        return functools.partial(getattr, progress, "completed")

    # ---- taps of the loop

    def _tap_parts(self, taps: Patches) -> None:
        strategy, epoch_loop = self._trainer.strategy, self._trainer.fit_loop.epoch_loop
        taps.replace(epoch_loop, "advance", self._around_advance)
        taps.replace(strategy, "batch_to_device", self._inside_part("transfer"))
        taps.replace(strategy, "training_step", self._inside_part("forward"))
        # Around the call of autograd alone: the strategy's own method runs the user's hooks, too.
        precision = strategy.precision_plugin
        taps.replace(precision, "backward", self._inside_part("backward"))
        taps.replace(strategy, "optimizer_step", self._around_optimizer_step)
        # Inside the optimizer's step Lightning runs hooks, which are not the optimizer's, and among them what is. Where
        # a Lightning keeps this in another way, all of it is the optimizer's.
        for target, name, make in (
            (precision, "_after_closure", self._inside_part("other")),
            (precision, "_clip_gradients", self._around_clipping),
        ):
            if callable(getattr(target, name, None)):
                taps.replace(target, name, make)
        self._tap_zero_grad(taps)

    def _tap_zero_grad(self, taps: Patches) -> None:
        """Mark dropping the gradients: the optimizers' own method where it is known, and a hook of the user's."""
        inside = self._inside_part("optimizer", counts=False)
        trainer = self._trainer
        # In manual optimization Lightning gives the user wrappers, which have a zero_grad of their own.
        for optimizer in (*trainer.optimizers, *getattr(trainer.strategy, "_lightning_optimizers", ())):
            if isinstance(optimizer, torch.optim.Optimizer):
                taps.replace(optimizer, "zero_grad", inside)
        loop = trainer.fit_loop.epoch_loop.automatic_optimization
        all_known = all(isinstance(optimizer, torch.optim.Optimizer) for optimizer in trainer.optimizers)
        own = all_known and is_lightnings_own(self._module, "optimizer_zero_grad")
        if not own and callable(getattr(loop, "_optimizer_zero_grad", None)):
            taps.replace(loop, "_optimizer_zero_grad", inside)

    def _around_advance(self, advance: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            scope = self._enter_batch_scope()
            if scope is None:
                return advance(*args, **kwargs)
            try:
                result = advance(*args, **kwargs)
            finally:
                self._leave_batch_scope(scope)
            self._after_batch()
            return result

        return run

    def _around_epoch(self, run_epoch: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            try:
                return run_epoch(*args, **kwargs)
            finally:
                self._epoch_ends()

        return run

    def _around_epoch_start(self, on_run_start: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            result = on_run_start(*args, **kwargs)
            self._epoch_begins()
            return result

        return run

    def _around_optimizer_step(self, optimizer_step: Callable[..., Any]) -> Callable[..., Any]:
        inside = self._inside_part("optimizer")(optimizer_step)
        manual = not self._module.automatic_optimization

        def run(optimizer: Any, closure: Any = None, *args: Any, **kwargs: Any) -> Any:
            if self._engine_accumulates():
                return optimizer_step(optimizer, closure, *args, **kwargs)
            # In automatic optimization the closure holds forward, backward and Lightning's work between them, which is
            # no optimizer's; in manual optimization it is the user's own forward and backward, or does nothing.
            if callable(closure) and getattr(closure, "__name__", "") != "do_nothing_closure":
                closure = self._inside_part("forward" if manual else "other")(closure)
            self._in_strategy_step = True
            try:
                return inside(optimizer, closure, *args, **kwargs)
            finally:
                self._in_strategy_step = False

        return run

    @guarded
    def _engine_accumulates(self) -> bool:
        """Whether this call of the optimizer's step is one that DeepSpeed, called after every batch, lets pass."""
        return self._engine is not None and not self._engine.is_gradient_accumulation_boundary()

    def _around_clipping(self, clip: Callable[..., Any]) -> Callable[..., Any]:
        inside = self._inside_part("optimizer", counts=False)(clip)
        precision = self._trainer.strategy.precision_plugin
        always = not (
            is_lightnings_own(self._module, "configure_gradient_clipping")
            and is_lightnings_own(precision, "_clip_gradients")
            and is_lightnings_own(precision, "clip_gradients")
        )

        def run(*args: Any, **kwargs: Any) -> Any:
            # Lightning's own code asks its way through several objects to find that there is nothing to clip.
            return (inside if always or self._trainer.gradient_clip_val else clip)(*args, **kwargs)

        return run

    def _around_fetch_start(self, before_fetch: Callable[[], Any]) -> Callable[[], Any]:
        monitor = self._monitor

        # This one and the next are called for every batch of the run, and so guard themselves.
        def run() -> Any:
            try:
                if monitor is not None:
                    monitor.fetch_begins()
                if self._marking:
                    self._enter("data_wait")
            except Exception as error:
                self._fail(error)
            return before_fetch()

        return run

    def _around_fetch_end(self, after_fetch: Callable[[], Any]) -> Callable[[], Any]:
        monitor = self._monitor

        def run() -> Any:
            try:
                return after_fetch()
            finally:
                try:
                    if self._marking:
                        self._leave()
                    if monitor is not None:
                        monitor.fetch_ends()
                except Exception as error:
                    self._fail(error)

        return run

    def _raw_step_begins(self, *_: Any) -> None:
        # A subclass's step that calls its parent's, or an optimizer around another one, fires the hooks of both.
        self._raw_depth += 1
        if self._raw_depth == 1 and not self._in_strategy_step:
            self._enter("optimizer")

    def _raw_step_ends(self, *_: Any) -> None:
        self._raw_depth -= 1
        if self._raw_depth == 0 and not self._in_strategy_step:
            self._raw_updates += 1
            self._leave()

    # ---- events of the callback

    def batch_starts(self, batch: Any) -> None:
        """A batch has been fetched and transferred."""
        try:
            self._batch_starts(batch)
        except Exception as error:
            self._fail(error)

    def batch_ends(self, batch: Any) -> None:
        """A batch is done, and with it perhaps a step."""
        try:
            steps = self._optimizer_steps()
            updates = steps - self._last_global_step + self._raw_updates
            self._last_global_step = steps
            self._raw_updates = self._raw_depth = 0  # a step that raised, and was caught, never told that it ended
            if self._hears_starts:
                self._consider_starts(batch)
            self._batch_ends(batch, updates=updates, ends_step=updates > 0 or self._steps_without_optimizer())
        except Exception as error:
            self._fail(error)

    def _consider_starts(self, batch: Any) -> None:
        """Hear of batches that start as long as a window is open, or the user's steps change the shapes in a batch."""
        if self._batch is not None and tensor_shapes(batch) != self._shapes:
            self._batches_change = True
        self._batches_compared += 1
        if self._batches_compared >= _BATCHES_COMPARED and not self._in_window and not self._batches_change:
            self._hears_starts = False
            self._hear_starts(False)

    def _open_window(self) -> None:
        if not self._hears_starts:
            self._hears_starts = True
            self._hear_starts(True)
        super()._open_window()

    def _steps_without_optimizer(self) -> bool:
        """Whether every batch is a step, for want of an optimizer that would tell."""
        return not self._module.automatic_optimization and all(
            type(optimizer).__name__ == "_MockOptimizer" for optimizer in self._trainer.optimizers
        )

    # ---- what the report asks

    def _run_context(self) -> RunContext:
        assert self._context is not None
        return replace(
            self._context,
            micro_batch_size=self._micro_batch_size,
            accumulate=self._trainer.accumulate_grad_batches,  # which a scheduler may have changed since the fit began
        )

    def _optimizers(self) -> Iterable[Any]:
        return list(self._trainer.optimizers)

    def _whole_model(self) -> nn.Module:
        model = self._trainer.strategy.model
        return self._module if model is None else model

    def _loader_workers(self) -> int | None:
        return loader_workers(self._trainer)

    def _feed(self) -> Feed:
        return LoaderQueue(
            lambda: backlogs_of(loader_iterators(self._trainer), note=self._note),
            batches_a_step=self._trainer.accumulate_grad_batches,
        )

    def _x_axis(self) -> int:
        return int(self._trainer.fit_loop.epoch_loop._batches_that_stepped)

    def _reading_is_due(self) -> bool:
        # Lightning's own rule for its own metrics (logger_connector.should_update_logs), without its detours.
        trainer = self._trainer
        every = getattr(trainer, "log_every_n_steps", 0)
        return bool(every) and (
            (trainer.fit_loop.epoch_loop._batches_that_stepped + 1) % every == 0 or trainer.should_stop
        )

    # ---- out of the way

    def _take_out_taps(self) -> None:
        while self._hooks:
            self._hooks.pop().remove()
        self._reset_fetcher()

    def _reset_fetcher(self) -> None:
        """The data fetcher keeps the epoch loop's methods as they were when it was made: give it those of now."""
        fit_loop = self._trainer.fit_loop
        fetcher = getattr(fit_loop, "_data_fetcher", None)
        if fetcher is None:
            return
        for name, method in (("_start_profiler", "_on_before_fetch"), ("_stop_profiler", "_on_after_fetch")):
            kept = vars(fetcher).get(name)
            if untapped(kept) is not kept:
                setattr(fetcher, name, getattr(fit_loop.epoch_loop, method))
