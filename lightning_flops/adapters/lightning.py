"""Lightning: one call of ``Trainer.fit``, ``predict``, ``test`` or ``validate``, as events of a ``Run``.

Batches, epochs and validations are the callback's hooks. While the parts of a step are marked, ``start`` and ``stop``
of the Trainer's own profiler are heard: every Trainer calls them around its actions, which are the loader, the
transfer, the step, the backward and the optimizer.
"""

from __future__ import annotations

import functools
import math
import sys
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from lightning_flops.adapters.hearing import HearingAdapter, Hook
from lightning_flops.adapters.place import announce_in_log, mesh_sizes, run_context_on, sizes_along
from lightning_flops.config import BLOCK, ProfilerConfig
from lightning_flops.measure.batches import samples_in, tensor_shapes
from lightning_flops.measure.patches import listen
from lightning_flops.measure.recorder import steps_to_settle
from lightning_flops.measure.torch_private.optional import fetched_ahead, loader_of, rows_fetched
from lightning_flops.records import Loop, RunContext, TimePhase
from lightning_flops.run.adapter import Facts
from lightning_flops.run.output import LoggedOutput
from lightning_flops.run.run import Run, safe
from lightning_flops.run.throughput import Batch
from lightning_flops.run.unhooked import always_heard
from lightning_flops.schema.profile import Profile
from lightning_flops.signals import Undo
from lightning_flops.sinks.services import Services

if TYPE_CHECKING:
    from lightning.pytorch import Callback as Callback, LightningModule as LightningModule, Trainer as Trainer
else:  # LightningCLI runs the callback's TYPE_CHECKING imports: these must not import the root that is not used
    Callback = LightningModule = Trainer = Any

IMPORT_ROOTS = ("lightning.pytorch", "pytorch_lightning")  # the two names under which Lightning is installed
_THEIRS = ("lightning.pytorch.", "pytorch_lightning.")  # begin names of modules of its, and of no package named alike

_PARTS: dict[str, TimePhase] = {  # of a step, by the Trainer's action
    "batch_to_device": "transfer",
    **dict.fromkeys(("training_step", "validation_step", "test_step", "predict_step"), "forward"),
    "optimizer_step": "other",
    "optimizer_zero_grad": "optimizer",
    "configure_gradient_clipping": "optimizer",
}
# Parts that begin where an action ends. They are over where one of these begins, or else where one of _CLOSES ends.
_OPENS: dict[str, TimePhase] = {
    # Autograd runs between the last hook before the backward, which is the module's, and the first one after it.
    "on_before_backward": "backward",
    # The update's action is around the closure with the forward and the backward. Its own work follows on clipping,
    # which is the last thing in there; what Lightning does around these is other.
    "configure_gradient_clipping": "optimizer",
}
_CLOSES: dict[tuple[str, bool], TimePhase] = {
    ("on_after_backward", True): "backward",
    ("optimizer_step", False): "optimizer",
}

_KINDS = {"next", *_PARTS, *_OPENS, *(kind for kind, _ in _CLOSES)}
_SEVERAL = (Mapping, list, tuple)  # what holds several loaders
_OTHER_FIT = "another fit"
_EVERY_LOOP = "_call_and_handle_interrupt"  # of Lightning's module ``trainer.call``: runs each loop of each Trainer

# Parts when the strategy takes them: the user's module has methods of the same names.
_OF_STRATEGY = frozenset("batch_to_device training_step validation_step test_step predict_step".split())


@dataclass(slots=True)
class _Done:
    """What has gone through the loop, and what it waits for."""

    attempts: int = 0  # of the Trainer's optimizers until the latest batch
    updates: int = 0  # that the optimizers themselves have made since then
    waits: bool = False  # it waits for a batch of this run's steps, or has
    asked: Callable[[], Any] = lambda: None  # returns the iterator of the Trainer's own DataLoader that was asked last
    inner: set[TimePhase] = field(default_factory=set)  # parts of ``_OPENS`` that run, while parts are marked


