"""The door of one DeepSpeed engine of any kind: how its run begins and ends, and what it says about itself.

An object for its steps decides which of the engine's calls belong to a step, and to which part of it: ``EngineSteps``,
or ``PipelineSteps`` if the engine is one stage of a pipeline.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Protocol

from lightning_flops.doors.deepspeed_builtin import EngineProfiler
from lightning_flops.doors.deepspeed_context import engine_device, engine_output, run_context, settle_steps
from lightning_flops.doors.loader_taps import LoaderTaps, Loop
from lightning_flops.instrument.border import on_deletion
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
    from lightning_flops.session.private_names import PrivateNames

logger = package_logger(__name__)

_STEPS_BETWEEN_READINGS = 10
"""How often throughput is written if ``steps_per_print`` does not say it; this is DeepSpeed's default."""


class Steps(Loop, Protocol):
    """Decides which of an engine's calls belong to a step, and to which part of it."""

    def meter(self, note: Callable[[str], None]) -> BatchMeter:
        """What finds the samples and tokens in the engine's batches."""

    def tap_run(self, taps: Patches) -> None:
        """Wrap what shows steps, evaluation, and whether the engine raises."""

    def tap_parts(self, taps: Patches) -> None:
        """Wrap the parts of a step."""

    def take_out(self) -> None:
        """Remove what is not in the session's taps."""

    @property
    def half_done(self) -> bool:
        """A step has begun and has not ended."""


class EngineDoor:
    """The door of one engine, on one rank; it lives as long as the engine does.

    Args:
        engine: a ``DeepSpeedEngine``, ready to train.
        config: the settings.
        publish: gets each profile when its window has closed.
        steps: makes the object that recognizes the engine's steps.
        names: private names of DeepSpeed; what is missing is told in the reports.
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
        names: PrivateNames,
        whole_steps: bool,
        keep_builtin: bool,
    ) -> None:
        self.engine = engine
        self.config = config
        self._keep_builtin = keep_builtin
        self._builtin = EngineProfiler()
        self.names = names
        """Private names of DeepSpeed."""
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
        self.names.tell(self.session.notes.add_for_run)
        self.loaders = LoaderTaps(
            self.session, self.steps, batches_a_step=lambda: int(engine.gradient_accumulation_steps())
        )

    @property
    def border(self) -> Border:
        """Catches what our code raises."""
        return self.session.border

    @on_deletion
    def __del__(self) -> None:
        # The user has dropped the engine. Its own __del__ calls destroy, but our wrapper is gone by then.
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
        """The meter for the engine's steps."""
        return self.steps.meter(note)

    def tap_run(self, taps: Patches) -> None:
        """Put in the wrappers that stay for the whole run."""
        # Keep us alive by the engine: the wrappers do not, and the user need not keep the handle.
        kinds = type(self.engine).__mro__
        taps.keep(self.engine, self, kind=next(kind for kind in kinds if kind.__module__.startswith("deepspeed.")))
        taps.replace(self.engine, "destroy", self.session.taps.before(self.end))
        self.steps.tap_run(taps)
        self.loaders.tap_run()
        if not self._keep_builtin:
            self._builtin.stand_down(self.engine, names=self.names)

    def tap_parts(self, taps: Patches) -> None:
        """Put in the wrappers around the parts of a step."""
        self.steps.tap_parts(taps)
        self.loaders.tap_parts(taps)
        # What the engine itself computes for the update, such as Muon's products, is the optimizer's.
        for name in ("_backward_epilogue", "_take_model_step"):
            if self.names.has(self.engine, name):
                taps.replace(self.engine, name, self.session.taps.optimizer_work())

    def window_opens(self) -> None:
        """The step that begins now is counted."""

    # ---- how it ends

    def interrupted(self, error: BaseException) -> None:
        """The user's step raised *error*: report what was measured, and remove everything of ours."""
        self.session.window.leave_scope()
        self.session.finish(interrupted_by=error)
        self.session.warn(
            f"training raised {type(error).__name__}: the FLOPs profiler has reported what it had and taken itself out"
        )
        self.session.take_out()

    @guarded
    def end(self) -> None:
        """The run is over: report what was measured, and remove everything of ours."""
        self.session.window.leave_scope()
        self.session.finish()
        self.session.take_out()

    @guarded
    def end_if_left(self) -> None:
        """Another engine starts: if a step is unfinished, the loop left it, by an exception that no wrapper saw."""
        if self.steps.half_done:
            self.end()

    def take_out(self) -> None:
        """Remove what is not in the session's taps, and switch DeepSpeed's own profiler on again."""
        try:
            self.loaders.take_out()
            self.steps.take_out()
        finally:
            self._builtin.put_back()

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
        """The engine's only optimizer."""
        return (self.engine.optimizer,)

    def whole_model(self) -> nn.Module:
        """The engine's module; it has no wrapper."""
        module: nn.Module = self.engine.module
        return module

    def loader_workers(self) -> int | None:
        """Worker processes of the engine's own loader, if it made one."""
        loader = getattr(vars(self.engine).get("training_dataloader"), "dataloader", None)
        return None if loader is None else int(loader.num_workers)

    def feed(self) -> Feed:
        """The queue of the loader that the loop used last."""
        return LoaderQueue(
            lambda: backlogs_of(self.loaders.iterators(), note=self.session.notes.add_for_run),
            batches_a_step=int(self.engine.gradient_accumulation_steps()),
        )
