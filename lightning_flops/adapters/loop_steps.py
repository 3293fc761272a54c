"""What the events of a loop do: its steps as the run hears of them, by what ``adapters/steps.py`` decides.

An event is applied by its facts alone, or not at all where its step repeats the one before.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, MutableMapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from lightning_flops.adapters.phases import PhasedAdapter
from lightning_flops.adapters.place import Frame, device_of, root_of, run_context
from lightning_flops.adapters.repeats import Repeats
from lightning_flops.adapters.steps import StepEnd, Steps
from lightning_flops.config import ProfilerConfig
from lightning_flops.measure.batches import HIDDEN_SHAPE, alike_parts, samples_in, tensor_shapes
from lightning_flops.measure.fake_steps import in_shapes, kept_call
from lightning_flops.measure.recorder import steps_to_settle
from lightning_flops.measure.torch_private.optional import fetched_ahead, workers_of
from lightning_flops.records import BatchTokens, RunContext, Shapes, TimePhase
from lightning_flops.run.adapter import Facts
from lightning_flops.run.output import LoggedOutput
from lightning_flops.run.run import Run
from lightning_flops.schema.profile import Profile

_NO_SAMPLES = (
    "samples/s is n/a: {}. batch_size=... says how many samples a batch has, profiler.batches(...) what a batch is, "
    "profiler.step() where a step ends."
)
_NOT_CALLED = "The model was not called, or by compiled code: forward is what ran from the batch to the backward."


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
    latest: Shapes = ()  # of the tensors that its latest forward was called with, if it was with gradients
    updates: int = 0


@dataclass(slots=True)
class _Fetches:
    """What was heard of the loop's fetches, and read of the latest: most that follow are alike."""

    names: tuple[int, int] = (-1, -1)  # of what was asked for a batch last, and of its loader
    waits: bool = False  # it is being asked, for a step
    shapes: Shapes = ()  # of what was fetched last
    handed: _MicroStep | None = None  # what ``batches`` has handed out, and no forward has taken
    asked: Callable[[], Any] = lambda: None  # returns what is asked, which has these names
    asked_names: tuple[int, int] = (-1, -1)
    brought: tuple[type, Shapes] = (object, ())  # a batch's kind and shapes, which has these rows in so many parts
    sizes: tuple[int | None, int] = (None, 1)

    def brings(self, batch: Any) -> Shapes:
        """The shapes of *batch*, whose sizes are known where the latest was alike."""
        shapes = tensor_shapes(batch)
        if self.brought != (kind := (type(batch), shapes)):
            self.brought, self.sizes = kind, (samples_in(shapes), alike_parts(batch))
        return shapes


@dataclass(slots=True)
class _Known:
    """What is known of the loop, before it or by now."""

    steps_before: int  # that it has made without us
    initial_step: int  # x-axis of the first step
    log_every: int  # steps; 0: throughput is written when a subclass says so
    on_host: bool  # the model is there
    reads_fetched: bool  # tokens, before the model gets them
    keeps_batches: bool  # for settings that are functions of one; it is not held otherwise
    accumulate: int = 1
    autocast: str = ""
    call: tuple[Any, ...] = ()  # what the model is called with, as of ``kept_call``
    workers: int | None = None
    counted: set[Shapes] = field(default_factory=set)  # what steps begin with that were counted


def _event(apply: Callable[[Any, bool], None]) -> Callable[..., None]:
    """A method that hears of an event, of which *apply* need know only whether it is ``autograd.grad``'s."""

    def hear_event(self: LoopSteps, /, *_: Any, grad_only: bool = False, **__: Any) -> None:
        self._repeats.hear(apply, grad_only)

    return hear_event


