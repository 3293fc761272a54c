"""One DeepSpeed engine as a session, whatever kind of engine: how its run begins and ends, and what it tells of itself.

What of the engine's calls belongs to a step, and to which part of it, is for its steps to say: ``EngineSteps``, or
``PipelineSteps`` where the engine is one stage of a pipeline.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Protocol

from lightning_flops.doors.deepspeed_context import (
    engine_device,
    engine_output,
    private_names,
    run_context,
    settle_steps,
)
from lightning_flops.doors.deepspeed_loaders import LoaderTaps, Loop
from lightning_flops.instrument.timing.loader_queue import LoaderQueue, backlogs_of
from lightning_flops.session.border import guarded
from lightning_flops.session.door import RunPlan
from lightning_flops.session.session import Session
from lightning_flops.text.printable import package_logger

if TYPE_CHECKING:
    from torch import nn

    from lightning_flops.config import ProfilerConfig
    from lightning_flops.instrument.batches import BatchMeter
    from lightning_flops.instrument.patches import Patches
    from lightning_flops.instrument.timing.loader_queue import Feed
    from lightning_flops.records import RunContext
    from lightning_flops.schema.profile import Profile
    from lightning_flops.session.border import Border

logger = package_logger(__name__)

_STEPS_BETWEEN_READINGS = 10
"""How often throughput is written where ``steps_per_print`` does not say it; it is DeepSpeed's default for that."""


class Steps(Loop, Protocol):
    """What of an engine's calls belongs to a step, and to which part of it."""

    def meter(self, note: Callable[[str], None]) -> BatchMeter:
        """What tells the samples and tokens of the engine's batches."""

    def tap_run(self, taps: Patches) -> None:
        """Tap what tells steps and evaluation, and whether the engine raises."""

    def tap_parts(self, taps: Patches) -> None:
        """Tap the parts of a step."""

    def take_out(self) -> None:
        """Take off what the session's taps do not hold."""

    @property
    def half_done(self) -> bool:
        """A step has begun and has not ended."""


class EngineDoor:
    """The door of one engine, on one rank; it lives as long as the engine does.

    Args:
        engine: a ``DeepSpeedEngine``, ready to train.
        config: the settings.
        publish: gets each profile when its window has closed.
        steps: makes what tells the engine's steps.
        whole_steps: as for ``Session``.
        keep_builtin: leave DeepSpeed's own profiler on, if the engine was made with it.
    """

    def __init__(
        self,
        engine: Any,
        *,
        config: ProfilerConfig,
        publish: Callable[[Profile], None],
        steps: Callable[[EngineDoor], Steps],
        whole_steps: bool = False,
        keep_builtin: bool = False,
    ) -> None:
        self.engine = engine
        self.config = config
        self._keep_builtin = keep_builtin
        self._builtin: Any = None
        """DeepSpeed's settings of its own profiler, while that stands down for us."""
        self.names = private_names(lambda sentence: self.session.notes.add_for_run(sentence))
        """Private names of DeepSpeed's."""
        self.steps = steps(self)
        self.session = Session(
            self,
            engine.module,
            config=config,
            publish=publish,
            rank=int(engine.global_rank),
            world_size=int(engine.world_size),
            whole_steps=whole_steps,
        )
        self.loaders = LoaderTaps(
            self.session, self.steps, batches_a_step=lambda: int(engine.gradient_accumulation_steps())
        )

    @property
    def border(self) -> Border:
        """Where what fails on our side ends."""
        return self.session.border

    def __del__(self) -> None:
        # The user has let the engine go. Its own __del__ calls destroy, of which no tap tells any more.
        if "loaders" in vars(self):
            self.end()

    # ---- how the run begins

    def plan(self) -> RunPlan:
        """How the run begins: its steps are counted from the one that begins now or next."""
        return RunPlan(
            profile_step=self.config.next_profile_step(steps_done=0),
            settle_steps=settle_steps(self.engine),
            device=engine_device(self.engine),
            dp_size=self.context().dp_size,
            output=engine_output(self.engine, self.config),
        )

    def meter(self, note: Callable[[str], None]) -> BatchMeter:
        """As the engine's steps tell."""
        return self.steps.meter(note)

    def tap_run(self, taps: Patches) -> None:
        """Put in what stays for the whole run."""
        # Taps hold nothing alive, and the user need not keep the handle.
        kinds = type(self.engine).__mro__
        taps.keep(self.engine, self, kind=next(kind for kind in kinds if kind.__module__.startswith("deepspeed.")))
        taps.replace(self.engine, "destroy", self.session.taps.before(self.end))
        self.steps.tap_run(taps)
        self.loaders.tap_run()
        builtin = getattr(self.names.get(self.engine, "_config", None), "flops_profiler_config", None)
        if builtin is not None and builtin.enabled and not self._keep_builtin:
            # Off until we are out; the log lines that it forces can no more be stopped.
            builtin.enabled, self._builtin = False, builtin

    def tap_parts(self, taps: Patches) -> None:
        """Put in what tells the parts of a step."""
        self.steps.tap_parts(taps)
        self.loaders.tap_parts(taps)
        # What the engine itself computes for the update, as Muon's products, is the optimizer's.
        for name in ("_backward_epilogue", "_take_model_step"):
            if self.names.has(self.engine, name):
                taps.replace(self.engine, name, self.session.taps.optimizer_work())

    def window_opens(self) -> None:
        """The step that begins now is counted."""

    # ---- how it ends

    def interrupted(self, error: BaseException) -> None:
        """The user's step raised *error*: report what there is, and leave nothing behind."""
        self.session.window.leave_scope()
        self.session.finish(interrupted_by=error)
        self.session.warn(
            f"training raised {type(error).__name__}: the FLOPs profiler has reported what it had and taken itself out"
        )
        self.session.take_out()

    @guarded
    def end(self) -> None:
        """The run is over: report what there is, and leave nothing behind."""
        self.session.window.leave_scope()
        self.session.finish()
        self.session.take_out()

    @guarded
    def end_if_left(self) -> None:
        """Another engine starts: a step that is half over was left, by an exception of the loop that no tap saw."""
        if self.steps.half_done:
            self.end()

    def take_out(self) -> None:
        """Take off what the session's taps do not hold, and let DeepSpeed's own profiler have its word again."""
        try:
            self.loaders.take_out()
            self.steps.take_out()
        finally:
            builtin, self._builtin = self._builtin, None
            if builtin is not None:
                builtin.enabled = True

    # ---- what the session asks

    def context(self) -> RunContext:
        """Where the engine trains."""
        return run_context(self.engine)

    def x_axis(self) -> int:
        """Updates that the engine has attempted."""
        return int(self.engine.global_steps)

    def reading_is_due(self) -> bool:
        """As often as DeepSpeed prints."""
        return self.x_axis() % int(self.engine.steps_per_print() or _STEPS_BETWEEN_READINGS) == 0

    def optimizers(self) -> Iterable[Any] | None:
        """The engine's one."""
        return (self.engine.optimizer,)

    def whole_model(self) -> nn.Module:
        """The engine's module, around which there is nothing."""
        module: nn.Module = self.engine.module
        return module

    def loader_workers(self) -> int | None:
        """Of the engine's own loader, if it made one."""
        loader = getattr(vars(self.engine).get("training_dataloader"), "dataloader", None)
        return None if loader is None else int(loader.num_workers)

    def feed(self) -> Feed:
        """The queue of the loader that the loop asked last."""
        return LoaderQueue(
            lambda: backlogs_of(self.loaders.iterators(), note=self.session.notes.add_for_run),
            batches_a_step=int(self.engine.gradient_accumulation_steps()),
        )
