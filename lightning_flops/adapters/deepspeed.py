"""DeepSpeed's engines: a loop whose steps are those of ``engine.global_steps``, or one stage of a pipeline.

Calls of an engine's methods are heard on DeepSpeed's classes. ``train_batch`` of a pipeline is a step. A stage runs a
list of instructions, and finds the function of each kind in a table; each kind is one part of the step, and what it
exchanges with the other stages is the bubble.
"""

from __future__ import annotations

import importlib
import logging
import math
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import nn

from lightning_flops.adapters.loop import LoopAdapter
from lightning_flops.adapters.place import Frame
from lightning_flops.config import OWN_FOLDER, ProfilerConfig
from lightning_flops.errors import ConfigError
from lightning_flops.measure.batches import tensor_shapes
from lightning_flops.measure.module_scope import parallel_sizes
from lightning_flops.measure.patches import listen
from lightning_flops.measure.recorder import steps_to_settle
from lightning_flops.measure.torch_private.optional import fetched_ahead
from lightning_flops.records import RunContext, Shapes, TimePhase
from lightning_flops.run.delivery import OUTCOMES
from lightning_flops.run.output import LoggedOutput
from lightning_flops.run.run import Run, safe
from lightning_flops.run.throughput import Batch
from lightning_flops.run.unhooked import always_heard
from lightning_flops.schema.profile import Profile
from lightning_flops.signals import Undo
from lightning_flops.sinks.console import to_standard_output
from lightning_flops.sinks.services import monitors_in
from lightning_flops.units import package_logger, page

logger = package_logger(__name__)

_STEPS_BETWEEN_READINGS = 10  # if ``steps_per_print`` does not say it; DeepSpeed's default
_ADAPTER = "_lightning_flops_adapter"  # attribute of an engine that is profiled

_WRAPPED = ("_forward_module", "_orig_mod")  # attributes of wrappers around an engine
_MOST_WRAPPERS = 3

# What an engine itself computes for the update, such as Muon's products: it is the optimizer's.
_OWN_WORK = ("_backward_epilogue", "_take_model_step")

_PARTS: dict[str, TimePhase] = {  # of a step, by the class of an instruction; any other one is ``other``
    "LoadMicroBatch": "transfer",  # without the wait for the batch
    "ForwardPass": "forward",  # on the last stage it includes the loss
    "BackwardPass": "backward",
    "ReduceGrads": "backward",  # as in engines without stages
    "RecvActivation": "bubble",
    "SendActivation": "bubble",
    "RecvGrad": "bubble",
    "SendGrad": "bubble",
    "ReduceTiedGrads": "bubble",  # an exchange between the stages that share the weights
    "OptimizerStep": "optimizer",
    "_aggregate_total_loss": "bubble",  # a method
}
_OF_A_STAGE = (
    "This is stage {} of a pipeline of {}: FLOPs, parameters and times are those of its layers, unless said to be of "
    "all ranks; over the stages FLOPs and parameters add up to the model's."
)

# ---- what an engine says of its run, and where its reports go; nothing here imports DeepSpeed or asks a rank


def switch_off_builtin(engine: Any, run: Run) -> None:
    """Switch off DeepSpeed's own profiler, if *engine* was made with it, for as long as *run*."""
    settings = getattr(getattr(engine, "_config", None), "flops_profiler_config", None)
    if settings is not None and settings.enabled:
        settings.enabled = False
        run.undo.callback(setattr, settings, "enabled", True)


def make_without_builtin(undo: Undo) -> None:
    """Have engines made with DeepSpeed's own profiler off, and so without its timers, until *undo* is closed."""

    def was_read(settings: Any, error: BaseException | None) -> None:
        if error is None and isinstance(settings.enabled, int):  # DeepSpeed refuses anything else later
            settings.enabled = False

    owner = importlib.import_module("deepspeed.runtime.config")
    listen(undo, owner, "DeepSpeedFlopsProfilerConfig", lambda *_: was_read)


def engine_output(engine: Any, config: ProfilerConfig) -> LoggedOutput:
    """Where rank 0 shows the reports of *engine*'s run."""
    monitors = monitors_in(engine.monitor, tensorboard_dir=config.tensorboard_dir)
    return LoggedOutput(
        config,
        loggers=monitors,
        # As DeepSpeed's profiler does: users who keep the block look for the report in the job's output.
        console=to_standard_output,
        folder=lambda: monitors.folder() or OWN_FOLDER,
        text_file=False,
        announce=lambda sentence: to_standard_output(page([sentence])),
    )


