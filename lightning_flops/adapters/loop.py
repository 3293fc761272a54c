"""A training loop of the user's own: torch's public hooks of its models and optimizers, and autograd's two entries.

A batch is what the models were called with, or what ``batches`` handed out. A step ends with that of the last listed
optimizer, or where the loop says so. What runs between the forward and the backward is the loss, and is forward, too. A
model that is called with gradients off in evaluation mode is an evaluation, which belongs to no step.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from lightning_flops.adapters.place import Frame, called_in, device_of, root_of, run_context
from lightning_flops.adapters.wrapping import hear, hear_backwards, hear_fetches
from lightning_flops.config import ProfilerConfig
from lightning_flops.measure.batches import HIDDEN_SHAPE, tensor_shapes
from lightning_flops.measure.module_hooks import around_compilations, around_scripting
from lightning_flops.measure.optimizer_hooks import OptimizerHooks
from lightning_flops.measure.recorder import steps_to_settle
from lightning_flops.measure.torch_private.needed import hide
from lightning_flops.measure.torch_private.optional import fetched_ahead, leave_compiled_code, was_used, workers_of
from lightning_flops.records import BatchTokens, Shapes
from lightning_flops.run.facts import Facts
from lightning_flops.run.output import LoggedOutput
from lightning_flops.run.run import Run, failed, safe
from lightning_flops.schema.profile import Profile

_NOT_CALLED = "The model was not called, or by compiled code: forward is what ran from the batch to the backward."


class Hook:
    """A hook of ours on a module or an optimizer of the user's, which holds the adapter weakly."""

    def __init__(self, adapter: Any, notify: Callable[..., None]) -> None:
        self._adapter = weakref.ref(adapter)
        self._notify = notify

    def __call__(self, *args: Any) -> None:
        """Notify the adapter, if it is there, on the thread that trains."""
        leave_compiled_code()
        adapter = self._adapter()
        if adapter is not None and adapter.run.thread == threading.get_ident():
            self._notify(adapter, *args)

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (nullcontext(), "__exit__")  # in a pickle or a copy: the standard library's, and does nothing


hide(Hook.__call__)


@dataclass(slots=True)
class _Batch:
    """The running batch."""

    shapes: Shapes = ()
    tokens: BatchTokens | None = None
    given: Any = ()  # what settings that are functions of the batch are asked of
    handed: bool = False  # by ``batches``: its shapes are known
    pending: bool = False  # a model was called on it
    after_backward: bool = False
    next_is_there: bool = False  # the one after it was fetched
    updates: int = 0
    ends_step: bool = False  # the last optimizer has made its step


@dataclass(slots=True)
class _Place:
    """Where the loop is; what runs in another one of its kind is a depth."""

    forwards: int = 0
    in_forward: bool = False
    backwards: int = 0
    updates: int = 0
    fetches: int = 0
    outside: int = 0  # of what the loop itself leaves out of its steps
    away: bool = False  # until the loop goes on with its steps, for an evaluation
    asked: Callable[[], Any] = lambda: None  # returns what was asked for a batch last
    feeder: Callable[[], Any] | None = lambda: None  # what has fed the latest forward of a step; None: what comes next
    has_fetched: bool = False
    has_trained: bool = False  # a model was called in training mode
    ends_known: bool = False  # the loop says where its steps end


