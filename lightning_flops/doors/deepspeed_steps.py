"""The steps of a DeepSpeed engine: ``engine.forward``, the backward, and ``engine.step`` at the accumulation border."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from lightning_flops.doors.loop_steps import LoopSteps
from lightning_flops.instrument.batches import BatchMeter

if TYPE_CHECKING:
    from lightning_flops.doors.deepspeed_engine import EngineDoor
    from lightning_flops.instrument.patches import Patches


class EngineSteps:
    """Tells the session of an engine's steps.

    Args:
        door: the engine's.
    """

    def __init__(self, door: EngineDoor) -> None:
        self._door = door
        self._engine = engine = door.engine
        # The first step is whole if no micro-step of it has run yet.
        is_whole = int(engine.micro_steps) % int(engine.gradient_accumulation_steps()) == 0
        self._steps = LoopSteps(door, lambda: engine.module, is_whole=is_whole)

    def meter(self, note: Callable[[str], None]) -> BatchMeter:
        """Finds samples and tokens in the tensors of a forward, or takes them from the engine's config."""
        return BatchMeter.by_settings(self._door.config, note, declared=self._engine.train_micro_batch_size_per_gpu)

    # ---- what the loaders' taps ask

    @property
    def half_done(self) -> bool:
        """A step has begun and has not ended."""
        return self._steps.half_done

    def on_its_thread(self) -> bool:
        """Whether this is the thread that trains, as far as that is known."""
        return self._steps.on_its_thread()

    def fetch_begins(self, iterator: Any) -> bool:
        """The loop asks a loader for a batch: what runs next is not the loss."""
        if not self._steps.on_its_thread():
            return False
        self._steps.no_loss_follows()
        if not self._steps.evaluating:
            self._steps.batch_is_asked_for()
        return not self._steps.evaluating

    def batch_fetched(self, iterator: Any, batch: Any) -> None:
        """Nothing: the batch is what the engine's forward gets."""

    def nothing_fetched(self, iterator: Any) -> None:
        """Nothing: the batch is what the engine's forward gets."""

    def loader_is_used_up(self) -> None:
        """A loader that was asked for a batch has no more."""
        if self._steps.on_its_thread():
            self._steps.loader_is_used_up()

    def loader_is_left(self) -> None:
        """The iterator that fed the latest steps was dropped."""
        self._steps.loader_is_left()

    def looks_left(self, sign: str, in_words: str) -> None:
        """Something happens that suggests that the loop has left a step unfinished."""
        self._steps.looks_left(sign, in_words)

    def interrupted(self, error: BaseException) -> None:
        """The user's code raised *error* in a step."""
        self._door.interrupted(error)

    # ---- the taps

    def tap_run(self, taps: Patches) -> None:
        """Wrap what shows steps, evaluation, and whether the engine raises."""
        engine, make, steps = self._engine, self._door.session.taps, self._steps
        taps.replace(engine, "forward", steps.around_forward())
        # Also around torch's hooks, our own among them: a Ctrl-C may arrive there.
        taps.replace_calls(engine, steps.around_forward())
        taps.replace(engine, "backward", steps.around_backward())
        taps.replace(
            engine,
            "step",
            make.around(self._step_begins, self._step_ends, fails=lambda _, error: self.interrupted(error)),
        )
        taps.replace(engine, "train", make.around(self._mode_changes, None))
        taps.replace(engine, "eval", make.before(lambda: self._mode_changes(False)))
        saved = make.before(lambda: steps.looks_left("checkpoint", "a checkpoint was saved"))
        outside = make.outside_of_steps("checkpoint")
        taps.replace(engine, "save_checkpoint", lambda save: saved(outside(save)))
        if self._door.names.has(engine, "_backward_epilogue"):
            taps.replace(engine, "_backward_epilogue", make.after(self._gradients_are_there))

    def tap_parts(self, taps: Patches) -> None:
        """Wrap the function that ``loss.backward()`` calls, and ``engine.backward()`` as well in the end."""
        taps.replace(torch.autograd, "backward", self._steps.around_backward())

    def take_out(self) -> None:
        """Nothing to do: all our wrappers are in the session's taps."""

    def _gradients_are_there(self) -> None:
        """A backward is done. It ends a micro-step where ``engine.step`` is not called for each of them."""
        own = vars(self._engine)  # not getattr: the engine passes on attributes of the user's model
        self._steps.micro_step_is_over = (
            bool(own.get("inside_no_sync_ctxt"))
            or self._door.names.get(self._engine, "_is_gradient_accumulation_boundary", None) is not None
            or self._leaves_the_border_to_its_user()
        )

    def _leaves_the_border_to_its_user(self) -> bool:
        """Whether every ``engine.step`` updates; newer versions of DeepSpeed have a setting for that."""
        managed = getattr(type(self._engine), "managed_gradient_accumulation", None)
        return managed is not None and not managed(self._engine)

    def _step_begins(self, *args: Any, **kwargs: Any) -> tuple[bool, int]:
        """``engine.step`` begins: returns whether it is going to update, and the number of updates before it."""
        updates = int(self._engine.global_steps)
        steps = self._steps
        if not (self._door.session.window.marking or steps.outside):
            return False, updates
        steps.no_loss_follows()
        steps.returns_to_steps()
        # An engine that leaves the border to its user says that it is at the border only while its step runs.
        at_border = self._leaves_the_border_to_its_user() or bool(self._engine.is_gradient_accumulation_boundary())
        marked = at_border and steps.is_whole
        if marked:
            self._door.session.enter("optimizer")
        return marked, updates

    def _step_ends(self, begun: tuple[bool, int]) -> None:
        marked, updates = begun
        session = self._door.session
        if marked:
            session.leave()
        ends_step = int(self._engine.global_steps) != updates
        counted = session.window.recorder.counting
        self._steps.micro_step_ends(updates=int(ends_step), ends_step=ends_step)
        if counted:
            self._compare_batch_size()

    def _compare_batch_size(self) -> None:
        """Note it in the report if the counted batch does not have the size in the engine's config."""
        session = self._door.session
        found = session.reports.micro_batch_size
        declared = int(self._engine.train_micro_batch_size_per_gpu())
        if found is not None and found != declared and self._door.config.batch_size is None:
            session.notes.add_for_run(
                f"train_micro_batch_size_per_gpu is {declared}, and the tensors of a forward are of {found} samples: "
                "samples are counted by the tensors, unless batch_size is set."
            )

    def _mode_changes(self, training: bool = True) -> None:
        """The engine is put into training or evaluation mode."""
        if training:
            self._steps.returns_to_steps()
            return
        self._steps.looks_left("evaluation", "engine.eval() was called")
        self._steps.evaluation_may_begin()