class LoopSteps(PhasedAdapter):
    """The adapter of one loop, on one rank, which has made *steps_before* steps without it.

    With *log_every_n_steps* 0, throughput is written when a subclass says so. The last arguments are as in ``Facts``.
    """

    run: Run
    unseen: tuple[TimePhase, ...] = ("transfer", "other")  # as in ``Facts``
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
        root: nn.Module | None = None,
        device: torch.device | None = None,
        settle_steps: int = 2,
        ends_when_dropped: bool = False,
    ) -> None:
        self._model, self._frame = model, frame
        self._optimizers = tuple(optimizers)
        self.facts = Facts(
            root=root_of(model) if root is None else root,
            device=device_of(model) if device is None else device,
            output=output,
            rank=frame.rank,
            world_size=frame.world_size,
            profile_step=config.next_profile_step(steps_done=steps_before),
            settle_steps=settle_steps,
            unseen=self.unseen,
            ends_when_dropped=ends_when_dropped,
        )
        self._known = _Known(
            steps_before,
            initial_step,
            log_every_n_steps,
            on_host=self.facts.device.type == "cpu",
            reads_fetched=self.facts.device.type != "cpu",
            keeps_batches=callable(config.batch_size) or callable(config.tokens_per_sample),
        )
        self._machine = Steps(map(id, self._optimizers))
        self._names: MutableMapping[Any, int] = WeakIdKeyDictionary()  # of iterators and loaders
        self._running, self._fetches = _RunningStep(), _Fetches()
        self._read: tuple[Any, ...] = ()  # while it is applied: what a model gets, or a fetch has brought, as it is
        self._inputs: list[weakref.ref[torch.Tensor]] = []  # first tensors of the step's forwards with gradients
        self._in_forward = self._in_update = False  # one has begun for the run, and not ended
        self._outcome: tuple[Any, ...] = ()  # what the latest step came to
        self._repeats = Repeats(self, state=self._state, may_skip=self._may_skip, again=self._is_over_again)
        self.run = Run(self, config, publish)
        self.run.steps_done = steps_before

    # ---- what the run asks

    def context(self) -> RunContext:
        """Where the loop runs."""
        known, device = self._known, self.facts.device
        return run_context(self._frame, self._model, device, accumulate=known.accumulate, autocast=known.autocast)

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

    # ---- its steps

    @property
    def _steps(self) -> Steps:
        """The machine, for what is no event of these."""
        self._repeats.spoil()
        return self._machine

    def _state(self) -> Any:
        """All that decides what an event does, but for what only grows while it makes no difference."""
        kept = vars(self._machine), self._running, self._fetches, self._in_forward, self._in_update
        return deepcopy((*kept, len(self._inputs), list(self.run.tokens.fetched)))

    def _may_skip(self) -> bool:
        """Whether nothing but the fetches and the end of the step that begins concerns the run."""
        run = self.run
        is_left_alone = run.window.scope is None and not run.window.recorder.marking
        return is_left_alone and not (run.outside_of or run.throughput.step.random)

    def _is_over_again(self) -> None:
        batches, updates, rows = self._outcome
        self._inputs.clear()
        self.run.batch_done(*batches, updates=updates, ends_step=True, logs=self._logs(), rows=rows)

    def _follow(self, *, is_last: bool = False) -> None:
        """Do what the machine has decided; nothing else of the event *is* to come if it is the *last* of its step."""
        steps = self._machine
        if (ended := steps.ended) is not None:
            steps.ended = None
            self._repeats.ends(may_repeat=is_last and not ended.why)
            self._step_is_over(ended)
        if steps.away is not bool(self.run.between):
            self._repeats.spoil()
            words = "validation" if steps.away else ""
            self.run.between_steps(words, since_batch=not steps.step.computed)

    def _goes_away(self, what: str) -> None:
        """*what* begins, which belongs to no step, until the next batch is asked for; none: the step goes on."""
        self._steps.away = bool(what)
        self.run.between_steps("")
        self.run.between_steps(what)

    def _step_is_over(self, ended: StepEnd) -> None:
        run, known, number = self.run, self._known, len(ended.rows)
        step, self._running = self._running, _RunningStep()
        self._inputs.clear()
        found = step.micro_steps or [_MicroStep(self._fetches.shapes)]
        if len(found) != number:  # what was taken for one, until a batch was fetched for the step
            found[0].shapes = tuple(shape for one in found for shape in one.shapes)
            found = [found[0], *[_MicroStep()] * (number - 1)]
        declared, rows = self.declared_batch_size() if ended.why else None, ended.rows
        if declared is not None:
            rows = (declared,) * number
        elif ended.why:
            run.notes.add_for_run(_NO_SAMPLES.format(ended.why))
        if not self._machine.known.calls and run.window.marks is not None:
            run.notes.add(_NOT_CALLED)
        known.accumulate = max(known.accumulate, number)  # the last step of an epoch may have fewer
        batches = [(one.given, one.shapes, one.tokens) for one in found]
        self._outcome = () if known.keeps_batches else (batches, step.updates, rows)
        run.batch_done(*batches, updates=step.updates, ends_step=True, logs=self._logs(), rows=rows)

    def _logs(self) -> bool:
        """Whether throughput is written after the step that ends now."""
        every = self._known.log_every
        return every > 0 and (self.run.steps_done + 1) % every == 0

    def call(self) -> tuple[str, Any] | None:
        """The model, as in its first forward, with tensors of the shapes that the running step's latest one had."""
        self._repeats.spoil()
        return in_shapes(self._known.call, self._running.latest)

    # ---- what an event does

    def _apply_forward(self, model: int, shapes: Shapes, grads: bool, training: bool, same: bool | None) -> None:
        steps, run, inside, step = self._machine, self.run, self._machine.inside, self._running
        # A model inside another one, a recomputation, or in what the loop leaves out.
        if inside.forwards + inside.backwards + inside.fetches + inside.left_out > 0:
            inside.forwards += 1
            self._repeats.spoil()
            if same is False:
                self._inputs.pop()
            return
        computed = steps.step.computed
        part = steps.forward_begins(model, samples_in(shapes), grads=grads, training=training, same=bool(same))
        is_first = not computed or steps.ended is not None
        if steps.ended is not None or steps.away is not bool(run.between):
            self._follow()
            step = self._running
        if part == "outside":
            return
        if part == "micro-step":
            self._micro_step_begins(shapes, is_first=is_first)
        elif grads and step.micro_steps:
            step.micro_steps[-1].shapes += shapes
        if grads and self._read and not self._known.call:
            given, args, kwargs = self._read
            self._known.call = kept_call(self.facts.root, args, kwargs, given)
        step.latest = shapes if grads else ()
        if run.window.parts is not None and not self._in_forward:
            self._in_forward = True
            run.enter("forward", counts=grads)

    def _micro_step_begins(self, shapes: Shapes, *, is_first: bool) -> None:
        """A micro-step begins; if it *is_first*, nothing of its step has computed anything."""
        run, device, given = self.run, self.facts.device.type, (*self._read, ())[0]
        if run.window.marks is not None and torch.is_autocast_enabled(device):
            self._known.autocast = str(torch.get_autocast_dtype(device)).removeprefix("torch.")
        kept = given if self._known.keeps_batches else ()
        one, self._fetches.handed = self._fetches.handed or _MicroStep(shapes, given=kept), None
        # A tensor alone shows none.
        if run.tokens.fetched or (self._repeats.live and run.tokens.reads and not isinstance(given, torch.Tensor)):
            one.tokens = self._tokens(given, shapes)
        self._running.micro_steps.append(one)
        if is_first and not (self.counts_at_fetch and self._machine.known.feeders):
            self._may_count(one.shapes, one.tokens)

    def _may_count(self, shapes: Shapes, tokens: BatchTokens | None = None) -> None:
        run, counted = self.run, self._known.counted
        is_known = tokens is None and shapes in counted and not run.throughput.step.random
        if is_known or not (self._repeats.live and run.throughput.counts_steps):
            return
        self._repeats.spoil()
        if run.steps_done > self._known.steps_before:  # the first step lacks what follows an update
            run.batch_begins(shapes, tokens)
        if run.window.recorder.counting and tokens is None:
            counted.add(shapes)

    def _tokens(self, given: Any, shapes: Shapes) -> BatchTokens | None:
        """The tokens of a batch, read where it was fetched, or here if it is on the host."""
        reader = self.run.tokens
        tokens = reader.take()
        if tokens is not None and tokens.processed in {one[0] * one[1] for one in shapes if len(one) > 1}:
            return tokens
        return reader.of(given) if self._known.on_host and self._repeats.live else None

    def _apply_forward_end(self, raised: bool) -> None:
        """In an optimizer's closure, the loss is still a part of it."""
        steps, step = self._machine, self._running
        steps.forward_ends()
        is_inner = steps.inside.forwards or steps.inside.backwards or steps.inside.left_out or steps.inside.fetches
        if raised and not is_inner and step.micro_steps:  # this was not computed
            last = step.micro_steps[-1]
            last.shapes = last.shapes[: len(last.shapes) - len(step.latest)]
        if self._in_forward and not steps.inside.updates:
            self._forward_is_over()

    def _forward_is_over(self) -> None:
        if self._in_forward and not self._machine.inside.forwards:
            self._in_forward = False
            self.run.leave()

    @_event
    def backward_begins(self, grad_only: bool) -> None:
        """Autograd is about to run; what ran since the forward was the loss. *grad_only*: it accumulates nothing."""
        steps, run = self._machine, self.run
        part = steps.backward_begins(grad_only=grad_only)
        if part == "micro-step":  # compiled code called the model, and no hook of ours
            self._running.micro_steps.append(_MicroStep(self._fetches.shapes))
        if steps.away is not bool(run.between):
            self._follow()
        if run.window.parts is not None and part in ("step", "micro-step"):
            self._forward_is_over()
            run.claim("forward")
            run.enter("backward")

    @_event
    def backward_ends(self, grad_only: bool) -> None:
        """Autograd has run, or has raised."""
        steps = self._machine
        steps.backward_ends(grad_only=grad_only)
        if not (steps.inside.backwards or steps.inside.left_out):
            steps.inside.forwards = int(self._in_forward)  # a forward inside, if it has raised, has no end
            if self.run.window.parts is not None:
                self.run.leave()

    @_event
    def update_begins(self, _: bool) -> None:
        """An optimizer's step begins; where a subclass's step calls its parent's, the hooks are called again."""
        steps, run = self._machine, self.run
        part = steps.update_begins()
        if steps.away is not bool(run.between):
            self._follow()
        if part == "step" and run.window.parts is not None:
            self._in_update = True
            run.enter("optimizer")

    def _apply_update_end(self, name: int, later: bool) -> None:
        steps = self._machine
        if steps.update_ends(name, later=later) == "step":
            if self._in_update:
                self._update_is_over()
            self._running.updates += 1
            if steps.ended is not None:
                self._follow(is_last=True)

    def _update_is_over(self) -> None:
        self._in_update = False
        self._forward_is_over()
        self.run.leave()

    def _apply_fetch(
        self, source: Callable[[], Any], names: tuple[int, int], grads: bool, training: bool
    ) -> Callable[[], None] | None:
        steps, fetches, run = self._machine, self._fetches, self.run
        if steps.inside.fetches or steps.inside.left_out:
            steps.inside.fetches += 1
            return None
        if self._in_update:  # otherwise its closure fetches; no optimizer's step runs here: this one has raised
            self._update_is_over()
        is_new, fetches.names = fetches.names != names, names
        part = steps.fetch_begins(*names, grads=grads, training=training)
        if steps.ended is not None or steps.away is not bool(run.between):
            self._follow()
        fetches.waits = part == "step"
        if not fetches.waits:
            return None
        if is_new:
            self._known.workers = workers_of(source()) if self._known.workers is None else self._known.workers
            settle = steps_to_settle(batches_ahead=fetched_ahead(source()), batches_a_step=self._known.accumulate)
            run.window.recorder.settle_for(settle)
        if self._repeats.live:
            run.fetch_begins()
        return run.fetch_begins

    def _apply_fetch_end(
        self,
        over: bool,
        shapes: Shapes,
        sizes: tuple[int | None, int],
        handed_out: bool,
        tokens: BatchTokens | None,
    ) -> Callable[[], None] | None:
        steps, fetches, run, (source, loader) = self._machine, self._fetches, self.run, self._fetches.names
        if steps.inside.fetches > 1 or steps.inside.left_out:
            steps.fetch_fails()
            return None
        waits, fetches.waits = fetches.waits, False
        if waits and self._repeats.live:
            run.fetch_ends()
        if not waits or over:
            steps.fetch_fails(source, over=over)
            return run.fetch_ends if waits else None
        fetches.shapes = shapes
        steps.fetch_ends(source, *sizes, loader=loader, explicit=handed_out)
        if handed_out and HIDDEN_SHAPE not in shapes:  # otherwise they are those of what the model gets
            fetches.handed = _MicroStep(shapes, given=self._read[0] if self._known.keeps_batches else ())
        if self.counts_at_fetch and not steps.step.computed:
            self._may_count(shapes)  # before anything computes on it
        if self._known.reads_fetched and not handed_out and run.tokens.reads:
            run.tokens.fetched.append(tokens)
        return run.fetch_ends

    def _apply_mark(self, updated: bool | None) -> None:
        running = self._running
        running.updates = running.updates if updated is None else int(updated)
        self._inputs.clear()  # what is trained on once more from here on is a batch of its own
        self._machine.mark(updated=updated)
        self._follow(is_last=True)
