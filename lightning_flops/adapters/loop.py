"""A training loop of the user's own: torch's public hooks of its models and optimizers, and autograd's two entries.

Where a batch begins, where a step ends and what belongs to none, ``adapters/steps.py`` decides. What runs between the
forward and the backward is the loss, and is forward, too.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Collection, Iterable, MutableMapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from lightning_flops.adapters.hearing import HearingAdapter, Hook, nothing
from lightning_flops.adapters.place import Frame, called_in, device_of, root_of, run_context
from lightning_flops.adapters.steps import StepEnd, Steps
from lightning_flops.config import ProfilerConfig
from lightning_flops.measure.batches import HIDDEN_SHAPE, FetchedRows, first_tensor, tensor_shapes
from lightning_flops.measure.fake_steps import in_shapes, kept_call
from lightning_flops.measure.module_hooks import hear_steps
from lightning_flops.measure.recorder import steps_to_settle
from lightning_flops.measure.torch_private.optional import fetched_ahead, loader_of, workers_of
from lightning_flops.records import BatchTokens, RunContext, Shapes, TimePhase
from lightning_flops.run.adapter import Facts
from lightning_flops.run.output import LoggedOutput
from lightning_flops.run.run import Run, failed, safe
from lightning_flops.run.throughput import Batch
from lightning_flops.run.unhooked import always_heard
from lightning_flops.schema.profile import Profile
from lightning_flops.signals import Undo

_NO_SAMPLES = (
    "samples/s is n/a: {}. batch_size=... says how many samples a batch has, profiler.batches(...) what a batch is, "
    "profiler.step() where a step ends."
)
_numbers = itertools.count()  # names of objects that events are of
_NOT_CALLED = "The model was not called, or by compiled code: forward is what ran from the batch to the backward."


@dataclass(slots=True)
class _RunningStep:
    """What was heard of the running step."""

    micro_steps: list[Batch] = field(default_factory=list)  # what each of them computes on
    inputs: list[weakref.ref[torch.Tensor]] = field(default_factory=list)  # first tensors of its forwards
    latest: Shapes = ()  # of the tensors that its latest forward was called with, if it was with gradients
    updates: int = 0


@dataclass(slots=True)
class _Fetches(FetchedRows):
    """What was heard of the loop's fetches."""

    asked: Callable[[], Any] = lambda: None  # returns what was asked for a batch last
    names: tuple[int, int] = (-1, -1)  # of it, and of its loader
    waits: bool = False  # it is being asked, for a step
    handed: Batch | None = None  # what ``batches`` has handed out, and no forward has taken
    learned: set[Shapes] = field(default_factory=set)  # shapes whose steps were counted


@dataclass(slots=True)
class _Known:
    """What is known of the loop, before it or by now."""

    steps_before: int  # that it has made without us
    initial_step: int  # x-axis of the first step
    log_every: int  # steps; 0: throughput is written when a subclass says so
    reads_fetched: bool  # tokens, before the model gets them
    keeps_batches: bool  # for settings that are functions of one; it is not held otherwise
    accumulate: int = 1
    autocast: str = ""
    call: tuple[Any, ...] = ()  # what the model is called with, as of ``kept_call``
    workers: set[int] = field(default_factory=set)  # of each DataLoader that feeds steps


