"""The Trainer of transformers: one call of ``Trainer.train``, told to a ``Run``.

A step runs from the end of one ``on_step_end`` to the end of the next: the Trainer fetches all batches of the step, and
then trains on one after the other. Its events say where batches and steps end. Methods of the one Trainer at hand are
wrapped: for the whole training those that fetch, evaluate, save and log, and while parts are marked those that are parts
of a step. Everything else in a step is ``other``: callbacks, the scheduler, the Trainer's own log.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from accelerate import data_loader as accelerate_loaders
from transformers import Trainer

from lightning_flops.adapters.fetches import hear_fetches
from lightning_flops.adapters.transformers_context import (
    NO_TOKENS,
    builtin_stands_down,
    engine_of,
    private_names,
    run_context,
    settle_steps,
    torch_loader,
    training_output,
)
from lightning_flops.instrument.batches import tensor_shapes
from lightning_flops.instrument.patches import Make, Patches
from lightning_flops.records import BatchTokens, Shapes, TimePhase
from lightning_flops.run.adapter import Facts
from lightning_flops.run.run import Run
from lightning_flops.run.safety import safe
from lightning_flops.sinks.trainer_log import TrainerLogSink

if TYPE_CHECKING:
    from lightning_flops.config import ProfilerConfig
    from lightning_flops.schema.profile import Profile


class TrainerRun:
    """The adapter of one training, on one rank.

    Args:
        trainer: about to begin its first epoch.
        loader: what it takes its batches from.
        config: the settings.
        publish: gets each profile when its report is there.
        over: is called when the training has raised, after everything of ours is removed.
    """

    def __init__(
        self,
        trainer: Trainer,
        loader: Any,
        *,
        config: ProfilerConfig,
        publish: Callable[[Profile], None],
        over: Callable[[], None],
    ) -> None:
        self._trainer = trainer
        self._engine = engine = engine_of(trainer)
        self._over = over
        self._log = TrainerLogSink(trainer.callback_handler.callbacks)
        self._names = private_names()
        self._fetching = self._evaluating = False
        self._fetched: deque[tuple[Shapes, BatchTokens | None]] = deque()
        """What the loader has delivered, as it was on the host; accelerate is a batch ahead, and moves it."""
        self._batch: tuple[Any, Shapes, BatchTokens | None] = (), (), None
        """What the Trainer trains on; its shapes are taken before the step may change it."""
        self._in_windows = config.tokens_per_sample is None
        """A window wants the tokens of its batches."""
        args, model, context = trainer.args, trainer.model, run_context(trainer)
        assert model is not None
        workers = getattr(torch_loader(loader), "num_workers", None)
        facts = Facts(
            root=model,
            device=args.device,
            output=training_output(trainer, config, log=self._log),
            context=lambda: replace(context, accumulate=args.gradient_accumulation_steps),
            x_axis=lambda: int(trainer.state.global_step),
            optimizers=lambda: (getattr(trainer.optimizer, "optimizer", trainer.optimizer),),
            whole_model=lambda: trainer.model_wrapped if engine is None else engine.module,
            rank=args.process_index,
            world_size=args.world_size,
            profile_step=config.next_profile_step(steps_done=0),
            settle_steps=settle_steps(trainer, loader),
            loader_workers=lambda: workers,
            mark_parts=self._mark,
        )
        self.run = Run(facts, config, publish)
        self._names.tell(self.run.notes.add_for_run)

    def begin(self) -> None:
        """The first epoch begins."""
        trainer, run, names, taps = self._trainer, self.run, self._names, Patches()
        run.begin()
        run.undo.callback(taps.undo)
        hear_fetches(self, run.undo)
        if self._engine is not None:
            builtin_stands_down(self._engine, names, run.undo)
        taps.replace(trainer, "get_batch_samples", self._in(TrainerRun._fetch))
        taps.replace(trainer, "training_step", self._in(TrainerRun._training))
        taps.replace(trainer, "log", self._in(TrainerRun._logging))
        for name in ("evaluate", "predict"):
            taps.replace(trainer, name, self._in(TrainerRun._outside, "validation"))
        if names.has(trainer, "_save_checkpoint"):
            taps.replace(trainer, "_save_checkpoint", self._in(TrainerRun._outside, "checkpoint"))
        if names.has(trainer, "_run_epoch"):
            taps.replace(trainer, "_run_epoch", self._in(TrainerRun._epoch))
        run.outside("start")  # until the first batch is asked for

    def _in(self, scope: Callable[..., AbstractContextManager[None]], *facts: Any) -> Make:
        """A wrapper whose calls run in a *scope* of ours, which gets *facts* and the arguments; it holds us weakly."""
        found = weakref.ref(self)

        def make(original: Callable[..., Any]) -> Callable[..., Any]:
            @functools.wraps(original)
            def call(*args: Any, **kwargs: Any) -> Any:
                me = found()
                if me is None:
                    return original(*args, **kwargs)
                with scope(me, *facts, *args, **kwargs):
                    return original(*args, **kwargs)

            return call

        return make

    # ---- parts of a step

    def _mark(self, stack: ExitStack) -> None:
        taps = Patches()
        stack.callback(taps.undo)
        for owner, name, part, counts in self._parts():
            taps.replace(owner, name, self._in(TrainerRun._part, part, counts))

    def _parts(self) -> Iterator[tuple[Any, str, TimePhase, bool]]:
        """Methods that are parts of a step, and whether a call is a whole forward, backward or update."""
        trainer, names = self._trainer, self._names
        yield trainer, "compute_loss", "forward", True
        yield trainer.accelerator, "backward", "backward", True
        if self._engine is not None:  # accelerate has the engine update inside of its own backward
            yield self._engine, "step", "optimizer", True
        else:
            yield trainer.optimizer, "step", "optimizer", True
            yield trainer.accelerator, "clip_grad_norm_", "optimizer", False
            yield trainer.model_wrapped, "zero_grad", "optimizer", False
        if names.has(accelerate_loaders, "send_to_device"):
            yield accelerate_loaders, "send_to_device", "transfer", False
        if not names.has(trainer, "_prepare_inputs"):
            return
        if next(kind for kind in type(trainer).__mro__ if "_prepare_inputs" in vars(kind)) is Trainer:
            yield trainer, "_prepare_inputs", "transfer", False
        else:  # TRL's may generate whole batches there
            self.run.window.recorder.cannot_tell_apart(("transfer", "other"))

    @contextmanager
    def _part(self, part: TimePhase, counts: bool, *_: Any, **__: Any) -> Iterator[None]:
        self._enter(part, counts)
        try:
            yield
        finally:
            self._leave()

    @safe
    def _enter(self, part: TimePhase, counts: bool) -> None:
        if threading.get_ident() == self.run.thread:
            self.run.enter(part, counts=counts)

    @safe
    def _leave(self) -> None:
        if threading.get_ident() == self.run.thread:
            self.run.leave()

    # ---- what belongs to no step

    @contextmanager
    def _outside(self, what: str, *_: Any, **__: Any) -> Iterator[None]:
        self._evaluating = what == "validation"
        self.outside(what)
        try:
            yield
        finally:
            self._evaluating = False
            self._inside()

    @safe
    def outside(self, what: str) -> None:
        """*what* begins, which belongs to no step; an epoch's end does not wait for batches that it has fetched."""
        self.run.outside(what)

    @safe
    def _inside(self) -> None:
        self.run.inside()

    # ---- batches

    @contextmanager
    def _fetch(self, *_: Any, **__: Any) -> Iterator[None]:
        """The Trainer fetches the batches of a step, and counts what is in them."""
        self._fetching = True
        try:
            yield
            self._steps_go_on()
        finally:
            self._fetching = False

    @safe
    def _steps_go_on(self) -> None:
        while self.run.is_outside:
            self.run.inside()
        # A training that goes on from a checkpoint may skip batches; one is fetched ahead.
        while len(self._fetched) > self._trainer.args.gradient_accumulation_steps + 1:
            self._fetched.popleft()

    @safe
    def fetch_begins(self) -> None:
        """A DataLoader is asked for a batch; it has started its workers."""
        if self._fetching:
            self._steps_go_on()
            self.run.fetch_begins()

    @safe
    def fetch_ends(self, batch: Any) -> None:
        """It has delivered *batch*; while it is on the host, its tokens are read without waiting for a device."""
        if self._fetching:
            self.run.fetch_ends()
            if batch is not None and self._reads_tokens():
                self._fetched.append((tensor_shapes(batch), self.run.tokens.of(batch)))

    def _reads_tokens(self) -> bool:
        return self.run.tokens.reads or (self._in_windows and self.run.window.is_open)

    @contextmanager
    def _training(self, model: Any, inputs: Any, *_: Any, **__: Any) -> Iterator[None]:
        self._batch_begins(inputs)
        yield

    @safe
    def _batch_begins(self, inputs: Any) -> None:
        shapes = tensor_shapes(inputs)
        self._batch = inputs, shapes, self._tokens_of(inputs, shapes)
        self.run.batch_begins(*self._batch[1:])

    def _tokens_of(self, inputs: Any, shapes: Shapes) -> BatchTokens | None:
        while self._fetched:
            read, tokens = self._fetched.popleft()
            if read == shapes:
                return tokens
        return self.run.tokens.of(inputs) if self._reads_tokens() else None

    @safe
    def batch_ends(self, *, ends_step: bool) -> None:
        """The Trainer is through with a batch, and perhaps with a step."""
        (inputs, shapes, tokens), self._batch = self._batch, ((), (), None)
        if self._in_windows and self.run.window.is_open and isinstance(inputs, Mapping) and "input_ids" in inputs:
            if tokens is None or tokens.real is None:
                self.run.notes.add_for_run(NO_TOKENS)
        self.run.batch_done(inputs, shapes, updates=int(ends_step), ends_step=ends_step, tokens=tokens)

    def epoch_ends(self) -> None:
        """An epoch is over; a step that a callback has stopped in its middle goes on in the next one."""
        self._fetched.clear()
        self.outside("epoch restart")

    # ---- the Trainer's log, and the end

    @contextmanager
    def _logging(self, logs: Any, *_: Any, **__: Any) -> Iterator[None]:
        self._log_begins(logs)
        try:
            yield
        finally:
            self._log.log_ends(logs)

    @safe
    def _log_begins(self, logs: Any) -> None:
        """The Trainer logs its own metrics: those that we have go along."""
        if self._evaluating or not isinstance(logs, dict):
            return
        if "train_runtime" in logs:  # its last: what is measured goes along
            self.run.finish()
        else:
            self.run.log()
        self._log.log_begins(logs)

    @contextmanager
    def _epoch(self, *_: Any, **__: Any) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            self.finish(interrupted_by=error)
            self._over()
            raise

    @safe
    def finish(self, *, interrupted_by: BaseException | None = None) -> None:
        """The training is over: report what there is, if its last log has not said so."""
        self.run.finish(interrupted_by=interrupted_by)
