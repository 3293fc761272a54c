"""A training loop of the user's own: torch's public hooks of its models and optimizers, and autograd's two entries.

A batch is what the models were called with, or what ``batches`` handed out. A step ends with that of the last listed
optimizer, or where the loop says so. What runs between the forward and the backward is the loss, and is forward, too. A
model that is called with gradients off in evaluation mode is an evaluation, which belongs to no step.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from lightning_flops.adapters.fetches import hear_fetches
from lightning_flops.adapters.loop_context import Frame, called_in, device_of, root_of, run_context
from lightning_flops.adapters.loop_hooks import Hook, hear_backwards, hook_models, hook_optimizers
from lightning_flops.instrument.batches import HIDDEN, tensor_shapes
from lightning_flops.instrument.timing.settling import steps_to_settle
from lightning_flops.instrument.torch_private.loading import fetched_ahead, workers_of
from lightning_flops.run.adapter import Facts
from lightning_flops.run.run import Run
from lightning_flops.run.safety import safe

if TYPE_CHECKING:
    from lightning_flops.config import ProfilerConfig
    from lightning_flops.records import BatchTokens, Shapes
    from lightning_flops.run.output import LoggedOutput
    from lightning_flops.schema.profile import Profile

_MOST_AHEAD = 64
"""Fetched batches whose tokens are kept until they are used."""


@dataclass(slots=True)
class _Batch:
    """The running batch."""

    shapes: Shapes = ()
    tokens: BatchTokens | None = None
    whole: Any = ()
    """As ``batches`` handed it out, whose shapes these are then."""
    handed: bool = False
    begun: bool = False
    """A model has computed on it."""
    after_backward: bool = False
    updates: int = 0


@dataclass(slots=True)
class _Loader:
    """What was fetched, from DataLoaders and from ``batches``."""

    depth: int = 0
    """Fetches that are running, one in another."""
    fetches: int = 0
    is_fresh: bool = False
    """A batch was fetched since the running one began."""
    shapes: Shapes = ()
    """Of the latest batch."""
    tokens: deque[BatchTokens | None] = field(default_factory=lambda: deque(maxlen=_MOST_AHEAD))
    """Of the batches that wait to be used; on a GPU their tokens are not read."""
    workers: int | None = None
    ahead: int = 0
    """Most batches that it fetches ahead."""


@dataclass(slots=True)
class _Place:
    """Where the loop is."""

    depth: int = 0
    """Calls of the models that are running, one in another."""
    backwards: int = 0
    """Calls of autograd that are running, one in another, as reentrant checkpoints have it."""
    outside: int = 0
    """Depth of ``outside_of_steps``."""
    in_forward: bool = False
    in_evaluation: bool = False
    trained: bool = False
    """A forward with gradients was in training mode."""
    updating: list[Any] = field(default_factory=list)
    """Optimizers whose steps are running."""
    told: bool = False
    """The loop says itself where its steps end."""
    ends_step: bool = False
    """The optimizer that ends the step is among those that are running, or has run in the backward."""
    micro_batches: int = 0
    accumulate: int = 1
    autocast: str = ""


class LoopRun:
    """The adapter of one loop, on one rank.

    Args:
        model: what the loop calls; several as ``SeveralModels``.
        optimizers: of the loop, without wrappers.
        config: the settings.
        publish: gets each profile when its report is there.
        frame: what the library that drives the loop knows of it.
        output: where rank 0 shows its reports.
        log_every_n_steps: how often throughput is written.
        initial_step: the x-axis of the first step.
        steps_before: steps of the loop that were made before it had an adapter.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[Any],
        *,
        config: ProfilerConfig,
        publish: Callable[[Profile], None],
        frame: Frame,
        output: LoggedOutput,
        log_every_n_steps: int,
        initial_step: int = 0,
        steps_before: int = 0,
    ) -> None:
        self._model = model
        self._optimizers = tuple(optimizers)
        self._log_every = log_every_n_steps
        self._asks = callable(config.batch_size) or callable(config.tokens_per_sample)
        """The user's functions are asked of each batch, which is held for them."""
        self._batch = _Batch()
        place, loader = self.place, self._loader = _Place(), _Loader()
        device = device_of(model)
        self._device = device.type
        facts = Facts(
            root=root_of(model),
            device=device,
            output=output,
            context=lambda: run_context(frame, model, accumulate=place.accumulate, autocast=place.autocast),
            x_axis=lambda: initial_step + self.run.steps_done,
            optimizers=lambda: self._optimizers or None,
            whole_model=lambda: model,
            rank=frame.rank,
            world_size=frame.world_size,
            profile_step=config.next_profile_step(steps_done=steps_before),
            loader_workers=lambda: loader.workers,
            unseen=("transfer", "other"),
        )
        self.run = Run(facts, config, publish)
        self.run.steps_done = steps_before

    def begin(self) -> None:
        """The loop begins."""
        undo = self.run.undo
        hook_optimizers(self._optimizers, Hook(self, LoopRun.update_begins), Hook(self, LoopRun.update_ends), undo)
        hook_models(called_in(self._model), Hook(self, LoopRun.forward_begins), Hook(self, LoopRun.forward_ends), undo)
        hear_backwards(self, undo)
        hear_fetches(self, undo)
        self.run.begin()

    # ---- forward, backward, update

    @safe
    def forward_begins(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A model is called."""
        place, batch = self.place, self._batch
        if place.backwards or place.depth or place.outside:
            place.depth += 1  # a recomputation, or a model inside another one
            return
        place.depth = 1
        if not (torch.is_grad_enabled() or module.training):
            self._evaluation_begins()
            return
        self._evaluation_is_over()
        place.trained |= module.training
        if batch.after_backward and (self._loader.is_fresh or not self._loader.fetches):
            self._batch_is_over(ends_step=False)
        self._batch_begins(args, kwargs)
        if not place.in_forward:
            place.in_forward = True
            self.run.enter("forward")

    def _batch_begins(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Take the shapes and the tokens of a batch before the model can change it."""
        run, batch, loader = self.run, self._batch, self._loader
        is_first, batch.begun = not batch.begun, True
        if not batch.handed:
            known = () if batch.shapes == HIDDEN else batch.shapes
            batch.shapes = (*known, *tensor_shapes((*args, *kwargs.values()))) if args or kwargs else known
        if not is_first:
            return
        loader.is_fresh = False
        given = kwargs or (args[0] if len(args) == 1 else args)
        if self._asks and not batch.handed:
            batch.whole = given
        device = self._device
        self.place.autocast = _autocast(device)
        if run.tokens.reads or loader.tokens:
            batch.tokens = run.tokens.of(given) if device == "cpu" else self._tokens_fetched()
        if loader.ahead:
            run.window.recorder.settle_for(steps_to_settle(batches_ahead=loader.ahead, batches_a_step=1))
        if args or kwargs:  # otherwise its forward is over, too late to count the step
            run.batch_begins(batch.shapes, batch.tokens)

    def _tokens_fetched(self) -> BatchTokens | None:
        """Tokens of the batch in use, read when it was fetched; None if its sizes are not those of the model's."""
        waiting = self._loader.tokens
        tokens = waiting.popleft() if waiting else None
        sizes = {shape[0] * shape[1] for shape in self._batch.shapes if len(shape) > 1}
        return tokens if tokens is not None and tokens.processed in sizes else None

    @safe
    def forward_ends(self, module: nn.Module, args: Any, output: Any) -> None:
        """A model's forward is over, or has raised; in an optimizer's closure, the loss is part of it."""
        place = self.place
        place.depth = max(0, place.depth - 1)
        if not place.updating:
            self._forward_is_over()

    def _forward_is_over(self) -> None:
        if self.place.in_forward and not self.place.depth:
            self.place.in_forward = False
            self.run.leave()

    @safe
    def backward_begins(self, *, of_loss: bool) -> None:
        """Autograd is about to run; what ran since the forward was the loss."""
        place, batch = self.place, self._batch
        if place.outside:
            return
        place.backwards += 1
        if place.backwards > 1:
            return
        self._evaluation_is_over()
        if not batch.begun:  # compiled code called the model, and no hook of ours, or somebody called a method of it
            if not batch.handed:
                batch.shapes = self._loader.shapes
            self._batch_begins((), {})
        batch.after_backward |= of_loss
        self._forward_is_over()
        self.run.claim("forward")
        self.run.enter("backward")

    @safe
    def backward_ends(self) -> None:
        """Autograd has run."""
        place = self.place
        place.backwards = max(0, place.backwards - 1)
        if place.backwards or place.outside:
            return
        place.depth = int(place.in_forward)
        self.run.leave()
        if place.ends_step and not place.updating:
            self._batch_is_over(ends_step=True)

    @safe
    def update_begins(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """An optimizer's step begins; where a subclass's step calls its parent's, the hooks are called again."""
        place = self.place
        if place.backwards:
            return
        self._evaluation_is_over()
        place.updating.append(optimizer)
        if len(place.updating) == 1:
            self.run.enter("optimizer")

    @safe
    def update_ends(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """An optimizer's step is over."""
        place = self.place
        if place.outside:
            return
        if place.backwards:  # it steps as soon as its gradients are there: the step ends with the backward
            self._batch.updates += 1
            place.ends_step = not place.told
            return
        last = self._optimizers[-1] if self._optimizers else None
        place.ends_step |= optimizer is last and not place.told
        if place.updating:
            place.updating.pop()
        if place.updating:
            return
        self._forward_is_over()
        self.run.leave()
        self._batch.updates += 1
        if place.ends_step:
            self._batch_is_over(ends_step=True)

    # ---- fetches

    @safe
    def fetch_begins(self, iterator: Any) -> None:
        """A DataLoader is asked for a batch."""
        place, loader = self.place, self._loader
        if place.outside:
            return
        if self.run.facts.root.training:
            self._evaluation_is_over()
        elif place.trained or not torch.is_grad_enabled():
            self._evaluation_begins()
        if place.in_evaluation:
            return
        if iterator is not None and not loader.fetches:
            loader.workers, loader.ahead = workers_of(iterator), fetched_ahead(iterator)
        loader.fetches += 1
        loader.depth += 1
        self.run.fetch_begins()

    @safe
    def fetch_ends(self, batch: Any) -> None:
        """It has delivered *batch*; None: it is at its end."""
        run, loader = self.run, self._loader
        if not loader.depth:
            return
        loader.depth -= 1
        loader.is_fresh = True
        run.fetch_ends()
        if batch is not None:
            loader.shapes = tensor_shapes(batch)
            if run.tokens.reads and self._device != "cpu":
                loader.tokens.append(run.tokens.of(batch))

    @safe
    def wait_begins(self) -> None:
        """``batches`` asks the loop's own iterable for a batch."""
        self.fetch_begins(None)

    @safe
    def wait_ends(self) -> None:
        """It has answered."""
        self.fetch_ends(None)

    @safe
    def hands_out(self, batch: Any) -> None:
        """``batches`` hands out *batch*, which is what the step computes on."""
        if self.place.in_evaluation or self.place.outside:
            return
        if self._batch.after_backward:
            self._batch_is_over(ends_step=False)
        shapes = tensor_shapes(batch)  # HIDDEN where it has no tensors: then those of the model's arguments count
        self._batch.shapes, self._batch.handed, self._batch.whole = shapes, shapes != HIDDEN, batch

    # ---- what the loop says itself

    @safe
    def step_is_told(self) -> None:
        """The loop says that a batch is through, and with it a step, if it was updated."""
        batch, self.place.told = self._batch, True
        if batch.begun or not self._optimizers:
            self._evaluation_is_over()
            batch.updates = batch.updates or int(not self._optimizers)
            self._batch_is_over(ends_step=batch.updates > 0)

    @safe
    def leave_out(self, what: str) -> None:
        """*what* begins, which belongs to no step."""
        if self._batch.begun and not self._batch.after_backward:
            self.run.claim("forward")  # the loss
        self.place.outside += 1
        self._outside(what)

    @safe
    def take_in(self) -> None:
        """It is over."""
        self.place.outside -= 1
        self.run.inside()

    def _outside(self, what: str) -> None:
        self.run.outside(what, since_batch=not (self._batch.begun or self._loader.is_fresh))

    def _evaluation_begins(self) -> None:
        if not self.place.in_evaluation:
            self.place.in_evaluation = True
            self._outside("validation")

    def _evaluation_is_over(self) -> None:
        if self.place.in_evaluation:
            self.place.in_evaluation = False
            self.run.inside()

    def _batch_is_over(self, *, ends_step: bool) -> None:
        run, place, batch = self.run, self.place, self._batch
        logs = ends_step and (run.steps_done + 1) % self._log_every == 0
        place.micro_batches += 1
        if ends_step:
            place.accumulate, place.micro_batches, place.ends_step = place.micro_batches, 0, False
        self._batch = _Batch()
        run.batch_done(
            batch.whole, batch.shapes, updates=batch.updates, ends_step=ends_step, logs=logs, tokens=batch.tokens
        )

    @safe
    def finish(self, error: BaseException | None = None) -> None:
        """The loop is over, or has raised *error*."""
        self._evaluation_is_over()
        if self._batch.updates and self._optimizers and error is None:
            self.run.notes.add_for_run(
                f"The loop ended in a step: {type(self._optimizers[-1]).__name__}, the last optimizer in the list, "
                "ends each. List the one that steps last in the last place, or call profiler.step()."
            )
        self.run.finish(interrupted_by=error)


def _autocast(device: str) -> str:
    """The dtype that autocast computes in; empty where it is off."""
    return str(torch.get_autocast_dtype(device)).removeprefix("torch.") if torch.is_autocast_enabled(device) else ""
