"""One DeepSpeed engine under the profiler: what of its calls belongs to a step, and to which part of it.

A step runs from the end of one ``engine.step`` at the accumulation border to the end of the next. Its parts are
``engine.forward`` and what runs between it and the backward that follows (the loss), the backward, and
``engine.step`` at the border; a wait for a torch DataLoader is seen too, whatever else runs is ``other``.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from lightning_flops.doors.deepspeed_context import engine_device, engine_output, run_context, settle_steps
from lightning_flops.doors.deepspeed_taps import EngineTaps
from lightning_flops.instrument.batches import BatchMeter, tensor_shapes
from lightning_flops.instrument.recorder import State
from lightning_flops.instrument.timing.loader_queue import LoaderQueue, backlogs_of, batches_ahead
from lightning_flops.instrument.timing.settling import steps_to_settle
from lightning_flops.instrument.torch_private import dispatch
from lightning_flops.session.taps import guarded
from lightning_flops.text.printable import package_logger

if TYPE_CHECKING:
    from lightning_flops.analysis.profile import Profile
    from lightning_flops.config import ProfilerConfig
    from lightning_flops.instrument.timing.loader_queue import Feed
    from lightning_flops.records import RunContext

logger = package_logger(__name__)

_EVALUATION = "validation"

_STEPS_BETWEEN_READINGS = 10
"""How often throughput is written where ``steps_per_print`` does not say it; it is DeepSpeed's default for that."""


