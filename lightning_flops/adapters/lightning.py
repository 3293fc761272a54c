"""Lightning: one call of ``Trainer.fit``, ``predict``, ``test`` or ``validate``, as events of a ``Run``.

Batches, epochs and validations are the callback's hooks. While the parts of a step are marked, an object in front of
the Trainer's own profiler hears the Trainer's actions: every Trainer calls ``start`` and ``stop`` around the loader,
the transfer, the step, the backward and the optimizer.
"""

from __future__ import annotations

import operator
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from lightning_flops.adapters.lightning_context import (
    engine_of,
    is_lightnings,
    loader_workers,
    loaders,
    run_context,
    run_output,
    steps_in,
)
from lightning_flops.adapters.loop import Hook
from lightning_flops.adapters.wrapping import hear_fetches
from lightning_flops.instrument.batches import from_loader, tensor_shapes
from lightning_flops.instrument.optimizer_hooks import OptimizerHooks
from lightning_flops.instrument.timing.settling import steps_to_settle
from lightning_flops.instrument.torch_private.loading import fetched_ahead
from lightning_flops.run.adapter import Facts
from lightning_flops.run.run import Run
from lightning_flops.run.safety import failed, safe

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer

    from lightning_flops.config import ProfilerConfig
    from lightning_flops.records import BatchTokens, Loop, Shapes
    from lightning_flops.schema.profile import Profile

_PARTS = {
    "batch_to_device": ("transfer", False),
    "training_step": ("forward", True),
    "validation_step": ("forward", True),
    "test_step": ("forward", True),
    "predict_step": ("forward", True),
    "backward": ("backward", True),
    "optimizer_step": ("optimizer", True),
    "optimizer_zero_grad": ("optimizer", False),
    "configure_gradient_clipping": ("optimizer", False),
    # Hooks of the user's that run inside the backward and the optimizer's step.
    "on_before_backward": ("other", False),
    "on_after_backward": ("other", False),
    "on_before_zero_grad": ("other", False),
    "on_before_optimizer_step": ("other", False),
}
"""The part of a step that an action of the Trainer's is, and whether it is a whole forward, backward or update."""

_OF_STRATEGY = frozenset("batch_to_device training_step validation_step test_step predict_step backward".split())
"""Actions that are parts when the strategy takes them: the user's module has methods of the same names."""


class Actions:
    """Stands in front of a Trainer's own profiler, and hears where every action begins and ends.

    A pickle or a copy of it is the Trainer's own profiler.
    """

    def __init__(self, inner: Any, hear: Callable[[str, bool], object]) -> None:
        self._inner = inner
        self._hear = hear
        self._hears = True

    def start(self, action_name: str) -> None:
        """An action begins."""
        self._hear(action_name, True)
        self._inner.start(action_name)

    def stop(self, action_name: str) -> None:
        """An action ends."""
        self._inner.stop(action_name)
        self._hear(action_name, False)

    @contextmanager
    def profile(self, action_name: str) -> Iterator[str]:
        """An action, as a context."""
        self._hear(action_name, True)
        try:
            with self._inner.profile(action_name):
                yield action_name
        finally:
            self._hear(action_name, False)

    def detach_from(self, trainer: weakref.ref[Any]) -> None:
        """Let *trainer* have what stood there before, as soon as none stands in front of this one."""
        self._hears = False
        one = trainer()
        while one is not None and type(one.profiler) is Actions and not one.profiler._hears:
            one.profiler = one.profiler._inner

    def __getattr__(self, name: str) -> Any:
        """Everything else is the Trainer's own profiler's."""
        return getattr(self._inner, name)

    def __reduce__(self) -> tuple[Any, ...]:
        return operator.itemgetter(0), ((self._inner,),)  # of the standard library: such a pickle loads without us

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        """The class of the Trainer's own profiler, which Lightning asks for."""
        return type(self._inner)


