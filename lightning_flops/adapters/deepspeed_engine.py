"""A DeepSpeed engine: ``forward``, ``backward`` and ``step`` of one engine, as events of a ``Run``.

They are wrapped on DeepSpeed's classes. A step ends where ``engine.global_steps`` has grown.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch

from lightning_flops.adapters import deepspeed_context as context
from lightning_flops.adapters.phases import PhasedAdapter
from lightning_flops.adapters.wrapping import hear, hear_backwards, hear_fetches
from lightning_flops.config import ProfilerConfig
from lightning_flops.measure.batches import tensor_shapes
from lightning_flops.measure.recorder import steps_to_settle
from lightning_flops.measure.torch_private.optional import fetched_ahead
from lightning_flops.records import BatchTokens, RunContext, Shapes, TimePhase
from lightning_flops.run.adapter import Facts
from lightning_flops.run.output import LoggedOutput
from lightning_flops.run.run import Run, safe
from lightning_flops.schema.profile import Profile
from lightning_flops.signals import Undo

_ADAPTER = "_lightning_flops_adapter"  # attribute of an engine that is profiled

# By the name of a method: what is called before it, with its arguments, and after it, with what it returned.
Hooks = dict[str, tuple[Callable[..., object], Callable[[Any], object]]]


def adapter_of(engine: Any) -> EngineAdapter | None:
    """The adapter that profiles *engine* now; None without one. A copy of an engine has none."""
    adapter: EngineAdapter | None = vars(engine).get(_ADAPTER)
    return adapter if adapter is not None and adapter.engine is engine and not adapter.run.closed else None


@dataclass(slots=True)
class _Batch:
    """The running batch."""

    given: Any = ()  # what settings that are functions of the batch are asked of
    shapes: Shapes = ()  # of all its forwards; empty before its first
    tokens: BatchTokens | None = None
    backward_done: bool = False


class EngineAdapter(PhasedAdapter):
    """The adapter of one engine, on one rank; the engine keeps it alive."""

    unseen: tuple[TimePhase, ...] = ("transfer", "other")  # as in ``Facts``
    log_every: int | None = None  # steps from one reading of throughput to the next; None: as often as DeepSpeed prints
    initial_step: int | None = None  # x-axis of the first step; None: the engine's own count, which checkpoints keep

    def __init__(
        self, engine: Any, config: ProfilerConfig, publish: Callable[[Profile], None], output: LoggedOutput | None
    ) -> None:
        self.engine = engine
        self._is_whole = self._is_between_steps()  # the step that runs, or comes next, is seen from its beginning
        self._in_step = False  # a forward of the running step has begun
        self._batch = _Batch()
        self._backward_depth = 0
        self._updates = 0  # ``global_steps`` before the running ``engine.step``
        self._work = Undo()  # while the engine computes for the update
        self._is_own_output = output is None
        accumulate = int(engine.gradient_accumulation_steps())
        self.facts = Facts(
            root=engine.module,
            device=torch.device(engine.device),
            output=output or context.engine_output(engine, config),
            rank=int(engine.global_rank),
            world_size=int(engine.world_size),
            profile_step=config.next_profile_step(steps_done=0),
            settle_steps=steps_to_settle(batches_ahead=fetched_ahead(self._loader), batches_a_step=accumulate),
            unseen=self.unseen,
            ends_when_dropped=True,
        )
        self.run = Run(self, config, publish)
        context.switch_off_builtin(engine, self.run)
        self.hooks = self._hooks()

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()  # in a pickle or a copy of the engine

    # ---- what the run asks

    @property
    def _loader(self) -> Any:
        """The engine's own DataLoader; None: it has none."""
        return getattr(vars(self.engine).get("training_dataloader"), "dataloader", None)

    def context(self) -> RunContext:
        """Where the engine trains."""
        return context.run_context(self.engine)

    def x_axis(self) -> int:
        """The engine's own step, or the loop's."""
        return int(self.engine.global_steps) if self.initial_step is None else self.initial_step + self.run.steps_done

    def logged_at(self) -> int:
        """The samples of all ranks, as DeepSpeed's own scalars, where its monitors get them."""
        return int(self.engine.global_samples) if self._is_own_output else self.x_axis()

    def optimizers(self) -> Iterable[Any] | None:
        """What the engine updates by."""
        return (self.engine.optimizer,)

    def loader_workers(self) -> int | None:
        """Those of the engine's own DataLoader."""
        workers: int | None = getattr(self._loader, "num_workers", None)
        return workers

    def declared_batch_size(self) -> int | None:
        """The micro-batch of the config."""
        return int(self.engine.train_micro_batch_size_per_gpu())

    def mark_parts(self, stack: Undo) -> None:
        """Hear torch's own backward, which ``loss.backward()`` calls, and ``engine.backward`` in the end."""
        super().mark_parts(stack)
        hear_backwards(self, stack)

    def is_reading_due(self) -> bool:
        """Whether throughput is written after the step that ends now."""
        return int(self.engine.global_steps) % (self.log_every or context.steps_between_readings(self.engine)) == 0

    def _is_between_steps(self) -> bool:
        return int(self.engine.micro_steps) % int(self.engine.gradient_accumulation_steps()) == 0

    def _hooks(self) -> Hooks:
        return {
            **self.hooks_around_steps(),
            "forward": (self._forward_begins, lambda _: self.run.leave()),
            "backward": (self.backward_begins, self.backward_ends),
            "step": (self._step_begins, self._step_ends),
            "train": (self._mode_changes, lambda _: None),
            "eval": (lambda: self._mode_changes(False), lambda _: None),
            # What the engine itself computes for the update, such as Muon's products, is the optimizer's.
            "_backward_epilogue": (self._work_begins, self._gradients_are_there),
            "_take_model_step": (self._work_begins, lambda _: self._work.close()),
        }

    def hooks_around_steps(self) -> Hooks:
        """Hooks that every kind of engine has."""
        return {
            "save_checkpoint": (lambda *_, **__: self.run.outside("checkpoint"), lambda _: self.run.inside()),
            "destroy": (lambda: self.finish(), lambda _: None),
        }

    @safe
    def begin(self) -> None:
        """Put the hooks in place."""
        engine, run = self.engine, self.run
        run.undo.callback(vars(engine).pop, _ADAPTER, None)
        vars(engine)[_ADAPTER] = self
        for name in self.hooks:
            kind = next((kind for kind in type(engine).__mro__ if name in vars(kind)), None)
            if kind is not None:
                self.hear(kind, name, name, run.undo)
        hear_fetches(self, run.undo)
        run.begin()
        run.between_steps("start")  # until the first forward

    def hear(self, owner: Any, function: Any, name: str, undo: Undo) -> None:
        """Have the hooks of this *name* called around a *function* of *owner*'s when it is called for our engine."""

        def begins(adapter: EngineAdapter, engine: Any, /, *args: Any, **kwargs: Any) -> None:
            adapter._calls(adapter.hooks[name][0], *args, **kwargs)

        def ends(adapter: EngineAdapter, result: Any) -> None:
            adapter._calls(adapter.hooks[name][1], result)

        hear(self, owner, function, undo, begins=begins, ends=ends, raises=EngineAdapter.raised, of=self.engine)

    @safe
    def _calls(self, hook: Callable[..., object], *args: Any, **kwargs: Any) -> None:
        hook(*args, **kwargs)

    @safe
    def raised(self, error: BaseException) -> None:
        """The user's model, optimizer or data raised *error*: report what was measured; training goes on without us."""
        self.finish(error)
        done = "the FLOPs profiler has reported what it had, and is off"
        self.run.delivery.warn(f"training raised {type(error).__name__}: {done}")

    @safe
    def finish(self, error: BaseException | None = None) -> None:
        """The run is over, or has raised *error*: report what was measured, and remove everything of ours."""
        if threading.get_ident() == self.run.thread:  # and not a collection of garbage in another one
            self.run.finish(interrupted_by=error)
        self.run.close()

    @safe
    def fetch_begins(self, iterator: Any = None) -> None:
        """A DataLoader is asked for a batch."""
        self.run.fetch_begins()

    @safe
    def fetch_ends(self, batch: Any = None, *, handed_out: bool = False) -> None:
        """End of a fetch that delivered *batch*; if that goes to a device, its tokens are read here, on the host."""
        self.run.fetch_ends()
        if not handed_out and self.run.facts.device.type != "cpu" and self.run.between != "validation":
            self.run.tokens.fetch(batch)

    # ---- what a loop says itself that ``profile_training`` is around

    @safe
    def leave_out(self, what: str) -> None:
        """*what* begins, which belongs to no step."""
        self.run.outside(what)

    @safe
    def take_in(self) -> None:
        """End of what belonged to no step."""
        self.run.inside()

    def end_step(self) -> None:
        """Nothing: the engine knows its steps."""

    def _work_begins(self, *_: Any, **__: Any) -> None:
        if self.run.is_marking:
            self._work.enter_context(self.run.window.recorder.optimizer_work())

    def _forward_begins(self, *args: Any, **kwargs: Any) -> None:
        run = self.run
        if not torch.is_grad_enabled():
            if not (self._in_step or self.engine.module.training):
                self._evaluation_begins(since_batch=True)
            run.enter("forward", counts=False)
        elif self._is_whole:
            self.run.between_steps("")  # an evaluation is over, or what was before the first step
            if self._batch.backward_done:
                self._batch_ends()  # a loop that says itself where steps end calls engine.step only there
            is_first, self._in_step = not self._batch.shapes, True
            self._batch.shapes += tensor_shapes((*args, *kwargs.values()) if kwargs else args)
            if is_first:
                batch = args[0] if len(args) == 1 and not kwargs else (args, kwargs) if args else kwargs
                self._batch.tokens = run.tokens.take(batch, fetched=run.facts.device.type != "cpu")
                if callable(run.config.batch_size) or callable(run.config.tokens_per_sample):
                    self._batch.given = batch  # which is not held otherwise
                run.batch_begins(self._batch.shapes, self._batch.tokens)
            run.enter("forward")

    @safe
    def backward_begins(self, *_: Any, **__: Any) -> None:
        """Autograd is about to run, or the engine's backward."""
        self._backward_depth += 1
        if self._backward_depth == 1:
            if self._batch.shapes and not self._batch.backward_done:
                self.run.claim("forward")  # the loss
            self.run.enter("backward")

    @safe
    def backward_ends(self, *_: Any) -> None:
        """The backward has run."""
        self._backward_depth -= 1
        if self._backward_depth == 0:
            self.run.leave()
            self._batch.backward_done = bool(self._batch.shapes)

    def _gradients_are_there(self, *_: Any) -> None:
        self._work.close()
        # Torch's own backward is heard only while parts are marked.
        self._batch.backward_done = bool(self._batch.shapes)

    def _step_begins(self, *_: Any, **__: Any) -> None:
        self._updates = int(self.engine.global_steps)
        if self._is_whole:
            self.run.between_steps("")
        self.run.enter("optimizer", counts=bool(self.engine.is_gradient_accumulation_boundary()))

    def _step_ends(self, _: Any) -> None:
        ends_step = int(self.engine.global_steps) != self._updates
        self.run.leave()
        if self._is_whole and (ends_step or self._batch.shapes):
            self._batch_ends(ends_step=ends_step)
        self._is_whole |= ends_step

    def _batch_ends(self, *, ends_step: bool = False) -> None:
        batch, self._batch = self._batch, _Batch()
        self._in_step = not ends_step
        logs = ends_step and self.is_reading_due()
        done = batch.given, batch.shapes, batch.tokens
        self.run.batch_done(done, updates=int(ends_step), ends_step=ends_step, logs=logs)

    def _mode_changes(self, mode: bool = True) -> None:
        if not mode and not self._in_step:
            self._evaluation_begins()
        elif mode and self.run.between == "validation":
            self.run.between_steps("")

    def _evaluation_begins(self, *, since_batch: bool = False) -> None:
        if self.run.between != "validation":
            self.run.tokens.fetched.clear()
            self.run.between_steps("validation", since_batch=since_batch)
