"""One stage of a DeepSpeed pipeline, as events of a ``Run``: which part of a step each instruction is.

``train_batch`` is a step. A stage runs a list of instructions, and finds the function of each kind in a table. Each
kind is one part of the step; what it exchanges with the other stages is the bubble.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Container
from dataclasses import replace
from types import MethodType
from typing import Any

from lightning_flops.adapters.deepspeed_context import version
from lightning_flops.adapters.deepspeed_engine import EngineAdapter, Hooks
from lightning_flops.config import ProfilerConfig
from lightning_flops.measure.batches import tensor_shapes
from lightning_flops.records import Shapes, TimePhase
from lightning_flops.run.output import LoggedOutput
from lightning_flops.run.run import safe
from lightning_flops.schema.profile import Profile
from lightning_flops.signals import Undo

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
_LOST = {  # private names of an engine, and what is lost if one is missing
    "_INSTRUCTION_MAP": "the parts of a pipeline's step cannot be separated",
    "_next_batch": "neither the wait for a stage's micro-batches nor their sizes are seen",
    "_aggregate_total_loss": "the stages' exchange of the loss is in other",
}


class PipelineAdapter(EngineAdapter):
    """The adapter of one stage, on one rank."""

    unseen = ()

    def __init__(
        self, engine: Any, config: ProfilerConfig, publish: Callable[[Profile], None], output: LoggedOutput | None
    ) -> None:
        self._loads = bool(engine.is_first_stage() or engine.is_last_stage())
        self._always = () if self._loads else ("ForwardPass",)  # a stage in the middle knows a step by what it receives
        self._micro_batches: list[tuple[Any, Shapes, None]] = []
        if not self._loads:  # it gets activations, whose first dimension need not be samples
            size, tokens = config.batch_size, config.tokens_per_sample
            size = size if isinstance(size, int) else int(engine.train_micro_batch_size_per_gpu())
            config = replace(config, batch_size=size, tokens_per_sample=tokens if isinstance(tokens, int) else None)
        super().__init__(engine, config, publish, output)
        if engine.num_stages > 1:
            self.run.notes.add_for_run(_OF_A_STAGE.format(engine.stage_id, engine.num_stages))

    def _hooks(self) -> Hooks:
        engine = self.engine
        hooks: Hooks = {
            **self.hooks_around_steps(),
            "train_batch": (lambda *_, **__: self.run.between_steps(""), self._train_batch_ends),
            "eval_batch": (lambda *_, **__: self.run.outside("validation"), lambda _: self.run.inside()),
        }
        if self._loads:
            hooks["_next_batch"] = (self.run.fetch_begins, self._micro_batch_is_loaded)
        for name, part in _PARTS.items():
            if engine.num_stages > 1 or part != "bubble":  # there is no other stage to exchange anything with
                hooks[name] = (functools.partial(self._instruction_begins, part), lambda _: self.run.leave())
        for name, lost in _LOST.items():
            if not hasattr(type(engine), name):
                self.run.notes.add_for_run(f"This DeepSpeed ({version()}) keeps no {name}: {lost}.")
        return hooks

    def _is_between_steps(self) -> bool:
        return True  # train_batch is a whole step

    def mark_parts(self, stack: Undo) -> None:
        """Hear the instructions."""
        self._hear_instructions(set(self.hooks).difference(self._always), stack)

    @safe
    def begin(self) -> None:
        """Put the hooks in place."""
        self.run.undo.callback(self._forget_instruction)
        self._hear_instructions(self._always, self.run.undo)
        super().begin()

    def _hear_instructions(self, names: Container[str], undo: Undo) -> None:
        table = getattr(type(self.engine), "_INSTRUCTION_MAP", {})
        for kind in list(table):
            if kind.__name__ in names:
                self.hear(table, kind, kind.__name__, undo)

    def _forget_instruction(self) -> None:
        """Remove our wrapper from the function of its latest instruction, which the engine keeps as an attribute."""
        kept = vars(self.engine).get("_exec_instr")  # once it has run an instruction
        if function := getattr(getattr(kept, "__func__", None), "__wrapped__", None):
            self.engine._exec_instr = MethodType(function, self.engine)

    def _instruction_begins(self, part: TimePhase, *_: Any, buffer_id: int = 0, **__: Any) -> None:
        if part == "forward" and not self._loads and not self.run.outside_of:
            self._micro_batch_is_there((), tensor_shapes(self.engine.pipe_buffers["inputs"][buffer_id]))
        self.run.enter(part)

    def _micro_batch_is_loaded(self, batch: Any) -> None:
        self.run.fetch_ends()
        if not self.run.outside_of:
            self._micro_batch_is_there(() if batch is None else batch, tensor_shapes(batch))

    def _micro_batch_is_there(self, batch: Any, shapes: Shapes) -> None:
        """A micro-batch is there; with the first one of a step, this stage has computed nothing of the step yet."""
        self._micro_batches.append((batch, shapes, None))
        if len(self._micro_batches) == 1:
            self.run.batch_begins(shapes)

    def _train_batch_ends(self, _: Any) -> None:
        batches, self._micro_batches = self._micro_batches or [((), (), None)], []
        self.run.batch_done(*batches, updates=1, ends_step=True, logs=self.is_reading_due())
