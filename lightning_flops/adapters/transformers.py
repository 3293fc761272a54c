"""The Trainer of transformers: one call of ``Trainer.train``, a loop whose batches and steps the Trainer's events end.

A step runs from the end of one ``on_step_end`` to the end of the next: the Trainer fetches all batches of the step, and
then trains on one after the other. What comes between two steps, as an evaluation, are methods of the Trainer.
"""

from __future__ import annotations

import inspect
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from accelerate import Accelerator, data_loader as accelerate_loaders
from tqdm.auto import tqdm  # type: ignore[import-untyped]
from transformers import Trainer
from transformers.trainer_callback import CallbackHandler

from lightning_flops.adapters.deepspeed import switch_off_builtin
from lightning_flops.adapters.loop import LoopAdapter
from lightning_flops.adapters.place import Frame, accelerate_frame, log_is_shown, optimizers_in
from lightning_flops.config import BLOCK, ProfilerConfig
from lightning_flops.measure.module_scope import parallel_sizes
from lightning_flops.measure.recorder import steps_to_settle
from lightning_flops.measure.torch_private.optional import fetched_ahead
from lightning_flops.records import BatchTokens, Shapes, TimePhase
from lightning_flops.run.output import LoggedOutput
from lightning_flops.run.run import safe
from lightning_flops.run.unhooked import always_heard
from lightning_flops.signals import Undo
from lightning_flops.sinks.services import TrainerLog
from lightning_flops.units import printable

if TYPE_CHECKING:
    from transformers import TrainerCallback

    from lightning_flops.schema.profile import Profile

_NO_TOKENS = (
    "Tokens could not be counted, because a batch has no attention_mask on the host, and not every token has a label: "
    "those without one may be padding or a prompt. tokens/s needs tokens_per_sample=... to be given."
)


# What belongs to no step, by the Trainer's method that does it.
_LEFT_OUT = {"evaluate": "validation", "predict": "validation", "_save_checkpoint": "checkpoint"}