class LightningAdapter(HearingAdapter):
    """The adapter of one *loop* of a Trainer's, on one rank, for *callback*.

    *own_folder* takes reports if no logger has a folder.
    """

    def __init__(
        self,
        callback: Any,
        trainer: Trainer,
        pl_module: LightningModule,
        loop: Loop,
        *,
        config: ProfilerConfig,
        publish: Callable[[Profile], None],
        own_folder: str | None,
    ) -> None:
        super().__init__()
        self._callback, self._trainer = callback, trainer
        self._callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
        self._trains = loop == "training"
        self._manual = self._trains and not pl_module.automatic_optimization
        strategy: Any = trainer.strategy
        self._engine = engine = strategy.deepspeed_engine if self._trains and is_deepspeed(trainer) else None
        # DeepSpeed accumulates across epochs, where Lightning starts anew.
        counter = (trainer, "global_step") if engine is None else (engine, "global_steps")
        self._attempted: Callable[[], int] = partial(getattr, *counter)  # optimizer attempts so far
        self._loop_itself = trainer.fit_loop if self._trains else getattr(trainer, f"{loop}_loop")
        found, accumulate = _loaders(self._loop_itself), trainer.accumulate_grad_batches if self._trains else 1
        self._reads_ahead = trainer.strategy.root_device.type != "cpu" and len(found) == 1
        self._batch = Batch(given=None)  # the running one
        self._done = _Done()
        epochs, stepped = trainer.fit_loop.epoch_loop, "_batches_that_stepped"  # a private name
        of_fit: tuple[Any, str] = (epochs, stepped) if hasattr(epochs, stepped) else (trainer, "global_step")
        step = config.next_profile_step(steps_done=0)
        if step is not None:  # a loop that is known to be too short for it is profiled in its last step
            step = int(min(step, max(0, _steps_in(trainer, loop) - 1)))
        self.facts = Facts(
            root=pl_module,
            whole=strategy.model or pl_module,
            device=trainer.strategy.root_device,
            output=_output_of(trainer, config, loop=loop, own_folder=own_folder),
            rank=trainer.global_rank,
            world_size=trainer.world_size,
            loop=loop,
            profile_step=step,
            settle_steps=steps_to_settle(
                batches_ahead=max(map(fetched_ahead, found), default=0), batches_a_step=accumulate
            ),
        )
        self.run = Run(self, config, publish)
        self._axis = of_fit if self._trains else (self.run, "steps_done")

    # ---- what the run asks

    def context(self) -> RunContext:
        """Where the Trainer's loop runs."""
        return run_context(self._trainer, self.facts.loop)

    def call(self) -> tuple[str, Any] | None:
        """The training step, with the running batch; None in manual optimization, where it updates the weights."""
        batch = None if self._manual or not self._trains else self._batch.given
        return None if batch is None else ("training_step", batch)

    def optimizers(self) -> Iterable[Any] | None:
        """The Trainer's; none in a loop that does not train."""
        return list(self._trainer.optimizers) if self._trains else []

    def loader_workers(self) -> Collection[int]:
        """Those of the loop's DataLoaders."""
        found = [getattr(one, "num_workers", None) for one in _loaders(self._loop_itself)]
        return [one for one in found if isinstance(one, int)]

    def declared_batch_size(self) -> int | None:
        """What the loop's own DataLoader knows of the batch that it has brought last."""
        return rows_fetched(self._done.asked())

    def is_between_steps(self) -> bool:
        """Whether no tokens were read ahead, as beside a GPU, of a loader without a length."""
        return not self.run.tokens.fetched

    def put_hooks_on(self) -> None:
        """The optimizers have made attempts meanwhile."""
        super().put_hooks_on()
        self._done.attempts = self._attempted()

    # ---- what is heard

    def begin(self) -> None:
        """The loop is about to fetch its first batch."""
        undo, kind = self.run.undo, LightningAdapter
        self.run.begin()
        self.hear_fetches(undo)
        for module in filter(None, (sys.modules.get(f"{root}.trainer.call") for root in IMPORT_ROOTS)):
            if hasattr(module, _EVERY_LOOP):
                self.hear(module, _EVERY_LOOP, undo, begins=kind._leaves, ends=kind._comes_back)
        # Not by the callback's hooks: what the others do at the end of the batch, and the loggers, is in a step.
        fit = self._trainer.fit_loop
        for loop, name, what in (
            (fit, "on_advance_end", "epoch restart"),
            (fit.epoch_loop.val_loop, "run", "validation"),
        ):
            self.hear(type(loop), name, undo, begins=partial(kind._pauses, what=what), of=loop)
        if self._manual:
            self._hear_what_is_called_by_hand(undo)
        self._done.attempts = self._attempted()
        self.outside("start")  # until the first batch is there

    @safe
    @always_heard
    def finish(self, error: BaseException | None = None) -> None:
        """The loop is over, or has raised *error*."""
        self.run.finish(interrupted_by=error)

    # ---- parts of a step

    def mark_parts(self, stack: Undo) -> None:
        """Hear the Trainer's own profiler."""
        super().mark_parts(stack)
        self._done.inner.clear()
        for method in ("start", "stop"):
            notify = partial(LightningAdapter._action, begins=method == "start")
            listen(stack, type(self._trainer.profiler), method, Hook(self, notify), around=_told)  # type: ignore[attr-defined]

    def _action(self, profiler: Any, action: str, *, begins: bool) -> None:
        """An action of *profiler*'s begins, or ends."""
        if profiler is not self._trainer.profiler or self._is_elsewhere():  # type: ignore[attr-defined]
            return
        run, inner, (kind, part) = self.run, self._done.inner, _meaning(action)
        if kind == "next":
            self.fetch_begins() if begins else self.fetch_ends(None)
        if (over := _CLOSES.get((kind, begins))) in inner:
            inner.remove(over)
            run.leave()
        if part is not None:
            run.enter(part, counts=part == "forward") if begins else run.leave()
        if not begins and kind in _OPENS and _OPENS[kind] not in inner:
            inner.add(_OPENS[kind])
            engine = self._engine if _OPENS[kind] == "optimizer" else None
            # Lightning calls DeepSpeed's update after every batch. What is called by hand counts where it is heard.
            run.enter(
                _OPENS[kind],
                counts=not self._manual and (engine is None or bool(engine.is_gradient_accumulation_boundary())),
            )

    def _is_elsewhere(self) -> bool:
        """Whether another fit runs inside of this one: another Trainer's, or a finder's, which takes callbacks off."""
        now: list[Any] = self._trainer.callbacks  # type: ignore[attr-defined]
        is_taken_off = now is not self._callbacks and self._callback not in now
        return is_taken_off or _OTHER_FIT in self.run.outside_of

    def fetch_begins(self, iterator: Any = None) -> None:
        """The loop waits for a batch: as the Trainer's action, as a DataLoader's, or as both, one inside the other."""
        # Not for a validation inside the fit.
        self._done.waits = not (self._is_elsewhere() or (self._trains and not self._trainer.training))
        if self._done.waits:
            if self.run.between:
                self.run.between_steps("")
            if iterator is not None and any(
                getattr(one, "batch_sampler", None) is loader_of(iterator) for one in _loaders(self._loop_itself)
            ):
                self._done.asked = weakref.ref(iterator)
            self.run.fetch_begins()

    def fetch_ends(self, batch: Any) -> None:
        """A loader has delivered *batch*; if it goes to a device, its tokens are read here, on the host."""
        if self._done.waits:
            self.run.fetch_ends()
            if self._reads_ahead:
                self.run.tokens.fetch(batch)

    # ---- fits of other Trainers inside of this one

    def _leaves(self, *_: Any, **__: Any) -> None:
        self.run.outside(_OTHER_FIT)

    def _comes_back(self, _: Any) -> None:
        self.run.inside()

    def _pauses(self, *_: Any, what: str) -> None:
        if not self._is_elsewhere():
            self.outside(what)

    # ---- manual optimization: what is called without the Trainer, whose actions and counter know nothing of it

    def _hear_what_is_called_by_hand(self, undo: Undo) -> None:
        begins, ends = LightningAdapter._begins_by_hand, LightningAdapter._ends_by_hand
        self.hear(
            torch.autograd,
            "backward",
            undo,
            begins=partial(begins, part="backward"),
            ends=partial(ends, part="backward"),
        )
        update = Hook(self, partial(begins, part="optimizer")), Hook(self, partial(ends, part="optimizer"))
        for one in self._trainer.optimizers:
            if hasattr(one, "register_step_pre_hook"):
                undo.callback(one.register_step_pre_hook(update[0]).remove)
                undo.callback(one.register_step_post_hook(update[1]).remove)

    def _begins_by_hand(self, /, *_: Any, part: TimePhase, **__: Any) -> None:
        self.run.enter(part)

    def _ends_by_hand(self, /, *_: Any, part: TimePhase) -> None:
        self.run.leave()
        self._done.updates += part == "optimizer" and not self._is_elsewhere()

    # ---- batches, epochs, validations, by the hooks of the callback

    @safe
    def outside(self, what: str) -> None:
        """*what* begins between two batches, and belongs to no step."""
        self.run.tokens.fetched.clear()
        if self.run.between == "checkpoint":  # it is over, as something else begins
            self.run.between_steps("")
        self.run.between_steps(what)

    @safe
    def saves(self) -> None:
        """A checkpoint is being saved; between two batches it belongs to no step, until the next one is asked for."""
        if self._batch.given is None:
            self.run.between_steps("checkpoint")

    @safe
    def batch_starts(self, batch: Any) -> None:
        """A batch has been fetched and transferred: take its shapes before the user's step may change it."""
        run = self.run
        if run.between:
            run.between_steps("")
        reader, tokens = run.tokens, None
        if reader.reads:
            tokens = reader.take() if self._reads_ahead else reader.of(batch)
        self._batch = running = Batch(tensor_shapes(batch), tokens, batch)
        run.batch_begins(running.shapes, tokens)

    @safe
    def batch_ends(self, batch: Any, outputs: Any) -> None:
        """*batch* went through the loop, and with it perhaps a step; *outputs* is what Lightning keeps of it."""
        if batch is None:
            return  # the loader yielded None, and nothing ran
        running, self._batch, done = self._batch, Batch(given=None), self._done
        if batch is not running.given:  # a dataloader_iter step fetches its batch itself
            running = Batch(tensor_shapes(batch), running.tokens, batch)
        combined: Any = getattr(self._loop_itself, "_combined_loader", None)  # a private name, as that of its mode
        rows = None
        if getattr(combined, "_mode", "sequential") != "sequential" and isinstance(combined.iterables, _SEVERAL):
            rows = _rows(batch, combined.iterables)
        if self._trains and not self._manual and not outputs:  # the step returned None: nothing was trained on
            rows, running = 0, Batch(given=batch)
        before, done.attempts = done.attempts, self._attempted()
        updates, done.updates = max(done.updates, done.attempts - before), 0
        # In manual optimization Lightning's stand-in for an optimizer makes no steps.
        unseen = self._manual and all(type(one).__module__.startswith(_THEIRS) for one in self._trainer.optimizers)
        ends_step = not self._trains or updates > 0 or unseen
        self.run.batch_done(
            running,
            updates=updates,
            ends_step=ends_step,
            logs=ends_step and self._logs(),
            rows=None if rows is None else [rows],
        )

    def _logs(self) -> bool:
        """Whether the Trainer logs its metrics with this step (``logger_connector.should_update_logs``)."""
        every, step = int(getattr(self._trainer, "log_every_n_steps", 0)), getattr(*self._axis) + 1
        return every > 0 and bool(step % every == 0 or (self._trains and self._trainer.should_stop))

    def x_axis(self) -> int:
        """The step at which Lightning logs its own metrics; a loop without training has its batches."""
        return int(getattr(*self._axis))


