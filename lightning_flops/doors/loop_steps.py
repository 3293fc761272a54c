"""Finds the steps of a training loop that is the user's own: which calls belong to a step, and to which part of it.

A step runs from the end of one update to the end of the next. Its parts are the model's forward with what runs between
it and the next backward (the loss), the backward, and the update. A wait for a loader is seen, too. Everything else is
``other``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from threading import get_ident
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import nn

from lightning_flops.doors.loop_batches import LoopBatches, batch_of
from lightning_flops.doors.plain_context import device_of
from lightning_flops.instrument.batches import UNKNOWN
from lightning_flops.instrument.torch_private.dispatch import fake_mode
from lightning_flops.records import Shapes
from lightning_flops.session.noted_calls import NotedCalls, Seen

if TYPE_CHECKING:
    from lightning_flops.config import ProfilerConfig
    from lightning_flops.doors.loader_taps import LoaderTaps
    from lightning_flops.instrument.patches import Make
    from lightning_flops.session.session import Session

_EVALUATION, _RESTART = "validation", "epoch restart"
"""What runs outside of all steps, as under Lightning."""

_NOTED_BATCHES = 250
"""So many batches are noted at most before the session is told of them."""

_UNSEEN_WAIT = (
    "The wait for data could not be seen, because the batches did not come from a torch DataLoader on the training "
    "thread: it is in other."
)
_FEWER_FETCHED = (
    "Fewer batches came from a torch DataLoader on the training thread than the steps computed on: some came from "
    "elsewhere, or several are of one that was fetched. So the wait for data may not be seen whole: it is in other."
)


class LoopDoor(Protocol):
    """The door that the steps belong to."""

    session: Session
    loaders: LoaderTaps
    config: ProfilerConfig

    def interrupted(self, error: BaseException) -> None:
        """The user's code raised *error* in a step."""

    def reading_is_due(self) -> bool:
        """Whether the monitor is read at the step that ends."""


