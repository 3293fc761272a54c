"""A training loop of the user's own: torch's public hooks of its models and optimizers, and autograd's two entries.

Where a batch begins, where a step ends and what belongs to none, ``adapters/steps.py`` decides. What runs between the
forward and the backward is the loss, and is forward, too.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

from lightning_flops.adapters.phases import PhasedAdapter
from lightning_flops.adapters.place import Frame, called_in, device_of, root_of, run_context
from lightning_flops.adapters.steps import Decision, Part, StepEnd, Steps
from lightning_flops.adapters.wrapping import Hook, hear, hear_backwards, hear_calls, hear_fetches
from lightning_flops.config import ProfilerConfig
from lightning_flops.measure.batches import HIDDEN_SHAPE, alike_parts, first_tensor, samples_in, tensor_shapes
from lightning_flops.measure.optimizer_hooks import OptimizerHooks
from lightning_flops.measure.recorder import steps_to_settle
from lightning_flops.measure.torch_private.optional import (
    fetched_ahead,
    loader_of,
    workers_of,
)
from lightning_flops.records import BatchTokens, RunContext, Shapes
from lightning_flops.run.adapter import Facts
from lightning_flops.run.output import LoggedOutput
from lightning_flops.run.run import Run, failed, safe
from lightning_flops.schema.profile import Profile
from lightning_flops.signals import Undo

_NO_SAMPLES = (
    "samples/s is n/a: {}. batch_size=... says how many samples a batch has, profiler.batches(...) what a batch is, "
    "profiler.step() where a step ends."
)
_NOT_CALLED = "The model was not called, or by compiled code: forward is what ran from the batch to the backward."


def _update_is_over(optimizer: Any, adapter: LoopAdapter, _: Any) -> None:
    adapter.update_ends(optimizer)


def _nothing(*_: Any) -> None:
    """As torch does, which calls no hook after a step that has raised."""


@dataclass(slots=True)
class _MicroStep:
    """What one micro-step computes on."""

    shapes: Shapes = ()
    tokens: BatchTokens | None = None
    given: Any = ()  # what settings that are functions of the batch are asked of


@dataclass(slots=True)
class _RunningStep:
    """What was heard of the running step."""

    micro_steps: list[_MicroStep] = field(default_factory=list)
    inputs: list[weakref.ref[torch.Tensor]] = field(default_factory=list)  # first tensors of its forwards
    latest: Shapes = ()  # of the latest forward with gradients
    updates: int = 0


@dataclass(slots=True)
class _Fetches:
    """What was heard of the loop's fetches."""

    asked: Callable[[], Any] = lambda: None  # returns what was asked for a batch last
    names: tuple[int, int] = (-1, -1)  # of it, and of its loader
    waits: bool = False  # it is being asked, for a step
    shapes: Shapes = ()  # of what was fetched last
    handed: _MicroStep | None = None  # what ``batches`` has handed out, and no forward has taken
    learned: set[Shapes] = field(default_factory=set)  # shapes whose steps were counted


@dataclass(slots=True)
class _Known:
    """What is known of the loop, before it or by now."""

    steps_before: int  # that it has made without us
    initial_step: int  # x-axis of the first step
    log_every: int  # steps; 0: throughput is written when a subclass says so
    reads_fetched: bool  # tokens, before the model gets them
    accumulate: int = 1
    autocast: str = ""
    workers: int | None = None