# ---- the block of a DeepSpeed config, whatever framework got it


def settings_of(
    block: object | None, given: Mapping[str, Any], *, enabled: bool, run: str, logs: bool, level: int = logging.WARNING
) -> ProfilerConfig:
    """The settings of a *run*: those of the *block* (None: there is none), and those *given*, which win.

    A block without the key ``enabled`` is *enabled* or not. With *logs*, what is wrong is logged; and, at this *level*,
    that the run is not profiled, where nothing is.
    """
    taken, unknown, wrong = ProfilerConfig.taken_over(
        {} if block is None else block, given=given, enabled=enabled or block is None
    )
    if logs:
        for words in unknown:
            logger.warning("in the DeepSpeed config, %s", words)
        if wrong:
            OUTCOMES.warned = True
            logger.warning("this %s is not profiled: %s", run, wrong)
        elif not taken.enabled:
            logger.log(level, "flops_profiler.enabled is not true: this %s is not profiled", run)
    return taken


# ---- engines


def engine_in(model: object) -> Any:
    """The engine that *model* is, or is a wrapper of, as Fabric's and the compiler's are; None: there is none."""
    for _ in range(_MOST_WRAPPERS):
        names = [f"{kind.__module__}.{kind.__name__}" for kind in type(model).__mro__]
        if model is None or "deepspeed.runtime.engine.DeepSpeedEngine" in names:
            return model
        held = vars(model).get("_modules", {}) if isinstance(model, nn.Module) else {}
        model = next((held[name] for name in _WRAPPED if name in held), None)
    return None


def adapter_of(engine: Any) -> EngineAdapter | None:
    """The adapter that profiles *engine* now; None without one. A copy of an engine has none."""
    adapter: EngineAdapter | None = vars(engine).get(_ADAPTER)
    return adapter if adapter is not None and adapter.engine is engine and not adapter.run.closed else None


def engine_run(engine: Any, config: ProfilerConfig, publish: Callable[[Profile], None], **how: Any) -> EngineAdapter:
    """The adapter of *engine*, with *how* as for ``EngineAdapter``; a ConfigError if it has one."""
    if adapter_of(engine) is not None:
        raise ConfigError("this engine is profiled already: detach() its handle, or take the block out of its config")
    staged = any(kind.__name__ == "PipelineEngine" for kind in type(engine).__mro__)
    return (PipelineAdapter if staged else EngineAdapter)(engine, config, publish, **how)


