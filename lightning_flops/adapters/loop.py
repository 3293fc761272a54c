"""A training loop of the user's own: torch's public hooks of its models and optimizers, and autograd's two entries.

A batch is what the models were called with, or what ``batches`` handed out. A step ends with that of the last listed
optimizer, or where the loop says so. What runs between the forward and the backward is the loss, and is forward, too. A
model that is called with gradients off in evaluation mode is an evaluation, which belongs to no step.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from lightning_flops.adapters.backwards import hear_backwards
from lightning_flops.adapters.fetches import hear_fetches
from lightning_flops.adapters.loop_context import Frame, called_in, device_of, root_of, run_context
from lightning_flops.instrument.batches import HIDDEN_SHAPE, tensor_shapes
from lightning_flops.instrument.timing.settling import steps_to_settle
from lightning_flops.instrument.torch_private.compiler import (
    compiler_callbacks,
    hide,
    leave_compiled_code,
    was_used,
)
from lightning_flops.instrument.torch_private.loading import fetched_ahead, workers_of
from lightning_flops.run.adapter import Facts
from lightning_flops.run.run import Run
from lightning_flops.run.safety import safe

if TYPE_CHECKING:
    from lightning_flops.config import ProfilerConfig
    from lightning_flops.records import BatchTokens, Shapes, TimePhase
    from lightning_flops.run.output import LoggedOutput
    from lightning_flops.schema.profile import Profile

_MOST_AHEAD = 64
"""Fetched batches whose tokens are kept until they are used."""

_MOST_LEARNED = 1000
"""Shapes of fetched batches whose steps were counted."""

_NOT_CALLED = (
    "The model was not called, or compiled code called it: forward is what ran from the batch to the backward."
)


class Hook:
    """A hook of ours on a module or an optimizer of the user's, which holds the adapter weakly.

    In a pickle or a copy of what it is on, it is a function of the standard library's that does nothing.
    """

    def __init__(self, adapter: LoopRun, tell: Callable[..., None]) -> None:
        self._adapter = weakref.ref(adapter)
        self._tell = tell

    def __call__(self, *args: Any) -> None:
        """Tell the adapter, if it is there and this is the thread that trains."""
        leave_compiled_code()
        adapter = self._adapter()
        if adapter is not None and adapter.run.thread == threading.get_ident():
            self._tell(adapter, *args)

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (nullcontext(), "__exit__")


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
        """The user's functions are asked of each batch."""
        self._state = _State()
        self._fetched: deque[BatchTokens | None] = deque(maxlen=_MOST_AHEAD)
        root = root_of(model)
        state = self._state
        facts = Facts(
            root=root,
            device=device_of(model),
            output=output,
            context=lambda: run_context(frame, model, accumulate=state.accumulate, autocast=state.autocast),
            x_axis=lambda: initial_step + self.run.steps_done,
            optimizers=lambda: self._optimizers or None,
            whole_model=lambda: model,
            rank=frame.rank,
            world_size=frame.world_size,
            profile_step=config.next_profile_step(steps_done=steps_before),
            loader_workers=lambda: state.workers,
        )
        self.run = Run(facts, config, publish)
        self.run.steps_done = steps_before

    def begin(self) -> None:
        """The loop begins."""
        run = self.run
        self._put_hooks(run.undo)
        hear_backwards(self, run.undo, entries=("backward", "grad"))
        hear_fetches(self, run.undo)
        run.begin()

    def _put_hooks(self, undo: ExitStack) -> None:
        begins, ends = Hook(self, LoopRun.update_begins), Hook(self, LoopRun.update_ends)
        if not self._optimizers:  # those of any optimizer
            undo.callback(register_optimizer_step_pre_hook(begins).remove)
            undo.callback(register_optimizer_step_post_hook(ends).remove)
        for optimizer in self._optimizers:
            undo.callback(optimizer.register_step_pre_hook(begins).remove)
            undo.callback(optimizer.register_step_post_hook(ends).remove)
        handles: list[Any] = []
        enters, leaves = Hook(self, LoopRun.forward_begins), Hook(self, LoopRun.forward_ends)
        models = called_in(self._model)

        def put_up(*_: Any) -> None:
            if not handles:
                for model in models:
                    handles.append(model.register_forward_pre_hook(enters, prepend=True, with_kwargs=True))
                    handles.append(model.register_forward_hook(leaves, always_call=True))

        def take_down(*_: Any) -> None:
            while handles:
                handles.pop().remove()

        undo.callback(take_down)
        put_up()
        # While torch compiles, the hooks are down: code that had seen them would break its graph there.
        compiler = compiler_callbacks() if was_used() else None
        if compiler is not None:
            for callback in (take_down, put_up):
                hide(callback)  # torch holds a lock around these calls, and would take it again to compile them
            undo.callback(compiler.remove_start_callback, take_down)
            undo.callback(compiler.remove_end_callback, put_up)
            compiler.register_start_callback(take_down)
            compiler.register_end_callback(put_up)

    # ---- what the hooks tell

    @safe
    def forward_begins(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A model is called."""
        run, state = self.run, self._state
        if state.backwards or state.depth or state.outside:
            state.depth += 1  # a recomputation, or a model inside another one
            return
        if self._evaluates(module):
            state.depth += 1
            return
        self._evaluation_is_over()
        if state.after_backward and (state.fetched or not state.fetches):
            self._batch_is_over(ends_step=False)
        state.depth += 1
        state.forwards += 1
        state.trained |= module.training
        state.feeder = state.asked
        self._take(args, kwargs)
        if not state.in_forward:
            state.in_forward = True
            run.enter("forward")

    def _take(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Take the shapes and the tokens of the batch before the model can change it."""
        run, state = self.run, self._state
        first, state.pending = not state.pending, True
        if not state.handed:
            state.shapes = (*state.shapes, *tensor_shapes((*args, *kwargs.values()) if kwargs else args))
        if not first:
            return
        device = run.facts.device.type
        if run.is_marking:
            state.autocast = _autocast(device)
        state.fetched = False
        given = kwargs or (args[0] if len(args) == 1 else args)
        if self._asks and not state.handed:
            state.batch = given
        if run.tokens.reads or self._fetched:
            state.tokens = run.tokens.of(given) if device == "cpu" else self._tokens_fetched()
        if not state.fetches:
            run.batch_begins(state.shapes, state.tokens)

    def _comes(self, shapes: Shapes) -> None:
        """A batch of *shapes* is there: have its step counted if they are new, before anything computes on it."""
        run, state = self.run, self._state
        if not (state.pending or shapes in state.learned) and len(state.learned) < _MOST_LEARNED:
            run.batch_begins(shapes)
            if run.window.recorder.counting:
                state.learned.add(shapes)

    def _tokens_fetched(self) -> BatchTokens | None:
        """Tokens of the batch in use, read when it was fetched; None if its sizes are not those of the model's."""
        tokens = self._fetched.popleft() if self._fetched else None
        sizes = {shape[0] * shape[1] for shape in self._state.shapes if len(shape) > 1}
        return tokens if tokens is not None and tokens.processed in sizes else None

    @safe
    def forward_ends(self, module: nn.Module, args: Any, output: Any) -> None:
        """A model's forward is over, or has raised; in an optimizer's closure, the loss is still a part of it."""
        state = self._state
        state.depth = max(0, state.depth - 1)
        if not state.updating:
            self._forward_is_over()

    def _forward_is_over(self) -> None:
        state = self._state
        if state.in_forward and not state.depth:
            state.in_forward = False
            self.run.leave()

    @safe
    def backward_begins(self, entry: str) -> None:
        """Autograd is about to run; what ran since the forward was the loss."""
        run, state = self.run, self._state
        if state.outside:
            return
        state.backwards += 1
        if state.backwards > 1:  # a reentrant checkpoint's
            return
        self._evaluation_is_over()
        if not state.pending:  # compiled code called the model, and no hook of ours
            state.pending, state.fetched = True, False
            if state.shapes_fetched:
                state.shapes = state.shapes_fetched
        state.after_backward |= entry == "backward"  # more may be computed on the batch after a penalty's gradient
        self._forward_is_over()
        run.claim("forward")
        run.enter("backward")

    @safe
    def backward_ends(self) -> None:
        """Autograd has run."""
        state = self._state
        state.backwards = max(0, state.backwards - 1)
        if state.backwards or state.outside:
            return
        state.depth = int(state.in_forward)
        self.run.leave()
        if state.ends_step and not state.updating:
            self._batch_is_over(ends_step=True)

    @safe
    def update_begins(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """An optimizer's step begins; where a subclass's step calls its parent's, the hooks are called again."""
        self._evaluation_is_over()
        self._state.updating.append(optimizer)
        if len(self._state.updating) == 1:
            self.run.enter("optimizer")

    @safe
    def update_ends(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """An optimizer's step is over."""
        state = self._state
        if optimizer is (self._optimizers or (None,))[-1]:
            state.ends_step = not state.told
        was_open = bool(state.updating)
        if was_open:
            state.updating.pop()
        if state.updating or state.outside:
            return
        if was_open:  # otherwise its closure has fetched a batch
            self._forward_is_over()
            self.run.leave()
        state.updates += 1
        if state.ends_step and not state.backwards:  # in a backward a hook of a gradient's makes the update
            self._batch_is_over(ends_step=True)

    @safe
    def fetch_begins(self, iterator: Any) -> None:
        """A DataLoader is asked for a batch."""
        state = self._state
        self._update_is_over()
        if state.feeder() is iterator:
            self._evaluation_is_over()  # the loop goes back to the loader of its steps
        elif not state.outside and state.forwards:
            self._evaluates(self._model, fetches=True)
        if state.outside or state.evaluating:
            return
        if not state.fetches:
            state.workers = workers_of(iterator)
            settle = steps_to_settle(batches_ahead=fetched_ahead(iterator), batches_a_step=1)
            self.run.window.recorder.settle_for(settle)
        state.fetches += 1
        if state.asked() is not iterator:
            state.asked = weakref.ref(iterator)
        state.fetching = True
        self.run.fetch_begins()

    @safe
    def fetch_ends(self, batch: Any) -> None:
        """It has delivered *batch*; None: it is at its end."""
        run, state = self.run, self._state
        if not state.fetching:
            return
        state.fetching = False
        state.fetched = True
        run.fetch_ends()
        if batch is not None:
            state.shapes_fetched = tensor_shapes(batch)
            self._comes(state.shapes_fetched)
            if run.tokens.reads and run.facts.device.type != "cpu":
                self._fetched.append(run.tokens.of(batch))

    # ---- what the loop says itself

    @safe
    def hands_out(self, batch: Any) -> None:
        """``batches`` hands out *batch*, which is what the step computes on."""
        state = self._state
        if state.after_backward:
            self._batch_is_over(ends_step=False)
        shapes = tensor_shapes(batch)
        state.batch = batch
        if HIDDEN_SHAPE not in shapes:  # otherwise those of what the model gets
            state.shapes, state.handed = shapes, True
            self._comes(shapes)

    @safe
    def wait_begins(self) -> None:
        """``batches`` asks the loop's own iterable for a batch."""
        self._update_is_over()
        self._evaluation_is_over()
        self.run.fetch_begins()

    @safe
    def wait_ends(self) -> None:
        """It has answered."""
        self._state.fetches += 1
        self._state.fetched = True
        self.run.fetch_ends()

    @safe
    def step_is_told(self) -> None:
        """The loop says that a batch is through, and with it a step, if it was updated."""
        state = self._state
        state.told = True
        if state.pending or not self._optimizers:
            self._evaluation_is_over()
            state.updates = state.updates or int(not self._optimizers)
            self._batch_is_over(ends_step=state.updates > 0)

    @safe
    def leave_out(self, what: str) -> None:
        """*what* begins, which belongs to no step."""
        state = self._state
        if state.pending and not (state.outside or state.after_backward):
            self.run.claim("forward")
        state.outside += 1
        self.run.outside(what)

    @safe
    def take_in(self) -> None:
        """It is over."""
        self._state.outside -= 1
        self.run.inside()

    @safe
    def finish(self, error: BaseException | None = None) -> None:
        """The loop is over, or has raised *error*."""
        self._evaluation_is_over()
        if self._state.updates and self._optimizers and error is None:
            self.run.notes.add_for_run(
                f"The loop ended in a step: {type(self._optimizers[-1]).__name__}, the last optimizer in the list, "
                "ends each. List the one that steps last in the last place, or call profiler.step()."
            )
        self.run.finish(interrupted_by=error)

    # ---- batches

    def _evaluates(self, module: nn.Module, *, fetches: bool = False) -> bool:
        """Whether *module* is evaluated now, or a batch is fetched for that; then what runs belongs to no step."""
        state = self._state
        if module.training or (torch.is_grad_enabled() and not (fetches and state.trained)):
            return False
        if not state.evaluating:
            state.evaluating = True
            self.run.outside("validation", since_batch=not state.pending)
        return True

    def _update_is_over(self) -> None:
        """No optimizer's step runs where a batch is asked for: one that is still open has raised."""
        if self._state.updating:
            self._state.updating.clear()
            self.run.leave()

    def _evaluation_is_over(self) -> None:
        if self._state.evaluating:
            self._state.evaluating = False
            self.run.inside()

    def _batch_is_over(self, *, ends_step: bool) -> None:
        run, state = self.run, self._state
        logs = ends_step and (run.steps_done + 1) % self._log_every == 0
        shapes, tokens, batch, updates = state.shapes, state.tokens, state.batch, state.updates
        state.micro_batches += 1
        if run.is_marking:
            run.window.recorder.cannot_tell_apart(self._unseen())
            if not state.forwards:
                run.notes.add(_NOT_CALLED)
        if ends_step:
            state.accumulate, state.micro_batches = state.micro_batches, 0
        state.next_batch()
        run.batch_done(batch, shapes, updates=updates, ends_step=ends_step, logs=logs, tokens=tokens)

    def _unseen(self) -> Iterator[TimePhase]:
        """Parts of a step whose time is in ``other``."""
        yield from ("transfer", "other")
        if not self._state.fetches:
            yield "data_wait"


class _State:
    """Where the loop is."""

    def __init__(self) -> None:
        self.depth = 0
        """Calls of the models that are running, one in another."""
        self.in_forward = self.evaluating = self.fetching = self.trained = self.told = False
        self.backwards = 0
        """Calls of autograd that are running, one in another."""
        self.outside = 0
        """Depth of ``outside_of_steps``."""
        self.updating: list[Any] = []
        """Optimizers whose steps are running."""
        self.fetches = self.forwards = 0
        """Seen so far."""
        self.asked: Callable[[], Any] = lambda: None
        """Returns the iterator that was asked last; and ``feeder`` the one that fed the latest forward of a step."""
        self.feeder = self.asked
        self.fetched = False
        """A batch was fetched since the running one began."""
        self.shapes_fetched: Shapes = ()
        self.learned: set[Shapes] = set()
        self.workers: int | None = None
        self.autocast = ""
        self.micro_batches = 0
        self.accumulate = 1
        self.next_batch()

    def next_batch(self) -> None:
        """The running batch is over."""
        self.shapes: Shapes = ()
        self.tokens: BatchTokens | None = None
        self.batch: Any = ()
        self.updates = 0
        self.pending = self.handed = self.after_backward = self.ends_step = False


def _autocast(device: str) -> str:
    """The dtype that autocast computes in; empty where it is off."""
    return str(torch.get_autocast_dtype(device)).removeprefix("torch.") if torch.is_autocast_enabled(device) else ""


hide(Hook.__call__)