class LoopSteps:
    """Tells the session of the steps of one loop.

    Args:
        door: the loop's.
        module: returns the model whose forwards belong to the steps; its mode tells training from evaluation.
        is_whole: the step that begins now or next has not begun yet.
        goes_on: a loop that has left a step goes on with another one; otherwise it may be over, and the window ends.
        one_pass: each batch has one backward after its forwards, as in a loop of one optimizer.
        thread: the one that trains; None: the one that calls the model first.
    """

    def __init__(
        self,
        door: LoopDoor,
        module: Callable[[], nn.Module],
        *,
        is_whole: bool,
        goes_on: bool = False,
        one_pass: bool = False,
        thread: int | None = None,
    ) -> None:
        self.told_of: float | None = None
        """When that happened which the door was told of later; None: it happens now."""
        self.nodes_then: int | None = None
        """How many autograd nodes were made by then, if somebody looked."""
        self.outside = ""
        """Why what runs now belongs to no step; empty if it does."""
        self.left_out = 0
        """So many sections run of which the loop has said that they belong to no step."""
        self._used_up = False
        """The loader has no more batches, and the step of its last one has not ended."""
        self._between_epochs = False
        """The loader had no more batches, and nothing of a step has run since."""
        self._awaits_first_fetch = False
        """An epoch has begun, and its first batch was not asked for yet."""
        self._epoch_is_new = True
        """No forward of an epoch's steps has begun yet."""
        self._has_grad = True
        """As far as that was seen, gradients are on in forwards of the running batch."""
        self._has_left_over = False
        """A batch was delivered by an iterator that was dropped before anything ran for the batch."""
        self._uses_left_over = False
        """The loop has computed on the latest such batch."""
        self.in_backward = False
        """A backward runs: what it calls is a part of it."""
        self.is_whole = is_whole
        """Everything of the running step was seen."""
        self.micro_step_is_over = False
        """The next forward begins another batch."""
        self._has_gradients = False
        """A backward has run for the running batch."""
        self._door = door
        self._find_model = module
        self._model = module()
        """As it was when the latest step ended."""
        self._loop_goes_on = goes_on
        config = door.config
        keeps = callable(config.batch_size) or callable(config.tokens_per_sample)
        self.batches = LoopBatches(lambda: self._session, keeps=keeps, one_pass=one_pass, counts_calls=goes_on)
        """The running one, and those that come next."""
        self._thread = thread
        """The one that trains, once it is known."""
        self._forward_depth = 0
        self._backward_depth = 0
        self._at_border = self._is_first = True
        self._trains_in_eval_mode = not self._model.training
        self._loss_may_follow = False
        self.batches_a_step = 1
        """Batches of the last step that has ended."""
        self._batches_so_far = 0
        self._batches_watched = 0
        self._unseen_steps = 0
        """Steps whose batches nobody saw."""
        self.autocast = ""
        """The dtype that autocast computed in when the latest marked forward began; empty if it was off."""
        self._signs: set[str] = set()
        self._usual_signs: set[str] = set()

    @property
    def _is_between_batches(self) -> bool:
        """No step has begun, or the running batch of one has had its backward."""
        return self._at_border or self._has_gradients

    @property
    def _is_set_to_evaluate(self) -> bool:
        return not (self._model.training or self._trains_in_eval_mode)

    @property
    def half_done(self) -> bool:
        """A step has begun and has not ended."""
        return not self._at_border

    @property
    def evaluating(self) -> bool:
        """What runs now is an evaluation."""
        return self.outside == _EVALUATION

    @functools.cached_property
    def _session(self) -> Session:
        return self._door.session

    def on_its_thread(self) -> bool:
        """Whether this is the thread that trains, as far as that is known."""
        return self._thread == get_ident() or self._thread is None

    def no_loss_follows(self) -> None:
        """What runs next is not the loss."""
        self._loss_may_follow = False

    def claims_loss(self) -> None:
        """Something else begins: what ran since the forward was the loss."""
        if self._loss_may_follow and self.on_its_thread():
            self._session.window.recorder.claim("forward")

    def update_begins(self) -> bool:
        """An optimizer begins its update; returns whether that is a part of the loop."""
        if self._thread != get_ident() and self._thread is not None:
            return False
        self._loss_may_follow = False
        self.returns_to_steps()
        return True

    # ---- forward

    def around_forward(self) -> Make:
        """A wrapper for the function that runs the model's forward."""
        return self._session.taps.around(self._forward_begins, self.forward_ends, fails=self._forward_fails)

    def around_noted_forward(self, calls: NotedCalls) -> Make:
        """The same, where the calls can be noted."""
        return self._session.taps.noted.forward(
            calls,
            self._forward_begins,
            self.forward_ends,
            fails=self._forward_fails,
            root=self._model,
            sees=lambda args, kwargs: self.batches.sees(batch_of(args, kwargs)),
        )

    def forward_began(self, seen: Seen | None) -> bool:
        """As ``_forward_begins``, for a forward that was noted."""
        if not (self._forward_depth or self.in_backward):
            self._begins_batch()
            if seen is not None:
                self.batches.takes_seen_arguments((), seen)
        self._forward_depth += 1
        return False

    def _forward_begins(self, *args: Any, **kwargs: Any) -> bool | None:
        """A forward of the model begins; True if it is a part of a step, None if another thread runs it."""
        thread = get_ident()
        if self._thread != thread:
            if self._thread is not None:
                return None
            self._thread = thread
        marked = not self._forward_depth and self._begin_forward(args, kwargs)
        self._forward_depth += 1
        return marked

    def _begin_forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        if self.left_out or self.in_backward:
            return False
        if self._is_between_batches and self._is_evaluation():
            self._leaves_steps(_EVALUATION)
            return False
        if self.outside:
            self.returns_to_steps()
        begins = self._begins_batch()
        session = self._session
        window = session.window
        if not window.marking:
            if self.batches.looks_at_arguments:
                self.batches.takes_arguments(args, kwargs)
            if begins and session.flops.wants_shapes and self.is_whole:
                shapes, tokens = self.batches.running()
                # It may go through the model as often as the one before.
                session.step_begins(((*shapes, *self.batches.calls),), (tokens,))
                if window.in_scope:
                    self._door.loaders.scope_is_entered()
            return False
        if not window.in_scope and window.recorder.counting and self.is_whole:
            # A step begins when the one before it ends; the very first step has none before it.
            sentence = (
                "The counted step is the first one, which begins with the model's first forward: what ran before it, "
                "a teacher's forward for one, is not counted."
            )
            session.notes.add(sentence)  # this window's alone
            session.warn(sentence)
            self._enter_scope()
        if self.batches.looks_at_arguments:
            self.batches.takes_arguments(args, kwargs)
        self.autocast = _autocast_dtype(device_of(self._model).type)
        if self.is_whole:
            self._loss_may_follow = False
            session.enter("forward")
        return self.is_whole

    def _begins_batch(self) -> bool:
        """A forward of a step begins, perhaps with another batch; returns whether the step begins with it."""
        if self._has_left_over:
            self._has_left_over, self._uses_left_over = False, True
        if self.micro_step_is_over:
            self.micro_step_ends(updates=0, ends_step=False)
        elif self.batches.ahead:
            self._turns_to_next_batch()
        elif self._has_gradients and self.batches.come_apart():
            self.micro_step_ends(updates=0, ends_step=False)
        begins, self._at_border, self._is_first = self._at_border, False, False
        self._epoch_is_new = False
        self.batches.is_used = True
        self.batches.forwards += 1
        self._has_grad = self.told_of is not None or torch.is_grad_enabled()
        return begins

    def forward_ends(self, marked: bool) -> None:
        """A forward has ended; *marked* is what its begin has returned."""
        self._forward_depth -= 1
        if marked:
            self._session.leave()
            self._loss_may_follow = True

    def _forward_fails(self, marked: bool, error: BaseException) -> None:
        self._forward_depth -= 1
        if marked:
            self._session.leave()
        if not self.in_backward:  # there checkpointing ends a forward by an exception when it has what it needs
            self._door.interrupted(error)

    # ---- backward

    def around_backward(self) -> Make:
        """A wrapper for a function that runs a backward."""
        return self._session.taps.around(self._backward_begins, self._backward_ends, fails=self._backward_fails)

    def _backward_begins(self, *args: Any, **kwargs: Any) -> bool | None:
        """A backward begins; True if it is a part of a step, and not inside another backward."""
        session = self._session
        if self._backward_depth or self.left_out or not self.is_whole or not self.on_its_thread():
            return None
        if fake_mode() is not None:  # a compiler traces it
            return None
        if self.evaluating:
            session.notes.add_for_run(
                "A backward ran in what was taken for an evaluation, because the model was in evaluation mode: "
                "the forwards before it are in no figure."
            )
        self.returns_to_steps()
        self.claims_loss()
        self._loss_may_follow = False
        session.enter("backward")
        self._backward_depth += 1
        return True

    def _backward_ends(self, _: bool) -> None:
        self._backward_depth -= 1
        self._session.leave()

    def gradients_are_there(self) -> None:
        """A backward has ended. The next forward begins another batch, unless batches are known from a loader."""
        if self.batches.ahead and self._has_gradients:  # of a model that is not called
            self.micro_step_ends(updates=0, ends_step=False)
        self.batches.backwards += 1
        self._has_gradients = self.batches.is_used = True
        self.micro_step_is_over = not self.batches.is_fetched

    def _turns_to_next_batch(self) -> None:
        """A forward begins, and a batch was fetched since the last one."""
        if self._has_gradients:
            self.micro_step_ends(updates=0, ends_step=False)
            return
        if not self._has_grad:  # the loop has only looked at what the model makes of the batch
            self.batches.pass_over(trains=False)
            return
        self.looks_left("batch", "it went on to the next batch without a backward")
        if "batch" in self._usual_signs and self.batches.ahead:
            self.batches.pass_over(trains=True)
        else:
            self.drops_batch()
            self.batches.has_skipped = True

    def _backward_fails(self, _: bool, error: BaseException) -> None:
        self._backward_ends(True)
        self._door.interrupted(error)

    # ---- the update

    def micro_step_ends(self, *, updates: int, ends_step: bool) -> None:
        """A batch is through.

        Args:
            updates: optimizer attempts that belong to it.
            ends_step: a step ends with it.
        """
        if self._signs:
            self._usual_signs |= self._signs
            self._signs.clear()
        self._has_gradients = self.micro_step_is_over = False
        batch, of_batch, tokens = self.batches.end(ends_step=ends_step)
        if batch is None and not ends_step:
            return  # no forward and no update: nothing has run
        self._batches_so_far += 1
        if ends_step:
            self.batches_a_step, self._batches_so_far = self._batches_so_far, 0
        session = self._session
        if self.told_of is not None:
            self._at_border = self._at_border or ends_step
            shapes = self._unseen_shapes() if batch is None else of_batch
            session.log.note_late(self.told_of, shapes, updates, ends_step, tokens, nodes=self.nodes_then)
            return
        window = session.window
        if self.is_whole and (not window.marking or window.in_scope or not window.recorder.counting):
            if ends_step and window.marking and window.is_open:
                self._look_at_fetches()
            shapes = self._unseen_shapes() if batch is None else of_batch
            session.batch(
                () if batch is None else batch,
                shapes,
                updates=updates,
                ends_step=ends_step,
                logs=ends_step and self._door.reading_is_due(),
                tokens=tokens,
            )
            if window.in_scope:
                window.leave_scope()
                session.after_batch()
        if ends_step:
            self.is_whole = self._at_border = True
            self._model = model = self._find_model()
            self._trains_in_eval_mode = not model.training
        if session.window.marking:
            if self.is_whole and not session.out:
                self._enter_scope()
        elif ends_step:
            self._door.loaders.fetches = self._batches_watched = 0
        if self._used_up:
            self._epoch_may_end()

    def note(self, calls: NotedCalls, *, steps: int) -> None:
        """A step has ended, and nobody asks for the next *steps* of them: note their *calls*, if all is as usual."""
        log = self._session.log
        steps = min(steps, log.spare, _NOTED_BATCHES // self.batches_a_step)
        usual = self.is_whole and not (self._forward_depth or self._backward_depth or self._used_up)
        usual = usual and not (self.outside or self.left_out)
        usual = usual and not (self.batches.lacks_beside or self.batches.is_in_doubt or self.batches.was_hidden)
        in_training = self._thread == get_ident() and not self._trains_in_eval_mode
        if steps > 1 and usual and in_training and not self.batches.keeps:
            calls.start(log, steps=steps, has_batch=self.batches.is_fetched)

    @property
    def is_between_batches(self) -> bool:
        """A step has ended, and nothing of another one has happened."""
        batches = self.batches
        return self._at_border and batches.batch is None and not batches.ahead and not self._forward_depth

    def _unseen_shapes(self) -> Shapes:
        """Stands for shapes that nobody saw: those of no other step are the same."""
        self._unseen_steps += 1
        self._session.notes.add_for_run(
            "Batches could not be seen, because they came neither from a torch DataLoader, nor through batches(...), "
            "nor as arguments of model(...). So it is not known which steps are like the counted one."
        )
        return (UNKNOWN, (self._unseen_steps,))

    def _look_at_fetches(self) -> None:
        """Say which parts this step did not show: never a transfer, and no wait for data without a loader."""
        session, loaders = self._session, self._door.loaders
        recorder = session.window.recorder
        recorder.cannot_tell_apart(("transfer", "other"))
        self._batches_watched += self.batches_a_step
        # A loader may be one batch ahead, and have nothing to fetch in the last step of an epoch.
        if loaders.fetches + int(loaders.in_use) < self._batches_watched:
            recorder.cannot_tell_apart(("data_wait", "transfer", "other"))
            session.notes.add_for_run(_FEWER_FETCHED if loaders.in_use else _UNSEEN_WAIT)

    def _enter_scope(self) -> None:
        self._session.window.enter_scope()
        self._door.loaders.scope_is_entered()

    # ---- evaluation

    def _is_evaluation(self) -> bool:
        """Whether a forward between two batches belongs to an evaluation.

        Of a model in evaluation mode it does if either gradients are off or the last step was trained in training mode.
        Of another it does if gradients are off between two epochs. From a batch's training forward to its backward,
        everything that runs belongs to the step.
        """
        if self._model.training:
            looks = self._epoch_is_new and self.batches.is_of_dropped_iterator  # at a batch of next(iter(loader))
            return (self._between_epochs or looks) and not torch.is_grad_enabled()
        return not torch.is_grad_enabled() or not self._trains_in_eval_mode

    def looks_at_mode(self) -> None:
        """Something of the loop begins that may belong to a step or to an evaluation, as the model's mode tells."""
        if not self._model.training:
            self.evaluation_may_begin()
        elif self.evaluating:
            self.returns_to_steps()

    def evaluation_may_begin(self) -> None:
        """The model is in evaluation mode, or soon will be: an evaluation begins, unless it trains in that mode."""
        if self._is_between_batches and not self._trains_in_eval_mode and self.on_its_thread():
            self._leaves_steps(_EVALUATION)

    def _leaves_steps(self, name: str) -> None:
        """From here on what runs belongs to no step, but to what has this *name*."""
        if self.outside != name:
            self._leaves_outside()
            self.outside = name
            self._session.check_waits()
            self._session.training_stops(name)
            self._session.enter(name)

    def _leaves_outside(self) -> None:
        if self.outside:
            name, self.outside = self.outside, ""
            self._session.leave()
            self._session.training_goes_on(name)

    def returns_to_steps(self) -> None:
        """What runs belongs to a step again."""
        self._leaves_outside()
        if self._between_epochs:
            self._between_epochs, self._awaits_first_fetch, self._epoch_is_new = False, True, True
            self._session.steps_of_epoch_begin()

    # ---- epochs

    def loader_is_used_up(self) -> None:
        """The loop has asked for a batch, and its loader has no more: when the running step is done, an epoch is."""
        if not (self.outside or self.left_out):
            self.batches.loader_is_used_up()
            self._used_up = True
            self._epoch_may_end()

    def loader_is_left(self) -> None:
        """The loop has dropped the iterator that fed it, by ``break`` for one: an epoch is over.

        Its last batch may be dropped with it, or may be used yet: the next forward, or the next fetch, tells.
        """
        if self.outside or self.left_out or (self.batches.is_unused and self.batches.wait):
            return
        self._has_left_over, self._used_up = self.batches.has_left_over, True
        self._epoch_may_end()

    def _epoch_may_end(self) -> None:
        """What runs from the end of an epoch to the first fetch of the next belongs to no step, as under Lightning."""
        is_dropped = self._has_left_over and not self._uses_left_over
        begun = self.batches.batch is not None and not (self._has_gradients or is_dropped)
        if self.batches.wait or begun or self._forward_depth:
            return
        self._used_up, self._between_epochs = False, True
        self._leaves_steps(_RESTART)
        self._session.steps_of_epoch_end()

    def batch_is_asked_for(self) -> None:
        """The loop asks a loader for a batch that is for a step. If it is the first of an epoch, that begins."""
        if self._has_left_over:
            self._has_left_over = self._uses_left_over = False
            self.batches.drop_left_over()
            if self._used_up:
                self._epoch_may_end()
        if self._between_epochs:
            self.returns_to_steps()
        if self._is_first:  # of all steps, which begins here: none has ended before it
            self._is_first = False
            window = self._session.window
            if self.is_whole and window.marking and not window.in_scope:
                self._enter_scope()
        if not self._awaits_first_fetch:
            return
        self._awaits_first_fetch = False
        window = self._session.window
        if self.is_whole and self.is_between_batches:
            self._session.check_may_begin()
            if window.marking and not window.in_scope:
                self._enter_scope()

    # ---- a step that the loop leaves unfinished

    def looks_left(self, sign: str, in_words: str) -> None:
        """Something happens that suggests that the loop has left a step, by an exception that no wrapper sees.

        A loop may also do this inside ordinary steps. If such a step goes on to its end, we ignore this *sign* from
        then on.
        """
        half_done = self.batches.batch is not None and not self._at_border and not self.micro_step_is_over
        if not half_done or self.left_out or self._forward_depth or self._backward_depth or not self.on_its_thread():
            return
        if self.evaluating or (self._is_between_batches and self._is_set_to_evaluate):
            return
        self._signs.add(sign)
        if sign not in self._usual_signs:
            self.was_left(f"The loop left a step between a forward and its update: {in_words} there.")

    def updated_between(self) -> None:
        """An update was made that ends no step. It was on no other batch if a step has ended since the last fetch."""
        if self.batches.is_of_ended_step:
            self.drops_batch()

    def others_have_turn(self) -> None:
        """Other loops have made steps since the latest of this one ended: nothing of that belongs to its next step."""
        self.was_left("Another optimizer than those of the loop has made updates in a row, as another loop does.")
        self.returns_to_steps()
        self.batches.drop_all()
        self._signs.clear()
        self._has_gradients = self.micro_step_is_over = self._has_left_over = self._uses_left_over = False
        self._used_up = False
        self._batches_so_far = 0
        self._at_border = True
        self._session.step_begins_anew()

    def drops_batch(self) -> None:
        """The loop gives the running batch up: it belongs to no step."""
        self._has_gradients = self.micro_step_is_over = False
        self.batches.go_on()

    def was_left(self, ended_by: str) -> None:
        """The loop has left the running step unfinished; *ended_by* says so in a sentence."""
        session = self._session
        window = session.window
        if not window.in_scope or (self._loop_goes_on and window.recorder.timer is not None):
            return  # a step that is only timed shows it by its signature
        window.leave_scope()
        if window.recorder.counting and not window.recorder.has_counted:
            session.postpone_window(ended_by)
        else:
            session.end_window(ended_by)


def _autocast_dtype(device_type: str) -> str:
    if not torch.is_autocast_enabled(device_type):
        return ""
    return str(torch.get_autocast_dtype(device_type)).removeprefix("torch.")