class EngineAdapter(LoopAdapter):
    """The adapter of one engine, on one rank; the engine keeps it alive.

    Without *output* its monitors get the reports. Throughput is written each *log_every* steps, None: as often as
    DeepSpeed prints. *initial_step* is the x-axis of the first step; None: the engine's own, which checkpoints keep.
    """

    counts_at_fetch = False  # there with its first forward: what counts would keep the model alive

    def __init__(
        self,
        engine: Any,
        config: ProfilerConfig,
        publish: Callable[[Profile], None],
        *,
        output: LoggedOutput | None = None,
        log_every: int | None = None,
        initial_step: int | None = None,
    ) -> None:
        self.engine = engine
        self._log_every, self._x_axis_is_own = log_every, initial_step is None
        self._monitors_log = output is None
        self._updates = int(engine.global_steps)  # before the running ``engine.step``
        self._work = Undo()  # while the engine computes for the update
        accumulate = int(engine.gradient_accumulation_steps())
        loader = getattr(vars(engine).get("training_dataloader"), "dataloader", None)  # its own; None: it has none
        super().__init__(
            engine.module,
            (),
            config=config,
            publish=publish,
            # As far as a rank knows without asking the others.
            frame=Frame(
                framework="deepspeed",
                precision=lambda _: (
                    "fp16" if engine.fp16_enabled() else "bf16" if engine.bfloat16_enabled() else "fp32"
                ),
                rank=int(engine.global_rank),
                world_size=int(engine.world_size),
                sizes=parallel_sizes(engine),
                strategy=f"ZeRO-{int(engine.zero_optimization_stage())}",
            ),
            output=output or engine_output(engine, config),
            initial_step=initial_step or 0,
            device=torch.device(engine.device),
            settle_steps=steps_to_settle(batches_ahead=fetched_ahead(loader), batches_a_step=accumulate),
            ends_when_dropped=True,
        )
        self._steps.known.says_ends = True
        self._known.accumulate = accumulate
        self._is_half = self._begins_amid_step()  # the step that runs was not seen from its beginning
        switch_off_builtin(engine, self.run)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()  # in a pickle or a copy of the engine

    # ---- what the run asks

    def x_axis(self) -> int:
        """The engine's own step, or the loop's."""
        return int(self.engine.global_steps) if self._x_axis_is_own else super().x_axis()

    def logged_at(self) -> int:
        """The samples of all ranks, as DeepSpeed's own scalars, where its monitors get them."""
        return int(self.engine.global_samples) if self._monitors_log else self.x_axis()

    def optimizers(self) -> Iterable[Any] | None:
        """What the engine updates by."""
        return (self.engine.optimizer,)

    def declared_batch_size(self) -> int | None:
        """The micro-batch of the config."""
        return int(self.engine.train_micro_batch_size_per_gpu())

    def _logs(self) -> bool:
        asked = self._log_every or self.engine.steps_per_print() or 0
        every = int(asked) if 1 <= asked < math.inf else _STEPS_BETWEEN_READINGS  # accelerate silences it by infinity
        return int(self.engine.global_steps) % every == 0

    def _begins_amid_step(self) -> bool:
        return int(self.engine.micro_steps) % int(self.engine.gradient_accumulation_steps()) > 0

    # ---- what is heard

    @safe
    def begin(self) -> None:
        """The engine is profiled from here on."""
        run = self.run
        run.undo.callback(vars(self.engine).pop, _ADAPTER, None)
        vars(self.engine)[_ADAPTER] = self
        kind = EngineAdapter
        self._hear_method("save_checkpoint", run.undo, partial(kind._leaves, what="checkpoint"), kind._comes_back)
        self._hear_method("destroy", run.undo, kind._is_destroyed)
        super().begin()
        if self._is_half:
            self.leave_out("start")
        else:
            self._goes_away("start")  # until the first batch is asked for

    def _hear_method(
        self,
        name: str,
        undo: Undo,
        begins: Callable[..., object] | None = None,
        ends: Callable[[Any, Any], object] | None = None,
    ) -> None:
        """Have *begins* and *ends* called around a method of the engine, which is over with what it raises."""
        self.hear(type(self.engine), name, undo, begins=begins, ends=ends, raises=EngineAdapter.raised, of=self.engine)

    def _hear_model(self, undo: Undo) -> None:
        kind = EngineAdapter
        self._hear_method("forward", undo, kind._forward_begins, kind._forward_ends)
        self._hear_method("step", undo, kind._step_begins, kind._step_ends)
        self._hear_method("eval", undo, partial(kind._mode_changes, mode=False))
        self._hear_method("train", undo, kind._mode_changes)

    def mark_parts(self, stack: Undo) -> None:
        """Hear the engine's own backward, which is more than autograd's, and what it computes for the update."""
        super().mark_parts(stack)
        self._hear_method("backward", stack, LoopAdapter.backward_begins, LoopAdapter.backward_ends)
        for name in _OWN_WORK:
            if hasattr(type(self.engine), name):
                self._hear_method(name, stack, EngineAdapter._work_begins, EngineAdapter._work_ends)

    def _work_begins(self, *_: Any, **__: Any) -> None:
        self._work.enter_context(self.run.window.recorder.optimizer_work())

    def _work_ends(self, _: Any) -> None:
        self._work.close()

    def _leaves(self, *_: Any, what: str, **__: Any) -> None:
        self.leave_out(what)

    def _comes_back(self, _: Any) -> None:
        self.take_in()

    @always_heard
    def _is_destroyed(self, _: Any) -> None:
        self.finish()

    @safe
    @always_heard
    def raised(self, error: BaseException) -> None:
        """The user's model, optimizer or data raised *error*: report what was measured; training goes on without us."""
        self.finish(error)
        self.run.delivery.warn(
            f"training raised {type(error).__name__}: the FLOPs profiler has reported what it had, and is off"
        )

    def _forward_begins(self, _: Any, *args: Any, **kwargs: Any) -> None:
        self.forward_begins(self.engine.module, args, kwargs)

    def _forward_ends(self, output: Any) -> None:
        self.forward_ends(self.engine.module, (), output)

    def _step_begins(self, *_: Any, **__: Any) -> None:
        self._updates = int(self.engine.global_steps)
        if self.engine.is_gradient_accumulation_boundary():
            self.update_begins(self.engine)

    def _step_ends(self, _: Any) -> None:
        is_updated = int(self.engine.global_steps) != self._updates
        if self._steps.inside.updates:
            self.update_ends(self.engine)
        if not self._is_half:
            self.end_step(updated=is_updated)
        elif is_updated:
            self._is_half = False
            self.take_in()

    def _mode_changes(self, _: Any, mode: bool = True) -> None:
        if not mode and not self._steps.step.computed:
            self._goes_away("validation")
        elif mode and self.run.between == "validation":
            self._goes_away("")