def _told(hooks: list[Hook], original: Callable[..., Any]) -> Callable[..., Any]:
    """A wrapper of a profiler's ``start`` or ``stop``, which a step calls some fifty times, mostly for nothing."""

    @functools.wraps(original)
    def call(self: Any, action_name: str, *args: Any, **kwargs: Any) -> Any:
        if any(_meaning(action_name)):
            for hook in hooks:
                hook(self, action_name)
        return original(self, action_name, *args, **kwargs)

    return call


@functools.cache
def _meaning(action: str) -> tuple[str, TimePhase | None]:
    """The kind of an *action*, empty for one that says nothing of a step, and the part that it is, if it is one."""
    owner, _, kind = action.rpartition(".")
    # The user's module has methods of the same names as the strategy's, and callbacks hooks of the module's.
    is_theirs = kind in _OF_STRATEGY and not owner.startswith("[Strategy]")
    if is_theirs or (kind == "on_before_backward" and not owner.startswith("[LightningModule]")):
        return "", None
    kind = "next" if kind.endswith("_next") else kind
    return kind if kind in _KINDS else "", _PARTS.get(kind)


# ---- what a Trainer knows about its run, and where its reports go; nothing here asks another rank


def _output_of(trainer: Trainer, config: ProfilerConfig, *, loop: Loop, own_folder: str | None) -> LoggedOutput:
    """Where reports on a loop of *trainer* go."""
    development = bool(getattr(trainer, "fast_dev_run", False))  # it writes no files but one that a setting names
    # On other ranks some loggers number their folders anew.
    loggers = Services(trainer.loggers)
    numbered = loggers if trainer.is_global_zero else Services(())
    return LoggedOutput(
        config,
        loggers=loggers,
        # Not ``trainer.log_dir``, which broadcasts and so needs all ranks, and not the ``save_dir`` of a logger without
        # a folder for each run, which may be the working directory.
        folder=lambda: None if development else numbered.folder() or own_folder,
        announce=partial(announce_in_log, _import_root(trainer)),
        nowhere=""
        if development or own_folder
        else "No file keeps it: give the Trainer a logger or a FlopsProfilerCallback, or "
        'call logging.basicConfig(level="INFO").',
        part=loop.removeprefix("training"),
    )


