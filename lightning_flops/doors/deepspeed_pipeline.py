"""One stage of a DeepSpeed pipeline under the profiler: what its instructions are in a step.

``train_batch`` is a step: all micro-batches through all stages, and the update. A stage is told what to do by a list of
instructions, which the engine looks up in a table; each kind is one part of the step. The stage's forwards and
backwards are its own layers', so the stages' profiles add up to the model's. Sending to, receiving from and waiting for
the other stages is the bubble.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from lightning_flops.doors.deepspeed_engine import EngineProfiler
from lightning_flops.instrument.batches import BatchMeter, Shapes, tensor_shapes
from lightning_flops.instrument.patches import untapped
from lightning_flops.session.taps import guarded

if TYPE_CHECKING:
    from lightning_flops.config import ProfilerConfig
    from lightning_flops.instrument.patches import Patches
    from lightning_flops.instrument.timing.monitor import Monitor
    from lightning_flops.records import TimePhase
    from lightning_flops.schema.profile import Profile

_PARTS: dict[str, TimePhase] = {
    "LoadMicroBatch": "transfer",  # less the wait for the batch
    "ForwardPass": "forward",  # with the loss, on the last stage
    "BackwardPass": "backward",
    "ReduceGrads": "backward",  # where it is in engines without stages
    "RecvActivation": "bubble",
    "SendActivation": "bubble",
    "RecvGrad": "bubble",
    "SendGrad": "bubble",
    "ReduceTiedGrads": "bubble",  # an exchange between the stages that share the weights
    "OptimizerStep": "optimizer",
}
"""What part of a step each kind of instruction is, by the name of its class; any other kind is ``other``."""

_TABLE = "_INSTRUCTION_MAP"
_LATEST = "_exec_instr"
"""Where the engine keeps the function of the instruction that it ran last."""


class PipelineProfiler(EngineProfiler):
    """The profiler on one rank of a pipeline. Made by ``start``; inert after ``take_out``."""

    def __init__(self, engine: Any, *, config: ProfilerConfig, publish: Callable[[Profile], None]) -> None:
        super().__init__(engine, config=config, publish=publish)
        self._in_train_batch = False
        self._micro_batches: list[tuple[Any, Shapes]] = []
        self._samples_of_step: int | None = 0
        self._loads = bool(engine.is_first_stage() or engine.is_last_stage())
        if not self._loads:
            self._meter = self._meter_without_batches()

    def _tap_engine(self, taps: Patches) -> None:
        engine = self._engine
        self._live_as_long_as_the_engine(taps)
        taps.replace(engine, "train_batch", self._around_train_batch)
        taps.replace(engine, "eval_batch", self._outside_of_steps("validation"))
        taps.replace(engine, "save_checkpoint", self._outside_of_steps("checkpoint"))
        taps.replace(engine, "destroy", self._around_destroy)
        if self._loads:
            taps.replace(engine, "_next_batch", self._around_next_batch)
        else:  # what a stage in the middle receives is all that tells one step from another
            self._tap_instructions(taps, {"ForwardPass": self._around_forward_of_middle})

    def _tap_parts(self, taps: Patches) -> None:
        parts = dict(_PARTS)
        if self._engine.num_stages > 1:
            self._note_the_stage()
            taps.replace(self._engine, "_aggregate_total_loss", self._in_train_batch_only("bubble"))
        else:  # nobody to exchange anything with
            parts = {name: part for name, part in parts.items() if part != "bubble"}
        self._tap_instructions(taps, {name: self._in_train_batch_only(part) for name, part in parts.items()})
        self._tap_optimizer_work(taps)
        self._tap_loaders(taps)

    def _note_the_stage(self) -> None:
        self._notes.add(
            f"This is stage {self._engine.stage_id} of a pipeline of {self._engine.num_stages}: FLOPs, parameters and "
            "times are those of its layers, unless said to be of all ranks; over the stages FLOPs and parameters add "
            "up to the model's."
        )

    def _tap_instructions(
        self, taps: Patches, makes: dict[str, Callable[[Callable[..., Any]], Callable[..., Any]]]
    ) -> None:
        """Put taps around the functions of the kinds of instructions that *makes* names."""
        kinds = getattr(self._engine, _TABLE)
        taps.replace_entries(
            self._engine, _TABLE, {kind: makes[kind.__name__] for kind in kinds if kind.__name__ in makes}
        )

    def _take_out_taps(self) -> None:
        super()._take_out_taps()
        if (latest := vars(self._engine).get(_LATEST)) is not None:
            setattr(self._engine, _LATEST, untapped(latest))

    def _in_train_batch_only(self, part: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """What turns a function into one whose calls are *part* of a step, unless an evaluation makes them."""

        def make(original: Callable[..., Any]) -> Callable[..., Any]:
            marked = self._inside_part(part)(original)

            def run(*args: Any, **kwargs: Any) -> Any:
                return (marked if self._in_train_batch else original)(*args, **kwargs)

            return run

        return make

    def _around_train_batch(self, train_batch: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            self._train_batch_begins()
            try:
                result = train_batch(*args, **kwargs)
            except BaseException as error:
                self._interrupted(error)
                raise
            self._train_batch_ends()
            return result

        return run

    def _around_next_batch(self, next_batch: Callable[[], Any]) -> Callable[[], Any]:
        def run() -> Any:
            if not self._in_train_batch:
                return next_batch()
            self._wait_begins()
            try:
                batch = next_batch()
            finally:
                self._wait_ends()
            self._has_micro_batch(batch, batch)
            return batch

        return run

    def _around_forward_of_middle(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        def run(engine: Any, *, buffer_id: int, **kwargs: Any) -> Any:
            if self._in_train_batch:
                self._has_micro_batch((), engine.pipe_buffers["inputs"][buffer_id])
            return forward(engine, buffer_id=buffer_id, **kwargs)

        return run

    @guarded
    def _train_batch_begins(self) -> None:
        self._thread = threading.get_ident()
        self._in_train_batch = True
        self._micro_batches.clear()
        if self._scope is None and self._marking:
            self._enter_scope()

    @guarded
    def _wait_begins(self) -> None:
        if self._monitor is not None:
            self._monitor.fetch_begins()
        self._enter("data_wait")

    @guarded
    def _wait_ends(self) -> None:
        self._leave()
        if self._monitor is not None:
            self._monitor.fetch_ends()

    @guarded
    def _has_micro_batch(self, batch: Any, tensors: Any) -> None:
        self._micro_batches.append((batch if self._keeps_batch and batch is not None else (), tensor_shapes(tensors)))

    @guarded
    def _train_batch_ends(self) -> None:
        self._in_train_batch = False
        *first, last = self._micro_batches or [((), ())]
        for batch, shapes in first:
            self._ends(batch, shapes, ends_step=False)
        self._ends(*last, ends_step=True)
        self._micro_batches.clear()
        self._leave_scope()
        self._after_batch()
        if self._marking and not self._out:
            self._enter_scope()

    def _ends(self, batch: Any, shapes: Shapes, *, ends_step: bool) -> None:
        self._batch, self._shapes = batch, shapes
        self._batch_ends(batch, updates=int(ends_step), ends_step=ends_step)

    def _batches_to_spare(self) -> int:
        return 0  # a pipeline's micro-batches overlap, and are looked at together

    def _watch(self, monitor: Monitor, *, samples: int | None, ends_step: bool, alike: bool) -> None:
        """Tell *monitor* of a whole step as of one batch."""
        known = self._samples_of_step is not None and samples is not None
        self._samples_of_step = (self._samples_of_step or 0) + (samples or 0) if known else None
        if ends_step:
            super()._watch(monitor, samples=self._samples_of_step, ends_step=True, alike=alike)
            self._samples_of_step = 0

    def _meter_without_batches(self) -> BatchMeter:
        """A meter for a stage that gets activations: their first dimension need not be the samples'."""
        config, declared = self._config, int(self._engine.train_micro_batch_size_per_gpu())
        return BatchMeter(
            batch_size=config.batch_size if isinstance(config.batch_size, int) else declared,
            tokens_per_sample=config.tokens_per_sample if isinstance(config.tokens_per_sample, int) else None,
            note=self._note,
        )
