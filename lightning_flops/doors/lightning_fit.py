"""The door of one ``Trainer.fit``: which functions of Lightning's loop are wrapped, and what their calls mean."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from lightning_flops.doors.lightning_context import (
    fetches_can_be_wrapped,
    is_lightnings,
    is_lightnings_own,
    last_step_of_development_run,
    loader_iterators,
    loader_workers,
    private_names,
    reset_fetcher,
    run_context,
    run_output,
    settle_steps,
)
from lightning_flops.doors.lightning_deepspeed import engine_of
from lightning_flops.instrument.batches import BatchMeter, tensor_shapes, without_loss
from lightning_flops.instrument.optimizer_hooks import OptimizerHooks
from lightning_flops.instrument.timing.loader_queue import LoaderQueue, backlogs_of
from lightning_flops.instrument.timing.monitor import LONGEST_LOG
from lightning_flops.records import Shapes
from lightning_flops.session.border import guarded
from lightning_flops.session.door import RunPlan
from lightning_flops.session.session import Session
from lightning_flops.text.printable import package_logger

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer
    from torch import nn

    from lightning_flops.config import ProfilerConfig
    from lightning_flops.instrument.patches import Make, Patches
    from lightning_flops.instrument.timing.loader_queue import Feed
    from lightning_flops.records import BatchTokens, RunContext
    from lightning_flops.schema.profile import Profile
    from lightning_flops.session.border import Border

logger = package_logger(__name__)

_BATCHES_COMPARED = 10
"""At least this many batches are compared before and after their step, because a step may change its batch."""

_NO_LOSS = (
    "In a step, training_step returned None, so no backward ran. Such steps spend less than others of the same shapes: "
    "their FLOPs are known only where one of them was counted."
)


class LightningFit:
    """The door of one fit, on one rank.

    Args:
        trainer: about to run its first batch.
        pl_module: the root of the module tree.
        config: the settings.
        publish: gets each profile when its window has closed.
        hear_starts: is told whether ``batch_starts`` must be called; until it is told, it must be.
        own_folder: of the reports if no logger has a folder; None: then they have none.
    """

    _context: RunContext
    """As it was when the run began."""
    _logged_step: Callable[[], int]
    """The step that Lightning's loggers use as x-axis."""

    def __init__(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        *,
        config: ProfilerConfig,
        publish: Callable[[Profile], None],
        hear_starts: Callable[[bool], None],
        own_folder: str | None,
    ) -> None:
        self._trainer = trainer
        self._module = pl_module
        self._config = config
        self._engine = engine_of(trainer)
        self._manual_steps = trainer.fit_loop.epoch_loop.manual_optimization.optim_step_progress.total
        self._is_manual = not pl_module.automatic_optimization
        self._left_open = 0
        """Updates of manual optimization that had begun and not ended when the latest batch was done: they raised."""
        self._raw_updates = 0
        self._raw_depth = 0
        self._hear_starts = hear_starts
        self._own_folder = own_folder
        self._hears_starts = True
        self._batches_compared = 0
        self._batches_change = False
        self._batch: Any = None
        self._shapes: Shapes = ()
        self._tokens: BatchTokens | None = None
        self._optimizer_steps = self._step_counter()
        self._last_global_step = self._optimizer_steps()
        self._names = private_names(trainer)
        self.session = Session(
            self,
            pl_module,
            config=config,
            publish=publish,
            rank=trainer.global_rank,
            world_size=trainer.world_size,
            hears_starts=True,
        )
        self._names.tell(self.session.notes.add_for_run)
        self._log = self.session.log
        self._notes = False
        """A batch that only the monitor needs to know of is noted."""
        self._any_optimizer = OptimizerHooks(
            self._raw_step_begins, self._raw_step_ends, failed=self.session.border.broke
        )

    @property
    def border(self) -> Border:
        """Catches what our code raises."""
        return self.session.border

    def _step_counter(self) -> Callable[[], int]:
        """Returns a function that says how many optimizer attempts there were until now."""
        if (engine := self._engine) is not None:
            # DeepSpeed accumulates across epochs, where Lightning starts anew.
            return lambda: int(engine.global_steps)
        # The counter behind trainer.global_step. The property goes through five objects, and we read this after every
        # batch of the run.
        epoch_loop = self._trainer.fit_loop.epoch_loop
        if self._module.automatic_optimization:
            progress = epoch_loop.automatic_optimization.optim_progress.optimizer.step.total
        else:
            progress = epoch_loop.manual_optimization.optim_step_progress.total
        return functools.partial(getattr, progress, "completed")

    # ---- how the run begins

    def plan(self) -> RunPlan:
        """How the fit begins. A development run profiles its last step if it is too short for the one to profile."""
        self._context = run_context(self._trainer)
        trainer, epoch_loop = self._trainer, self._trainer.fit_loop.epoch_loop
        if self._names.has(epoch_loop, "_batches_that_stepped"):
            self._logged_step = functools.partial(getattr, epoch_loop, "_batches_that_stepped")
        else:
            self._logged_step = lambda: int(trainer.global_step)
        profile_step = self._config.next_profile_step(steps_done=0)
        last = last_step_of_development_run(self._trainer)
        if last is not None and profile_step is not None and profile_step > last:
            logger.info("fast_dev_run: profile_step is %d in place of %d", last, profile_step)
            profile_step = last
        return RunPlan(
            profile_step=profile_step,
            settle_steps=settle_steps(
                trainer.fit_loop, names=self._names, batches_a_step=trainer.accumulate_grad_batches
            ),
            device=self._trainer.strategy.root_device,
            dp_size=self._context.dp_size,
            output=run_output(self._trainer, self._config, own_folder=self._own_folder),
        )

    def meter(self, note: Callable[[str], None]) -> BatchMeter:
        """Finds samples and tokens from the tensors of a batch and the settings."""
        return BatchMeter.by_settings(self._config, note)

    # ---- taps of the loop

    def tap_run(self, taps: Patches) -> None:
        """Wrap what shows waiting for data, epochs, validation and checkpoints."""
        session, make = self.session, self.session.taps
        epoch_loop = self._trainer.fit_loop.epoch_loop
        session.training_stops("epoch restart")  # until the first epoch's first batch
        if fetches_can_be_wrapped(self._trainer.fit_loop, epoch_loop, names=self._names):
            taps.replace(epoch_loop, "_on_before_fetch", make.fetch_begins())
            taps.replace(epoch_loop, "_on_after_fetch", make.fetch_ends())
        taps.replace(epoch_loop, "run", make.after(session.epoch_ends, also_failed=True))
        taps.replace(epoch_loop, "on_run_start", make.after(session.epoch_begins))
        taps.replace(epoch_loop.val_loop, "run", make.outside_of_steps("validation"))
        taps.replace(self._trainer, "save_checkpoint", make.outside_of_steps("checkpoint"))
        if session.tokens.reads and self._trainer.strategy.root_device.type != "cpu":
            taps.replace(self._trainer.strategy, "batch_to_device", make.around(self._batch_is_on_host, None))
        if not self._module.automatic_optimization:
            # A user may step an optimizer that Lightning does not wrap; torch's own hooks see every optimizer.
            self._any_optimizer.put_up()

    def _batch_is_on_host(self, batch: Any, *args: Any, **kwargs: Any) -> None:
        """A batch is going to be moved: what its tokens are can still be read without waiting for the device."""
        if self.session.tokens.reads and self._trainer.training:
            self._tokens = self.session.tokens.of(batch)

    def tap_parts(self, taps: Patches) -> None:
        """Wrap the parts of a training step."""
        strategy, epoch_loop = self._trainer.strategy, self._trainer.fit_loop.epoch_loop
        make = self.session.taps
        window = self.session.window
        taps.replace(
            epoch_loop,
            "advance",
            make.around(self._advance_begins, self._advance_ends, fails=lambda _, error: window.leave_scope()),
        )
        taps.replace(strategy, "batch_to_device", make.part("transfer"))
        taps.replace(strategy, "training_step", make.part("forward"))
        # Only around the call of autograd: the strategy's own method runs the user's hooks, too.
        precision = strategy.precision_plugin
        taps.replace(precision, "backward", make.part("backward"))
        taps.replace(strategy, "optimizer_step", self._around_optimizer_step())
        # Inside the optimizer's step Lightning runs hooks, which are not the optimizer's work, except for clipping. If
        # a version of Lightning does not have these methods, all of it counts as the optimizer's.
        for target, name, wrapper in (
            (precision, "_after_closure", make.part("other")),
            (precision, "_clip_gradients", self._around_clipping()),
        ):
            if self._names.has(target, name):
                taps.replace(target, name, wrapper)
        self._tap_zero_grad(taps)

    def _tap_zero_grad(self, taps: Patches) -> None:
        """Mark zero_grad as the optimizer's: the optimizers' own method if known, and a hook of the user's."""
        inside = self.session.taps.part("optimizer", counts=False)
        trainer = self._trainer
        # In manual optimization Lightning gives the user wrappers, which have a zero_grad of their own.
        for optimizer in (*trainer.optimizers, *self._names.get(trainer.strategy, "_lightning_optimizers", ())):
            if isinstance(optimizer, torch.optim.Optimizer):
                taps.replace(optimizer, "zero_grad", inside)
        loop = trainer.fit_loop.epoch_loop.automatic_optimization
        all_known = all(isinstance(optimizer, torch.optim.Optimizer) for optimizer in trainer.optimizers)
        own = all_known and is_lightnings_own(self._module, "optimizer_zero_grad")
        if not own and self._names.has(loop, "_optimizer_zero_grad"):
            taps.replace(loop, "_optimizer_zero_grad", inside)

    def _advance_begins(self, *args: Any, **kwargs: Any) -> bool:
        self.session.window.enter_scope()
        return True

    def _advance_ends(self, _: bool) -> None:
        self.session.window.leave_scope()
        self.session.after_batch()

    def _around_optimizer_step(self) -> Make:
        taps = self.session.taps
        manual = not self._module.automatic_optimization
        # In automatic optimization the closure holds forward, backward and Lightning's work between them, none of which
        # is the optimizer's. In manual optimization it is the user's own forward and backward, or does nothing.
        around_closure, around_step = taps.part("forward" if manual else "other"), taps.part("optimizer")

        def make(step: Callable[..., Any]) -> Callable[..., Any]:
            inside = around_step(step)

            def choose(_: Any, optimizer: Any, closure: Any = None, *args: Any, **kwargs: Any) -> Any:
                if self._engine is not None and not self._engine.is_gradient_accumulation_boundary():
                    # Lightning calls DeepSpeed after every batch; for this one DeepSpeed does not update.
                    return step, (optimizer, closure, *args), kwargs
                if callable(closure) and getattr(closure, "__name__", "") != "do_nothing_closure":
                    closure = around_closure(closure)
                return inside, (optimizer, closure, *args), kwargs

            return taps.instead(choose)(step)

        return make

    def _around_clipping(self) -> Make:
        taps = self.session.taps
        precision = self._trainer.strategy.precision_plugin
        always = not (
            is_lightnings_own(self._module, "configure_gradient_clipping")
            and is_lightnings_own(precision, "_clip_gradients")
            and is_lightnings_own(precision, "clip_gradients")
        )

        def make(clip: Callable[..., Any]) -> Callable[..., Any]:
            inside = taps.part("optimizer", counts=False)(clip)

            def choose(_: Any, *args: Any, **kwargs: Any) -> Any:
                # If nothing is clipped, we call it unwrapped: Lightning's code then only finds that out.
                return inside if always or self._trainer.gradient_clip_val else clip, args, kwargs

            return taps.instead(choose)(clip)

        return make

    @guarded
    def _raw_step_begins(self, *_: Any) -> None:
        # The hooks fire twice if a subclass's step calls its parent's, or if an optimizer wraps another one.
        self._raw_depth += 1
        if self._raw_depth == 1 and not self._in_lightnings_step():
            self.session.enter("optimizer")

    @guarded
    def _raw_step_ends(self, *_: Any) -> None:
        self._raw_depth -= 1
        if self._raw_depth == 0 and not self._in_lightnings_step():
            self._raw_updates += 1
            self.session.leave()

    def _in_lightnings_step(self) -> bool:
        """Whether Lightning's own wrapper of an optimizer runs, which counts the update itself."""
        steps = self._manual_steps
        return bool(steps.ready - steps.completed > self._left_open)

    # ---- events of the callback; these two are called for every batch of the run, and their caller catches errors

    def batch_starts(self, batch: Any) -> None:
        """A batch has been fetched and transferred: take its shapes before the user's step may change it."""
        self._batch = batch
        self._shapes = tensor_shapes(batch)
        if self.session.flops.wants_shapes:
            if self._tokens is None and self.session.tokens.reads:
                self._tokens = self.session.tokens.of(batch)
            self.session.step_begins((self._shapes,), (self._tokens,))

    def batch_ends(self, batch: Any, outputs: Any) -> bool:
        """A batch is done, and perhaps a step with it; *outputs* are its step's. Returns whether our part is over."""
        steps = self._optimizer_steps()
        updates = steps - self._last_global_step
        # Lightning has called no backward if the step returned None, as people do where a loss is no number.
        has_loss = self._is_manual or type(outputs) is not dict or bool(outputs)
        if self._notes and has_loss and batch is not None and not self._trainer.should_stop:
            shapes = self._shapes if batch is self._batch else tensor_shapes(batch)
            if self._log.note(shapes, updates, updates > 0):  # most of the run
                self._last_global_step = steps
                if self._hears_starts:
                    self._consider_starts(batch)
                    self._batch = None
                return not self._log.spare and self._looks(ends_step=updates > 0)
        session = self.session
        updates += self._raw_updates
        self._last_global_step = steps
        # A step that raised, and was caught, did not fire its post hook.
        self._raw_updates = self._raw_depth = 0
        self._left_open = self._manual_steps.ready - self._manual_steps.completed
        if self._hears_starts:
            self._consider_starts(batch)
        started, self._batch = self._batch, None
        if batch is not started:
            self._shapes = tensor_shapes(batch)  # a dataloader_iter step fetches its batch itself
        if batch is None:
            return session.out  # the loader yielded None: no batch, no start, nothing ran
        ends_step = updates > 0 or self._steps_without_optimizer()
        tokens, self._tokens = self._tokens, None
        if tokens is None and session.tokens.reads:
            tokens = session.tokens.of(batch)
        until_log = self._batches_until_log()
        logs = ends_step and (until_log == 0 or self._trainer.should_stop)
        shapes = self._shapes
        if not (has_loss or session.out):
            shapes = without_loss(shapes)
            session.flops.note(_NO_LOSS)
        session.batch(batch, shapes, updates=updates, ends_step=ends_step, logs=logs, tokens=tokens)
        self._notes = not (self._is_manual or session.tokens.reads)
        if self._notes:
            self._note_until_log(until_log, ends_step=ends_step)
        if session.flops.wants_shapes:
            self._hear_of_starts()
        return session.out

    def _looks(self, *, ends_step: bool) -> bool:
        """A batch was noted after which somebody must look. Returns whether our part of the run is over."""
        until_log = self._batches_until_log()
        self.session.look(logs=ends_step and until_log == 0)
        self._note_until_log(until_log, ends_step=ends_step)
        if self.session.flops.wants_shapes:
            self._hear_of_starts()
        return self.session.out

    def _note_until_log(self, until_log: int, *, ends_step: bool) -> None:
        """Note no more batches than until the Trainer logs again."""
        if not until_log:  # it logs with the step that ends now, or with the one that is running
            until_log = self._logs_every if ends_step else 1
        self._log.stop_before(until_log)

    def _batches_until_log(self) -> int:
        """With how many further batches the Trainer logs its metrics at the earliest; 0: with the one that has ended.

        That is Lightning's own rule (``logger_connector.should_update_logs``).
        """
        every = self._logs_every
        return -(self._logged_step() + 1) % every if every else LONGEST_LOG

    @property
    def _logs_every(self) -> int:
        """After so many steps the Trainer logs; 0: it never does."""
        return int(getattr(self._trainer, "log_every_n_steps", 0))

    def _consider_starts(self, batch: Any) -> None:
        """Ask for ``batch_starts`` as long as a window is open, or if the user's steps change the shapes in a batch."""
        if batch is not None and batch is self._batch and tensor_shapes(batch) != self._shapes:
            self._batches_change = True
        self._batches_compared += 1
        compared = self._batches_compared >= _BATCHES_COMPARED
        wanted = self.session.window.is_open or self.session.flops.wants_shapes
        if compared and not wanted and not self._batches_change:
            self._hears_starts = False
            self._hear_starts(False)

    def window_opens(self) -> None:
        """The step that begins now is counted: ask for ``batch_starts``, before a step changes its batch."""
        self._hear_of_starts()

    def _hear_of_starts(self) -> None:
        if not self._hears_starts:
            self._hears_starts = True
            self._hear_starts(True)

    def _steps_without_optimizer(self) -> bool:
        """Whether every batch is a step, because there is no optimizer whose steps would show it."""
        return not self._module.automatic_optimization and all(
            is_lightnings(type(optimizer))
            for optimizer in self._trainer.optimizers  # its stand-in for none at all
        )

    # ---- what the session asks

    def context(self) -> RunContext:
        """Where the fit runs; how many batches are accumulated may have changed since it began."""
        return replace(self._context, accumulate=self._trainer.accumulate_grad_batches)

    def optimizers(self) -> Iterable[Any]:
        """The Trainer's optimizers."""
        return list(self._trainer.optimizers)

    def whole_model(self) -> nn.Module:
        """The module in the strategy's wrappers."""
        model = self._trainer.strategy.model
        return self._module if model is None else model

    def loader_workers(self) -> int | None:
        """Fewest worker processes of the training loaders."""
        return loader_workers(self._trainer.fit_loop, names=self._names)

    def feed(self) -> Feed:
        """The queues of the training loaders."""
        loop, note = self._trainer.fit_loop, self.session.notes.add_for_run
        return LoaderQueue(
            lambda: backlogs_of(loader_iterators(loop, names=self._names), note=note),
            batches_a_step=self._trainer.accumulate_grad_batches,
        )

    def x_axis(self) -> int:
        """The step at which Lightning logs its own metrics."""
        return self._logged_step()

    # ---- removal

    def take_out(self) -> None:
        """Remove torch's hooks, and our wrappers that the data fetcher keeps."""
        try:
            self._any_optimizer.remove()
        finally:
            reset_fetcher(self._trainer.fit_loop, self._trainer.fit_loop.epoch_loop, names=self._names)