def _steps_in(trainer: Trainer, loop: Loop) -> float:
    """Steps of *loop* as far as they are known before it runs: of a fit, those of a development run."""
    if loop == "training":
        # Lightning sets this attribute from outside its class; it is the number of batches, or a bool.
        return math.ceil(int(getattr(trainer, "fast_dev_run", False)) / trainer.accumulate_grad_batches) or math.inf
    batches = getattr(trainer, f"{loop}_loop").max_batches
    return float(sum(batches) if isinstance(batches, list) else batches)


def _loaders(of_loop: Any) -> list[Any]:
    """The data loaders of a loop of the Trainer's."""
    return list(getattr(getattr(of_loop, "_combined_loader", None), "flattened", ()))  # a private name


def _rows(batch: Any, loaders: Any) -> int | None:
    """Rows of *batch* from several *loaders* at a time, all of them together; None: they are not known."""
    known = [samples_in(tensor_shapes(one)) for one in _parts(batch, loaders) if one is not None]
    return None if None in known else sum(one or 0 for one in known)


def _parts(batch: Any, loaders: Any) -> list[Any]:
    """What each of *loaders* has put into *batch*, which is built as they are; the whole where it is not any more."""
    if not (isinstance(loaders, _SEVERAL) and isinstance(batch, _SEVERAL) and len(batch) == len(loaders)):
        return [batch]
    names = loaders.keys() if isinstance(loaders, Mapping) else range(len(loaders))
    if isinstance(batch, Mapping) is not isinstance(loaders, Mapping) or (
        isinstance(batch, Mapping) and batch.keys() != names
    ):
        return [batch]
    return [part for name in names for part in _parts(batch[name], loaders[name])]


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


def is_deepspeed(trainer: Trainer) -> bool:
    """Whether *trainer* uses a DeepSpeedStrategy, of either import root, or a subclass of it."""
    return any(kind.__name__ == "DeepSpeedStrategy" for kind in type(trainer.strategy).__mro__)


def block_of(trainer: Trainer) -> object | None:
    """The ``"flops_profiler"`` block of *trainer*'s DeepSpeed config; None if there is none."""
    config = getattr(trainer.strategy, "config", None) if is_deepspeed(trainer) else None
    return config.get(BLOCK) if isinstance(config, Mapping) else None
