"""For any PyTorch loop: profile its training, or count the FLOPs of a block of code or of a step that does not run."""

from __future__ import annotations

import operator
import os
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar

import torch
from torch import nn

from lightning_flops.adapters.deepspeed import engine_in, engine_run
from lightning_flops.adapters.loop import LoopAdapter
from lightning_flops.adapters.place import frame_of, loop_output, optimizers_in
from lightning_flops.analysis.counts import FlopCounts
from lightning_flops.analysis.formula import FlopsFormula
from lightning_flops.analysis.plan import MemoryPrediction
from lightning_flops.config import ProfilerConfig, SettingArguments, config_from, takes_settings
from lightning_flops.errors import ConfigError, require
from lightning_flops.measure.counting.flop_counter import FlopCounter
from lightning_flops.measure.counting.offline import VariedBatch, count_on_fake_tensors
from lightning_flops.measure.fake_steps import fake_steps
from lightning_flops.measure.module_hooks import with_inner
from lightning_flops.measure.module_scope import describe_modules, require_module
from lightning_flops.run.delivery import ProfiledRun
from lightning_flops.run.run import safe
from lightning_flops.signals import Quiet, Undo
from lightning_flops.sinks.services import is_writer

if TYPE_CHECKING:
    from typing_extensions import Self, Unpack

    from lightning_flops.records import FlopRecord, ModuleRecord
    from lightning_flops.schema.profile import Profile

    _Make = Callable[[Callable[[Profile], None]], LoopAdapter]

T = TypeVar("T")


@contextmanager
def count_flops(
    model: nn.Module | None = None, *, causal_attention: Literal["full", "half"] = "full"
) -> Iterator[FlopCounts]:
    """Counts the FLOPs of everything that runs inside, by the modules of *model*; a multiply-add is two FLOPs.

    Forward, backward and optimizer steps are counted as they run. The counts may be read inside the block, where they
    are those of the moment, and after it. Once the block has begun, no error of ours is raised in it or at its end:
    where something was not counted, a note says so.

    Without *model*, everything that runs stands under ``(outside)``. ``causal_attention="half"`` counts half of the
    score matrix where attention is flagged causal.

    Raises:
        TypeError: *model* is neither a module nor None.
        Exception: counting could not begin; then nothing inside has run.
    """
    if model is not None:
        require_module(model)
    counter = FlopCounter(model, causal_attention=causal_attention)
    counts = FlopCounts(counter.record, () if model is None else _described_later(model))
    try:
        with counter:
            yield counts
    finally:
        with Quiet(Exception):
            counts.settle()  # so that they do not keep the model


def count_offline(model: nn.Module, batch: Any, *, causal_attention: Literal["full", "half"] = "full") -> FlopCounts:
    """Counts one eager forward and backward of *model* on a batch of these shapes, without running it.

    For a compiled model, whose compiled path may do less work or hide it, this is the figure of the eager one. The
    backward is that of everything the forward puts out. A forward that asks for values, as of a mask, raises. *batch*
    is a tuple of positional arguments, a dict of keyword arguments, or the one argument (a named tuple is one).

    Raises:
        TypeError: *model* is no module.
        LightningFlopsError: a lazy module has no shapes yet.
        Exception: whatever the model raises where its forward asks for values.
    """
    require_module(model)
    record = count_on_fake_tensors(model, batch, causal_attention=causal_attention)
    return FlopCounts(record, _described_later(model))


def flops_formula(
    model: nn.Module,
    batch: Any,
    vary: Mapping[str | int, Sequence[int] | Mapping[int, str]],
    *,
    causal_attention: Literal["full", "half"] = "full",
) -> FlopsFormula:
    """The FLOPs of one eager forward and backward of *model* as an exact function of its batch's sizes.

    Batches like *batch* in other sizes are counted on fake tensors, as ``count_offline`` does, until a polynomial of
    the sizes agrees with all of them and with at least two more than it needs. Where there is none, the result says so,
    and counts every size that it is asked for: call it with sizes, print it, or ask for ``to_json()``.

    ``flops_formula(model, batch, vary={"input_ids": (0, 1)})(batch=8, sequence=4096)`` are the FLOPs of these sizes.

    *batch* is as for ``count_offline``; what it holds is repeated or cut off for other sizes. *vary* has, by argument
    (its name, or its position in a tuple), the axes that vary. Axis 0 is named ``batch``, axis 1 ``sequence``, those of
    images ``height`` and ``width``; a mapping from axes to names gives others. Other tensors of the batch follow where
    they have the same size in the same axis.

    Raises:
        TypeError: *model* is no module.
        ConfigError: *vary* names what is not in the batch.
        Exception: as ``count_offline`` for *batch* itself. Other sizes that the model refuses are passed over.
    """
    require_module(model)
    varied = VariedBatch(batch, vary)

    def count(sizes: Mapping[str, int]) -> FlopRecord:
        return count_on_fake_tensors(model, varied.resized(sizes), causal_attention=causal_attention)

    return FlopsFormula(varied.sizes, varied.batch_names, count)


