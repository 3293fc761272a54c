"""The steps of a DeepSpeed engine: which of its calls belong to a step, and to which part of it.

A step runs from the end of one ``engine.step`` at the accumulation border to the end of the next. Its parts are
``engine.forward`` with what runs between it and the next backward (the loss), the backward, and ``engine.step`` at the
border. A wait for a torch DataLoader is seen, too. Everything else is ``other``.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from lightning_flops.instrument.batches import BatchMeter, Shapes, tensor_shapes

if TYPE_CHECKING:
    from lightning_flops.doors.deepspeed_engine import EngineDoor
    from lightning_flops.instrument.patches import Patches

_EVALUATION = "validation"


class EngineSteps:
    """Tells the session of an engine's steps.

    Args:
        door: the engine's.
    """

    def __init__(self, door: EngineDoor) -> None:
        engine, config = door.engine, door.config
        self.evaluating = False
        self._door = door
        self._engine = engine
        self._keeps_batch = callable(config.batch_size) or callable(config.tokens_per_sample)
        self._thread: int | None = None
        """The one that trains, once it is known."""
        self._forward_depth = 0
        self._backward_depth = 0
        # The first step is whole if no micro-step of it has run yet.
        self._whole_step = int(engine.micro_steps) % int(engine.gradient_accumulation_steps()) == 0
        self._at_border = True
        self._trains_in_eval_mode = False
        self._loss_may_follow = False
        self._micro_step_is_over = False
        self._batch: Any = None
        self._shapes: Shapes = ()
        self._signs: set[str] = set()
        self._usual_signs: set[str] = set()

    def meter(self, note: Callable[[str], None]) -> BatchMeter:
        """Finds samples and tokens in the tensors of a forward, or takes them from the engine's config."""
        config = self._door.config
        return BatchMeter(
            batch_size=config.batch_size,
            tokens_per_sample=config.tokens_per_sample,
            note=note,
            declared=self._engine.train_micro_batch_size_per_gpu,
        )

    @property
    def half_done(self) -> bool:
        """A step has begun and has not ended."""
        return not self._at_border

    # ---- the taps

    def tap_run(self, taps: Patches) -> None:
        """Wrap what shows steps, evaluation, and whether the engine raises."""
        engine, make = self._engine, self._door.session.taps
        taps.replace(
            engine, "forward", make.around(self._forward_begins, self._forward_ends, fails=self._forward_fails)
        )
        taps.replace(engine, "backward", self._around_backward())
        taps.replace(engine, "step", make.around(self._step_begins, self._step_ends, fails=self._fails))
        taps.replace(engine, "train", make.around(self._mode_changes, _nothing))
        taps.replace(engine, "eval", make.before(lambda: self._mode_changes(False)))
        saved = make.before(lambda: self.looks_left("checkpoint", "a checkpoint was saved"))
        outside = make.outside_of_steps("checkpoint")
        taps.replace(engine, "save_checkpoint", lambda save: saved(outside(save)))
        if self._door.names.has(engine, "_backward_epilogue"):
            taps.replace(engine, "_backward_epilogue", make.after(self._gradients_are_there))

    def tap_parts(self, taps: Patches) -> None:
        """Wrap the function that ``loss.backward()`` calls, and ``engine.backward()`` as well in the end."""
        taps.replace(torch.autograd, "backward", self._around_backward())

    def take_out(self) -> None:
        """Nothing to do: all our wrappers are in the session's taps."""

    def _around_backward(self) -> Any:
        return self._door.session.taps.around(self._backward_begins, self._backward_ends, fails=self._fails)

    def _fails(self, _: object, error: BaseException) -> None:
        self._door.interrupted(error)

    def interrupted(self, error: BaseException) -> None:
        """The user's code raised *error* in a step."""
        self._door.interrupted(error)

    def on_its_thread(self) -> bool:
        """Whether this is the thread that trains, as far as that is known."""
        return self._thread in (None, threading.get_ident())

    def turns_to_loader(self) -> None:
        """The loop asks a loader for a batch: what runs next is not the loss."""
        self._loss_may_follow = False

    # ---- forward

    def _forward_begins(self, *args: Any, **kwargs: Any) -> bool:
        marked = self._begin_forward(args, kwargs)
        self._forward_depth += 1
        return marked

    def _begin_forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """A forward of the engine begins; True if it is a part of a step."""
        session = self._door.session
        if self._forward_depth or not self.on_its_thread():
            return False
        self._thread = threading.get_ident()
        if self._at_border and self._is_evaluation():
            self._evaluation_begins()
            return False
        self._evaluation_ends()
        if self._micro_step_is_over:
            self._micro_step_ends(ends_step=False)
        self._at_border = False
        window = session.window
        if not window.in_scope and window.recorder.counting and self._whole_step:
            # A step begins when the one before it ends; the very first step has none before it.
            sentence = (
                "The counted step is the first one, which begins with the engine's first forward: what ran before it, "
                "a teacher's forward for one, is not counted."
            )
            session.notes.add(sentence)  # this window's alone
            session.warn(sentence)
            self._enter_scope()
        if self._batch is None:
            batch = batch_of(args, kwargs)
            self._batch = batch if self._keeps_batch else ()
            self._shapes = tensor_shapes(batch)
        else:
            self._shapes = (*self._shapes, *tensor_shapes((args, kwargs)))
        marked = window.marking and self._whole_step
        if marked:
            self._loss_may_follow = False
            session.enter("forward")
        return marked

    def _forward_ends(self, marked: bool) -> None:
        self._forward_depth -= 1
        if marked:
            self._door.session.leave()
            self._loss_may_follow = True

    def _forward_fails(self, _: bool, error: BaseException) -> None:
        self._forward_depth -= 1
        self._door.interrupted(error)

    # ---- backward

    def _backward_begins(self, *args: Any, **kwargs: Any) -> bool | None:
        """A backward begins; True if it is a part of a step, and not inside another backward."""
        session = self._door.session
        if self._backward_depth or not self._whole_step or not self.on_its_thread():
            return None
        if self.evaluating:
            session.notes.add_for_run(
                "A backward ran in what was taken for an evaluation, because the model was in evaluation mode: "
                "the forwards before it are in no figure."
            )
            self._evaluation_ends()
        if self._loss_may_follow:
            session.window.recorder.claim("forward")
            self._loss_may_follow = False
        session.enter("backward")
        self._backward_depth += 1
        return True

    def _backward_ends(self, _: bool) -> None:
        self._backward_depth -= 1
        self._door.session.leave()

    def _gradients_are_there(self) -> None:
        """A backward is done. It ends a micro-step where ``engine.step`` is not called for each of them."""
        own = vars(self._engine)  # not getattr: the engine passes on attributes of the user's model
        self._micro_step_is_over = (
            bool(own.get("inside_no_sync_ctxt"))
            or own.get("_is_gradient_accumulation_boundary") is not None
            or self._leaves_the_border_to_its_user()
        )

    def _leaves_the_border_to_its_user(self) -> bool:
        """Whether every ``engine.step`` updates; newer versions of DeepSpeed have a setting for that."""
        managed = getattr(type(self._engine), "managed_gradient_accumulation", None)
        return managed is not None and not managed(self._engine)

    # ---- the update

    def _step_begins(self, *args: Any, **kwargs: Any) -> tuple[bool, int]:
        """``engine.step`` begins: returns whether it is going to update, and the number of updates before it."""
        updates = int(self._engine.global_steps)
        if not (self._door.session.window.marking or self.evaluating):
            return False, updates
        self._loss_may_follow = False
        self._evaluation_ends()
        # An engine that leaves the border to its user says that it is at the border only while its step runs.
        at_border = self._leaves_the_border_to_its_user() or bool(self._engine.is_gradient_accumulation_boundary())
        marked = at_border and self._whole_step
        if marked:
            self._door.session.enter("optimizer")
        return marked, updates

    def _step_ends(self, begun: tuple[bool, int]) -> None:
        marked, updates = begun
        if marked:
            self._door.session.leave()
        self._micro_step_ends(ends_step=int(self._engine.global_steps) != updates)

    def _micro_step_ends(self, *, ends_step: bool) -> None:
        self._micro_step_is_over = False
        self._usual_signs |= self._signs
        self._signs.clear()
        if self._batch is None and not ends_step:
            return  # no forward and no update: nothing has run
        session = self._door.session
        window = session.window
        recorder = window.recorder
        if self._whole_step and not (recorder.counting and not window.in_scope):
            if ends_step and recorder.marking:
                self._look_at_fetches()
            batch, shapes = (self._batch, self._shapes) if self._batch is not None else ((), ())
            self._batch = None
            session.batch(batch, shapes, updates=int(ends_step), ends_step=ends_step)
            if recorder.counting:
                self._compare_batch_size()
            if window.in_scope:
                window.leave_scope()
                session.after_batch()
        self._batch = None
        if ends_step:
            self._whole_step = True
            self._at_border = True
            self._door.loaders.fetches = 0
            self._trains_in_eval_mode = not self._engine.module.training
        if self._whole_step and not session.out and session.window.marking:
            self._enter_scope()

    def _compare_batch_size(self) -> None:
        """Note it in the report if the counted batch does not have the size in the engine's config."""
        session = self._door.session
        found = session.micro_batch_size
        declared = int(self._engine.train_micro_batch_size_per_gpu())
        if found is not None and found != declared and self._door.config.batch_size is None:
            session.notes.add_for_run(
                f"train_micro_batch_size_per_gpu is {declared}, and the tensors of a forward are of {found} samples: "
                "samples are counted by the tensors, unless batch_size is set."
            )

    def _look_at_fetches(self) -> None:
        """Say which parts this step did not show: never a transfer, and no wait for data without a torch DataLoader."""
        session = self._door.session
        recorder = session.window.recorder
        recorder.cannot_tell_apart(("transfer", "other"))
        if self._door.loaders.fetches <= session.steps.batches:  # fewer than one for each micro-step
            recorder.cannot_tell_apart(("data_wait", "transfer", "other"))
            session.notes.add_for_run(
                "The wait for data could not be seen, because the batches did not come from a torch DataLoader on the "
                "training thread: it is in other."
            )

    def _enter_scope(self) -> None:
        self._door.session.window.enter_scope()
        self._door.loaders.scope_is_entered()

    # ---- evaluation

    def _is_evaluation(self) -> bool:
        """Whether a forward between two steps belongs to an evaluation, and not to a step.

        It does if the model is in evaluation mode, and either gradients are off or the last step was trained in
        training mode. Once a training forward has begun a step, everything that runs belongs to the step.
        """
        if self._engine.module.training:
            return False
        return not torch.is_grad_enabled() or not self._trains_in_eval_mode

    def _mode_changes(self, training: bool = True) -> None:
        """The engine is put into training or evaluation mode."""
        if training:
            self._evaluation_ends()
            return
        self.looks_left("evaluation", "engine.eval() was called")
        if self._at_border and not self._trains_in_eval_mode and self.on_its_thread():
            self._evaluation_begins()

    def _evaluation_begins(self) -> None:
        if not self.evaluating:
            self.evaluating = True
            self._door.session.training_stops(_EVALUATION)
            self._door.session.enter(_EVALUATION)

    def _evaluation_ends(self) -> None:
        if self.evaluating:
            self.evaluating = False
            self._door.session.leave()
            self._door.session.training_goes_on(_EVALUATION)

    # ---- a step that the loop leaves unfinished

    def looks_left(self, sign: str, in_words: str) -> None:
        """Something happens that suggests that the loop has left a step, by an exception that no wrapper sees.

        A loop may also do this inside ordinary steps. If such a step goes on to its end, we ignore this *sign* from
        then on.
        """
        half_done = self._batch is not None and not self._micro_step_is_over
        if not half_done or self._forward_depth or self._backward_depth or not self.on_its_thread():
            return
        self._signs.add(sign)
        session = self._door.session
        window = session.window
        if sign in self._usual_signs or not window.in_scope:  # a step that is only timed shows it by its signature
            return
        window.leave_scope()
        ended_by = f"The loop left a step between a forward and its update: {in_words} there."
        if window.recorder.counting and not window.recorder.has_counted:
            session.postpone_window(ended_by)
        else:
            session.end_window(ended_by)


def batch_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The arguments of a forward in their shortest form: the only one, the positional, the named, or both kinds."""
    if not kwargs:
        return args[0] if len(args) == 1 else args
    return kwargs if not args else (args, kwargs)


def _nothing(token: object) -> None:
    pass