class LoopRun:
    """The adapter of one loop, on one rank, which has made *steps_before* steps without it.

    With *log_every_n_steps* 0, throughput is written when a subclass says so. *facts* are by the names of ``Facts``.
    """

    run: Run
    counts_at_fetch = True  # steps are counted from their first fetch on, where it is seen: a teacher may run first

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[Any],
        *,
        config: ProfilerConfig,
        publish: Callable[[Profile], None],
        frame: Frame,
        output: LoggedOutput,
        log_every_n_steps: int = 0,
        steps_before: int = 0,
        **facts: Any,
    ) -> None:
        self._model = model
        self._optimizers = tuple(optimizers)
        self._log_every = log_every_n_steps
        self._asks = callable(config.batch_size) or callable(config.tokens_per_sample)  # of each batch
        self._place = _Place()
        self._batch = _Batch()
        self._micro_batches = 0
        self._accumulate = 1
        self._autocast = ""
        self._workers: int | None = None
        self._learned: set[Shapes] = set()  # shapes of fetched batches whose steps were counted
        self._shapes_fetched: Shapes = ()
        known: dict[str, Any] = {
            "root": root_of(model),
            "device": device_of(model),
            "output": output,
            "context": lambda: run_context(frame, model, accumulate=self._accumulate, autocast=self._autocast),
            "x_axis": lambda: self.run.steps_done,
            "optimizers": lambda: self._optimizers or None,
            "whole_model": lambda: model,
            "rank": frame.rank,
            "world_size": frame.world_size,
            "profile_step": config.next_profile_step(steps_done=steps_before),
            "loader_workers": lambda: self._workers,
            "unseen": ("transfer", "other"),
        }
        self.run = Run(Facts(**(known | facts)), config, publish)
        self.run.steps_done = steps_before
        self._reads_fetched = self.run.facts.device.type != "cpu"  # tokens, before the model gets them

    def begin(self) -> None:
        """The loop begins."""
        undo = self.run.undo
        self._hear_models(undo)
        self._hear_updates(undo)
        hear_backwards(self, undo)
        hear(self, torch.autograd, "grad", undo, begins=LoopRun.backward_begins, ends=LoopRun.backward_ends)
        hear_fetches(self, undo)
        self.run.begin()

    def _hear_updates(self, undo: ExitStack) -> None:
        begins, ends = Hook(self, type(self).update_begins), Hook(self, type(self).update_ends)
        for one in self._optimizers:
            undo.callback(one.register_step_pre_hook(begins).remove)
            undo.callback(one.register_step_post_hook(ends).remove)
        if not self._optimizers:
            hooks = OptimizerHooks(begins, ends, failed=partial(failed, self.run))
            undo.callback(hooks.remove)
            hooks.put_up()

    def _hear_models(self, undo: ExitStack) -> None:
        handles: list[Any] = []
        enters, leaves = Hook(self, type(self).forward_begins), Hook(self, type(self).forward_ends)
        models = called_in(self._model)

        def put_up(*_: Any) -> None:
            for model in () if handles else models:
                handles.append(model.register_forward_pre_hook(enters, prepend=True, with_kwargs=True))
                handles.append(model.register_forward_hook(leaves, always_call=True))

        def take_down(*_: Any) -> None:
            while handles:
                handles.pop().remove()

        undo.callback(take_down)
        put_up()
        around_scripting(undo, take_down, put_up)
        if was_used():  # code that had seen the hooks would break its graph there
            around_compilations(undo, take_down, put_up)

    # ---- the parts of a step

    @safe
    def forward_begins(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A model is called."""
        place = self._place
        place.forwards += 1
        if place.forwards > 1 or place.backwards or place.outside:
            return  # a model inside another one, or a recomputation
        self._end_step_if_due()
        if self._evaluates(module):
            return
        self._steps_go_on()
        if self._batch.after_backward and (self._batch.next_is_there or not place.has_fetched):
            self._batch_is_over(ends_step=False)
        place.has_trained |= module.training
        place.feeder = place.asked
        self._take(args, kwargs)
        if not place.in_forward:
            place.in_forward = True
            self.run.enter("forward")

    def _take(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Take the shapes and the tokens of the batch before the model can change it."""
        run, batch = self.run, self._batch
        first, batch.pending = not batch.pending, True
        if not batch.handed:
            batch.shapes += tensor_shapes((*args, *kwargs.values()) if kwargs else args)
        if not first:
            return
        batch.next_is_there = False
        device = run.facts.device.type
        if run.is_marking and torch.is_autocast_enabled(device):
            self._autocast = str(torch.get_autocast_dtype(device)).removeprefix("torch.")
        given = kwargs or (args[0] if len(args) == 1 else args)
        if self._asks and not batch.handed:
            batch.given = given
        if run.tokens.reads or run.tokens.fetched:
            tokens = run.tokens.take(None, fetched=True)
            if tokens is not None and tokens.processed in {one[0] * one[1] for one in batch.shapes if len(one) > 1}:
                batch.tokens = tokens
            elif device == "cpu":
                batch.tokens = run.tokens.of(given)
        if not (self.counts_at_fetch and self._place.has_fetched):
            run.batch_begins(batch.shapes, batch.tokens)

    @safe
    def forward_ends(self, module: nn.Module, args: Any, output: Any) -> None:
        """A model's forward is over, or has raised; in an optimizer's closure, the loss is still a part of it."""
        place = self._place
        place.forwards = max(0, place.forwards - 1)
        if not place.updates:
            self._forward_is_over()

    def _forward_is_over(self) -> None:
        if self._place.in_forward and not self._place.forwards:
            self._place.in_forward = False
            self.run.leave()

    @safe
    def backward_begins(self, *_: Any, **__: Any) -> None:
        """Autograd is about to run; what ran since the forward was the loss."""
        place, batch = self._place, self._batch
        if place.outside:
            return
        place.backwards += 1
        if place.backwards > 1:  # a reentrant checkpoint's
            return
        self._steps_go_on()
        if not batch.pending:  # compiled code called the model, and no hook of ours
            batch.pending, batch.next_is_there = True, False
            batch.shapes = self._shapes_fetched or batch.shapes
            if self.run.is_marking:
                self.run.notes.add(_NOT_CALLED)
        batch.after_backward = True
        self._forward_is_over()
        self.run.claim("forward")
        self.run.enter("backward")

    @safe
    def backward_ends(self, _: Any = None) -> None:
        """Autograd has run."""
        place = self._place
        place.backwards = max(0, place.backwards - 1)
        if not (place.backwards or place.outside):
            place.forwards = int(place.in_forward)
            self.run.leave()
            self._end_step_if_due()

    @safe
    def update_begins(self, optimizer: Any, *_: Any, **__: Any) -> None:
        """An optimizer's step begins; where a subclass's step calls its parent's, the hooks are called again."""
        self._steps_go_on()
        self._place.updates += 1
        if self._place.updates == 1:
            self.run.enter("optimizer")

    @safe
    def update_ends(self, optimizer: Any, *_: Any) -> None:
        """An optimizer's step is over."""
        place, batch = self._place, self._batch
        if not place.ends_known and optimizer is (self._optimizers or (None,))[-1]:
            batch.ends_step = True
        place.updates -= 1
        if place.updates > 0 or place.outside:
            return
        if place.updates == 0:  # otherwise its closure has fetched a batch
            self._forward_is_over()
            self.run.leave()
        place.updates = 0
        batch.updates += 1
        # A traced step ends with what comes next: here torch's own scope of the update is still open.
        if not (self.run.is_marking and self.run.window.recorder.tracing):
            self._end_step_if_due()

    # ---- batches

    @safe
    def fetch_begins(self, source: Any) -> None:
        """A DataLoader's iterator, or ``batches``, is asked for a batch."""
        place = self._place
        if place.updates:  # no optimizer's step runs where a batch is asked for: this one has raised
            place.updates = 0
            self.run.leave()
        self._end_step_if_due()
        if place.feeder is None or place.feeder() is source:
            place.feeder = weakref.ref(source)
            self._steps_go_on()  # the loop goes back to the loader of its steps
        elif not (place.outside or place.fetches):
            self._evaluates(*called_in(self.run.facts.root), fetches=True)
        if place.outside or place.away:
            return
        place.fetches += 1
        if place.asked() is not source:
            if (workers := workers_of(source)) is not None:
                self._workers = workers
                settle = steps_to_settle(batches_ahead=fetched_ahead(source), batches_a_step=self._accumulate)
                self.run.window.recorder.settle_for(settle)
            if place.fetches == 1:
                place.asked = weakref.ref(source)
        if place.fetches == 1:
            place.has_fetched = True
            self.run.fetch_begins()

    @safe
    def fetch_ends(self, batch: Any) -> None:
        """End of a fetch that delivered *batch*; None: the loader is at its end, or the batch will be handed out."""
        place = self._place
        if not place.fetches:
            return
        place.fetches -= 1
        if not place.fetches:
            self._batch.next_is_there = True
            self.run.fetch_ends()
        if batch is not None:
            self._shapes_fetched = tensor_shapes(batch)
            if self.counts_at_fetch:
                self._comes(self._shapes_fetched)
            if self._reads_fetched:
                self.run.tokens.fetch(batch)

    def _comes(self, shapes: Shapes) -> None:
        """A batch of *shapes* is there: have its step counted if they are new, before anything computes on it."""
        if not (self._batch.pending or shapes in self._learned):
            self.run.batch_begins(shapes)
            if self.run.window.recorder.counting:
                self._learned.add(shapes)

    @safe
    def hands_out(self, batch: Any) -> None:
        """``batches`` hands out *batch*, which is what the step computes on."""
        if self._place.outside or self._place.away:
            return
        if self._batch.after_backward:
            self._batch_is_over(ends_step=False)
        shapes = tensor_shapes(batch)
        self._batch.given = batch
        if HIDDEN_SHAPE not in shapes:  # otherwise those of what the model gets
            self._batch.shapes, self._batch.handed = shapes, True
            self._comes(shapes)

    def _end_step_if_due(self) -> None:
        if self._batch.ends_step and not (self._place.backwards or self._place.updates):
            self._batch_is_over(ends_step=True)

    def _batch_is_over(self, *, ends_step: bool) -> None:
        run, batch, self._batch = self.run, self._batch, _Batch()
        logs = ends_step and self._log_every > 0 and (run.steps_done + 1) % self._log_every == 0
        self._micro_batches += 1
        if ends_step:
            self._accumulate, self._micro_batches = self._micro_batches, 0
        done = (batch.given, batch.shapes, batch.tokens)
        run.batch_done(done, updates=batch.updates, ends_step=ends_step, logs=logs)

    # ---- what belongs to no step

    def _evaluates(self, *modules: nn.Module, fetches: bool = False) -> bool:
        """Whether one of *modules* is evaluated now, or a batch is fetched for that: what runs belongs to no step."""
        may_train = torch.is_grad_enabled() and not (fetches and self._place.has_trained)
        if may_train or all(one.training for one in modules):
            return False
        if not self._place.away:
            self._goes_away("validation", since_batch=not self._batch.pending)
        return True

    def _goes_away(self, what: str, *, since_batch: bool = False) -> None:
        """*what* begins, which belongs to no step, until the loop goes on with its steps."""
        self._steps_go_on()
        self._place.away = True
        self.run.outside(what, since_batch=since_batch)

    def _steps_go_on(self) -> None:
        if self._place.away:
            self._place.away = False
            self.run.inside()

    @safe
    def leave_out(self, what: str) -> None:
        """*what* begins, which belongs to no step, until ``take_in``."""
        place, batch = self._place, self._batch
        self._end_step_if_due()
        if batch.pending and not (place.outside or batch.after_backward):
            self.run.claim("forward")
        place.outside += 1
        self.run.outside(what)

    @safe
    def take_in(self) -> None:
        """End of what belonged to no step."""
        self._place.outside -= 1
        self.run.inside()

    @safe
    def end_step(self) -> None:
        """The loop says that a batch is through, and with it a step, if it was updated."""
        self._place.ends_known = True
        if self._batch.pending or not self._optimizers:
            self._steps_go_on()
            self._batch.updates = self._batch.updates or int(not self._optimizers)
            self._batch_is_over(ends_step=self._batch.updates > 0)

    @safe
    def finish(self, error: BaseException | None = None) -> None:
        """The loop is over, or has raised *error*."""
        self._steps_go_on()
        self._end_step_if_due()
        self.run.finish(interrupted_by=error)