class EngineProfiler(EngineTaps):
    """The profiler on one engine, on one rank. Made by ``start``; inert after ``take_out``."""

    def __init__(self, engine: Any, *, config: ProfilerConfig, publish: Callable[[Profile], None]) -> None:
        super().__init__(engine, config=config, publish=publish)
        self._meter = BatchMeter(
            batch_size=config.batch_size,
            tokens_per_sample=config.tokens_per_sample,
            note=self._note,
            declared=engine.train_micro_batch_size_per_gpu,
        )
        self._scope: AbstractContextManager[Any] | None = None
        self._keeps_batch = callable(config.batch_size) or callable(config.tokens_per_sample)
        # The first step is whole if no micro-step of it has run yet.
        self._whole_step = int(engine.micro_steps) % int(engine.gradient_accumulation_steps()) == 0
        self._at_border = True
        self._trains_in_eval_mode = False
        self._loss_may_follow = False
        self._micro_step_is_over = False
        self._fetches = 0
        self._fetching = False
        self._iterator: Callable[[], Any] | None = None
        self._iterator_is_used_up = False
        self._modes_in_scope = 0
        self._signs: set[str] = set()
        self._usual_signs: set[str] = set()
        self._builtin: Any = None

    @classmethod
    def start(
        cls, engine: Any, *, config: ProfilerConfig, publish: Callable[[Profile], None], keep_builtin: bool = False
    ) -> EngineProfiler:
        """Tap *engine* from here on.

        Args:
            engine: a ``DeepSpeedEngine``, ready to train.
            config: the settings.
            publish: gets the profile when the window has closed.
            keep_builtin: leave DeepSpeed's own profiler on, if the engine was made with it.
        """
        profiler = cls(engine, config=config, publish=publish)
        profiler._begin()
        if not keep_builtin:
            profiler._stand_builtin_down()
        return profiler

    @guarded
    def _stand_builtin_down(self) -> None:
        """Switch DeepSpeed's own profiler off until we are out; the log lines that it forces can no more be stopped."""
        builtin = self._engine._config.flops_profiler_config
        if builtin.enabled:
            builtin.enabled, self._builtin = False, builtin

    @guarded
    def _begin(self) -> None:
        engine = self._engine
        self._start(
            profile_step=self._config.next_profile_step(steps_done=0),
            settle_steps=settle_steps(engine),
            device=engine_device(engine),
            output=engine_output(engine, self._config),
            dp_size=self._run_context().dp_size,
        )
        self._tap_engine(self._whole_run)

    # ---- what the taps tell

    @guarded
    def _forward_begins(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """A forward of the engine begins; True if it is a part of a step."""
        if self._forward_depth or not self._on_our_thread():
            return False
        self._thread = threading.get_ident()
        if self._at_border and self._is_evaluation():
            self._evaluation_begins()
            return False
        self._evaluation_ends()
        if self._micro_step_is_over:
            self._micro_step_ends(ends_step=False)
        self._at_border = False
        assert self._recorder is not None
        if self._scope is None and self._recorder.counting and self._whole_step:
            # The very first step has no step before it at whose end it could have begun.
            sentence = (
                "The counted step is the first one, which begins with the engine's first forward: what ran before it, "
                "a teacher's forward for one, is not counted."
            )
            self._recorder.note(sentence)  # this window's alone
            if self._writes:
                logger.warning(sentence)
            self._enter_scope()
        if self._batch is None:
            batch = batch_of(args, kwargs)
            self._batch = batch if self._keeps_batch else ()
            self._shapes = tensor_shapes(batch)
        else:
            self._shapes = (*self._shapes, *tensor_shapes((args, kwargs)))
        marked = self._marking and self._whole_step
        if marked:
            self._loss_may_follow = False
            self._enter("forward")
        return marked

    @guarded
    def _forward_ends(self) -> None:
        self._leave()
        self._loss_may_follow = True

    @guarded
    def _backward_begins(self) -> bool:
        """A backward begins; True if it is a part of a step, and not inside another backward."""
        if self._backward_depth or not self._whole_step or not self._on_our_thread():
            return False
        if self._evaluating:
            self._note(
                "A backward ran in what was taken for an evaluation, because the model was in evaluation mode: "
                "the forwards before it are in no figure."
            )
            self._evaluation_ends()
        if self._loss_may_follow:
            assert self._recorder is not None
            self._recorder.claim("forward")
            self._loss_may_follow = False
        self._enter("backward")
        return True

    @guarded
    def _gradients_are_there(self) -> None:
        """A backward is done. Where calls of ``engine.step`` do not tell the micro-steps apart, it ends one."""
        own = vars(self._engine)  # the engine answers for its module, too: what it lacks is asked of the user's model
        self._micro_step_is_over = (
            bool(own.get("inside_no_sync_ctxt"))
            or own.get("_is_gradient_accumulation_boundary") is not None
            or self._leaves_the_border_to_its_user()
        )

    def _leaves_the_border_to_its_user(self) -> bool:
        """Whether every ``engine.step`` updates, which newer DeepSpeeds can be told."""
        managed = getattr(type(self._engine), "managed_gradient_accumulation", None)
        return managed is not None and not managed(self._engine)

    @guarded
    def _step_begins(self) -> bool:
        """``engine.step`` begins; True if it is going to update."""
        if not (self._marking or self._evaluating):
            return False
        self._loss_may_follow = False
        self._evaluation_ends()
        # An engine that leaves the border to its user says that it is there while its step runs only.
        updates = self._leaves_the_border_to_its_user() or bool(self._engine.is_gradient_accumulation_boundary())
        marked = updates and self._whole_step
        if marked:
            self._enter("optimizer")
        return marked

    @guarded
    def _micro_step_ends(self, *, ends_step: bool) -> None:
        self._micro_step_is_over = False
        self._usual_signs |= self._signs
        self._signs.clear()
        recorder = self._recorder
        assert recorder is not None
        if self._batch is None and not ends_step:
            return  # no forward, no border: nothing has run
        if self._whole_step and not (recorder.counting and self._scope is None):
            if ends_step and recorder.marking:
                self._look_at_fetches()
            if self._batch is None:  # an update without a forward of the engine before it
                self._batch, self._shapes = (), ()
            self._batch_ends(self._batch, updates=int(ends_step), ends_step=ends_step)
            if recorder.counting:
                self._compare_batch_size()
            if self._scope is not None:
                self._leave_scope()
                self._after_batch()
        self._batch = None
        if ends_step:
            self._whole_step = True
            self._at_border = True
            self._fetches = 0
            self._trains_in_eval_mode = not self._engine.module.training
        if self._whole_step and not self._out and self._marking:
            self._enter_scope()

    def _compare_batch_size(self) -> None:
        """Say so where the counted batch is not of the size that the engine's config names."""
        found = self._micro_batch_size
        declared = int(self._engine.train_micro_batch_size_per_gpu())
        if found is not None and found != declared and self._config.batch_size is None:
            self._note(
                f"train_micro_batch_size_per_gpu is {declared}, and the tensors of a forward are of {found} samples: "
                "samples are counted by the tensors, unless batch_size is set."
            )

    def _look_at_fetches(self) -> None:
        """Say which waits this step did not show: a transfer never, the wait for a loader where there was none."""
        recorder = self._recorder
        assert recorder is not None
        recorder.cannot_tell_apart(("transfer", "other"))
        if self._fetches <= len(self._step_shapes):  # fewer than one for each micro-step
            recorder.cannot_tell_apart(("data_wait", "transfer", "other"))
            self._note(
                "The wait for data could not be seen, because the batches did not come from a torch DataLoader on the "
                "training thread: it is in other."
            )

    @guarded
    def _fetch_starts(self, iterator: Any) -> bool:
        if self._fetching or not self._on_our_thread():
            return False
        assert self._recorder is not None
        self._loss_may_follow = False
        self._iterator = weakref.ref(iterator, self._iterator_is_gone)
        self._iterator_is_used_up = False
        if self._recorder.counting:
            self._recorder.settle_for(
                steps_to_settle(
                    batches_ahead=batches_ahead(iterator),
                    batches_a_step=int(self._engine.gradient_accumulation_steps()),
                )
            )
        self._enter("data_wait")
        self._fetching = True
        return True

    @guarded
    def _fetch_ends(self, *, used_up: bool) -> None:
        self._fetching = False
        self._leave()
        self._iterator_is_used_up = used_up
        self._fetches += not used_up

    @guarded
    def _loader_starts(self) -> bool:
        if not self._on_our_thread():
            return False
        if not self._iterator_is_used_up:
            self._looks_left("loader", "a DataLoader was started")
        self._enter("epoch restart")
        return True

    # ---- evaluation

    def _is_evaluation(self) -> bool:
        """Whether a forward at a step's border is an evaluation's, and no step's.

        It is if the model is in evaluation mode, and either no gradient is wanted or the last step was trained in
        training mode. Once a training forward has begun a step, whatever runs belongs to the step.
        """
        if self._engine.module.training:
            return False
        return not torch.is_grad_enabled() or not self._trains_in_eval_mode

    @guarded
    def _mode_changes(self, training: bool) -> None:
        if training:
            self._evaluation_ends()
            return
        self._looks_left("evaluation", "engine.eval() was called")
        if self._at_border and not self._trains_in_eval_mode and self._on_our_thread():
            self._evaluation_begins()

    def _evaluation_begins(self) -> None:
        if not self._evaluating:
            self._evaluating = True
            self._training_stops(_EVALUATION)
            self._enter(_EVALUATION)

    def _evaluation_ends(self) -> None:
        if self._evaluating:
            self._evaluating = False
            self._leave()
            self._training_goes_on(_EVALUATION)

    # ---- a step that the loop leaves

    @guarded
    def _looks_left(self, sign: str, in_words: str) -> None:
        """Something happens that a loop does after it has left a step half done, by an exception that no tap sees.

        A loop may do it inside its steps as well. Then they go on to their end, and such a *sign* is none any more.
        """
        half_done = self._batch is not None and not self._micro_step_is_over
        if not half_done or self._forward_depth or self._backward_depth or not self._on_our_thread():
            return
        self._signs.add(sign)
        recorder = self._recorder
        assert recorder is not None
        if sign in self._usual_signs or self._scope is None:  # a step that is only timed tells by its signature
            return
        self._leave_scope()
        ended_by = f"The loop left a step between a forward and its update: {in_words} there."
        if recorder.state is State.COUNTING:
            self._postpone_window(ended_by)
        else:
            recorder.note(f"{ended_by} The window ended with that step.")
            self._report()
            self._await_window(self._config.next_profile_step(steps_done=self._steps_done + 1))
        self._tap_window()
        if self._monitor is not None:
            self._monitor.restart()

    def _postpone_window(self, reason: str) -> None:
        """What was being counted was no whole step: have the window open with the next one."""
        assert self._recorder is not None and self._next_step is not None
        self._recorder.abandon()
        self._window.undo()
        self._in_window = False
        if self._ranks is not None:
            self._ranks.say_absent(self._next_step, "its loop left that step half done")
        self._await_window(self._steps_done + 1)
        sentence = f"{reason} Step {self._steps_done} is not counted, but the one after it."
        self._recorder.note(sentence)
        if self._writes:
            logger.warning(sentence)

    def _iterator_is_gone(self, iterator: object) -> None:
        """A DataLoader's iterator goes with the loop over it; called wherever Python notices, and in any thread."""
        in_handler = dispatch.depth() < self._modes_in_scope  # which torch would put back after us
        if iterator is self._iterator and not self._iterator_is_used_up and not in_handler:
            self._looks_left("loader", "the DataLoader's iterator was dropped")

    # ---- the end

    def _enter_scope(self) -> None:
        self._scope = self._enter_batch_scope()
        self._modes_in_scope = dispatch.depth()

    def _take_out_taps(self) -> None:
        self._leave_scope()
        super()._take_out_taps()
        if self._builtin is not None:
            self._builtin.enabled, self._builtin = True, None

    def _leave_scope(self) -> None:
        scope, self._scope = self._scope, None
        if scope is not None:
            self._leave_batch_scope(scope)

    @guarded
    def _interrupted(self, error: BaseException) -> None:
        """The user's step raised: report what there is, and leave nothing behind."""
        self._leave_scope()
        self.finish(interrupted_by=error)
        if self._writes:
            logger.warning(
                "training raised %s: the FLOPs profiler has reported what it had and taken itself out",
                type(error).__name__,
            )
        self.take_out()

    def end(self) -> None:
        """The run is over: report what there is, and leave nothing behind."""
        self._leave_scope()
        self.finish()
        self.take_out()

    @guarded
    def end_if_left(self) -> None:
        """Another engine starts: a step that is half over was left, by an exception of the loop that no tap saw."""
        if not self._at_border:
            self.end()

    # ---- what the run says

    def _run_context(self) -> RunContext:
        return replace(run_context(self._engine), micro_batch_size=self._micro_batch_size)

    def _feed(self) -> Feed:
        return LoaderQueue(
            lambda: backlogs_of(self._loader_iterators(), note=self._note),
            batches_a_step=int(self._engine.gradient_accumulation_steps()),
        )

    def _loader_iterators(self) -> list[Any]:
        """The iterator that was asked for a batch last, if it is still there."""
        iterator = None if self._iterator is None else self._iterator()
        return [] if iterator is None else [iterator]

    def _optimizers(self) -> Iterable[Any] | None:
        return (self._engine.optimizer,)

    def _loader_workers(self) -> int | None:
        loader = getattr(vars(self._engine).get("training_dataloader"), "dataloader", None)
        return None if loader is None else int(loader.num_workers)

    def _x_axis(self) -> int:
        return int(self._engine.global_steps)

    def _reading_is_due(self) -> bool:
        return self._x_axis() % int(self._engine.steps_per_print() or _STEPS_BETWEEN_READINGS) == 0


def batch_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What a forward was given, in its shortest form: one argument, positional ones, named ones, or both kinds."""
    if not kwargs:
        return args[0] if len(args) == 1 else args
    return kwargs if not args else (args, kwargs)
