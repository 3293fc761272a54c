"""One ``Trainer.fit`` under the profiler: where the loop is tapped, and what goes out when the window closes.

Everything here runs inside somebody's training. Every entry is guarded: the first failure of ours is logged once, the
profiler takes itself out completely, and training goes on.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from lightning_flops.analysis.profile import build_profile
from lightning_flops.instrument.batches import BatchMeter, Shapes, tensor_shapes
from lightning_flops.instrument.clocks import clock_for
from lightning_flops.instrument.flop_counter import FlopCounter
from lightning_flops.instrument.monitor import Monitor
from lightning_flops.instrument.patches import Patches
from lightning_flops.instrument.recorder import Recorder, State
from lightning_flops.lightning_run import RunOutput, last_step_of_development_run, run_context, settle_steps

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer

    from lightning_flops.analysis.profile import Profile
    from lightning_flops.config import ProfilerConfig
    from lightning_flops.records import RunContext

logger = logging.getLogger(__name__)

P = ParamSpec("P")
R = TypeVar("R")


def _guarded(
    method: Callable[Concatenate[FitProfiler, P], R],
) -> Callable[Concatenate[FitProfiler, P], R | None]:
    """*method*, which never raises into training: its first failure takes the profiler out."""

    @functools.wraps(method)
    def guarded(self: FitProfiler, /, *args: P.args, **kwargs: P.kwargs) -> R | None:
        if self._out:
            return None
        try:
            return method(self, *args, **kwargs)
        except Exception as error:  # the border to the training loop: whatever it is, it is ours to swallow
            self._fail(error)
            return None

    return guarded


class FitProfiler:
    """The profiler inside one fit, on one rank. Made by ``start``; inert after ``take_out``."""

    def __init__(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        *,
        config: ProfilerConfig,
        publish: Callable[[Profile], None],
    ) -> None:
        self._trainer = trainer
        self._module = pl_module
        self._config = config
        self._publish = publish
        self._output: RunOutput | None = None
        self._out = False
        self._whole_fit = Patches()
        self._window = Patches()
        self._hooks: list[Any] = []
        self._monitor = Monitor() if config.monitor else None
        self._profile: Profile | None = None
        self._batch: Any = None
        self._shapes: Shapes = ()
        self._step_shapes: list[Shapes] = []
        self._step_updates = 0
        self._in_batch_scope = False
        self._in_strategy_step = False
        self._raw_updates = 0
        self._raw_depth = 0
        self._micro_batch_size: int | None = None
        self._recorder: Recorder | None = None
        self._context: RunContext | None = None
        self._last_global_step = 0
        self._reported = False
        self._meter = BatchMeter(
            batch_size=config.batch_size, tokens_per_sample=config.tokens_per_sample, note=self._note
        )
        self._optimizer_steps: Callable[[], int] = lambda: 0

    @classmethod
    def start(
        cls,
        trainer: Trainer,
        pl_module: LightningModule,
        *,
        config: ProfilerConfig,
        publish: Callable[[Profile], None],
    ) -> FitProfiler:
        """Tap *trainer*'s loop for the fit that begins now.

        Args:
            trainer: about to run its first batch.
            pl_module: the root of the module tree.
            config: the settings.
            publish: gets the profile when the window has closed.
        """
        fit = cls(trainer, pl_module, config=config, publish=publish)
        fit._begin()
        return fit

    @_guarded
    def _begin(self) -> None:
        trainer = self._trainer
        self._output = RunOutput(trainer, self._config)
        self._context = run_context(trainer)
        profile_step = self._config.profile_step
        if (last := last_step_of_development_run(trainer)) is not None and profile_step > last:
            profile_step = last
            logger.info("fast_dev_run: profile_step is %d in place of %d", profile_step, self._config.profile_step)
        self._recorder = Recorder(
            self._module,
            profile_step=profile_step,
            timing_steps=self._config.timing_steps,
            settle_steps=settle_steps(trainer),
            clock=clock_for(trainer.strategy.root_device),
            new_counter=lambda root: FlopCounter(root, causal_attention=self._config.causal_attention),
        )
        epoch_loop = trainer.fit_loop.epoch_loop
        # What trainer.global_step is made of; that property asks its way through five objects, and this is asked
        # after every batch of the run.
        if self._module.automatic_optimization:
            progress = epoch_loop.automatic_optimization.optim_progress.optimizer.step.total
        else:
            progress = epoch_loop.manual_optimization.optim_step_progress.total
        self._optimizer_steps = lambda: int(progress.completed)
        self._last_global_step = self._optimizer_steps()
        self._whole_fit.replace(epoch_loop, "_on_before_fetch", self._around_fetch_start)
        self._whole_fit.replace(epoch_loop, "_on_after_fetch", self._around_fetch_end)
        self._whole_fit.replace(epoch_loop, "run", self._around_epoch)
        self._whole_fit.replace(epoch_loop, "on_run_start", self._around_epoch_start)
        self._whole_fit.replace(epoch_loop.val_loop, "run", self._outside_of_steps("validation"))
        self._whole_fit.replace(trainer, "save_checkpoint", self._outside_of_steps("checkpoint"))
        if not self._module.automatic_optimization:
            # A user may step an optimizer that Lightning does not wrap; torch's own hooks see every one.
            self._hooks.append(register_optimizer_step_pre_hook(self._raw_step_begins))
            self._hooks.append(register_optimizer_step_post_hook(self._raw_step_ends))
        if self._monitor is not None:
            self._monitor.exclude("epoch restart")  # until the first epoch's first batch
        self._tap_window()

    @property
    def out(self) -> bool:
        """Whether the profiler has nothing more to do in this fit."""
        return self._out

    # ---- taps of the loop

    def _tap_window(self) -> None:
        """Mark the parts of a step while a window needs them, and only then."""
        recorder = self._recorder
        assert recorder is not None
        if recorder.marking == bool(self._window):
            return
        if not recorder.marking:
            self._window.undo()
            return
        trainer = self._trainer
        strategy, epoch_loop = trainer.strategy, trainer.fit_loop.epoch_loop
        self._window.replace(epoch_loop, "advance", self._around_advance)
        self._window.replace(strategy, "batch_to_device", self._inside_part("transfer"))
        self._window.replace(strategy, "training_step", self._inside_part("forward"))
        self._window.replace(strategy, "backward", self._inside_part("backward"))
        self._window.replace(strategy, "optimizer_step", self._around_optimizer_step)

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

    @_guarded
    def _enter_batch_scope(self) -> AbstractContextManager[Any]:
        assert self._recorder is not None
        scope = self._recorder.batch_scope()
        scope.__enter__()
        self._in_batch_scope = True
        return scope

    def _leave_batch_scope(self, scope: AbstractContextManager[Any]) -> None:
        # Not @_guarded: a counter that was entered is left, also when the profiler has taken itself out meanwhile.
        self._in_batch_scope = False
        try:
            scope.__exit__(None, None, None)
        except Exception as error:
            self._fail(error)

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

    @_guarded
    def _epoch_ends(self) -> None:
        assert self._recorder is not None
        self._recorder.epoch_ends()
        if self._monitor is not None:
            self._monitor.exclude("epoch restart")

    @_guarded
    def _epoch_begins(self) -> None:
        assert self._recorder is not None
        self._recorder.epoch_begins()
        if self._monitor is not None:
            self._monitor.include("epoch restart")

    def _inside_part(self, part: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        def make(original: Callable[..., Any]) -> Callable[..., Any]:
            def run(*args: Any, **kwargs: Any) -> Any:
                self._enter(part)
                try:
                    return original(*args, **kwargs)
                finally:
                    self._leave()

            return run

        return make

    def _around_optimizer_step(self, optimizer_step: Callable[..., Any]) -> Callable[..., Any]:
        inside = self._inside_part("optimizer")(optimizer_step)
        manual = not self._module.automatic_optimization

        def run(optimizer: Any, closure: Any = None, *args: Any, **kwargs: Any) -> Any:
            # In automatic optimization the closure calls strategy.training_step; in manual optimization it is the
            # user's own forward and backward, or Lightning's that does nothing.
            if manual and callable(closure) and getattr(closure, "__name__", "") != "do_nothing_closure":
                closure = self._inside_part("forward")(closure)
            self._in_strategy_step = True
            try:
                return inside(optimizer, closure, *args, **kwargs)
            finally:
                self._in_strategy_step = False

        return run

    def _outside_of_steps(self, name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        marked = self._inside_part(name)

        def make(original: Callable[..., Any]) -> Callable[..., Any]:
            inner = marked(original)

            def run(*args: Any, **kwargs: Any) -> Any:
                self._training_stops(name)
                try:
                    return inner(*args, **kwargs)
                finally:
                    self._training_goes_on(name)

            return run

        return make

    def _around_fetch_start(self, before_fetch: Callable[[], Any]) -> Callable[[], Any]:
        def run() -> Any:
            self._fetch_begins()
            return before_fetch()

        return run

    def _around_fetch_end(self, after_fetch: Callable[[], Any]) -> Callable[[], Any]:
        def run() -> Any:
            try:
                return after_fetch()
            finally:
                self._fetch_ends()

        return run

    @_guarded
    def _fetch_begins(self) -> None:
        if self._monitor is not None:
            self._monitor.fetch_begins()
        self._enter("data_wait")

    @_guarded
    def _fetch_ends(self) -> None:
        self._leave()
        if self._monitor is not None:
            self._monitor.fetch_ends()

    @_guarded
    def _training_stops(self, reason: str) -> None:
        if self._monitor is not None:
            self._monitor.exclude(reason)

    @_guarded
    def _training_goes_on(self, reason: str) -> None:
        if self._monitor is not None:
            self._monitor.include(reason)

    @_guarded
    def _enter(self, part: str) -> None:
        assert self._recorder is not None
        if self._recorder.marking:
            self._recorder.enter(part)

    @_guarded
    def _leave(self) -> None:
        assert self._recorder is not None
        if self._recorder.marking:
            self._recorder.leave()

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

    @_guarded
    def batch_starts(self, batch: Any) -> None:
        """Take the batch's shapes before the user's step may change it."""
        self._batch = batch
        self._shapes = tensor_shapes(batch)
        self._raw_depth = 0  # a step that raised, and was caught, never told that it ended

    @_guarded
    def batch_ends(self, batch: Any) -> None:
        """Tell the recorder and the monitor; report if the window is over."""
        recorder = self._recorder
        assert recorder is not None
        started, self._batch = self._batch, None
        ends_step = self._step_ended()
        if batch is None and started is None:
            return  # the loader yielded None: no batch, no start, nothing ran
        if batch is not started:
            self._shapes = tensor_shapes(batch)  # a dataloader_iter step fetches its batch itself
        shapes = self._shapes
        samples = self._meter.samples(batch, shapes)
        counted = recorder.counting
        if recorder.state is not State.CLOSED:
            tokens = self._meter.tokens(batch, samples)
            recorder.end_batch(shapes=shapes, samples=samples, tokens=tokens, ends_step=ends_step)
        if counted and self._micro_batch_size is None:
            self._micro_batch_size = samples
        self._step_shapes.append(shapes)
        if self._monitor is not None:
            self._watch(self._monitor, samples=samples, ends_step=ends_step, counted=counted)
        if ends_step:
            self._step_shapes.clear()
            self._step_updates = 0
        if not self._in_batch_scope:
            self._after_batch()

    @_guarded
    def _after_batch(self) -> None:
        """What follows from the state the recorder is in now: taps on or off, the report, or the end of our work."""
        recorder = self._recorder
        assert recorder is not None
        self._tap_window()
        if recorder.state is State.CLOSED:
            if not self._reported:
                self._report()
            if self._monitor is None:
                self.take_out()

    def _step_ended(self) -> bool:
        """Whether an optimizer attempt belongs to the batch that just ended."""
        trainer = self._trainer
        before, self._last_global_step = self._last_global_step, self._optimizer_steps()
        raw, self._raw_updates = self._raw_updates, 0
        updates = self._last_global_step - before + raw
        self._step_updates += updates
        if updates:
            return True
        return not self._module.automatic_optimization and all(
            type(optimizer).__name__ == "_MockOptimizer" for optimizer in trainer.optimizers
        )

    @_guarded
    def finish(self, *, interrupted_by: BaseException | None = None) -> None:
        """The fit ends: report what there is, or say why there is nothing."""
        recorder = self._recorder
        assert recorder is not None
        if self._reported:
            return
        if not recorder.reached:
            if interrupted_by is None and self._trainer.is_global_zero:
                logger.warning(
                    "nothing was profiled: profile_step is %d, and this fit ended after %d step(s)",
                    self._config.profile_step,
                    recorder.steps_done,
                )
            return
        if interrupted_by is not None:
            recorder.note(f"Training was interrupted by {type(interrupted_by).__name__}.")
        self._report()

    def _note(self, sentence: str) -> None:
        """Put *sentence* into the report and, once, into the log."""
        assert self._recorder is not None
        if self._recorder.note(sentence) and self._trainer.is_global_zero:
            logger.warning(sentence)

    # ---- out of the way

    def take_out(self) -> None:
        """Leave nothing of ours on the trainer, its loops, its strategy or torch."""
        self._out = True
        try:
            self._window.undo()
            self._whole_fit.undo()
            self._reset_fetcher()
            while self._hooks:
                self._hooks.pop().remove()
        except Exception:
            logger.warning("could not take every tap off the training loop", exc_info=True)

    def _reset_fetcher(self) -> None:
        """The data fetcher keeps the epoch loop's methods, ours among them: give it the loop's own."""
        fit_loop = self._trainer.fit_loop
        fetcher = getattr(fit_loop, "_data_fetcher", None)
        if fetcher is None:
            return
        for name, method in (("_start_profiler", "_on_before_fetch"), ("_stop_profiler", "_on_after_fetch")):
            if hasattr(vars(fetcher).get(name), "__lightning_flops_patch__"):
                setattr(fetcher, name, getattr(fit_loop.epoch_loop, method))

    def _fail(self, error: Exception) -> None:
        if self._out:
            return
        logger.warning(
            "the FLOPs profiler failed and has taken itself out; training goes on: %s: %s",
            type(error).__name__,
            error,
            exc_info=logger.isEnabledFor(logging.DEBUG),
        )
        self.take_out()

    # ---- what goes out

    def _report(self) -> None:
        recorder, trainer = self._recorder, self._trainer
        assert recorder is not None and self._context is not None and self._output is not None
        self._reported = True
        started = time.perf_counter()
        step = trainer.fit_loop.epoch_loop._batches_that_stepped
        context = replace(
            self._context,
            micro_batch_size=self._micro_batch_size,
            accumulate=trainer.accumulate_grad_batches,  # which a scheduler may have changed since the fit began
        )
        window = recorder.close(context=context, report_step=step)
        self._window.undo()
        if window is None:
            if trainer.is_global_zero:
                logger.warning("nothing was profiled: training ended while the first step was being counted")
            return
        profile = build_profile(window, config=self._config)
        self._profile = profile
        self._publish(profile)
        if trainer.is_global_zero:
            self._output.write_profile(profile, step=step)
        logger.info("profiled step %d of this fit in %.3f s", window.profile_step, time.perf_counter() - started)
        if self._monitor is not None:
            self._monitor.restart()

    def _watch(self, monitor: Monitor, *, samples: int | None, ends_step: bool, counted: bool) -> None:
        recorder, trainer = self._recorder, self._trainer
        assert recorder is not None
        alike = not ends_step or (
            tuple(self._step_shapes) == recorder.counted_shapes and self._step_updates == recorder.counted_updates
        )
        monitor.batch(samples=samples, ends_step=ends_step, counted_signature=alike)
        if counted:
            monitor.restart()  # counting costs time, so what went by until here is no throughput
        if not ends_step:
            return
        # Lightning's own rule for its own metrics (logger_connector.should_update_logs), without its detours.
        step = trainer.fit_loop.epoch_loop._batches_that_stepped
        every = int(getattr(trainer, "log_every_n_steps", 0))
        if not every or ((step + 1) % every and not trainer.should_stop):
            return
        reading = monitor.read()
        if reading.steps and trainer.is_global_zero:
            assert self._context is not None and self._output is not None
            profile = self._profile if reading.counted_signature else None
            self._output.write_reading(
                reading,
                dp_size=self._context.dp_size,
                model_flops_peak_sec=None if profile is None else profile.model_flops_peak_sec,
                step=step,
            )
