"""Lightning: one call of ``Trainer.fit``, ``predict``, ``test`` or ``validate``, as events of a ``Run``.

Batches, epochs and validations are the callback's hooks. While the parts of a step are marked, ``start`` and ``stop``
of the Trainer's own profiler are heard: every Trainer calls them around its actions, which are the loader, the
transfer, the step, the backward and the optimizer.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

from lightning_flops.adapters.loop import Hook
from lightning_flops.adapters.place import announce_in_log, mesh_sizes, run_context_on, sizes_along
from lightning_flops.adapters.wrapping import hear, hear_fetches
from lightning_flops.config import BLOCK, ProfilerConfig
from lightning_flops.measure.batches import from_loader, tensor_shapes
from lightning_flops.measure.optimizer_hooks import OptimizerHooks
from lightning_flops.measure.recorder import steps_to_settle
from lightning_flops.measure.torch_private.optional import fetched_ahead
from lightning_flops.records import BatchTokens, Loop, RunContext, Shapes
from lightning_flops.run.adapter import Facts
from lightning_flops.run.output import LoggedOutput
from lightning_flops.run.run import Run, failed, safe
from lightning_flops.schema.profile import Profile
from lightning_flops.sinks.services import Services

if TYPE_CHECKING:
    from lightning.pytorch import Callback as Callback
    from lightning.pytorch import LightningModule as LightningModule
    from lightning.pytorch import Trainer as Trainer
else:  # LightningCLI runs the callback's TYPE_CHECKING imports: these must not import the root that is not used
    Callback = LightningModule = Trainer = Any

IMPORT_ROOTS = ("lightning.pytorch", "pytorch_lightning")  # the two names under which Lightning is installed

_PARTS = {  # of a step, by the Trainer's action, and whether it is a whole forward, backward or update
    "batch_to_device": ("transfer", False),
    **dict.fromkeys(("training_step", "validation_step", "test_step", "predict_step"), ("forward", True)),
    "backward": ("backward", True),
    "optimizer_step": ("optimizer", True),
    "optimizer_zero_grad": ("optimizer", False),
    "configure_gradient_clipping": ("optimizer", False),
    # Hooks of the user's that run inside the backward and the optimizer's step.
    **dict.fromkeys((f"on_{name}" for name in ("before_backward", "after_backward")), ("other", False)),
    **dict.fromkeys((f"on_before_{name}" for name in ("zero_grad", "optimizer_step")), ("other", False)),
}

# Parts when the strategy takes them: the user's module has methods of the same names.
_OF_STRATEGY = frozenset("batch_to_device training_step validation_step test_step predict_step backward".split())


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
        self._engine = _engine_of(trainer) if self._trains else None
        found, accumulate = _loaders(trainer, loop), trainer.accumulate_grad_batches if self._trains else 1
        self._several_loaders = not self._trains and len(found) > 1
        self._reads_ahead = trainer.strategy.root_device.type != "cpu" and len(found) == 1
        self._batch: Any = None
        self._is_in_batch = self._in_backward = False
        self._shapes: Shapes = ()
        self._tokens: BatchTokens | None = None
        self._batches_done = self._depth = 0  # depth: of optimizers' steps that are running, one in another
        self._updates = 0  # optimizer attempts until the latest batch; in manual optimization, those since then
        self._is_between = False  # what runs belongs to no step until the next batch is there
        step = config.next_profile_step(steps_done=0)
        if step is not None:  # a loop that is known to be too short for it is profiled in its last step
            step = int(min(step, max(0, _steps_in(trainer, loop) - 1)))
        facts = Facts(
            root=pl_module,
            device=trainer.strategy.root_device,
            output=_run_output(trainer, config, own_folder=own_folder, loop=loop),
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
            loader_workers=lambda: min(
                (one for each in _loaders(trainer, loop) if isinstance(one := getattr(each, "num_workers", None), int)),
                default=None,
            ),
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
        else:
            self._updates = int(self._trainer.global_step if self._engine is None else self._engine.global_steps)
        self.outside("start")  # until the first batch is there

    # ---- parts of a step

    def _mark(self, stack: ExitStack) -> None:
        for method in ("start", "stop"):
            begins = partial(LightningRun._action, begins=method == "start")
            hear(self, type(self._trainer.profiler), method, stack, begins=begins)  # type: ignore[attr-defined]

    @safe
    def _action(self, profiler: Any, action_name: str, *, begins: bool) -> None:
        if profiler is not self._trainer.profiler:  # type: ignore[attr-defined]
            return  # another Trainer's
        run, name = self.run, action_name
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
            # Attempts so far; DeepSpeed accumulates across epochs, where Lightning starts anew.
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


# ---- what a Trainer knows about its run, and where its reports go; nothing here asks another rank


def is_lightnings(kind: type) -> bool:
    """Whether the class *kind* is defined in Lightning itself, and not in a package whose name begins as its name."""
    return kind.__module__.startswith(tuple(f"{root}." for root in IMPORT_ROOTS))


def _steps_in(trainer: Trainer, loop: Loop) -> float:
    """Steps of *loop* as far as they are known before it runs: of a fit, those of a development run."""
    if loop == "training":
        # Lightning sets this attribute from outside its class; it is the number of batches, or a bool.
        return math.ceil(int(getattr(trainer, "fast_dev_run", False)) / trainer.accumulate_grad_batches) or math.inf
    batches = getattr(trainer, f"{loop}_loop").max_batches
    return float(sum(batches) if isinstance(batches, list) else batches)


def _loaders(trainer: Trainer, loop: Loop) -> list[Any]:
    """The data loaders of *loop*."""
    names = {"training": "train_dataloader", "validate": "val_dataloaders", "test": "test_dataloaders"}
    found = getattr(trainer, names.get(loop, "predict_dataloaders"))
    return _leaves(getattr(found, "iterables", found))


def _leaves(value: Any) -> list[Any]:
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        return [leaf for one in value for leaf in _leaves(one)]
    return [] if value is None else [value]


def run_context(trainer: Trainer, loop: Loop = "training") -> RunContext:
    """Where this run takes place, as far as a rank knows without asking the others."""
    root = _import_root(trainer)
    try:
        mesh = getattr(trainer.strategy, "device_mesh", None)
    except RuntimeError:  # its processes have not found each other yet
        mesh = None
    return run_context_on(
        trainer.strategy.root_device,
        sizes_along(mesh_sizes(mesh), world_size=trainer.world_size),
        framework=root,
        framework_version=str(getattr(sys.modules.get(root.partition(".")[0]), "__version__", "unknown")),
        precision=str(trainer.precision),
        rank=trainer.global_rank,
        world_size=trainer.world_size,
        accumulate=trainer.accumulate_grad_batches if loop == "training" else 1,
        strategy=type(trainer.strategy).__name__,
        loop=loop,
    )


def _import_root(trainer: Trainer) -> str:
    modules = [kind.__module__ for kind in type(trainer).__mro__]  # the Trainer may be a subclass of the user's
    return next((root for module in modules for root in IMPORT_ROOTS if module.startswith(f"{root}.")), modules[0])


def _run_output(trainer: Trainer, config: ProfilerConfig, *, own_folder: str | None, loop: Loop) -> LoggedOutput:
    """Where rank 0 shows the reports of this run: files go to *own_folder* where no logger has a folder.

    A development run writes no files but one that a setting names.
    """
    development = bool(getattr(trainer, "fast_dev_run", False))
    return LoggedOutput(
        config,
        loggers=Services(trainer.loggers),
        folder=lambda: None if development else _log_folder(trainer) or own_folder,
        announce=partial(announce_in_log, _import_root(trainer)),
        nowhere=""
        if development or own_folder
        else "No file keeps it: give the Trainer a logger or a FlopsProfilerCallback, or "
        'call logging.basicConfig(level="INFO").',
        part="" if loop == "training" else loop,
    )


def _log_folder(trainer: Trainer) -> str | None:
    """The folder that a logger has for this run; None if none has one.

    Not ``trainer.log_dir``, which broadcasts and so needs all ranks, and not the ``save_dir`` of a logger without a
    folder for each run, which may be the working directory. A mock logger has an object under every name: only paths.
    """
    folders = [getattr(one, "log_dir", None) for one in trainer.loggers]
    return next((str(one) for one in folders if isinstance(one, (str, PurePath)) and str(one)), None)


def is_deepspeed(trainer: Trainer) -> bool:
    """Whether *trainer* uses a DeepSpeedStrategy, of either import root, or a subclass of it."""
    return any(kind.__name__ == "DeepSpeedStrategy" for kind in type(trainer.strategy).__mro__)


def _engine_of(trainer: Trainer) -> Any:
    """The engine that *trainer* uses in a fit; None without DeepSpeed."""
    return trainer.strategy.deepspeed_engine if is_deepspeed(trainer) else None  # type: ignore[attr-defined]


def block_of(trainer: Trainer) -> object | None:
    """The ``"flops_profiler"`` block of *trainer*'s DeepSpeed config; None if there is none."""
    config = getattr(trainer.strategy, "config", None) if is_deepspeed(trainer) else None
    return config.get(BLOCK) if isinstance(config, Mapping) else None