class LightningRun:
    """The adapter of one *loop* of a Trainer's, on one rank; *own_folder* takes reports if no logger has a folder."""

    def __init__(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        loop: Loop,
        *,
        config: ProfilerConfig,
        publish: Callable[[Profile], None],
        own_folder: str | None,
    ) -> None:
        self._trainer = trainer
        self._trains = loop == "training"
        self._manual = self._trains and not pl_module.automatic_optimization
        self._engine = engine_of(trainer) if self._trains else None
        self._several_loaders = not self._trains and len(loaders(trainer, loop)) > 1
        self._reads_ahead = trainer.strategy.root_device.type != "cpu" and len(loaders(trainer, loop)) == 1
        self._batch: Any = None
        self._is_in_batch = False
        self._shapes: Shapes = ()
        self._tokens: BatchTokens | None = None
        self._batches_done = 0
        self._updates = 0  # optimizer attempts until the latest batch; in manual optimization, those since then
        self._depth = 0  # optimizers' steps that are running, one in another
        self._in_backward = False
        self._is_between = False  # what runs belongs to no step until the next batch is there
        found, accumulate = loaders(trainer, loop), trainer.accumulate_grad_batches if self._trains else 1
        step = config.next_profile_step(steps_done=0)
        if step is not None:  # a loop that is known to be too short for it is profiled in its last step
            step = int(min(step, max(0, steps_in(trainer, loop) - 1)))
        facts = Facts(
            root=pl_module,
            device=trainer.strategy.root_device,
            output=run_output(trainer, config, own_folder=own_folder, loop=loop),
            context=lambda: run_context(trainer, loop),
            x_axis=self._logged_step,
            optimizers=lambda: list(trainer.optimizers) if self._trains else [],
            whole_model=lambda: trainer.strategy.model or pl_module,
            rank=trainer.global_rank,
            world_size=trainer.world_size,
            loop=loop,
            profile_step=step,
            settle_steps=steps_to_settle(
                batches_ahead=max(map(fetched_ahead, found), default=0), batches_a_step=accumulate
            ),
            loader_workers=lambda: loader_workers(trainer, loop),
            mark_parts=self._mark,
        )
        self.run = Run(facts, config, publish)

    def begin(self) -> None:
        """The loop is about to fetch its first batch."""
        run = self.run
        run.begin()
        hear_fetches(self, run.undo)
        if self._manual:  # users may step optimizers that Lightning does not wrap: torch hears every one
            begins, ends = Hook(self, LightningRun.update_begins), Hook(self, LightningRun.update_ends)
            hooks = OptimizerHooks(begins, ends, failed=partial(failed, run))
            run.undo.callback(hooks.remove)
            hooks.put_up()
        if not self._manual:
            self._updates = int(self._trainer.global_step if self._engine is None else self._engine.global_steps)
        self.outside("start")  # until the first batch is there

    # ---- parts of a step

    def _mark(self, stack: ExitStack) -> None:
        """Hear the Trainer's actions until *stack* is closed."""
        trainer: Any = self._trainer
        actions = Actions(trainer.profiler, self._action)
        stack.callback(actions.detach_from, weakref.ref(trainer))
        trainer.profiler = actions

    @safe
    def _action(self, name: str, begins: bool) -> None:
        run = self.run
        owner, _, kind = name.rpartition(".")
        if kind.endswith("_next"):
            self.fetch_begins() if begins else self.fetch_ends(None)
        elif kind in ("setup", "teardown"):  # no event has ended the run
            run.close()
        elif kind == "on_exception":  # of any callback's: one before ours may raise
            run.finish(interrupted_by=sys.exc_info()[1])
        elif name == "run_training_batch":
            if begins and not self._is_in_batch:  # our callback was taken out of the Trainer
                run.close()
        elif name == "save_checkpoint":
            run.outside("checkpoint") if begins else run.inside()
        elif (part := _PARTS.get(kind)) is None or (kind in _OF_STRATEGY and not owner.startswith("[Strategy]")):
            return
        elif kind == "optimizer_step" and (self._manual or not owner.startswith("[LightningModule]")):
            return  # manual optimization: torch's hooks
        elif self._manual and kind in ("on_before_backward", "on_after_backward"):
            self._hear_manual_backward(owner, kind, begins)
        elif begins:
            run.enter(part[0], counts=part[1] and self._is_whole(kind))
        else:
            run.leave()

    def _hear_manual_backward(self, owner: str, kind: str, begins: bool) -> None:
        """Autograd runs between the last hook before the backward and the first one after it."""
        if kind == "on_before_backward" and not begins and owner.startswith("[LightningModule]"):
            self._in_backward = True
            self.run.enter("backward")
        elif kind == "on_after_backward" and begins and self._in_backward:
            self._in_backward = False
            self.run.leave()

    def _is_whole(self, kind: str) -> bool:
        """Whether an optimizer's step updates: Lightning calls DeepSpeed's after every batch."""
        engine = self._engine
        return kind != "optimizer_step" or engine is None or bool(engine.is_gradient_accumulation_boundary())

    @safe
    def update_begins(self, *_: Any) -> None:
        """An optimizer steps; torch says so again where a subclass's step calls its parent's."""
        self._depth += 1
        if self._depth == 1:
            self.run.enter("optimizer")

    @safe
    def update_ends(self, *_: Any) -> None:
        """The optimizer has made its step."""
        self._depth -= 1
        if self._depth == 0:
            self.run.leave()
            self._updates += 1

    @safe
    def fetch_begins(self, iterator: Any = None) -> None:
        """The loop waits for a batch: as the Trainer's action, as a DataLoader's, or as both, one inside the other."""
        if not self._trains or self._trainer.training:  # and not a validation inside the fit
            if self._is_between:
                self._steps_go_on()
            self.run.fetch_begins()

    @safe
    def fetch_ends(self, batch: Any) -> None:
        """A loader has delivered *batch*; if it goes to a device, its tokens are read here, on the host."""
        if not self._trains or self._trainer.training:
            self.run.fetch_ends()
            if self._reads_ahead:
                self.run.tokens.fetch(batch)

    # ---- batches, epochs, validations: hooks of the callback, which are safe

    def outside(self, what: str) -> None:
        """*what* begins between two batches, and belongs to no step, nor does what ran since the last batch."""
        self.run.tokens.fetched.clear()
        self._is_between = True
        self.run.outside(what, since_batch=True)

    def _steps_go_on(self) -> None:
        """What was between two batches is over, with the hooks of every callback."""
        self._is_between = False
        while self.run.outside_of:
            self.run.inside()

    def checkpoint_begins(self) -> None:
        """A checkpoint is written until the next batch is there; while parts are marked, it is an action."""
        if not self.run.is_marking:
            self._is_between = True
            self.run.outside("checkpoint")

    def batch_starts(self, batch: Any, dataloader_idx: int) -> None:
        """A batch has been fetched and transferred: take its shapes before the user's step may change it."""
        if self._is_between:
            self._steps_go_on()
        run, self._is_in_batch = self.run, True
        self._batch, self._shapes = batch, tensor_shapes(batch)
        if self._several_loaders:
            self._shapes = from_loader(self._shapes, dataloader_idx)
        self._tokens = run.tokens.take(batch, fetched=self._reads_ahead) if run.tokens.reads else None
        run.batch_begins(self._shapes, self._tokens)

    def batch_ends(self, batch: Any) -> dict[str, Any] | None:
        """Arguments of ``Run.batch_done`` for *batch*, with which perhaps a step ends; None: nothing ran."""
        self._is_in_batch = False
        if batch is None:
            return None  # the loader yielded None
        if batch is not self._batch:
            self._shapes = tensor_shapes(batch)  # a dataloader_iter step fetches its batch itself
        self._batches_done += 1
        updates, self._updates = self._updates, 0
        if self._trains and not self._manual:
            # DeepSpeed accumulates across epochs, where Lightning starts anew.
            self._updates = int(self._trainer.global_step if self._engine is None else self._engine.global_steps)
            updates = self._updates - updates
        self._depth = 0
        ends_step = not self._trains or updates > 0
        if self._manual:  # without an optimizer whose steps would show it, every batch is a step
            ends_step |= all(is_lightnings(type(one)) for one in self._trainer.optimizers)
        tokens, self._batch, self._tokens = self._tokens, None, None
        logs = ends_step and self._logs()
        return {"shapes": self._shapes, "updates": updates, "ends_step": ends_step, "logs": logs, "tokens": tokens}

    def _logs(self) -> bool:
        """Whether the Trainer logs its metrics with this step (``logger_connector.should_update_logs``)."""
        every, step = int(getattr(self._trainer, "log_every_n_steps", 0)), self._logged_step() + self._trains
        return every > 0 and (step % every == 0 or (self._trains and bool(self._trainer.should_stop)))

    def _logged_step(self) -> int:
        """The step at which Lightning logs its own metrics; a loop without training has its batches."""
        if not self._trains:
            return self._batches_done
        stepped = getattr(self._trainer.fit_loop.epoch_loop, "_batches_that_stepped", None)  # a private name
        return int(self._trainer.global_step if stepped is None else stepped)
