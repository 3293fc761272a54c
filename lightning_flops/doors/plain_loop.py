"""The door of a training loop that the user wrote: which functions of torch are wrapped, and what their calls mean.

The model's calls, autograd's entry and the optimizers' steps tell the parts of a step apart. DataLoaders, or what the
user passes through ``batches``, tell the batches.
"""

from __future__ import annotations

import functools
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import nn

from lightning_flops.doors.loader_taps import Fetched, LoaderTaps
from lightning_flops.doors.loop_batches import Place, nobody
from lightning_flops.doors.loop_steps import LoopSteps
from lightning_flops.doors.optimizers import stand_ins, without_inner
from lightning_flops.doors.plain_context import Frame, LoopOutput, device_of, run_context
from lightning_flops.doors.read_ahead import innermost_not_ours
from lightning_flops.doors.several_models import called_in, root_of
from lightning_flops.doors.turns import MANY_UPDATES, PATIENCE, Turns
from lightning_flops.instrument.batches import BatchMeter
from lightning_flops.instrument.optimizer_hooks import OptimizerHooks
from lightning_flops.instrument.timing.loader_queue import LoaderQueue, backlogs_of
from lightning_flops.instrument.timing.settling import steps_to_settle
from lightning_flops.instrument.torch_private.autograd import backward_entries, runs_step_in_step
from lightning_flops.instrument.torch_private.dispatch import fake_mode
from lightning_flops.instrument.torch_private.loading import workers_of, yielded_by
from lightning_flops.session.border import guarded
from lightning_flops.session.door import RunPlan
from lightning_flops.session.noted_calls import (
    BACKWARD,
    BACKWARD_ENDS,
    FACTS,
    FETCH,
    FORWARD,
    FORWARD_ENDS,
    NO_BATCH,
    TOLD,
    UPDATE,
    UPDATE_ENDS,
    NotedCalls,
)
from lightning_flops.session.session import Session

if TYPE_CHECKING:
    from lightning_flops.config import ProfilerConfig
    from lightning_flops.instrument.patches import Make, Patches
    from lightning_flops.instrument.timing.loader_queue import Feed
    from lightning_flops.records import RunContext
    from lightning_flops.schema.profile import Profile
    from lightning_flops.session.border import Border
    from lightning_flops.session.run_so_far import RunSoFar

T = TypeVar("T")


_USUAL_STEP = bytes((FETCH, FORWARD, FORWARD_ENDS, BACKWARD, BACKWARD_ENDS, UPDATE, UPDATE_ENDS))
_FACTS_OF_USUAL_STEP = sum(FACTS[kind] for kind in _USUAL_STEP)


_LATE = (
    "Of the optimizers that were given, {missing} made no update in the first {many}. Steps end with the last of the "
    "others in the list. If the loop calls profiler.step(), they end there."
)
_AWAITED = (
    "No step has ended: of the optimizers that were given, {missing} made no update, and the first step ends when each "
    "has made one. If the loop calls profiler.step(), steps end there."
)


_TURNS_OF_OTHERS = (
    "Another optimizer than those that were given made several updates in a row, as another loop does. What ran from "
    "the end of a step of this loop to the last of these updates is in no figure."
)


def _place_of_user() -> Place | None:
    """Where the innermost function on the stack stands that is not in this package."""
    frame = innermost_not_ours()
    return None if frame is None else Place(id(frame), frame.f_lasti)


