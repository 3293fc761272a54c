"""The door of one ``Trainer.train`` of transformers: which of its functions are wrapped, and what their calls mean.

A step runs from the end of one ``on_step_end`` to the end of the next: the Trainer fetches all batches of the step, and
then trains on one after the other. Its parts are the wait for those batches, their transfer, ``compute_loss``, the
backward of autograd, and the update with clipping before it and ``zero_grad`` after it. Everything else is ``other``:
hooks of callbacks, the scheduler, the Trainer's own log. Evaluation and saving belong to no step.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from accelerate import data_loader as accelerate_loaders
from transformers import Trainer

from lightning_flops.doors.deepspeed_builtin import EngineProfiler
from lightning_flops.doors.hf_batches import NOTHING, FetchedBatches
from lightning_flops.doors.hf_context import (
    engine_of,
    loads_onto_device,
    private_names,
    root_of,
    run_context,
    settle_steps,
    torch_loader,
    training_output,
)
from lightning_flops.instrument.batches import BatchMeter, tensor_shapes
from lightning_flops.instrument.patches import Patches
from lightning_flops.instrument.timing.loader_queue import LoaderQueue, backlogs_of
from lightning_flops.records import Shapes
from lightning_flops.session.door import RunPlan
from lightning_flops.session.session import Session
from lightning_flops.sinks.trainer_log import TrainerLogSink

if TYPE_CHECKING:
    from torch import nn

    from lightning_flops.config import ProfilerConfig
    from lightning_flops.instrument.patches import Make
    from lightning_flops.instrument.timing.loader_queue import Feed
    from lightning_flops.records import BatchTokens, RunContext
    from lightning_flops.schema.profile import Profile
    from lightning_flops.session.border import Border

_VALIDATION, _CHECKPOINT = "validation", "checkpoint"


class HfTraining:
    """The door of one training, on one rank.

    Args:
        trainer: about to begin its first epoch.
        loader: what it takes its batches from.
        config: the settings.
        publish: gets each profile when its window has closed.
        over: is called when the training has raised, after everything of ours is removed.
    """

    _context: RunContext
    """As it was when the training began."""

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
        self._loader = loader
        self._config = config
        self._over = over
        self._engine = engine_of(trainer)
        self._builtin = EngineProfiler()
        self._log = TrainerLogSink(trainer.callback_handler.callbacks)
        self._thread = threading.get_ident()
        self._between_epochs = True
        self._fetching = False
        self._fetched: int | None = None
        """The identity of the list of batches that is known, while the Trainer fetches a step."""
        self._in_loop = False
        """The Trainer fetches the batches of a step."""
        self._passing: deque[tuple[Shapes, BatchTokens | None]] = deque()
        """Batches that the Trainer has not trained on yet, of a step that only the monitor needs to know of."""
        self._taps_of_steps = Patches()
        """Wrappers of what is called in every step of the run."""
        self._only_logs = False
        """All that is left to do is to give to the Trainer's log what waits for it."""
        self._stepping = False
        """The Trainer runs the forward and the backward of a batch."""
        self._in_backward = False
        self._evaluating = False
        self._finished = False
        self._iterator: Callable[[], Any] = lambda: None
        self._batches = FetchedBatches(lambda sentence: self.session.notes.add_for_run(sentence))
        self._names = private_names()
        self.session = Session(
            self,
            root_of(trainer),
            config=config,
            publish=publish,
            rank=trainer.args.process_index,
            world_size=trainer.args.world_size,
        )
        self._names.tell(self.session.notes.add_for_run)
        self._batch_log, self._tokens = self.session.log, self.session.tokens  # asked in every step of the run

    @property
    def border(self) -> Border:
        """Catches what our code raises."""
        return self.session.border

    # ---- how the training begins

    def plan(self) -> RunPlan:
        """How the training begins; its steps are counted from here, also where it goes on from a checkpoint."""
        self._context = run_context(self._trainer)
        return RunPlan(
            profile_step=self._config.next_profile_step(steps_done=0),
            settle_steps=settle_steps(self._trainer, self._loader),
            device=self._trainer.args.device,
            dp_size=self._context.dp_size,
            output=training_output(self._trainer, self._config, log=self._log),
            holds_back=self._waits_for_log,
        )

    def meter(self, note: Callable[[str], None]) -> BatchMeter:
        """Finds samples in the tensors of a batch, and tokens by its mask or its labels, unless the settings tell."""
        return BatchMeter.by_settings(self._config, note, found_tokens=self._batches.tokens)

    # ---- taps of the loop

    def tap_run(self, taps: Patches) -> None:
        """Wrap what shows waiting for data, evaluation, checkpoints, logs, and whether the training raises."""
        trainer, make, names = self._trainer, self.session.taps, self._names
        self.session.training_stops("epoch restart")  # until the first epoch's first batch
        self._taps_of_steps.replace(
            trainer,
            "get_batch_samples",
            make.spared(
                self._fetch_begins, fails=self._fetch_fails, returns=self._step_is_fetched, passes=self._batches_pass
            ),
        )
        if trainer.args.world_size > 1:
            self._tap_counting_of_items(self._taps_of_steps)  # there the ranks wait for one another
        if (loader := torch_loader(self._loader)) is not None:
            taps.replace(loader, "__iter__", make.around(_begun, None, returns=self._loader_starts))
        if self.session.tokens.reads and loads_onto_device(trainer) and names.has(accelerate_loaders, "send_to_device"):
            reading = make.around(
                self._batch_is_sent, None, returns=lambda found, moved: self._batches.read(*found, moved)
            )
            self._taps_of_steps.replace(accelerate_loaders, "send_to_device", reading)
        taps.replace(trainer, "evaluate", self._around_evaluation())
        if names.has(trainer, "_save_checkpoint"):
            taps.replace(trainer, "_save_checkpoint", make.outside_of_steps(_CHECKPOINT))
        taps.replace(trainer, "log", make.around(self._log_begins, self._log_ends))
        failing = make.around(_begun, None, fails=self._interrupted)
        if names.has(trainer, "_run_epoch"):
            taps.replace(trainer, "_run_epoch", failing)
        if names.has(trainer, "_finalize_training"):
            finishing = make.before(self.finish)
            taps.replace(trainer, "_finalize_training", lambda finalize: failing(finishing(finalize)))
        # What a callback raises when another epoch begins passes by the Trainer's own methods.
        taps.replace(trainer.callback_handler, "on_epoch_begin", failing)
        if self._engine is not None:
            self._builtin.stand_down(self._engine, names=names)

    def tap_parts(self, taps: Patches) -> None:
        """Wrap the parts of a step."""
        trainer, make, names = self._trainer, self.session.taps, self._names
        if trainer.args.world_size == 1:
            self._tap_counting_of_items(taps)
        taps.replace(trainer, "training_step", make.around(self._batch_begins, self._batch_is_done))
        taps.replace(trainer, "compute_loss", self._part_of_batch("forward"))
        if names.has(trainer, "_prepare_inputs"):
            if type(trainer)._prepare_inputs is vars(Trainer)["_prepare_inputs"]:
                taps.replace(trainer, "_prepare_inputs", self._part_of_batch("transfer"))
            else:  # TRL's may generate whole batches there
                self.session.window.recorder.cannot_tell_apart(("transfer", "other"))
        if names.has(accelerate_loaders, "send_to_device"):
            taps.replace(accelerate_loaders, "send_to_device", self._around_transfer())
        backward = make.around(self._backward_begins, self._backward_ends)
        taps.replace(torch.autograd, "backward", backward)
        clears = make.part("optimizer", counts=False)
        if self._engine is not None:
            # accelerate has the engine update inside of its own backward.
            taps.replace(self._engine, "backward", backward)
            taps.replace(self._engine, "step", self._part_of_batch("optimizer"))
            return
        taps.replace(trainer.optimizer, "step", make.part("optimizer"))
        taps.replace(trainer.accelerator, "clip_grad_norm_", clears)
        taps.replace(trainer.model_wrapped, "zero_grad", clears)

    def _batch_is_sent(self, batch: Any, *args: Any, **kwargs: Any) -> tuple[BatchTokens | None] | None:
        """A batch is going to be moved to the device: its tokens can still be read without waiting for that."""
        if threading.get_ident() != self._thread or not self.session.tokens.reads:
            return None
        if not (self._in_loop or self._is_spared):
            return None
        return (self.session.tokens.of(batch),)

    def _tap_counting_of_items(self, taps: Patches) -> None:
        """Wrap what the Trainer does between fetching the batches of a step and training on them."""
        if self._names.has(self._trainer, "_get_num_items_in_batch"):
            around = self.session.taps.around(self._items_are_counted, None)
            taps.replace(self._trainer, "_get_num_items_in_batch", around)

    def _part_of_batch(self, part: str) -> Make:
        """A wrapper that books its calls as *part* while the Trainer trains on a batch, and not while it evaluates."""
        make = self.session.taps

        def wrapper(original: Callable[..., Any]) -> Callable[..., Any]:
            inside = make.part(part)(original)

            def choose(_: Any, *args: Any, **kwargs: Any) -> Any:
                return inside if self._stepping else original, args, kwargs

            return make.instead(choose)(original)

        return wrapper

    def _around_transfer(self) -> Make:
        make = self.session.taps

        def wrapper(send: Callable[..., Any]) -> Callable[..., Any]:
            inside = make.part("transfer")(send)

            def begins(batch: Any, *args: Any, **kwargs: Any) -> tuple[Any]:
                return (batch,)

            def moved(kept: tuple[Any], result: Any) -> None:
                self._batches.moved(kept[0], result)

            seen = make.around(begins, None, returns=moved)(inside)

            def choose(_: Any, *args: Any, **kwargs: Any) -> Any:
                ours = self._in_loop and threading.get_ident() == self._thread
                return seen if ours else send, args, kwargs

            return make.instead(choose)(send)

        return wrapper

    def _around_evaluation(self) -> Make:
        outside = self.session.taps.outside_of_steps(_VALIDATION)

        def begins(*args: Any, **kwargs: Any) -> bool | None:
            if self._evaluating:
                return None  # a dict of datasets: the Trainer evaluates one after the other
            self._evaluating = True
            return True

        def ends(_: bool) -> None:
            self._evaluating = False

        noted = self.session.taps.around(begins, ends)
        return lambda evaluate: noted(outside(evaluate))

    # ---- batches are fetched

    def _fetch_begins(self, *args: Any, **kwargs: Any) -> bool:
        self._in_loop = True
        self._fetched = None
        if self.session.window.marking and not self.session.window.in_scope:
            self.session.window.enter_scope()
        if not self._between_epochs:
            self._fetching = True
            self.session.fetch_begins()
        return True

    def _loader_starts(self, _: object, iterator: Any) -> None:
        """The loader of torch has started its workers: from here on the Trainer waits for its first batch."""
        if not (self._in_loop or self._is_spared):
            return
        self._iterator = weakref.ref(iterator)
        if self._between_epochs:
            self._epoch_begins()
        self._fetching = self._in_loop
        self.session.fetch_begins()

    def _items_are_counted(self, batches: Any, *args: Any, **kwargs: Any) -> None:
        """The Trainer has the *batches* of a step, and counts what is in them: it does not wait for data any more."""
        if self._is_spared:
            self._batches_pass(batches)
        elif self._in_loop:
            self._batches_are_there(batches)

    def _step_is_fetched(self, _: object, result: Any) -> None:
        self._in_loop = False
        batches = result[0] if type(result) is tuple else result
        if id(batches) != self._fetched:
            self._batches_are_there(batches)

    @property
    def _is_spared(self) -> bool:
        """The batches of a step are fetched, and nobody but the monitor needs to know of the step."""
        return self.session.log.fetch_since is not None and not self._fetching

    def _batches_pass(self, result: Any) -> None:
        """The Trainer has waited for the batches of a step, and nobody but the monitor needs to know of it."""
        log, passing, tokens = self._batch_log, self._passing, self._tokens
        if log.fetch_since is None:
            return  # it is known already
        log.fetch_ends()
        batches = result[0] if type(result) is tuple else result
        if passing:
            passing.clear()
        if tokens.reads or self._batches.were_read or type(batches) is not list:
            passing.extend(self._batches.passing(batches, tokens))
            return
        for batch in batches:
            passing.append((tensor_shapes(batch), None))

    def _batches_are_there(self, batches: Any) -> None:
        if self._fetching:
            self._fetching = False
            self.session.fetch_ends()
        if self._between_epochs:  # the loader's start was not seen: the first wait of the epoch does not count
            self._epoch_begins()
        self._fetched = id(batches)
        self._batches.fetched(batches, counts=self.session.window.is_open and self._config.tokens_per_sample is None)
        if self.session.flops.wants_shapes:
            tokens = self._batches.read_waiting(self.session.tokens)
            self.session.step_begins(self._batches.shapes, tokens)

    def _fetch_fails(self, _: object, error: BaseException) -> None:
        self._in_loop = False
        if self._fetching:
            self._fetching = False
            self.session.fetch_ends()

    def _epoch_begins(self) -> None:
        self._between_epochs = False
        self.session.epoch_begins()
        window = self.session.window
        if window.marking and not window.in_scope:  # the epoch's first step is counted
            window.enter_scope()

    # ---- the parts of a step

    def _batch_begins(self, *args: Any, **kwargs: Any) -> bool:
        self._stepping = True
        return True

    def _batch_is_done(self, _: bool) -> None:
        self._stepping = False

    def _backward_begins(self, *args: Any, **kwargs: Any) -> bool | None:
        """A backward begins; None if it is inside another one, which DeepSpeed and checkpointed activations do."""
        if self._in_backward or not self._stepping or threading.get_ident() != self._thread:
            return None
        self._in_backward = True
        self.session.enter("backward")
        return True

    def _backward_ends(self, _: bool) -> None:
        self._in_backward = False
        self.session.leave()

    # ---- events of the callback; their caller catches errors

    def batch_ends(self, *, ends_step: bool) -> None:
        """The Trainer is through with a batch, and perhaps with a step."""
        session, passing, updates = self.session, self._passing, 1 if ends_step else 0
        if passing:
            shapes, tokens = passing.popleft()
            if not self._batch_log.note(shapes, updates, ends_step, tokens):  # most of the run are noted
                session.batch((), shapes, updates=updates, ends_step=ends_step, tokens=tokens)
            elif not self._batch_log.spare:
                session.look(logs=False)
            return
        if session.out or self._only_logs:
            return
        batch = self._batches.next()
        tokens = batch.tokens
        if session.tokens.reads and not batch.was_read:
            tokens = session.tokens.of(batch.inputs)
        session.batch(batch.inputs, batch.shapes, updates=updates, ends_step=ends_step, tokens=tokens)
        if session.window.in_scope:
            session.window.leave_scope()
            session.after_batch()
            if not ends_step and session.window.marking:
                session.window.enter_scope()
        self._batches.current = NOTHING

    def epoch_ends(self) -> None:
        """An epoch is over; what a callback has stopped in the middle of a step goes on in the next epoch."""
        if self.session.window.in_scope:
            self.session.window.leave_scope()
        self._batches.forget()
        self._passing.clear()
        self._between_epochs = True
        self.session.epoch_ends()

    def finish(self) -> None:
        """The training is over: report what there is."""
        if not self._finished:
            self._finished = True
            self.session.finish()

    def _interrupted(self, _: object, error: BaseException) -> None:
        """The training raised *error*: report what there is, and leave nothing behind."""
        if self.session.window.in_scope:
            self.session.window.leave_scope()
        if not self._finished:
            self._finished = True
            self.session.finish(interrupted_by=error)
        self.session.take_out()
        self._over()

    def _log_begins(self, logs: Any, *args: Any, **kwargs: Any) -> Any:
        """The Trainer logs its own metrics: those that we have go along."""
        if self._evaluating or not isinstance(logs, dict):
            return None
        if not self._finished:
            self.session.run_logs()
        self._log.log_begins(logs)
        return logs

    def _log_ends(self, logs: dict[str, float]) -> None:
        self._log.log_ends(logs)
        if not self._finished:
            self.session.run_has_logged()

    # ---- what the session asks

    def window_opens(self) -> None:
        """The step that begins now is counted."""

    def context(self) -> RunContext:
        """Where the training runs; how many batches are accumulated may have changed since it began."""
        return replace(self._context, accumulate=self._trainer.args.gradient_accumulation_steps)

    def optimizers(self) -> Iterable[Any]:
        """The Trainer's optimizer, without accelerate's wrapper."""
        if self._engine is not None:
            return (self._engine.optimizer,)
        optimizer = self._trainer.optimizer
        return (getattr(optimizer, "optimizer", optimizer),)

    def whole_model(self) -> nn.Module:
        """The model in its wrappers."""
        model: nn.Module = self._engine.module if self._engine is not None else self._trainer.model_wrapped
        return model

    def loader_workers(self) -> int | None:
        """Worker processes of the training loader."""
        workers = getattr(torch_loader(self._loader), "num_workers", None)
        return workers if isinstance(workers, int) else None

    def feed(self) -> Feed:
        """The queue of the training loader."""
        return LoaderQueue(self._backlogs, batches_a_step=self._trainer.args.gradient_accumulation_steps)

    def _backlogs(self) -> Any:
        iterator = self._iterator()
        return backlogs_of([] if iterator is None else [iterator], note=self.session.notes.add_for_run)

    def x_axis(self) -> int:
        """The Trainer's own step, which goes on from a checkpoint's."""
        return int(self._trainer.state.global_step)

    def _waits_for_log(self) -> bool:
        """Whether something waits for the Trainer's own log; asked when there is nothing else to do in the run."""
        if self._log.holds_back:
            self._only_logs = True
            self._taps_of_steps.undo()
            self._batches.forget()
        return self._log.holds_back

    # ---- removal

    def take_out(self) -> None:
        """Let go of the batches, and switch DeepSpeed's own profiler on again."""
        self._taps_of_steps.undo()
        self._builtin.put_back()
        self._passing.clear()
        self._batches.forget()


def _begun(*args: Any, **kwargs: Any) -> bool:
    return True
