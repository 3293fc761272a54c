"""DeepSpeed's standalone Flops Profiler: the same names, arguments and printed layout, with the counts of this package.

Forwards that are timed are not those that are counted: only then are the times true.
"""

from __future__ import annotations

import os
import sys
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import nn

from lightning_flops.adapters.place import run_context_on
from lightning_flops.analysis.profile import build_forward_profile
from lightning_flops.errors import LightningFlopsError
from lightning_flops.measure.batches import samples_in, tensor_shapes
from lightning_flops.measure.counting.flop_counter import FlopCounter
from lightning_flops.measure.module_scope import describe_modules, named_modules, parallel_sizes, require_module
from lightning_flops.measure.timing.phase_timer import ModuleTimer, WallClock, clock_for
from lightning_flops.records import ParallelSizes, PhaseSeconds, RunContext
from lightning_flops.report import module_text as units
from lightning_flops.report.text import render_aggregated, render_forwards
from lightning_flops.run.run import safe
from lightning_flops.schema.profile import Profile
from lightning_flops.signals import Undo
from lightning_flops.sinks.file import write_text_file
from lightning_flops.units import package_logger, shown

__all__ = ["FlopsProfiler", "get_model_profile"]

logger = package_logger(__name__)

_NOTHING = "nothing was profiled: start_profile() comes first"