class _Names:
    """A number for each object that a loop's events are of; holds none of them."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[int, weakref.ref[Any]]] = {}
        self._next = itertools.count()

    def __call__(self, one: object) -> int:
        known, key = self._known, id(one)
        found = known.get(key)
        if found is None:
            found = known[key] = next(self._next), weakref.ref(one, lambda _: known.pop(key, None))
        return found[0]


class LoopAdapter(PhasedAdapter):
    """The adapter of one loop, on one rank, which has made *steps_before* steps without it.

    With *log_every_n_steps* 0, throughput is written when a subclass says so. *facts*, if they are not the loop's own.
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
        initial_step: int = 0,
        facts: Facts | None = None,
    ) -> None:
        self._model, self._frame = model, frame
        self._optimizers = tuple(optimizers)
        self.facts = facts or Facts(
            root=root_of(model),
            device=device_of(model),
            output=output,
            rank=frame.rank,
            world_size=frame.world_size,
            profile_step=config.next_profile_step(steps_done=steps_before),
            unseen=("transfer", "other"),
        )
        on_device = self.facts.device.type != "cpu"
        self._known = _Known(steps_before, initial_step, log_every_n_steps, reads_fetched=on_device)
        self._steps = Steps(range(len(self._optimizers)))
        self._name = _Names()
        self._running, self._fetches = _RunningStep(), _Fetches()
        self._in_forward = self._in_update = False  # one has begun for the run, and not ended
        self.run = Run(self, config, publish)
        self.run.steps_done = steps_before

    # ---- what the run asks

    def context(self) -> RunContext:
        """Where the loop runs."""
        known = self._known
        return run_context(self._frame, self._model, accumulate=known.accumulate, autocast=known.autocast)

    def x_axis(self) -> int:
        """The loop's own step."""
        return self._known.initial_step + self.run.steps_done

    def optimizers(self) -> Iterable[Any] | None:
        """Those that were given."""
        return self._optimizers or None

    def whole_model(self) -> nn.Module:
        """The model as it was given."""
        return self._model

    def loader_workers(self) -> int | None:
        """Those of the first DataLoader that was asked."""
        return self._known.workers

    # ---- what is heard

    def begin(self) -> None:
        """The loop begins."""
        undo, kind = self.run.undo, type(self)
        self._hear_models(undo)
        self._hear_updates(undo)
        hear_backwards(self, undo)
        begins, ends = partial(kind.backward_begins, grad_only=True), partial(kind.backward_ends, grad_only=True)
        hear(self, torch.autograd, "grad", undo, begins=begins, ends=ends)
        hear_fetches(self, undo)
        self.run.begin()

    def _hear_updates(self, undo: Undo) -> None:
        kind = type(self)
        begins, ends = Hook(self, kind.update_begins), Hook(self, kind.update_ends)
        for one in self._optimizers:
            if hasattr(one, "register_step_pre_hook"):
                undo.callback(one.register_step_pre_hook(begins).remove)
                undo.callback(one.register_step_post_hook(ends).remove)
            else:  # several in one, or another thing with a step
                over = partial(_update_is_over, one)
                hear(self, type(one), "step", undo, begins=kind.update_begins, ends=over, raises=_nothing, of=one)
        if not self._optimizers:
            hooks = OptimizerHooks(begins, ends, failed=partial(failed, self.run))
            undo.callback(hooks.remove)
            hooks.put_up()

    def _hear_models(self, undo: Undo) -> None:
        hear_calls(self, called_in(self._model), undo, begins=type(self).forward_begins, ends=type(self).forward_ends)

    def _decided(self, decision: Decision) -> Part:
        """Do what *decision* says, and return what its event is."""
        if decision.ended is not None:
            self._step_is_over(decision.ended)
        if self._steps.away is not bool(self.run.between):
            words = "validation" if self._steps.away else ""
            self.run.between_steps(words, since_batch=not self._steps.has_begun)
        return decision.part

    def _step_is_over(self, ended: StepEnd) -> None:
        run, known, number = self.run, self._known, len(ended.rows)
        step, self._running = self._running, _RunningStep()
        found = step.micro_steps or [_MicroStep(self._fetches.shapes)]
        while len(found) > number:  # what was taken for one, until a batch was fetched for the step
            extra = found.pop()
            found[-1].shapes += extra.shapes
        found += [_MicroStep()] * (number - len(found))
        if ended.why:
            run.notes.add_for_run(_NO_SAMPLES.format(ended.why))
        if self._steps.is_blind and run.is_marking:
            run.notes.add(_NOT_CALLED)
        known.accumulate = number
        logs = known.log_every > 0 and (run.steps_done + 1) % known.log_every == 0
        batches = [(one.given, one.shapes, one.tokens) for one in found]
        run.batch_done(*batches, updates=step.updates, ends_step=True, logs=logs, rows=ended.rows)

    # ---- the parts of a step

    @safe
    def forward_begins(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A model is called."""
        steps = self._steps
        if steps.is_inside:  # a model inside another one, a recomputation, or in what the loop leaves out
            steps.forward_begins(None, None)
            return
        has_begun, grads = steps.has_begun, torch.is_grad_enabled()
        given = self._given(args, kwargs)
        shapes = tensor_shapes(given)
        same = grads and self._is_same(given)
        decision = steps.forward_begins(
            self._name(module), samples_in(shapes), grads=grads, training=module.training, same=same
        )
        part = self._decided(decision)
        if part is Part.OUTSIDE:
            return
        if part is Part.MICRO_STEP:
            self._micro_step_begins(given, shapes, is_first=not has_begun or decision.ended is not None)
        elif grads and self._running.micro_steps:
            self._running.micro_steps[-1].shapes += shapes
        self._running.latest = shapes if grads else ()
        if not self._in_forward:
            self._in_forward = True
            self.run.enter("forward", counts=grads)

    def _given(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What a model is called with, as the user calls it."""
        if args and kwargs:
            return (*args, *kwargs.values())
        return kwargs or (args[0] if len(args) == 1 else args)

    def _is_same(self, given: Any) -> bool:
        """Whether the first tensor in *given* is one that a forward of this step had."""
        first = first_tensor(given)
        if first is None or any(one() is first for one in self._running.inputs):
            return first is not None
        self._running.inputs.append(weakref.ref(first))
        return False

    def _micro_step_begins(self, given: Any, shapes: Shapes, *, is_first: bool) -> None:
        """A micro-step begins; if it *is_first*, nothing of its step has computed anything."""
        run, device = self.run, self.facts.device.type
        if run.is_marking and torch.is_autocast_enabled(device):
            self._known.autocast = str(torch.get_autocast_dtype(device)).removeprefix("torch.")
        one, self._fetches.handed = self._fetches.handed or _MicroStep(shapes, given=self._kept(given)), None
        one.tokens = self._tokens(given, shapes)
        self._running.micro_steps.append(one)
        if is_first and not (self.counts_at_fetch and self._steps.fetches):
            self._may_count(one.shapes, one.tokens)

    def _may_count(self, shapes: Shapes, tokens: BatchTokens | None = None) -> None:
        if self.run.steps_done > self._known.steps_before:  # the first step lacks what follows an update
            self.run.batch_begins(shapes, tokens)

    def _kept(self, given: Any) -> Any:
        """*given*, if a setting is a function of it; it is not held otherwise."""
        config = self.run.config
        return given if callable(config.batch_size) or callable(config.tokens_per_sample) else ()

    def _tokens(self, given: Any, shapes: Shapes) -> BatchTokens | None:
        """The tokens of a batch, read where it was fetched, or here if it is on the host."""
        reader = self.run.tokens
        if not (reader.reads or reader.fetched):
            return None
        tokens = reader.take(None, fetched=True)
        if tokens is not None and tokens.processed in {one[0] * one[1] for one in shapes if len(one) > 1}:
            return tokens
        return reader.of(given) if self.facts.device.type == "cpu" else None

    @safe
    def forward_ends(self, module: nn.Module, args: Any, output: Any) -> None:
        """A model's forward is over, or has raised; in an optimizer's closure, the loss is still a part of it."""
        self._steps.forward_ends()
        step = self._running
        if output is None and not self._steps.is_inside and step.micro_steps:  # it has raised: this was not computed
            last, step.latest, number = step.micro_steps[-1], (), len(step.latest)
            last.shapes = last.shapes[: len(last.shapes) - number]
        if not self._steps.inside.updates:
            self._forward_is_over()

    def _forward_is_over(self) -> None:
        if self._in_forward and not self._steps.inside.forwards:
            self._in_forward = False
            self.run.leave()

    @safe
    def backward_begins(self, /, *_: Any, grad_only: bool = False, **__: Any) -> None:
        """Autograd is about to run; what ran since the forward was the loss. *grad_only*: it accumulates nothing."""
        part = self._decided(self._steps.backward_begins(grad_only=grad_only))
        if part is Part.STEP or part is Part.MICRO_STEP:
            if part is Part.MICRO_STEP:  # compiled code called the model, and no hook of ours
                self._running.micro_steps.append(_MicroStep(self._fetches.shapes))
            self._forward_is_over()
            self.run.claim("forward")
            self.run.enter("backward")

    @safe
    def backward_ends(self, /, _: Any = None, *, grad_only: bool = False) -> None:
        """Autograd has run, or has raised."""
        steps = self._steps
        steps.backward_ends(grad_only=grad_only)
        if not (steps.inside.backwards or steps.leaves_out):
            steps.inside.forwards = int(self._in_forward)  # a forward inside, if it has raised, has no end
            self.run.leave()

    @safe
    def update_begins(self, optimizer: Any, *_: Any, **__: Any) -> None:
        """An optimizer's step begins; where a subclass's step calls its parent's, the hooks are called again."""
        if self._decided(self._steps.update_begins()) is Part.STEP:
            self._in_update = True
            self.run.enter("optimizer")

    @safe
    def update_ends(self, optimizer: Any, *_: Any) -> None:
        """An optimizer's step is over."""
        index = next((number for number, one in enumerate(self._optimizers) if one is optimizer), -1)
        # A traced step ends with what comes next: here torch's own scope of the update is still open.
        later = self.run.is_marking and self.run.window.recorder.tracing
        decision = self._steps.update_ends(index, later=later)
        if decision.part is Part.STEP:
            self._update_is_over()
            self._running.updates += 1
            self._decided(decision)

    def _update_is_over(self) -> None:
        if self._in_update:  # otherwise its closure has fetched a batch
            self._in_update = False
            self._forward_is_over()
            self.run.leave()

    # ---- batches

    @safe
    def fetch_begins(self, source: Any) -> None:
        """A DataLoader's iterator, or ``batches``, is asked for a batch."""
        steps = self._steps
        if not steps.is_inside:
            self._update_is_over()  # no optimizer's step runs where a batch is asked for: this one has raised
        fetches = self._fetches
        is_new = fetches.asked() is not source
        names = (self._name(source), self._name(loader_of(source))) if is_new else fetches.names
        training = steps.is_fed_by(names[0]) or any(one.training for one in called_in(self.facts.root))
        decision = steps.fetch_begins(*names, grads=torch.is_grad_enabled(), training=training)
        if self._decided(decision) is not Part.STEP:
            return
        if is_new:
            fetches.asked, fetches.names = weakref.ref(source), names
            self._known.workers = workers_of(source) if self._known.workers is None else self._known.workers
            settle = steps_to_settle(batches_ahead=fetched_ahead(source), batches_a_step=self._known.accumulate)
            self.run.window.recorder.settle_for(settle)
        self._fetches.waits = True
        self.run.fetch_begins()

    @safe
    def fetch_ends(self, batch: Any, *, handed_out: bool = False) -> None:
        """A fetch has brought *batch*, which ``batches`` has *handed_out*, or None: the loader is at its end."""
        steps, (source, loader) = self._steps, self._fetches.names
        if not (self._fetches.waits and steps.inside.fetches == 1):  # inside of another one, or outside of steps
            steps.fetch_fails()
            return
        self._fetches.waits = False
        self.run.fetch_ends()
        if batch is None:
            steps.fetch_fails(source)
            return
        shapes = tensor_shapes(batch)
        steps.fetch_ends(source, samples_in(shapes), alike_parts(batch), loader=loader, explicit=handed_out)
        if handed_out and HIDDEN_SHAPE not in shapes:  # otherwise they are those of what the model gets
            self._fetches.handed = _MicroStep(shapes, given=self._kept(batch))
        self._fetches.shapes = shapes
        if self.counts_at_fetch and not (steps.has_begun or shapes in self._fetches.learned):
            self._may_count(shapes)  # before anything computes on it
            if self.run.window.recorder.counting:
                self._fetches.learned.add(shapes)
        if self._known.reads_fetched and not handed_out:
            self.run.tokens.fetch(batch)

    # ---- what the loop says itself

    @safe
    def names_phase(self, *, begins: bool) -> None:
        """A phase of the step *begins*, or ends: nothing in it is an evaluation."""
        steps = self._steps
        steps.inside.phases += 1 if begins else -1
        steps.away &= steps.leaves_out or steps.says.outside
        self._decided(Decision())

    @safe
    def leave_out(self, what: str) -> None:
        """*what* begins, which belongs to no step, until ``take_in``."""
        if self._steps.awaits_backward:
            self.run.claim("forward")
        self._decided(self._steps.leave_out())
        self.run.outside(what)

    @safe
    def take_in(self) -> None:
        """End of what belonged to no step."""
        self._steps.take_in()
        self.run.inside()

    @safe
    def end_step(self, *, updated: bool | None = None) -> None:
        """A batch is through, and with it a step, if it was *updated*; None: if an optimizer's step was seen."""
        self._running.updates = self._running.updates if updated is None else int(updated)
        self._decided(self._steps.mark(updated=updated))

    @safe
    def finish(self, error: BaseException | None = None) -> None:
        """The loop is over, or has raised *error*."""
        self._decided(self._steps.finish())
        self.run.finish(interrupted_by=error)