class PlainLoop:
    """The door of one loop, on one rank.

    Args:
        model: what the loop calls; of several models, what holds them.
        optimizers: those that update it. If there are none, every call of ``step`` ends a step.
        config: the settings.
        publish: gets each profile when its window has closed.
        frame: what the library that drives the loop knows of it.
        output: where the reports go.
        log_every_n_steps: how often the monitor's figures are written.
        initial_step: the loggers' x-axis at the loop's first step.
        steps_before: steps that the loop has made unseen; the first step to profile comes at least one later.
        announce: as for ``LoggedOutput``.
        so_far: what is known of its earlier turns, if the loop goes on.
        thread: the one that trains; None: the one that calls the model first.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: tuple[Any, ...],
        *,
        config: ProfilerConfig,
        publish: Callable[[Profile], None],
        frame: Frame,
        output: LoopOutput,
        log_every_n_steps: int = 50,
        initial_step: int = 0,
        steps_before: int = 0,
        announce: Callable[[str], None] | None = None,
        so_far: RunSoFar | None = None,
        thread: int | None = None,
    ) -> None:
        self.config = config
        self._model = model
        self._root = root_of(model)
        self._optimizers = optimizers = without_inner(optimizers)
        self._stepping = [(one, each) for each in optimizers for one in (each, *stand_ins(each))]
        """Whatever makes updates by its step, with the one of the optimizers whose updates these are."""
        self._turns = Turns(optimizers, in_order=steps_before > 0)
        self._frame = frame
        self._places = output
        self._announce = announce
        self._log_every = log_every_n_steps
        self._initial_step = initial_step
        self._steps_before = self._steps_done = steps_before
        self._had_profile = so_far is not None and so_far.profile is not None
        self._is_told = not optimizers
        """The loop calls ``step``."""
        self._updates = 0
        self._updating = False
        self._ends_after_backward = False
        self._update_depth = 0
        self._training_iterator: Callable[[], Any] = nobody
        """Returns the iterator that fed the latest step, if it still exists."""
        self._steps = LoopSteps(
            self,
            lambda: self._root,
            is_whole=not steps_before,
            goes_on=True,
            one_pass=len(optimizers) <= 1,
            thread=thread,
        )
        self._notes_calls = bool(optimizers)
        self.session = Session(
            self,
            self._root,
            config=config,
            publish=publish,
            rank=frame.rank,
            world_size=frame.world_size,
            so_far=so_far,
        )
        self._calls = NotedCalls(self._tell_noted, tokens=self.session.tokens, replayed=self._steps.batches.replayed)
        self._of_others: Counter[int] = Counter()
        """Updates of each other optimizer, by its id, since the latest of the loop's own."""
        self._looks_for_others = bool(optimizers) and so_far is None and not steps_before
        """It looks itself whether other optimizers have the turn: nobody else would say when its own is over."""
        self._any_optimizer = OptimizerHooks(
            None if optimizers else self._any_update_begins,
            self._another_updated if optimizers else self._any_update_ends,
            failed=self.session.border.broke,
            but=[one for one, _ in self._stepping],
        )
        self.loaders = LoaderTaps(
            self.session,
            self,
            batches_a_step=lambda: self._steps.batches_a_step,
            takes_batches=True,
            calls=self._calls,
        )

    @property
    def border(self) -> Border:
        """Catches what our code raises."""
        return self.session.border

    # ---- how the run begins

    def plan(self) -> RunPlan:
        """How the loop begins."""
        before = self._steps_before
        # The step that runs now was not seen from its beginning.
        first = self.config.next_profile_step(steps_done=before + 1 if before else 0)
        if first is None and before and not (self._had_profile or self.config.timer_only):
            first = before + 1
        return RunPlan(
            steps_before=before,
            profile_step=first,
            settle_steps=steps_to_settle(batches_ahead=0, batches_a_step=1),
            device=device_of(self._model),
            dp_size=self.context().dp_size,
            output=self._places.logged(self.config, announce=self._announce),
        )

    def meter(self, note: Callable[[str], None]) -> BatchMeter:
        """Finds samples and tokens from the tensors of a batch and the settings."""
        return BatchMeter.by_settings(self.config, note)

    # ---- the taps

    def tap_run(self, taps: Patches) -> None:
        """Wrap what shows batches, steps, evaluation and checkpoints."""
        make = self.session.taps
        for model in called_in(self._model):
            taps.replace_calls(model, self._steps.around_noted_forward(self._calls))
        for stepping, optimizer in self._stepping:
            taps.replace(stepping, "step", self._around_update(optimizer))
        for module, name in backward_entries():
            taps.replace(
                module,
                name,
                make.noted.backward(
                    self._calls,
                    self._backward_begins,
                    self._backward_ends,
                    fails=self._backward_fails,
                    root=self._root,
                    aside=fake_mode,  # one that a compiler traces
                ),
            )
        if self._looks_for_others or not self._optimizers:  # torch's own hooks see every optimizer
            self._any_optimizer.put_up()
        # If a scaler finds gradients that are not finite, it does not call the optimizer: this is a step all the same.
        taps.replace(
            torch.amp.GradScaler,
            "step",
            make.around(self._scaled_update_begins, self._update_ends, fails=self._update_fails),
        )
        taps.replace(torch, "save", make.around(self._saving_begins, self._saving_ends))
        self.loaders.tap_run()

    def _around_update(self, optimizer: Any) -> Make:
        return self.session.taps.noted.update(
            self._calls,
            functools.partial(self._update_begins, optimizer),
            self._update_ends,
            fails=self._update_fails,
            root=self._root,
            optimizer=optimizer,
        )

    def tap_parts(self, taps: Patches) -> None:
        """Wrap the parts of a step."""
        make = self.session.taps
        for module, name in backward_entries():
            taps.replace(module, name, self._steps.around_backward())
        belongs = make.part("optimizer", counts=False)
        after_loss = make.before(self._steps.claims_loss)  # many clear the gradients between the loss and its backward
        for optimizer, _ in self._stepping:
            taps.replace(optimizer, "step", make.instead(self._mark_closure))
            if callable(getattr(optimizer, "zero_grad", None)):
                taps.replace(optimizer, "zero_grad", lambda clear: after_loss(belongs(clear)))
        for name in ("clip_grad_norm_", "clip_grad_value_"):
            taps.replace(torch.nn.utils, name, belongs)
        self.loaders.tap_parts(taps)

    def window_opens(self) -> None:
        """The step that begins now is counted."""

    def take_out(self) -> None:
        """Remove what is not in the session's taps."""
        self._calls.close()
        self._any_optimizer.remove()
        self.loaders.take_out()

    # ---- what the loaders' taps ask

    def on_its_thread(self) -> bool:
        """Whether this is the thread that trains, as far as that is known."""
        return self._steps.on_its_thread()

    def fetch_begins(self, iterator: Any) -> bool:
        """The loop asks *iterator* for a batch; returns whether the batch is for a step.

        One that has fed steps before still does, though the model may be in evaluation mode since the last evaluation.
        """
        steps = self._steps
        if steps.left_out or not steps.on_its_thread():
            return False
        if iterator is None or iterator is not self._training_iterator():
            self._calls.stop()
            steps.looks_at_mode()
            if iterator is not None and not steps.evaluating:
                self.loaders.looks_at(iterator)
        elif steps.evaluating:
            steps.returns_to_steps()
        if iterator is not None and not steps.evaluating:
            steps.batch_is_asked_for()
        return not steps.evaluating

    def batch_fetched(self, iterator: Any, batch: Any) -> None:
        """*iterator* has delivered *batch*, which is for a step."""
        self._takes_fetched(iterator, self._steps.batches.seen_of(batch))
        if iterator is not self._training_iterator():
            self._training_iterator = weakref.ref(iterator)
            self._calls.feeds = self._training_iterator

    def nothing_fetched(self, iterator: Any) -> None:
        """*iterator* has no more: a loader that has read ahead hands over its last batch now."""
        self._takes_fetched(iterator, None)

    def loader_is_used_up(self) -> None:
        """A loader that was asked for a batch has no more."""
        if self._steps.on_its_thread():
            self._steps.loader_is_used_up()

    def loader_is_left(self) -> None:
        """The iterator that fed the latest steps was dropped."""
        self._steps.loader_is_left()

    def _takes_fetched(self, iterator: Any, fetched: Fetched | None) -> None:
        ahead = self.loaders.ahead
        gets = ahead.handed_over(iterator, fetched) if ahead.is_needed else fetched
        if gets is None:
            return
        batches, first = self._steps.batches, 2 if ahead.is_needed else 1
        again = batches.is_from(iterator) and yielded_by(iterator) != first
        batches.takes(*gets, again=again, iterator=weakref.ref(iterator), place=_place_of_user())

    def looks_left(self, sign: str, in_words: str) -> None:
        """Something happens that suggests that the loop has left a step unfinished."""
        if self._steps.on_its_thread():
            self._calls.stop()
        self._steps.looks_left(sign, in_words)

    def interrupted(self, error: BaseException) -> None:
        """The user's code raised *error* in a step; the loop may catch it and go on."""
        self._calls.stop()
        self._steps.was_left(f"The loop left a step: it raised {type(error).__name__} there.")
        self._steps.drops_batch()

    @guarded
    def fetches_of(self, iterator: Iterator[T]) -> Callable[[], T]:
        """What fetches the next batch of *iterator*, and tells of it."""
        return self.loaders.watched(iterator)

    # ---- backward and update

    def _backward_begins(self, *args: Any, **kwargs: Any) -> bool | None:
        return self._backward_began() if self._steps.on_its_thread() else None

    def _backward_began(self) -> bool | None:
        if self._steps.in_backward or self._steps.left_out:
            return None
        self._steps.in_backward = True
        return True

    def _backward_ends(self, _: bool) -> None:
        self._steps.in_backward = False
        if self._updating:  # an optimizer's closure may run the same batch several times
            self._steps.batches.backwards += 1
        else:
            self._steps.gradients_are_there()
        if self._ends_after_backward:
            self._ends_after_backward = False
            self._step_ends()

    def _backward_fails(self, _: bool, error: BaseException) -> None:
        self._steps.in_backward = self._ends_after_backward = False

    def _update_begins(self, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        """An update by *optimizer* begins; None inside another one, or if it is not the training's."""
        if self._updating or not self._steps.update_begins():
            return None
        if self.session.window.marking:
            self.session.enter("optimizer")
        return self._update_began(optimizer)

    def _update_began(self, optimizer: Any) -> Any:
        if self._updating:
            return None
        self._updating = True
        return optimizer

    def _update_ends(self, optimizer: Any) -> None:
        self._updating = False
        if self.session.window.marking:
            self.session.leave()
        self._updates += 1
        self._of_others.clear()
        if self._is_told:
            return
        ends_step = self._turns.ends_step(optimizer)
        if self._turns.late:
            late, self._turns.late = self._turns.late, ()
            self.session.notes.add_for_run(_LATE.format(missing=" and ".join(late), many=MANY_UPDATES))
        if not ends_step:
            self._steps.updated_between()
        elif self._steps.in_backward:  # hooks update each parameter as soon as it has its gradient
            self._ends_after_backward = True
        else:
            self._step_ends()

    def _says_who_is_missing(self) -> None:
        """An optimizer makes no update, and so no step ends."""
        if (missing := self._turns.awaited) and not self._is_told:
            self.session.notes.add_for_run(_AWAITED.format(missing=" and ".join(missing)))

    def _update_fails(self, _: Any, error: BaseException) -> None:
        self._updating = False
        if self.session.window.marking:
            self.session.leave()
        self.interrupted(error)

    def _scaled_update_begins(self, scaler: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        its = next((its for one, its in self._stepping if one is optimizer), None)
        if its is None:
            return None
        self._calls.stop()
        self._notes_calls = False  # whether the scaler calls the optimizer is only known when it is done
        return self._update_begins(its)

    def _mark_closure(self, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Of what an optimizer's closure runs, everything is forward that is not marked as another part."""
        around = self.session.taps.part("forward", counts=False)
        if args and callable(args[0]):
            args = (around(args[0]), *args[1:])
        elif callable(kwargs.get("closure")):
            kwargs = {**kwargs, "closure": around(kwargs["closure"])}
        return step, args, kwargs

    @guarded
    def _any_update_begins(self, optimizer: Any, *_: Any) -> None:
        # The hooks fire twice if a subclass's step calls its parent's, or if an optimizer wraps another one.
        self._update_depth += 1
        if self._update_depth == 1:
            self._update_begins(optimizer)

    @guarded
    def _any_update_ends(self, optimizer: Any, *_: Any) -> None:
        self._update_depth -= 1
        if self._update_depth == 0:
            self._update_ends(optimizer)

    @guarded
    def _another_updated(self, optimizer: Any, *_: Any) -> None:
        """An optimizer that is none of the loop's has made an update; after several in a row, others have the turn."""
        calls, steps = self._calls, self._steps
        if self._updating or steps.left_out or not steps.on_its_thread():
            return
        if calls.on and calls.kinds.count(UPDATE) > calls.kinds.count(UPDATE_ENDS):
            return  # one of the loop's own runs it
        calls.stop()
        if runs_step_in_step():
            return  # torch's hooks fire for both
        self._of_others[id(optimizer)] += 1
        if self._of_others[id(optimizer)] >= PATIENCE and not (self._steps.in_backward or self._is_told):
            self.session.notes.add_for_run(_TURNS_OF_OTHERS)
            self._updates = 0
            steps.others_have_turn()

    def _step_ends(self) -> None:
        self._update_depth = 0  # a step that raised, and was caught, did not fire its post hook
        self._steps_done += 1  # the session counts steps later, where only the monitor looks at them
        updates, self._updates = self._updates, 0
        if not self._steps.is_whole:
            self.session.step_was_not_whole()
        self._steps.micro_step_ends(updates=updates, ends_step=True)
        if self._notes_calls and self._steps.told_of is None and not self.session.out:
            self._steps.note(self._calls, steps=self._log_every - self._steps_done % self._log_every)

    # ---- what was noted

    def _tell_noted(self, kinds: bytes, facts: list[Any]) -> None:
        """Between windows this is told of many steps together, of all that the taps have noted."""
        steps, log, monitor, place, fact = self._steps, self.session.log, self.session.monitor, 0, 0
        if monitor is None or self.session.out:
            return
        if FETCH in kinds:
            self.loaders.has_fed_again()  # only the fetches of one iterator are noted
        try:
            while place < len(kinds):
                if kinds.startswith(_USUAL_STEP, place) and self._is_between_steps():
                    while kinds.startswith(_USUAL_STEP, place):
                        began, ended, shapes, tokens = facts[fact]
                        if (seen := facts[fact + 2]) is not None:
                            steps.batches.replayed.learn(shapes, tokens, seen[0])
                        fact += _FACTS_OF_USUAL_STEP
                        place += len(_USUAL_STEP)
                        self._steps_done += 1
                        log.waited(began, ended)
                        log.note_late(facts[fact - 2], shapes, 1, True, tokens, nodes=facts[fact - 1])
                    steps.batches.steps_were_usual()
                else:
                    kind = kinds[place]
                    self._tell(kind, *facts[fact : fact + FACTS[kind]])
                    fact += FACTS[kind]
                    place += 1
        finally:
            steps.told_of = steps.nodes_then = None
        monitor.add_up()

    def _is_between_steps(self) -> bool:
        """Nothing is half done that could make the next step another than the usual one, of one batch."""
        alone = len(self._optimizers) == 1 and not (self._updates or self._is_told)
        return alone and self._steps.is_between_batches and self._steps.batches_a_step == 1

    def _tell(self, kind: int, first: Any = None, second: Any = None) -> None:
        """One call of a tap that was noted."""
        running, steps = self._calls.running, self._steps
        steps.nodes_then = second if kind in (TOLD, UPDATE_ENDS) else None
        if kind in (FETCH, NO_BATCH):
            began, ended, shapes, tokens = first
            self.session.log.waited(began, ended)
            if kind == FETCH:
                # Only the fetches of one iterator are noted.
                steps.batches.takes((), shapes, tokens, again=True, iterator=self._training_iterator)
        elif kind == UPDATE:
            running.append(self._update_began(first))
        elif kind == BACKWARD:
            running.append(self._backward_began())
        else:
            if first is not None:
                steps.told_of = first
            if kind == TOLD:
                self._step_told()
            elif kind == FORWARD:
                running.append(steps.forward_began(second))
            elif (token := running.pop()) is not None:
                ends: dict[int, Callable[[Any], None]] = {
                    FORWARD_ENDS: steps.forward_ends,
                    BACKWARD_ENDS: self._backward_ends,
                    UPDATE_ENDS: self._update_ends,
                }
                ends[kind](token)

    def another_updates(self) -> bool:
        """An optimizer that is not the loop's has made a step; returns whether that was inside a step of the loop.

        The running step is unlike others.
        """
        if self._steps.on_its_thread():
            self._calls.stop()
            self._notes_calls = False
        self._updates += 1
        return not self._steps.is_between_batches

    # ---- what the user's loop calls

    @guarded
    def step_is_told(self) -> None:
        """The loop says that a batch is through; a step ends with it if it was updated, or if no optimizer is known."""
        calls = self._calls
        at, calls.steps_left = calls.now(), calls.steps_left - 1
        if calls.on and self._root.training and calls.steps_left > 0 and at < calls.until:
            calls.kinds.append(TOLD)
            calls.facts += (at, calls.nodes())
            return
        calls.stop()
        self._step_told()

    def _step_told(self) -> None:
        first, self._is_told = not self._is_told, True
        if first and not self._steps.half_done and not self._updates:
            return  # this step's update has ended it already
        if self._updates or not self._optimizers:
            self._step_ends()
        else:
            self._steps.micro_step_ends(updates=0, ends_step=False)

    @guarded
    def leave_out(self, name: str) -> None:
        """What runs from here on belongs to no step, until ``take_in`` is called with the same *name*."""
        self._calls.stop()
        self._steps.claims_loss()
        self._steps.left_out += 1
        self.session.training_stops(name)
        self.session.enter(name)

    @guarded
    def take_in(self, name: str) -> None:
        """*name* is over."""
        self._steps.left_out -= 1
        self.session.leave()
        self.session.training_goes_on(name)

    @guarded
    def end(self, error: BaseException | None = None, *, replaced: bool = False, taken: int = 0) -> None:
        """The loop is over, or was ended by *error*: report what was measured, and remove everything of ours.

        Args:
            error: None if it ended by itself.
            replaced: another loop has made steps since the latest one of this.
            taken: so many of its latest steps are the other one's.
        """
        self._calls.stop()
        if replaced and self.session.monitor is not None:
            self.session.monitor.drop_open_step(and_before=taken)
        self._says_who_is_missing()
        self._steps.returns_to_steps()
        self.session.window.leave_scope()
        self.session.finish(interrupted_by=error, replaced=replaced)
        self.session.take_out()
        self._places.close()

    # ---- checkpoints

    def _saving_begins(self, *args: Any, **kwargs: Any) -> bool | None:
        if not self._steps.on_its_thread():
            return None
        self._steps.looks_left("checkpoint", "a checkpoint was saved")
        self.leave_out("checkpoint")
        return True

    def _saving_ends(self, _: bool) -> None:
        self.take_in("checkpoint")

    # ---- what the session asks

    def context(self) -> RunContext:
        """Where the loop runs."""
        return run_context(
            self._frame, self._model, accumulate=self._steps.batches_a_step, autocast=self._steps.autocast
        )

    def x_axis(self) -> int:
        """Steps of the loop that have ended, from the one where it began."""
        return self._initial_step + self._steps_done

    def reading_is_due(self) -> bool:
        """Every so many steps."""
        return self._steps_done % self._log_every == 0

    def optimizers(self) -> tuple[Any, ...] | None:
        """Those that were given."""
        return self._optimizers or None

    def whole_model(self) -> nn.Module:
        """What the loop calls."""
        return self._model

    def loader_workers(self) -> int | None:
        """Worker processes of the loader that was asked last, if that is known."""
        return next(map(workers_of, self.loaders.iterators()), None)

    def feed(self) -> Feed:
        """The queue of the loader that the loop used last."""
        return LoaderQueue(
            lambda: backlogs_of(self.loaders.iterators(), note=self.session.notes.add_for_run),
            batches_a_step=self._steps.batches_a_step,
        )