class FlopsProfiler:
    """Profiles the forwards of a model between ``start_profile`` and ``stop_profile``.

    Everything that the model's modules run in between is counted and added up, in train and in eval mode. FLOPs of
    another model or of a loss function are not counted. If a forward raises, the profiler stops there. Starting,
    resetting and stopping are called in a training loop, so an error of this package is only logged there. Only the
    DeepSpeed engine *ds_engine* knows some sizes and latencies. In estimated lines of the report, a backward repeats
    *recompute_fwd_factor* forwards. A *model* that is no module is a TypeError.
    """

    run = None  # as of whatever has safe methods

    def __init__(self, model: nn.Module, ds_engine: Any = None, recompute_fwd_factor: float = 0.0) -> None:
        require_module(model)
        self.model = model
        self.ds_engine = ds_engine
        self.recompute_fwd_factor = recompute_fwd_factor
        self.flops: int | None = None  # what the latest report printed
        self.macs: int | None = None
        self.params: int | None = None
        self.started = False
        self._ignored_types: Collection[type[nn.Module]] = ()
        self._counted: tuple[FlopCounter, ModuleTimer] | None = None
        self._timed: ModuleTimer | None = None  # timed the latest calls; often that of ``_counted``
        self._calls: tuple[tuple[float, ...], int | None] = ((), None)  # seconds of calls left alone; samples in each
        self._undo = Undo()  # removes from torch what a start has put there
        weakref.finalize(self, self._undo.close).atexit = False

    @safe
    def start_profile(self, ignore_list: Collection[type[nn.Module]] | None = None, *, count: bool = True) -> None:
        """Starts from zero: forwards are counted and timed from here on.

        The work of modules of a class in *ignore_list* is attributed to the module around them. Without *count*,
        forwards are only timed, free of the time that counting takes; what was counted, and a list not given, stay.
        """
        count = count or self._counted is None
        if ignore_list is not None or count:
            self._ignored_types = tuple(ignore_list or ())
        self.started = True
        self._undo.close()
        timer = ModuleTimer(self.model, _clock_of(self.model))
        counter = None
        try:
            counter = self._undo.enter_context(FlopCounter(self.model)) if count else None
            self._undo.enter_context(timer)  # after the counter, so that its hooks come last
        except BaseException:
            self._undo.close()
            raise
        self._timed, self._calls = timer, ((), None)
        if counter is not None:
            self._counted = counter, timer

    @safe
    def stop_profile(self) -> None:
        """Stops; what was measured can still be read."""
        self._undo.close()

    @safe
    def reset_profile(self) -> None:
        """Forgets what was measured. A running profiler goes on from zero."""
        if self._undo:
            self.start_profile(self._ignored_types)
        else:
            self._counted = self._timed = None

    def end_profile(self) -> None:
        """Stops for good; the figures can still be read until the next start."""
        self.stop_profile()
        self.started = False

    # Any, as in DeepSpeed: with a union every typed caller would have to check which it got.

    def get_total_flops(self, as_string: bool = False) -> Any:
        """Forward FLOPs of the model, as an int; a multiply-add is two. With *as_string*: ``"6.28 G"``."""
        flops = self._profile().flops.forward
        return units.number_to_string(flops) if as_string else flops

    def get_total_macs(self, as_string: bool = False) -> Any:
        """Multiply-adds of the model's forward, as an int: half its FLOPs. With *as_string*: ``"3.14 GMACs"``."""
        macs = self._profile().flops.forward // 2
        return units.macs_to_string(macs) if as_string else macs

    def get_total_duration(self, as_string: bool = False) -> Any:
        """Seconds of the model's forward, as a float. None, or ``"n/a"``, on a device whose time cannot be read."""
        timing = self._profile().timing
        seconds = None if timing is None else timing.forward_sec
        return units.duration_to_string(seconds) if as_string else seconds

    def get_total_params(self, as_string: bool = False) -> Any:
        """Parameters of the model, as an int; ties count once, shards in full. With *as_string*: ``"336.23 M"``."""
        params = describe_modules(self.model)[0].params
        return units.params_to_string(params) if as_string else params

    def print_model_profile(
        self,
        profile_step: int = 1,
        module_depth: int = -1,
        top_modules: int = 1,
        detailed: bool = True,
        output_file: str | os.PathLike[str] | None = None,
    ) -> None:
        """Prints the report, which names *profile_step*; *detailed* has the tree of modules.

        *module_depth* is the deepest level shown (the model is level 0; -1 shows all), *top_modules* how many classes
        are listed at each. *output_file* is a path or URL to write instead; if that fails, a warning says why.
        """
        if self._counted is None:  # no error, as in DeepSpeed: loops start the profiler on one rank and print on all
            logger.warning(_NOTHING)
            return
        profile = self._profile(profile_step, module_depth=module_depth, top_modules=top_modules)
        self.flops, self.macs, self.params = profile.flops.forward, profile.flops.forward // 2, profile.params
        text = render_forwards(profile, detailed=detailed)
        if output_file:
            try:
                write_text_file(output_file, text)
                return
            except OSError as error:
                logger.warning("%s; the profile is printed instead", error)
        sys.stdout.write(text)

    def print_model_aggregated_profile(self, module_depth: int = -1, top_modules: int = 1) -> None:
        """Prints the classes of modules with the largest figures at each depth; arguments as for the whole report."""
        if self._counted is None:
            logger.warning(_NOTHING)
        else:
            sys.stdout.write(render_aggregated(self._profile(module_depth=module_depth, top_modules=top_modules)))

    def _measure(
        self, call: Callable[[], None], timed_runs: int, ignored: tuple[type[nn.Module], ...], *, in_root: bool
    ) -> tuple[float, ...]:
        """Count *call*, and time it by modules; returns the seconds that it takes alone, each of so many times."""
        clock = _clock_of(self.model)
        # First, while only the forward has filled the caches.
        seconds = [] if clock is None else [_seconds_of(call, clock) for _ in range(timed_runs)]
        for count in (True, False):
            self.start_profile(ignored, count=count)
            with Undo() as inside:
                for one in (self._counted[0] if count and self._counted else None, self._timed):
                    if in_root and one is not None:  # what runs between forwards is the model's, too
                        inside.enter_context(one.in_root())
                call()
            self.stop_profile()
        return tuple(seconds)

    def _profile(self, step: int = 0, *, module_depth: int = -1, top_modules: int = 1) -> Profile:
        timed = self._timed
        if self._counted is None or timed is None:
            raise LightningFlopsError(_NOTHING)
        counter, counted = self._counted
        calls_sec, samples = self._calls
        context, engine_sec = _context(self.ds_engine, next(iter(_devices(self.model)), torch.device("cpu")), samples)
        profile = build_forward_profile(
            records=describe_modules(self.model),
            flops=counter.record(),
            own_sec=timed.seconds(),
            calls=(counted.outermost_calls, timed.outermost_calls),
            timed_while_counted=timed is counted,
            calls_sec=calls_sec,
            context=context,
            recompute_fwd_factor=self.recompute_fwd_factor,
            engine_sec=engine_sec,
            ignored={name for name, module in named_modules(self.model) if type(module) in self._ignored_types},
        )
        return replace(
            profile,
            profile_step=step,
            settings=replace(profile.settings, module_depth=module_depth, top_modules=top_modules),
        )