class LoopAdapter(HearingAdapter):
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
        whole: nn.Module | None = None,
        device: torch.device | None = None,
        settle_steps: int = 2,
        ends_when_dropped: bool = False,
    ) -> None:
        super().__init__()
        self._model, self._frame = model, frame
        self._optimizers = tuple(optimizers)
        self.facts = Facts(
            root=root_of(model) if root is None else root,
            whole=model if whole is None else whole,
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
            reads_fetched=self.facts.device.type != "cpu",
            keeps_batches=callable(config.batch_size) or callable(config.tokens_per_sample),
        )
        self._steps = Steps(map(id, self._optimizers))
        self._names: MutableMapping[Any, int] = WeakIdKeyDictionary()  # of iterators and loaders
        self._running, self._fetches = _RunningStep(), _Fetches()
        self._in_forward = self._in_update = False  # one has begun for the run, and not ended
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

    def loader_workers(self) -> Collection[int]:
        """Those of the DataLoaders that were asked."""
        return self._known.workers

    def is_between_steps(self) -> bool:
        """Whether the step ended by itself, and no batch was fetched ahead."""
        return self._steps.is_at_rest()

    # ---- what is heard

    def begin(self) -> None:
        """The loop begins."""
        self._hear(self.run.undo)
        self.run.begin()

    def _hear(self, undo: Undo) -> None:
        begins, ends = type(self).backward_begins, type(self).backward_ends
        self._hear_model(undo)
        raises = getattr(type(self), "raised", None)
        self.hear(torch.autograd, "backward", undo, begins=begins, ends=ends, raises=raises)
        begins, ends = partial(begins, grad_only=True), partial(ends, grad_only=True)
        self.hear(torch.autograd, "grad", undo, begins=begins, ends=ends)
        self.hear_fetches(undo)

    def _hear_model(self, undo: Undo) -> None:
        self.hear_calls(called_in(self._model), undo, begins=type(self).forward_begins, ends=type(self).forward_ends)
        self._hear_updates(undo)

    def _hear_updates(self, undo: Undo) -> None:
        kind = type(self)
        begins, ends = Hook(self, kind.update_begins), Hook(self, kind.update_ends)
        for one in self._optimizers:
            if hasattr(one, "register_step_pre_hook"):
                undo.callback(one.register_step_pre_hook(begins).remove)
                undo.callback(one.register_step_post_hook(ends).remove)
            else:  # several in one, or another thing with a step
                self.hear(
                    type(one),
                    "step",
                    undo,
                    begins=kind.update_begins,
                    ends=partial(kind.update_ends, name=id(one)),
                    raises=nothing,
                    of=one,
                )
        if not self._optimizers:
            hear_steps(undo, begins, ends, failed=partial(failed, self.run))

    def _follow(self) -> None:
        """Do what the machine has decided."""
        steps = self._steps
        if (ended := steps.ended) is not None:
            steps.ended = None
            self._step_is_over(ended)
        if steps.away is not bool(self.run.between):
            self.run.between_steps("validation" if steps.away else "", since_batch=not steps.step.computed)

    def _goes_away(self, what: str) -> None:
        """*what* begins, which belongs to no step, until the next batch is asked for; none: the step goes on."""
        self._steps.away = bool(what)
        self.run.between_steps("")
        self.run.between_steps(what)

    def _step_is_over(self, ended: StepEnd) -> None:
        run, known, number = self.run, self._known, len(ended.rows)
        step, self._running = self._running, _RunningStep()
        found = step.micro_steps or [Batch(self._fetches.shapes)]
        if len(found) != number:  # what was taken for one, until a batch was fetched for the step
            found[0].shapes = tuple(shape for one in found for shape in one.shapes)
            found = [found[0], *[Batch()] * (number - 1)]
        declared, rows = self.declared_batch_size() if ended.why else None, ended.rows
        if declared is not None:
            rows = (declared,) * number
        elif ended.why:
            run.notes.add_for_run(_NO_SAMPLES.format(ended.why))
        if not self._steps.known.calls and run.window.marks is not None:
            run.notes.add(_NOT_CALLED)
        known.accumulate = max(known.accumulate, number)  # the last step of an epoch may have fewer
        run.batch_done(*found, updates=step.updates, ends_step=True, logs=self._logs(), rows=rows)

    def _logs(self) -> bool:
        """Whether throughput is written after the step that ends now."""
        every = self._known.log_every
        return every > 0 and (self.run.steps_done + 1) % every == 0

    # ---- the parts of a step

    def forward_begins(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A model is called."""
        steps, run, inside = self._steps, self.run, self._steps.inside
        # A model inside another one, a recomputation, or in what the loop leaves out.
        if inside.forwards + inside.backwards + inside.fetches + inside.left_out > 0:
            inside.forwards += 1
            return
        computed, grads = steps.step.computed, torch.is_grad_enabled()
        given = self._given(args, kwargs)
        shapes = tensor_shapes(given)
        rows = self._fetches.rows_of(args, shapes)
        same = self._is_same(given, grads=grads)
        part = steps.forward_begins(id(module), rows, grads=grads, training=module.training, same=same)
        is_first = not computed or steps.ended is not None
        if steps.ended is not None or steps.away is not bool(run.between):
            self._follow()
            self._is_same(given, grads=grads)  # notes it for the step that begins here
        if part == "outside":
            return
        if part == "micro-step":
            self._micro_step_begins(given, shapes, rows, is_first=is_first)
        elif grads and self._running.micro_steps:
            self._running.micro_steps[-1].shapes += shapes
        if grads and not self._known.call:
            self._known.call = kept_call(self.facts.root, args, kwargs, given)
        self._running.latest = shapes if grads else ()
        if run.window.parts is not None and not self._in_forward:
            self._in_forward = True
            run.enter("forward", counts=grads)

    def _given(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What a model is called with, as the user calls it."""
        if args and kwargs:
            return (*args, *kwargs.values())
        return kwargs or (args[0] if len(args) == 1 else args)

    def call(self) -> tuple[str, Any] | None:
        """The model, as in its first forward, with tensors of the shapes that the running step's latest one had."""
        return in_shapes(self._known.call, self._running.latest)

    def _is_same(self, given: Any, *, grads: bool) -> bool:
        """Whether the first tensor in *given* is one that a forward of this step with gradients had."""
        first = given if isinstance(given, torch.Tensor) else first_tensor(given)
        if first is None or not grads:
            return False
        for one in self._running.inputs:
            if one() is first:
                return True
        self._running.inputs.append(weakref.ref(first))
        return False

    def _micro_step_begins(self, given: Any, shapes: Shapes, rows: int | None, *, is_first: bool) -> None:
        """A micro-step begins; if it *is_first*, nothing of its step has computed anything."""
        run, device = self.run, self.facts.device.type
        if rows is None and self._fetches.of_loader:  # this may be a part of what the loader has brought
            self._steps.step.rows[-1] = None
        if run.window.marks is not None and torch.is_autocast_enabled(device):
            self._known.autocast = str(torch.get_autocast_dtype(device)).removeprefix("torch.")
        kept = given if self._known.keeps_batches else ()
        one, self._fetches.handed = self._fetches.handed or Batch(shapes, given=kept), None
        # A tensor alone shows none.
        if run.tokens.fetched or (run.tokens.reads and not isinstance(given, torch.Tensor)):
            one.tokens = self._tokens(given, shapes)
        self._running.micro_steps.append(one)
        if is_first and not (self.counts_at_fetch and self._steps.known.feeders):
            self._may_count(one.shapes, one.tokens)

    def _may_count(self, shapes: Shapes, tokens: BatchTokens | None = None) -> None:
        if self.run.steps_done > self._known.steps_before:  # the first step lacks what follows an update
            self.run.batch_begins(shapes, tokens)

    def _tokens(self, given: Any, shapes: Shapes) -> BatchTokens | None:
        """The tokens of a batch, read where it was fetched, or here if it is on the host."""
        reader = self.run.tokens
        tokens = reader.take()
        if tokens is not None and tokens.processed in {one[0] * one[1] for one in shapes if len(one) > 1}:
            return tokens
        return reader.of(given) if self.facts.device.type == "cpu" else None

    def forward_ends(self, module: nn.Module, args: Any, output: Any) -> None:
        """A model's forward is over, or has raised; in an optimizer's closure, the loss is still a part of it."""
        steps, step = self._steps, self._running
        steps.forward_ends()
        is_inner = steps.inside.forwards or steps.inside.backwards or steps.inside.left_out or steps.inside.fetches
        if output is None and not is_inner and step.micro_steps:  # it has raised: this was not computed
            last = step.micro_steps[-1]
            last.shapes = last.shapes[: len(last.shapes) - len(step.latest)]
        if self._in_forward and not steps.inside.updates:
            self._forward_is_over()

    def _forward_is_over(self) -> None:
        if self._in_forward and not self._steps.inside.forwards:
            self._in_forward = False
            self.run.leave()

    def backward_begins(self, /, *_: Any, grad_only: bool = False, **__: Any) -> None:
        """Autograd is about to run; what ran since the forward was the loss. *grad_only*: it accumulates nothing."""
        steps, run = self._steps, self.run
        part = steps.backward_begins(grad_only=grad_only)
        if part == "micro-step":  # compiled code called the model, and no hook of ours
            self._running.micro_steps.append(Batch(self._fetches.shapes))
        if steps.away is not bool(run.between):
            self._follow()
        if run.window.parts is not None and part in ("step", "micro-step"):
            self._forward_is_over()
            run.claim("forward")
            run.enter("backward")

    def backward_ends(self, /, _: Any = None, *, grad_only: bool = False) -> None:
        """Autograd has run, or has raised."""
        steps = self._steps
        steps.backward_ends(grad_only=grad_only)
        if not (steps.inside.backwards or steps.inside.left_out):
            steps.inside.forwards = int(self._in_forward)  # a forward inside, if it has raised, has no end
            if self.run.window.parts is not None:
                self.run.leave()

    def update_begins(self, *_: Any, **__: Any) -> None:
        """An optimizer's step begins; where a subclass's step calls its parent's, the hooks are called again."""
        steps, run = self._steps, self.run
        part = steps.update_begins()
        if steps.away is not bool(run.between):
            self._follow()
        if part == "step" and run.window.parts is not None:
            self._in_update = True
            run.enter("optimizer")

    def update_ends(self, optimizer: Any = None, *_: Any, name: int | None = None) -> None:
        """An optimizer's step is over, of the one of that *name*."""
        # A traced step ends with what comes next: here torch's own scope of the update is still open.
        recorder, steps = self.run.window.recorder, self._steps
        later = self.run.window.marks is not None and recorder.tracing
        if steps.update_ends(id(optimizer) if name is None else name, later=later) == "step":
            self._update_is_over()
            self._running.updates += 1
            if steps.ended is not None:
                self._follow()

    def _update_is_over(self) -> None:
        if self._in_update:
            self._in_update = False
            self._forward_is_over()
            self.run.leave()

    def mark_parts(self, stack: Undo) -> None:
        """Hear what belongs to an update and is none: clipping, and dropping gradients."""
        super().mark_parts(stack)
        self.hear_around_updates(
            (*self._optimizers, *called_in(self._model)),
            stack,
            begins=partial(LoopAdapter._part_begins, part="optimizer"),
            ends=LoopAdapter._part_ends,
        )

    def _part_begins(self, *_: Any, part: TimePhase, **__: Any) -> None:
        if self._steps.step.in_round:  # it is between the loss and its backward
            self.run.claim("forward")
        self.run.enter(part, counts=False)

    def _part_ends(self, _: Any) -> None:
        self.run.leave()

    # ---- batches

    def fetch_begins(self, source: Any) -> None:
        """A DataLoader's iterator, or ``batches``, is asked for a batch."""
        steps, fetches, run = self._steps, self._fetches, self.run
        if steps.inside.fetches or steps.inside.left_out:
            steps.inside.fetches += 1
            return
        self._update_is_over()  # otherwise its closure fetches; no optimizer's step runs here: this one has raised
        if is_new := fetches.asked() is not source:
            fetches.asked = weakref.ref(source)
            fetches.names = self._name(source), self._name(loader_of(source))
        training = fetches.names[0] in steps.known.feeders or any(one.training for one in called_in(self.facts.root))
        part = steps.fetch_begins(*fetches.names, grads=torch.is_grad_enabled(), training=training)
        if steps.ended is not None or steps.away is not bool(run.between):
            self._follow()
        fetches.waits = part == "step"
        if part != "step":
            return
        if is_new:
            if (workers := workers_of(source)) is not None:
                self._known.workers.add(workers)
            run.window.recorder.settle_for(
                steps_to_settle(batches_ahead=fetched_ahead(source), batches_a_step=self._known.accumulate)
            )
        run.fetch_begins()

    def _name(self, one: object) -> int:
        """A number for an object that a loop's events are of, which is not held."""
        return self._names.setdefault(one, next(_numbers))

    def fetch_ends(self, batch: Any, *, handed_out: bool = False) -> None:
        """A fetch has brought *batch*, which ``batches`` has *handed_out*, or None: the loader is at its end."""
        steps, fetches, (source, loader) = self._steps, self._fetches, self._fetches.names
        if steps.inside.fetches > 1 or steps.inside.left_out:
            steps.fetch_fails()
            return
        waits, fetches.waits = fetches.waits, False
        if waits:
            self.run.fetch_ends()
        if not waits or batch is None:
            steps.fetch_fails(source, over=batch is None)
            return
        shapes, rows = fetches.brings(batch, fetches.asked())
        steps.fetch_ends(source, rows, fetches.sizes[1], loader=loader, explicit=handed_out)
        if handed_out and HIDDEN_SHAPE not in shapes:  # otherwise they are those of what the model gets
            fetches.handed = Batch(shapes, given=batch if self._known.keeps_batches else ())
        if self.counts_at_fetch and not (steps.step.computed or shapes in fetches.learned):
            self._may_count(shapes)  # before anything computes on it
            if self.run.window.recorder.counting:
                fetches.learned.add(shapes)
        if self._known.reads_fetched and not handed_out:
            self.run.tokens.fetch(batch)

    # ---- what the loop says itself

    @safe
    def names_phase(self, *, begins: bool) -> None:
        """A phase of the step *begins*, or ends: nothing in it is an evaluation."""
        steps = self._steps
        steps.inside.phases = max(0, steps.inside.phases + (1 if begins else -1))  # it may have begun unhooked
        steps.away &= steps.inside.left_out > 0 or steps.known.says_outside
        self._follow()

    @safe
    @always_heard
    def leave_out(self, what: str) -> None:
        """*what* begins, which belongs to no step, until ``take_in``."""
        steps = self._steps
        if steps.step.in_round and not steps.inside.left_out:
            self.run.claim("forward")
        steps.leave_out()
        self._follow()
        self.run.outside(what)

    @safe
    @always_heard
    def take_in(self) -> None:
        """End of what belonged to no step."""
        self._steps.take_in()
        self.run.inside()

    @safe
    def end_step(self, *, updated: bool | None = None) -> None:
        """A batch is through, and with it a step, if it was *updated*; None: if an optimizer's step was seen."""
        running = self._running
        running.updates = running.updates if updated is None else int(updated)
        running.inputs.clear()  # what is trained on once more from here on is a batch of its own
        self._steps.mark(updated=updated)
        self._follow()

    @safe
    @always_heard
    def finish(self, error: BaseException | None = None) -> None:
        """The loop is over, or has raised *error*."""
        self._steps.finish()
        self._follow()
        self.run.finish(interrupted_by=error)