class TrainerAdapter(LoopAdapter):
    """The adapter of one training on the batches of *loader*, on one rank; *over* is called when the training is."""

    counts_at_fetch = False  # a step's batches are all fetched before the first is used
    unseen = ()

    def __init__(
        self,
        trainer: Trainer,
        loader: Any,
        *,
        config: ProfilerConfig,
        publish: Callable[[Profile], None],
        over: Callable[[], None],
    ) -> None:
        accumulate = trainer.args.gradient_accumulation_steps
        self.trainer = trainer
        self._engine = _engine_of(trainer)
        self._over = over
        self.log = log = TrainerLog(trainer.callback_handler.callbacks)
        self._logs_last: bool | None = None  # the Trainer logs its last metrics now; None: none of its training
        self._is_between_epochs, self._epoch_begins = False, True
        ahead = 1 + fetched_ahead(getattr(loader, "base_dataloader", loader))  # accelerate fetches one more
        super().__init__(
            trainer.model_wrapped,
            optimizers_in(trainer.optimizer),
            config=config,
            publish=publish,
            frame=_frame_of(trainer),
            output=LoggedOutput(
                config,
                loggers=log,
                folder=lambda: log.folder() or str(trainer.args.output_dir),  # so that TensorBoard's tab finds ours
                # Above the Trainer's progress bar, if it shows one.
                announce=lambda sentence: None if log_is_shown() else tqdm.write(printable(sentence)),
            ),
            root=trainer.model,  # made by now
            whole=getattr(self._engine, "module", trainer.model_wrapped),  # with its wrappers, without an engine
            settle_steps=steps_to_settle(batches_ahead=ahead, batches_a_step=accumulate),
        )
        self._steps.known.says_ends = self._steps.known.says_outside = True
        self._known.accumulate = accumulate
        # Accelerate moves them; what it skips in a training that goes on is dropped here.
        self._known.reads_fetched = True
        self.run.tokens.fetched = deque(maxlen=accumulate + 1)
        self.run.tokens.reads = self._wants_tokens = config.tokens_per_sample is None

    def x_axis(self) -> int:
        """The Trainer's own step."""
        return int(self.trainer.state.global_step)

    def begin(self) -> None:
        """The first epoch begins."""
        run, trainer, kind = self.run, self.trainer, TrainerAdapter
        if self._engine is not None:
            switch_off_builtin(self._engine, run)
        self.hear(type(trainer), "log", run.undo, begins=kind._log_begins, ends=kind._log_ends, of=trainer)
        self.hear(CallbackHandler, "on_epoch_begin", run.undo, raises=kind.finish, of=trainer.callback_handler)
        if hasattr(trainer, "_run_epoch"):  # otherwise what is on torch after an error stays until it trains again
            self.hear(type(trainer), "_run_epoch", run.undo, raises=kind.finish, of=trainer)
        for name, what in _LEFT_OUT.items():
            begins, ends = partial(kind._leaves, what=what), kind._comes_back
            self.hear(type(trainer), name, run.undo, begins=begins, ends=ends, of=trainer)
        super().begin()
        self._goes_away("start")  # until the first batch is asked for

    def _hear_updates(self, undo: Undo) -> None:
        if self._engine is None:
            super()._hear_updates(undo)
            return
        # Accelerate has it update inside of its own backward, which is more than autograd's.
        kind, engine, accelerator = TrainerAdapter, self._engine, self.trainer.accelerator
        self.hear(Accelerator, "backward", undo, begins=kind.backward_begins, ends=kind.backward_ends, of=accelerator)
        self.hear(type(engine), "step", undo, begins=kind.update_begins, ends=kind.update_ends, of=engine)

    # ---- parts of a step that no hook of torch's shows, while they are marked

    def mark_parts(self, stack: Undo) -> None:
        """Hear what the Trainer and accelerate do around a step's parts."""
        super().mark_parts(stack)
        trainer = self.trainer
        parts: tuple[tuple[Any, str, TimePhase, Any], ...] = (
            (type(trainer), "compute_loss", "forward", trainer),
            (accelerate_loaders, "send_to_device", "transfer", None),
        )
        for owner, name, part, of in parts:
            begins, ends = partial(TrainerAdapter._part_begins, part=part), TrainerAdapter._part_ends
            self.hear(owner, name, stack, begins=begins, ends=ends, of=of)

    # ---- batches

    def fetch_begins(self, source: Any) -> None:
        """A DataLoader's iterator is asked for a batch: the first one of an epoch feeds its steps."""
        if self._epoch_begins:
            self._epoch_begins = False
            self._steps.known.feeders.add(self._name(source))
        super().fetch_begins(source)

    def _given(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if "num_items_in_batch" in kwargs:  # that of all batches of a step
            kwargs = {name: value for name, value in kwargs.items() if name != "num_items_in_batch"}
        return kwargs if kwargs and not args else super()._given(args, kwargs)

    def _tokens(self, given: Any, shapes: Shapes) -> BatchTokens | None:
        tokens = super()._tokens(given, shapes)
        is_text = isinstance(given, dict) and "input_ids" in given
        if is_text and (tokens is None or tokens.real is None) and self._wants_tokens and self.run.window.is_open:
            self.run.notes.add_for_run(_NO_TOKENS)
        return tokens

    # ---- between steps

    def _leaves(self, *_: Any, what: str, **__: Any) -> None:
        self._goes_away("")
        self.leave_out(what)

    def _comes_back(self, _: Any) -> None:
        self.take_in()
        if self._is_between_epochs:
            self._goes_away("epoch restart")

    @safe
    def epoch_begins(self) -> None:
        """An epoch begins; what is asked for a batch next has those of the training."""
        self._is_between_epochs, self._epoch_begins = False, True

    @safe
    def epoch_ends(self) -> None:
        """An epoch is over; a step that a callback has stopped in its middle goes on in the next one."""
        self.run.tokens.fetched.clear()
        self._is_between_epochs = True
        self._goes_away("epoch restart")

    # ---- the Trainer's log, and the end

    def _log_begins(self, _: Any, logs: dict[str, float], *__: Any, **___: Any) -> None:
        """The Trainer logs its own metrics, those of its training or of an evaluation."""
        self._logs_last = None if self._steps.inside.left_out else "train_runtime" in logs

    def _log_ends(self, _: Any) -> None:
        """It has: those that we have follow, but not in an evaluation."""
        if self._logs_last is None:
            return
        trainer = self.trainer
        self.run.finish() if self._logs_last else self.run.log()
        self.log.log_ends(trainer.args, trainer.state, trainer.control)

    @safe
    @always_heard
    def finish(self, error: BaseException | None = None) -> None:
        """The training is over, or has raised *error*: report what there is, if its last log has not said so."""
        self.run.finish(interrupted_by=error)
        self._over()


# ---- what a Trainer knows about its run, and where its reports go; nothing here asks another rank


def trainer_of(callback: TrainerCallback) -> Trainer | None:
    """The Trainer that is calling an event of *callback*; None if no Trainer of transformers does.

    A Trainer gives its callbacks the model, the optimizer and much more, but never itself, and nothing that it gives
    leads to it. The method of it that runs its loop is on the stack, so we look there, once in a training.
    """
    frame = inspect.currentframe()
    while frame is not None:
        first = frame.f_code.co_varnames[:1]
        owner = frame.f_locals.get(first[0]) if first else None
        handler = getattr(owner, "callback_handler", None) if isinstance(owner, Trainer) else None
        if handler is not None and any(other is callback for other in handler.callbacks):
            return owner
        frame = frame.f_back
    return None


def _engine_of(trainer: Trainer) -> Any:
    return trainer.model_wrapped if getattr(trainer, "is_deepspeed_enabled", False) else None


def block_of(trainer: Trainer) -> object | None:
    """The ``"flops_profiler"`` block of *trainer*'s DeepSpeed config; None if there is none."""
    plugin = getattr(trainer.accelerator.state, "deepspeed_plugin", None) if _engine_of(trainer) is not None else None
    config = getattr(plugin, "deepspeed_config", None)
    return config.get(BLOCK) if isinstance(config, Mapping) else None


def _frame_of(trainer: Trainer) -> Frame:
    frame = replace(accelerate_frame(trainer.accelerator, trainer.model_wrapped, framework="transformers"), writers=())
    if (engine := _engine_of(trainer)) is None:
        return frame
    return replace(frame, sizes=parallel_sizes(engine), strategy=f"ZeRO-{int(engine.zero_optimization_stage())}")
