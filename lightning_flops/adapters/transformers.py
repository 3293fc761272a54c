"""The Trainer of transformers: one call of ``Trainer.train``, told to a ``Run``.

A step runs from the end of one ``on_step_end`` to the end of the next: the Trainer fetches all batches of the step, and
then trains on one after the other. Its events say where batches and steps end. Methods of the one Trainer at hand are
wrapped: for the whole training those that fetch, train, evaluate, save and log, and while parts are marked those that
are parts of a step. Everything else in a step is ``other``: callbacks, the scheduler, the Trainer's own log.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial, wraps
from typing import TYPE_CHECKING, Any

from accelerate import data_loader as accelerate_loaders
from transformers import Trainer

from lightning_flops.adapters.deepspeed_context import switch_off_builtin
from lightning_flops.adapters.fetches import hear_fetches
from lightning_flops.adapters.transformers_context import (
    LOST,
    NO_TOKENS,
    engine_of,
    facts_of,
    private_names,
)
from lightning_flops.instrument.batches import tensor_shapes
from lightning_flops.instrument.patches import Make, Patches
from lightning_flops.records import BatchTokens, Shapes, TimePhase
from lightning_flops.run.run import Run
from lightning_flops.run.safety import safe
from lightning_flops.sinks.services import TrainerLog

if TYPE_CHECKING:
    from lightning_flops.config import ProfilerConfig
    from lightning_flops.schema.profile import Profile

Tell = Callable[[Run], object]

_NOTHING = nullcontext()


class TrainerRun:
    """The adapter of one training on the batches of *loader*, on one rank; *over* is called if the training raises."""

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
        self._engine = engine_of(trainer)
        self._over = over
        self._log = TrainerLog(trainer.callback_handler.callbacks)
        self._names = private_names()
        self._fetching = False
        self._fetched: deque[tuple[Shapes, BatchTokens | None]] = deque()
        """What the loader has delivered, as it was on the host; accelerate is a batch ahead, and moves it."""
        self._batch: tuple[Any, Shapes, BatchTokens | None] = (), (), None
        """What the Trainer trains on; its shapes are taken before the step may change it."""
        self._in_windows = config.tokens_per_sample is None
        """Windows want the tokens of their batches."""
        self.run = Run(facts_of(trainer, loader, config, log=self._log, mark_parts=self._mark), config, publish)
        self._names.tell(self.run.notes.add_for_run)

    def begin(self) -> None:
        """The first epoch begins."""
        run, trainer = self.run, self._trainer
        run.begin()
        hear_fetches(self, run.undo)
        if self._engine is not None:
            switch_off_builtin(self._engine, run.undo, self._names)
        validation = self._around(partial(Run.outside, what="validation"), Run.inside)
        methods = (
            (trainer, "get_batch_samples", self._in(TrainerRun._fetch)),
            (trainer, "training_step", self._in(TrainerRun._training)),
            (trainer, "evaluate", validation),
            (trainer, "predict", validation),
            (trainer, "_save_checkpoint", self._around(partial(Run.outside, what="checkpoint"), Run.inside)),
            (trainer, "log", self._in(TrainerRun._logging)),
            (trainer, "_run_epoch", self._in(TrainerRun._failing)),
            (trainer.callback_handler, "on_epoch_begin", self._in(TrainerRun._failing)),  # other callbacks' events
        )
        self._wrap(methods, run.undo)
        run.outside("start")  # until the first batch is asked for

    # ---- methods of the Trainer's

    def _wrap(self, methods: Iterable[tuple[Any, str, Make]], undo: ExitStack) -> None:
        taps = Patches()
        undo.callback(taps.undo)
        for owner, name, make in methods:
            if name not in LOST or self._names.has(owner, name):
                taps.replace(owner, name, make)

    def _in(self, scope: Callable[..., AbstractContextManager[None]], *facts: Any) -> Make:
        """A wrapper whose calls run in a *scope* of ours, which gets *facts* and the arguments; it holds us weakly."""
        found = weakref.ref(self)

        def make(original: Callable[..., Any]) -> Callable[..., Any]:
            @wraps(original)
            def call(*args: Any, **kwargs: Any) -> Any:
                me = found()
                with _NOTHING if me is None else scope(me, *facts, *args, **kwargs):
                    return original(*args, **kwargs)

            return call

        return make

    def _around(self, begins: Tell, ends: Tell) -> Make:
        """A wrapper that tells the run where a call begins and where it ends."""
        return self._in(TrainerRun._told, begins, ends)

    @contextmanager
    def _told(self, begins: Tell, ends: Tell, *_: Any, **__: Any) -> Iterator[None]:
        self._tell(begins)
        try:
            yield
        finally:
            self._tell(ends)

    @safe
    def _tell(self, what: Tell) -> None:
        if threading.get_ident() == self.run.thread:
            what(self.run)

    def _mark(self, stack: ExitStack) -> None:
        for owner, name, part, is_whole in self._parts():
            self._wrap([(owner, name, self._around(partial(Run.enter, part=part, counts=is_whole), Run.leave))], stack)

    def _parts(self) -> Iterator[tuple[Any, str, TimePhase, bool]]:
        """Methods that are parts of a step, and whether a call is a whole forward, backward or update."""
        trainer = self._trainer
        yield trainer, "compute_loss", "forward", True
        yield trainer.accelerator, "backward", "backward", True
        if self._engine is not None:  # accelerate has the engine update inside of its own backward
            yield self._engine, "step", "optimizer", True
        else:
            yield trainer.optimizer, "step", "optimizer", True
            yield trainer.accelerator, "clip_grad_norm_", "optimizer", False
            yield trainer.model_wrapped, "zero_grad", "optimizer", False
        yield accelerate_loaders, "send_to_device", "transfer", False
        overridden = next((kind for kind in type(trainer).__mro__ if "_prepare_inputs" in vars(kind)), Trainer)
        if overridden is Trainer:
            yield trainer, "_prepare_inputs", "transfer", False
        else:  # TRL's may generate whole batches there
            self.run.window.recorder.cannot_tell_apart(("transfer", "other"))

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
    def fetch_begins(self, iterator: Any = None) -> None:
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

    def _training(self, model: Any, inputs: Any, *_: Any, **__: Any) -> AbstractContextManager[None]:
        self._batch_begins(inputs)
        return _NOTHING

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
        of_text = isinstance(inputs, Mapping) and "input_ids" in inputs
        if of_text and self._in_windows and self.run.window.is_open and (tokens is None or tokens.real is None):
            self.run.notes.add_for_run(NO_TOKENS)
        self.run.batch_done(inputs, shapes, updates=int(ends_step), ends_step=ends_step, tokens=tokens)

    @safe
    def epoch_ends(self) -> None:
        """An epoch is over; a step that a callback has stopped in its middle goes on in the next one."""
        self._fetched.clear()
        self.run.outside("epoch restart")

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
        """The Trainer logs its own metrics: those that we have go along, but not with an evaluation's."""
        if self.run.is_outside_for("validation"):
            return
        if "train_runtime" in logs:  # its last
            self.run.finish()
        else:
            self.run.log()
        self._log.log_begins(logs)

    @contextmanager
    def _failing(self, *_: Any, **__: Any) -> Iterator[None]:
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