def predict_memory(
    model: nn.Module,
    batch: Any,
    optimizer: Any = None,
    *,
    loss: Callable[[Any], torch.Tensor] | None = None,
    autocast: torch.dtype | None = None,
    accumulate: int = 1,
    device: Literal["cpu", "cuda"] | None = None,
) -> MemoryPrediction:
    """Peak memory of a training step, what is held then and which modules keep it, without running the step.

    Two eager steps run on fake tensors, as the optimizer's states are made in the first: forward, loss and backward
    *accumulate* times, the optimizer's step, then the gradients are dropped. The batch is held all the time; what the
    model returns is dropped when the loss is known. Nothing of the model, the batch or the optimizer is changed, and
    no memory is taken: they may lie on ``"meta"``.

    ``predict_memory(model, batch, optimizer).largest_batch(80e9)`` is the largest batch that 80 GB hold.

    Args:
        model: in training mode or not, as it is.
        batch: a tuple of positional arguments, a dict of keyword arguments, or the one argument (a named tuple is one).
        optimizer: torch's, or a wrapper of one; None: gradients are all that is made.
        loss: from the model's output to a scalar; None: its ``loss``, or the sum of all that it returns.
        autocast: dtype of an autocast around the forward and the loss.
        accumulate: forwards and backwards of one step.
        device: where it is to run; None: where the model is, and a GPU for one on ``"meta"``. On a GPU optimizers
            work on all parameters at once, attention's dropout is fused, and sizes are rounded up to 512 bytes.

    Raises:
        TypeError: *model* is no module.
        ConfigError: another argument is not what is described here.
        LightningFlopsError: the step cannot be run without values; the message names the operator and the module.
    """
    require_module(model)
    require(
        ("autocast must be a torch.dtype", autocast, autocast is None or isinstance(autocast, torch.dtype)),
        ("accumulate must be an integer >= 1", accumulate, _is_integer(accumulate, 1)),
        ('device must be "cpu" or "cuda"', device, device in (None, "cpu", "cuda")),
    )
    on = {tensor.device.type for tensor in model.parameters()}
    return MemoryPrediction(
        partial(
            fake_steps,
            model,
            batch,
            optimizer,
            loss=loss,
            autocast=autocast,
            accumulate=accumulate,
            on_cuda=device == "cuda" or (device is None and not on <= {"cpu"}),
        )
    )