class PipelineAdapter(EngineAdapter):
    """The adapter of one stage, on one rank."""

    unseen = ()

    def __init__(self, engine: Any, config: ProfilerConfig, publish: Callable[[Profile], None], **how: Any) -> None:
        self._loads = bool(engine.is_first_stage() or engine.is_last_stage())
        self._always = () if self._loads else ("ForwardPass",)  # a stage in the middle knows a step by what it receives
        self._micro_batches: list[Batch] = []
        if not self._loads:  # it gets activations, whose first dimension need not be samples
            size, tokens = config.batch_size, config.tokens_per_sample
            size = size if isinstance(size, int) else int(engine.train_micro_batch_size_per_gpu())
            config = replace(config, batch_size=size, tokens_per_sample=tokens if isinstance(tokens, int) else None)
        super().__init__(engine, config, publish, **how)
        if engine.num_stages > 1:
            self.run.notes.add_for_run(_OF_A_STAGE.format(engine.stage_id, engine.num_stages))

    def context(self) -> RunContext:
        """Where the stage is."""
        return replace(super().context(), pp_rank=int(self.engine.stage_id))

    def _begins_amid_step(self) -> bool:
        return False  # train_batch is a whole step

    def _hear(self, undo: Undo) -> None:
        undo.callback(self._forget_instruction)
        kind = PipelineAdapter
        self._hear_parts(self._always, undo)
        self._hear_method("train_batch", undo, kind._train_batch_begins, kind._train_batch_ends)
        self._hear_method("eval_batch", undo, partial(kind._leaves, what="validation"), kind._comes_back)
        if self._loads:
            self._hear_method("_next_batch", undo, kind._load_begins, kind._micro_batch_is_loaded)

    def mark_parts(self, stack: Undo) -> None:
        """Hear the instructions."""
        self._hear_parts(_PARTS.keys() - self._always, stack)

    def _hear_parts(self, names: Collection[str], undo: Undo) -> None:
        kind = type(self.engine)
        table = kind._INSTRUCTION_MAP  # without it no part is known, and we are off with a warning
        found: list[tuple[Any, Any, str]] = [(table, one, one.__name__) for one in table]
        found += [(kind, name, name) for name in _PARTS if hasattr(kind, name)]
        for owner, one, name in found:
            part = _PARTS.get(name)
            # Without other stages there is nothing to exchange.
            if name in names and part is not None and (self.engine.num_stages > 1 or part != "bubble"):
                self.hear(
                    owner,
                    one,
                    undo,
                    begins=partial(PipelineAdapter._part_begins, part=part),
                    ends=PipelineAdapter._part_ends,
                    of=self.engine,
                )

    def _forget_instruction(self) -> None:
        """Remove our wrapper from the function of its latest instruction, which the engine keeps as an attribute."""
        kept = vars(self.engine).get("_exec_instr")  # once it has run an instruction
        if function := getattr(getattr(kept, "__func__", None), "__wrapped__", None):
            self.engine._exec_instr = MethodType(function, self.engine)

    def _part_begins(self, /, *_: Any, part: TimePhase, buffer_id: int = 0, **__: Any) -> None:
        if part == "forward" and not self._loads and not self.run.outside_of:
            self._micro_batch_is_there((), tensor_shapes(self.engine.pipe_buffers["inputs"][buffer_id]))
        self.run.enter(part)

    def _load_begins(self, _: Any) -> None:
        self.run.fetch_begins()

    def _micro_batch_is_loaded(self, batch: Any) -> None:
        self.run.fetch_ends()
        if not self.run.outside_of:
            self._micro_batch_is_there(() if batch is None else batch, tensor_shapes(batch))

    def _micro_batch_is_there(self, batch: Any, shapes: Shapes) -> None:
        """A micro-batch is there; with the first one of a step, this stage has computed nothing of the step yet."""
        self._micro_batches.append(Batch(shapes, given=batch))
        if len(self._micro_batches) == 1:
            self.run.batch_begins(shapes)

    def _train_batch_begins(self, *_: Any, **__: Any) -> None:
        self._goes_away("")

    def _train_batch_ends(self, _: Any) -> None:
        batches, self._micro_batches = self._micro_batches or [Batch()], []
        self.run.batch_done(*batches, updates=1, ends_step=True, logs=self._logs())
