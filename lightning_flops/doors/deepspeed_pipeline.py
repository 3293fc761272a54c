"""The steps of one stage of a DeepSpeed pipeline: which part of a step each instruction is.

``train_batch`` is a step: all micro-batches through all stages, and the update. A stage runs a list of instructions,
and finds the function of each kind in a table. Each kind is one part of the step. A stage's forwards and backwards are
those of its own layers, so the stages' profiles add up to the model's. Sending to, receiving from and waiting for the
other stages is the bubble.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import MethodType
from typing import TYPE_CHECKING, Any

from lightning_flops.instrument.batches import BatchMeter, tensor_shapes
from lightning_flops.instrument.patches import untapped
from lightning_flops.records import Shapes

if TYPE_CHECKING:
    from lightning_flops.doors.deepspeed_engine import EngineDoor
    from lightning_flops.instrument.patches import Make, Patches
    from lightning_flops.records import TimePhase

_PARTS: dict[str, TimePhase] = {
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
}
"""The part of a step that each kind of instruction is, by the name of its class; any other kind is ``other``."""

_TABLE = "_INSTRUCTION_MAP"


class PipelineSteps:
    """Tells the session of a stage's steps.

    Args:
        door: the engine's.
    """

    def __init__(self, door: EngineDoor) -> None:
        engine, config = door.engine, door.config
        self._door = door
        self._engine = engine
        self._keeps_batch = callable(config.batch_size) or callable(config.tokens_per_sample)
        self._thread: int | None = None
        """The one that trains, once it is known."""
        self._in_train_batch = False
        self._micro_batches: list[tuple[Any, Shapes]] = []
        self._loads = bool(engine.is_first_stage() or engine.is_last_stage())

    def meter(self, note: Callable[[str], None]) -> BatchMeter:
        """Finds samples and tokens in the micro-batches.

        A stage that loads no data gets activations, whose first dimension need not be samples. There we use the config.
        """
        config, declared = self._door.config, self._engine.train_micro_batch_size_per_gpu
        if self._loads:
            return BatchMeter.by_settings(config, note, declared=declared)
        return BatchMeter(
            batch_size=config.batch_size if isinstance(config.batch_size, int) else int(declared()),
            tokens_per_sample=config.tokens_per_sample if isinstance(config.tokens_per_sample, int) else None,
            note=note,
        )

    @property
    def half_done(self) -> bool:
        """Always False: between two calls of ``train_batch`` no step is unfinished, even if one raised."""
        return False

    # ---- the taps

    def tap_run(self, taps: Patches) -> None:
        """Wrap what shows steps and evaluation, and the data by which steps differ."""
        engine, make = self._engine, self._door.session.taps
        taps.replace(
            engine,
            "train_batch",
            make.around(self._train_batch_begins, self._train_batch_ends, fails=self._train_batch_fails),
        )
        waits, evaluates = make.before(self._door.session.check_waits), make.outside_of_steps("validation")
        taps.replace(engine, "eval_batch", lambda evaluate: waits(evaluates(evaluate)))
        taps.replace(engine, "save_checkpoint", make.outside_of_steps("checkpoint"))
        if self._loads and self._door.names.has(engine, "_next_batch"):
            taps.replace(
                engine, "_next_batch", make.around(self._wait_begins, self._wait_ends, returns=self._loads_micro_batch)
            )
        elif not self._loads:  # a stage in the middle knows a step only by what it receives
            self._tap_instructions(taps, {"ForwardPass": make.around(self._middle_receives, None)})

    def tap_parts(self, taps: Patches) -> None:
        """Wrap the instructions of a step."""
        parts = dict(_PARTS)
        if self._engine.num_stages > 1:
            self._note_the_stage()
            if self._door.names.has(self._engine, "_aggregate_total_loss"):
                taps.replace(self._engine, "_aggregate_total_loss", self._in_train_batch_only("bubble"))
        else:  # there is no other stage to exchange anything with
            parts = {name: part for name, part in parts.items() if part != "bubble"}
        self._tap_instructions(taps, {name: self._in_train_batch_only(part) for name, part in parts.items()})

    def take_out(self) -> None:
        """Remove our wrapper from the function of its latest instruction, which the engine keeps as an attribute."""
        for name, kept in list(vars(self._engine).items()):
            if isinstance(kept, MethodType) and (function := untapped(kept)) is not kept:
                setattr(self._engine, name, function)

    def _note_the_stage(self) -> None:
        self._door.session.notes.add(
            f"This is stage {self._engine.stage_id} of a pipeline of {self._engine.num_stages}: FLOPs, parameters and "
            "times are those of its layers, unless said to be of all ranks; over the stages FLOPs and parameters add "
            "up to the model's."
        )

    def _tap_instructions(self, taps: Patches, makes: dict[str, Make]) -> None:
        """Wrap the functions of the kinds of instructions that *makes* names."""
        kinds = self._door.names.get(self._engine, _TABLE, {})
        known = {kind: makes[kind.__name__] for kind in kinds if kind.__name__ in makes}
        if known:
            taps.replace_entries(self._engine, _TABLE, known)

    def _in_train_batch_only(self, part: str) -> Make:
        """A wrapper whose calls are *part* of a step, except in an evaluation."""
        taps = self._door.session.taps
        inside = taps.part(part)

        def make(original: Callable[..., Any]) -> Callable[..., Any]:
            marked = inside(original)

            def choose(_: Any, *args: Any, **kwargs: Any) -> Any:
                return marked if self._in_train_batch else original, args, kwargs

            return taps.instead(choose)(original)

        return make

    # ---- what their calls mean

    def on_its_thread(self) -> bool:
        """Whether this is the thread that trains, as far as that is known."""
        return self._thread in (None, threading.get_ident())

    def fetch_begins(self, iterator: Any) -> bool:
        """A loader is asked for a batch, by the training as far as anybody can tell."""
        return self.on_its_thread()

    def batch_fetched(self, iterator: Any, batch: Any) -> None:
        """Nothing: the micro-batches are known from the engine."""

    def nothing_fetched(self, iterator: Any) -> None:
        """Nothing: the micro-batches are known from the engine."""

    def loader_is_used_up(self) -> None:
        """Nothing to do: ``train_batch`` tells where a step begins and ends."""

    def loader_is_left(self) -> None:
        """Nothing to do, as above."""

    def looks_left(self, sign: str, in_words: str) -> None:
        """Nothing to do: ``train_batch`` is a whole step, which a loop leaves unfinished only by an exception."""

    def interrupted(self, error: BaseException) -> None:
        """The user's code raised *error* in a step."""
        self._door.interrupted(error)

    def _train_batch_begins(self, *args: Any, **kwargs: Any) -> bool:
        self._thread = threading.get_ident()
        self._in_train_batch = True
        self._micro_batches.clear()
        window = self._door.session.window
        if not window.in_scope and window.marking:
            window.enter_scope()
        return True

    def _wait_begins(self) -> bool | None:
        if not self._in_train_batch:
            return None
        self._door.session.fetch_begins()
        return True

    def _wait_ends(self, _: bool) -> None:
        self._door.session.fetch_ends()

    def _loads_micro_batch(self, _: bool, batch: Any) -> None:
        self._has_micro_batch(batch if self._keeps_batch and batch is not None else (), tensor_shapes(batch))

    def _middle_receives(self, engine: Any, *, buffer_id: int, **kwargs: Any) -> None:
        if self._in_train_batch:
            self._has_micro_batch((), tensor_shapes(engine.pipe_buffers["inputs"][buffer_id]))

    def _has_micro_batch(self, batch: Any, shapes: Shapes) -> None:
        """A micro-batch is there; with the first one of a step, this stage has computed nothing of the step yet."""
        self._micro_batches.append((batch, shapes))
        session = self._door.session
        if len(self._micro_batches) == 1 and session.flops.wants_shapes:
            session.step_begins((shapes,))

    def _train_batch_ends(self, _: bool) -> None:
        session = self._door.session
        self._in_train_batch = False
        *first, last = self._micro_batches or [((), ())]
        for batch, shapes in first:
            session.batch(batch, shapes, updates=0, ends_step=False)
        session.batch(*last, updates=1, ends_step=True, logs=self._door.reading_is_due())
        self._micro_batches.clear()
        session.window.leave_scope()
        session.after_batch()
        if not session.out and session.window.marking:
            session.window.enter_scope()

    def _train_batch_fails(self, _: bool, error: BaseException) -> None:
        self._door.interrupted(error)