def _is_integer(value: object, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _described_later(model: nn.Module) -> Callable[[], tuple[ModuleRecord, ...]]:
    """Describes the modules when a caller asks, which few do; does not hold the model."""
    reference = weakref.ref(model)
    return lambda: () if (found := reference()) is None else describe_modules(found)


@takes_settings
def profile_training(
    model: nn.Module | Mapping[str, nn.Module],
    optimizer: Any = None,
    *,
    log_dir: str | os.PathLike[str] | None = None,
    writer: Any = None,
    accelerator: Any = None,
    fabric: Any = None,
    log_every_n_steps: int | None = None,
    initial_step: int | None = None,
    **settings: Unpack[SettingArguments],
) -> TrainingProfiler:
    """Profiles a training loop of your own, around which it is put with ``with``.

    A step ends when *optimizer* has made its step, of several at the next fetch after that, or where the loop calls
    ``profiler.step()``, as it must without an optimizer. Batches are seen if they come from a torch DataLoader;
    ``profiler.batches(...)`` shows those of any other iterable. A setting that is None has not been given. A DeepSpeed
    engine as *model* knows its optimizer and its steps.

    Args:
        model: what the loop calls: with its wrappers, such as DistributedDataParallel, or compiled. Of several models
            that it trains, such as a GAN's, a mapping of them by the names that reports have for them.
        optimizer: one or several, or None.
        log_dir: a folder for TensorBoard's files, with ``lightning_flops/profile.json`` in it.
        writer: a SummaryWriter, any object with ``add_scalar``, or a function of a dict of scalars and a step, as
            ``wandb.log`` is.
        accelerator: the ``accelerate.Accelerator`` of the loop, whose trackers get the reports, too.
        fabric: the ``lightning.fabric.Fabric`` of the loop, whose loggers get the reports, too.
        log_every_n_steps: how often throughput and MFU are written during the run. None: every 50 steps, of an engine
            as often as it prints.
        initial_step: the x-axis of the loop's first step, in a loop that goes on after a checkpoint. None: 0, of an
            engine its ``global_steps``.

    Raises:
        ConfigError: a setting breaks its rule, or an argument is not what is described here.
        TypeError: *model* is no module.
    """
    model = _as_one(model) if isinstance(model, Mapping) else model
    require_module(model)
    if accelerator is not None and fabric is not None:
        raise ConfigError("accelerator and fabric cannot both drive the loop: give one of them")
    every, step = log_every_n_steps, initial_step
    require(
        (
            "writer must have add_scalar, or be a function of scalars and a step",
            writer,
            writer is None or is_writer(writer),
        ),
        ("log_every_n_steps must be an integer >= 1", every, every is None or _is_integer(every, 1)),
        ("initial_step must be an integer >= 0", step, step is None or _is_integer(step, 0)),
    )
    config = config_from(settings, owner="profile_training")
    engine = engine_in(model)  # made by the loop, by accelerate or by Fabric
    optimizers = optimizers_in(optimizer)
    if engine is not None:
        own = set(map(id, with_inner(engine.optimizer)))
        foreign = next((one for one in optimizers if own.isdisjoint(map(id, with_inner(one)))), None)
        must = "optimizer must be the engine's own, which makes its updates, or be left out"
        require((must, foreign, foreign is None))

    def make(publish: Callable[[Profile], None]) -> LoopAdapter:
        frame = frame_of(model, accelerator=accelerator, fabric=fabric)
        output = loop_output(frame, config, log_dir=log_dir, writer=writer)
        if engine is not None:
            how = {"log_every": log_every_n_steps, "initial_step": initial_step}
            return engine_run(engine, config, publish, output=output, **how)
        return LoopAdapter(
            model,
            optimizers,
            config=config,
            publish=publish,
            frame=frame,
            output=output,
            log_every_n_steps=log_every_n_steps or 50,
            initial_step=initial_step or 0,
        )

    return TrainingProfiler(make, config=config)


def _as_one(models: Mapping[str, nn.Module]) -> nn.Module:
    """*models*, which one loop trains."""
    if not models:
        raise ConfigError("model must be a module, or a mapping of at least one, got an empty one")
    try:
        return nn.ModuleDict(models)
    except KeyError as error:
        raise ConfigError(f"model must map names without dots to modules: {error}") from error


class TrainingProfiler(ProfiledRun):
    """A profiler around a training loop; ``profile_training`` makes it. Nothing of it raises into the loop."""

    def __init__(self, make: _Make, *, config: ProfilerConfig) -> None:
        self._config = config
        self._make = make
        self._start_anew()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        self.stop(error)

    def start(self) -> None:
        """Begin, where ``with`` cannot be used; ``stop`` must follow. A loop that was not stopped is stopped first."""
        self.stop()
        self._begin()

    @safe
    def _begin(self) -> None:
        self._start_anew()
        self._begin_run(self._make(self._profiles.append))

    def stop(self, error: BaseException | None = None) -> None:
        """Report what was measured, and leave nothing behind; *error* is what has ended the loop, if anything has."""
        self._finish(error)

    def step(self) -> None:
        """A batch is through, and with it a step, if it was updated, or if ``profile_training`` got no optimizer."""
        if self._adapter is not None:
            self._adapter.end_step()

    def batches(self, loader: Iterable[T]) -> Batches[T]:
        """*loader*, whose batches and the wait for them are seen; a torch DataLoader's are seen without this."""
        return Batches(loader, lambda: self._adapter)

    @contextmanager
    def outside_of_steps(self, name: str = "validation") -> Iterator[None]:
        """What runs inside belongs to no step; an evaluation needs it only with gradients on, or in training mode."""
        with Undo() as after:
            if (loop := self._adapter) is not None:
                loop.leave_out(name)
                after.callback(loop.take_in)
            yield


_fetch_begins, _fetch_ends = safe(LoopAdapter.fetch_begins), safe(LoopAdapter.fetch_ends)


class Batches(Generic[T]):
    """The user's *loader*, whose batches are seen by the adapter that *loop* returns; all else is as it was."""

    def __init__(self, loader: Iterable[T], loop: Callable[[], LoopAdapter | None]) -> None:
        self._loader = loader
        self._loop = loop

    def __iter__(self) -> Iterator[T]:
        iterator = iter(self._loader)
        while True:
            loop, batch = self._loop(), None
            if loop is not None:
                _fetch_begins(loop, self)
            try:
                batch = next(iterator)
            except StopIteration:
                return
            finally:
                if loop is not None:
                    _fetch_ends(loop, batch, handed_out=True)
            yield batch

    def __len__(self) -> int:
        return len(self._loader)  # type: ignore[arg-type]

    def __reduce__(self) -> tuple[Any, ...]:  # a pickle or a copy is the loader's
        return operator.itemgetter(0), ((self._loader,),)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)