def get_model_profile(
    model: nn.Module,
    input_shape: tuple[int, ...] | None = None,
    args: Sequence[Any] | None = (),
    kwargs: Mapping[str, Any] | None = None,
    print_profile: bool = True,
    detailed: bool = True,
    module_depth: int = -1,
    top_modules: int = 1,
    warm_up: int = 1,
    as_string: bool = True,
    output_file: str | os.PathLike[str] | None = None,
    ignore_modules: Collection[type[nn.Module]] | None = None,
    mode: Literal["forward", "generate"] = "forward",
    timed_runs: int = 1,
) -> tuple[Any, Any, Any]:
    """FLOPs, MACs and parameters of a model's forward in eval mode, with a report of them and of its latency.

    After *warm_up* forwards, *timed_runs* are timed as a whole, one is counted, and one is timed module by module.
    Afterwards the model's mode and the random state are as before, also when a forward raises.

    Args:
        model: the model.
        input_shape: shape of the only tensor that the model takes; it is all ones, in the dtype of the parameters.
        args: positional arguments, if there is no *input_shape*.
        kwargs: keyword arguments.
        print_profile: whether the report is printed.
        detailed: whether the report has the tree of modules.
        module_depth: deepest level of modules shown; the model is level 0; -1 shows all.
        top_modules: how many classes of modules are listed at each depth.
        warm_up: number of forwards before the first that is timed.
        as_string: return ``("6.28 G", "3.14 GMACs", "336.23 M")`` instead of three ints.
        output_file: path or URL of the report; None prints it.
        ignore_modules: classes of modules whose work is attributed to the module around them.
        mode: ``"generate"`` calls ``model.generate``, always with the same random numbers; all of it is the forward.
        timed_runs: forwards that are timed, each from an idle device; from 2 on the report has mean, spread and rate.

    Raises:
        TypeError: *model* is not a module, or *args* not a list or tuple.
        ValueError: the model would be called without arguments, or *mode* is neither "forward" nor "generate".
    """
    profiler = FlopsProfiler(model)
    if mode not in ("forward", "generate"):
        raise ValueError(f'mode must be "forward" or "generate", got {shown(mode)}')
    given, named = _arguments(model, input_shape, args), dict(kwargs or {})
    if not given and not named:
        raise ValueError("input_shape, args or kwargs must be given: the model is not called without arguments")
    devices = [one for one in _devices(model) if one.type == "cuda"]
    function: Any = model.generate if mode == "generate" else model

    def call() -> None:
        with torch.random.fork_rng(devices=devices):
            function(*given, **named)

    try:
        with _evaluating(model):
            for _ in range(warm_up):
                call()
            seconds = profiler._measure(call, timed_runs, tuple(ignore_modules or ()), in_root=mode == "generate")
            profiler._calls = seconds, samples_in(tensor_shapes([*given, *named.values()]))
    finally:
        profiler.end_profile()
    if print_profile:
        profiler.print_model_profile(warm_up, module_depth, top_modules, detailed, output_file)
    return (
        profiler.get_total_flops(as_string),
        profiler.get_total_macs(as_string),
        profiler.get_total_params(as_string),
    )


def _arguments(model: nn.Module, input_shape: tuple[int, ...] | None, args: Sequence[Any] | None) -> tuple[Any, ...]:
    """What *model* is called with by position."""
    if not (args is None or isinstance(args, (list, tuple))):  # a tensor would be split into its rows
        raise TypeError(f"args must be a list or tuple of the model's positional arguments, got {type(args).__name__}")
    if input_shape is None:
        return tuple(args or ())
    like = next((one for one in model.parameters() if one.is_floating_point()), torch.ones(()))
    return (torch.ones(input_shape, dtype=like.dtype, device=like.device),)


def _seconds_of(call: Callable[[], None], clock: WallClock) -> float:
    """How long one *call* takes alone, on an idle device."""
    clock.stamp()
    clock.settle()
    start = clock.stamp()
    call()
    end = clock.stamp()
    clock.settle()
    return clock.seconds_between(start, end)


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Inside, the model is in eval mode; afterwards every module is in its own again."""
    before = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        model.train(before[0][1])  # a module may do more there than set the flag, and has to undo it
        for module, training in before:
            if module.training != training:
                module.training = training


def _devices(model: nn.Module) -> set[torch.device]:
    return {tensor.device for tensors in (model.parameters(), model.buffers()) for tensor in tensors}


def _clock_of(model: nn.Module) -> WallClock | None:
    """The clock of the device that the model is on; None if it is on several devices other than the CPU."""
    others = {device for device in _devices(model) if device.type != "cpu"}
    if not others and torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        # A model without state may get its inputs on the GPU. CUDA events measure work on the host as well.
        others = {torch.device("cuda")}
    return clock_for(next(iter(others), torch.device("cpu"))) if len(others) < 2 else None


def _context(engine: Any, device: torch.device, samples: int | None) -> tuple[RunContext, PhaseSeconds | None]:
    """What is known of the run, and the seconds of its step that only the DeepSpeed *engine*, if any, knows."""
    sizes, seconds = ParallelSizes(), None
    fields: dict[str, Any] = {"micro_batch_size": samples}
    if engine is not None:
        groups = parallel_sizes(engine)
        sizes = ParallelSizes(dp_size=groups.dp_size, tp_size=groups.tp_size)  # DeepSpeed's report knows no others
        fields = {"micro_batch_size": engine.train_micro_batch_size_per_gpu(), "world_size": engine.world_size}
        # The engine's timers cover all micro-steps of a step; the profile may cover fewer.
        if engine.wall_clock_breakdown() and engine.gradient_accumulation_steps() == 1:
            backward, optimizer = (engine.timers(name).elapsed(reset=False) / 1e3 for name in ("bwd", "step"))  # in ms
            seconds = PhaseSeconds(backward=backward, optimizer=optimizer)
    loop = "predict" if seconds is None else "training"
    return run_context_on(device, sizes, framework="torch", precision="", loop=loop, **fields), seconds
