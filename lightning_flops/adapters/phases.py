"""Phases of a step of reinforcement learning or distillation, by one rule for all frameworks.

What runs inside a model's ``generate``, or inside a call of a server that generates, is rollout. A model that is called
without gradients outside of it, and inside of no other module, is scoring: a reference, a teacher, a reward model.
Forward, backward and update of the rest are training. What the loop names by itself wins.
"""

from __future__ import annotations

import sys
import weakref
from typing import Any

import torch
from torch import nn

from lightning_flops.adapters.wrapping import hear, hear_calls
from lightning_flops.records import ROLLOUT, SCORING
from lightning_flops.run.adapter import Adapter
from lightning_flops.run.run import Run, safe
from lightning_flops.signals import Quiet, Undo

_SERVERS = (
    ("trl.generation.vllm_generation", "VLLMGeneration"),
    ("trl.generation.vllm_client", "VLLMClient"),
    ("vllm.entrypoints.llm", "LLM"),
)
"""Classes whose ``generate`` runs elsewhere, or in code of its own."""


class PhasedAdapter(Adapter):
    """An adapter that hears of phases while the parts of a step are marked."""

    run: Run
    _lookers: tuple[weakref.ref[nn.Module], ...] = ()  # models that were called without gradients
    _asked: tuple[tuple[Any, ...], ...] = ()  # what the rollouts that run were called with

    def mark_parts(self, stack: Undo) -> None:
        """Hear what generates, and models that were seen to be called without gradients."""
        kinds: set[type] = {type(one) for one in self.facts.root.modules()}
        kinds |= {getattr(sys.modules.get(module), kind, object) for module, kind in _SERVERS}
        for kind in kinds:
            if callable(getattr(kind, "generate", None)):
                begins, ends = PhasedAdapter._rollout_begins, PhasedAdapter._rollout_ends
                hear(self, kind, "generate", stack, begins=begins, ends=ends)
        self._hear_lookers([one for held in self._lookers if (one := held()) is not None], stack)

    def _hear_lookers(self, models: list[nn.Module], stack: Undo) -> None:
        hear_calls(self, models, stack, begins=PhasedAdapter._look_begins, ends=PhasedAdapter._look_ends)

    @safe
    def looks(self, model: nn.Module) -> None:
        """*model* is called without gradients, the first time: its later calls are heard, and the end of this one."""
        marks = self.run.window.marks
        is_free = not (self.run.phases or self.run.outside_of) and self.facts.loop == "training"
        if is_free and marks is not None and next(model.parameters(), None) is not None:
            self._lookers += (weakref.ref(model),)
            self._hear_lookers([model], marks)
            self._look_begins()

    @safe
    def _look_begins(self, *_: Any) -> None:
        self.run.phase_begins("" if torch.is_grad_enabled() else SCORING)

    @safe
    def _look_ends(self, *_: Any) -> None:
        self.run.phase_ends()

    @safe
    def _rollout_begins(self, model: Any, *args: Any, **kwargs: Any) -> None:
        # A generator of images may be trained in there; transformers switches gradients off by itself.
        trains = isinstance(model, nn.Module) and torch.is_grad_enabled() and not hasattr(model, "generation_config")
        self._asked += ((model, *args, *kwargs.values()),)
        self.run.phase_begins("" if trains else ROLLOUT)

    @safe
    def _rollout_ends(self, result: Any) -> None:
        self._asked, given = self._asked[:-1], self._asked[-1]
        made: tuple[tuple[int, int], ...] = ()
        with Quiet(Exception):  # the result may be any object of the user's
            made = (_tokens(given, result),)
        # One that calls another has made its tokens; an evaluation's are not the step's.
        self.run.phase_ends(*(() if self._asked or self.run.outside_of else made))


def _tokens(given: tuple[Any, ...], result: Any) -> tuple[int, int]:
    """Tokens of prompts and completions, by shape; raises where *result* does not show them."""
    made = getattr(result, "sequences", result)
    if isinstance(made, torch.Tensor):
        prompts = next((one for one in given if isinstance(one, torch.Tensor) and one.dim() == 2), made[:, :0])
        repeats = not getattr(getattr(given[0], "config", None), "is_encoder_decoder", False)
        return len(made) * prompts.shape[1], len(made) * (made.shape[1] - repeats * prompts.shape[1])
    if isinstance(made, dict):
        made = made["prompt_ids"], made["completion_ids"]
    elif hasattr(made[0], "outputs"):  # vLLM's own answers
        made = [one.prompt_token_ids for one in made], [out.token_ids for one in made for out in one.outputs]
    return sum(map(len, made[0])), sum(map(len, made[1]))
