"""What an adapter hears of: calls of a framework's functions on the training thread of its run, and phases of a step.

Phases, of reinforcement learning or distillation, are by one rule for all frameworks. What runs inside a model's
``generate``, or inside a call of a server that generates, is rollout. A model that is called without gradients outside
of it, and inside of no other module, is scoring: a reference, a teacher, a reward model. Forward, backward and update
of the rest are training. What the loop names by itself wins.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn

from lightning_flops.measure.module_hooks import around_compilations, around_scripting
from lightning_flops.measure.patches import Ends, listen
from lightning_flops.measure.torch_private.needed import hide
from lightning_flops.measure.torch_private.optional import (
    CLIPS,
    has_compiled,
    iterator_class,
    leave_compiled_code,
    was_used,
)
from lightning_flops.records import ROLLOUT, SCORING
from lightning_flops.run.adapter import Adapter
from lightning_flops.run.run import Run, safe
from lightning_flops.signals import Quiet, Undo

#: Classes whose ``generate`` runs elsewhere, or in code of its own.
_SERVERS = (
    ("trl.generation.vllm_generation", "VLLMGeneration"),
    ("trl.generation.vllm_client", "VLLMClient"),
    ("vllm.entrypoints.llm", "LLM"),
)


class Hook:
    """A hook of ours on a module or an optimizer of the user's, which holds the adapter weakly.

    What *notify* raises ends our part of the run, as all that it ``does``.
    """

    def __init__(self, adapter: Any, notify: Callable[..., None]) -> None:
        self._adapter = weakref.ref(adapter)
        self._notify = notify

    def __call__(self, *args: Any) -> None:
        """Notify the adapter, if it is there and hears this, on the thread that trains."""
        leave_compiled_code()
        adapter = self._adapter()
        if adapter is None or adapter.run.only not in (None, self._notify):
            return
        if adapter.run.delivery.thread == threading.get_ident():
            adapter.run.does(self._notify, adapter, *args)

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (nullcontext(), "__exit__")  # in a pickle or a copy: the standard library's, and does nothing


hide(Hook.__call__)


def nothing(*_: Any) -> None:
    """Hear of nothing, as where torch calls no hook after a step that has raised."""


class HearingAdapter(Adapter):
    """An adapter that hears of calls of its framework's functions, and of phases while parts of a step are marked."""

    run: Run
    _lookers: tuple[weakref.ref[nn.Module], ...] = ()  # models that were called without gradients
    _asked: tuple[tuple[Any, ...], ...] = ()  # what the rollouts that run were called with

    def __init__(self) -> None:
        self._hooks: dict[Callable[[], None], Callable[[], None]] = {}  # what takes some off, and puts them on again

    def hear(
        self,
        owner: Any,
        name: str,
        undo: Undo,
        *,
        begins: Callable[..., object] | None = None,
        ends: Callable[[Any, Any], object] | None = None,
        raises: Callable[[Any, BaseException], object] | None = None,
        of: object = None,
    ) -> None:
        """Hear of calls of a function on the run's training thread, until *undo* is closed; this holds us weakly.

        *begins* gets the arguments before the function does, *ends* what it has returned, or None where it has raised;
        where *raises* is given, a ``safe`` method, it gets what was raised. What the others raise ends our part of the
        run, too. *owner* is as for ``listen``; of a class, *of* is the only instance whose calls are heard.
        """
        held, only = weakref.ref(self), None if of is None else weakref.ref(of)

        def has_begun(*args: Any, **kwargs: Any) -> Ends | None:
            one, is_other = held(), only is not None and not (args and args[0] is only())
            if one is None or is_other or one.run.closed or one.run.delivery.thread != threading.get_ident():
                return None
            if raises is None and one.run.only not in (None, begins, ends):
                return None
            if begins is not None:
                one.run.does(begins, one, *args, **kwargs)
            return has_ended

        def has_ended(result: Any, error: BaseException | None) -> None:
            if (one := held()) is None:
                return
            if error is not None and raises is not None:
                raises(one, error)
            elif ends is not None:
                one.run.does(ends, one, result)

        hide(has_ended)
        listen(undo, owner, name, has_begun)

    def hear_calls(
        self,
        models: Iterable[nn.Module],
        undo: Undo,
        *,
        begins: Callable[..., None],
        ends: Callable[..., None],
    ) -> None:
        """Hear of the calls of *models*: *begins* gets the model, its arguments and the named ones."""
        held, handles = weakref.ref(self), list[Any]()
        enters, leaves = Hook(self, begins), Hook(self, ends)

        def put_up(*_: Any) -> None:
            one = held()
            for model in () if handles or one is None or one.run.only else models:
                handles.append(model.register_forward_pre_hook(enters, prepend=True, with_kwargs=True))
                handles.append(model.register_forward_hook(leaves, always_call=True))

        def take_down(*_: Any) -> None:
            while handles:
                handles[-1].remove()  # it is there until it is removed, whatever interrupts that
                handles.pop()

        self._hooks[take_down] = put_up
        undo.callback(self._hooks.pop, take_down, None)
        undo.callback(take_down)
        put_up()
        around_scripting(undo, take_down, put_up)
        if was_used():  # code that had seen the hooks would break its graph there
            around_compilations(undo, take_down, put_up)

    def take_hooks_off(self) -> None:
        """Take the hooks off the models, until ``put_hooks_on``."""
        for take_down in self._hooks:
            take_down()

    def put_hooks_on(self) -> None:
        """Put them on again."""
        for put_up in self._hooks.values():
            put_up()

    def hear_fetches(self, undo: Undo) -> None:
        """Hear of the batches that any DataLoader is asked for, by ``fetch_begins`` and ``fetch_ends``."""
        if iterator_class is not None:
            kind: Any = type(self)
            self.hear(iterator_class, "__next__", undo, begins=kind.fetch_begins, ends=kind.fetch_ends)

    def hear_around_updates(
        self, updated: Iterable[Any], undo: Undo, *, begins: Callable[..., None], ends: Callable[..., None]
    ) -> None:
        """Call *begins* and *ends* around what belongs to an update but is not its ``step``, until *undo* is closed.

        That is torch's and accelerate's clipping, and ``zero_grad`` and ``clip_grad_norm_`` of each model and optimizer
        of *updated*. What a compiled step may call is heard only where nothing was compiled: it would be compiled anew.
        """
        names, not_compiled = ("zero_grad", "clip_grad_norm_"), Undo()  # as FSDP's models have it
        accelerator = getattr(sys.modules.get("accelerate"), "Accelerator", object)

        def take_down(*_: Any) -> None:
            not_compiled.close()

        undo.callback(take_down)
        around_compilations(undo, take_down, nothing)
        own = [(type(one), name, one) for one in updated for name in names]
        for owner, name, of in [*own, *((*one, None) for one in [*CLIPS, (accelerator, "clip_grad_norm_")])]:
            is_never = owner is accelerator or isinstance(of, torch.optim.Optimizer)
            if hasattr(owner, name) and (is_never or not has_compiled()):
                self.hear(owner, name, undo if is_never else not_compiled, begins=begins, ends=ends, of=of)

    # ---- phases

    def mark_parts(self, stack: Undo) -> None:
        """Hear what generates, and models that were seen to be called without gradients."""
        servers = (getattr(sys.modules.get(module), kind, object) for module, kind in _SERVERS)
        for kind in {*map(type, self.facts.root.modules()), *servers}:
            if callable(getattr(kind, "generate", None)):
                self.hear(
                    kind,
                    "generate",
                    stack,
                    begins=HearingAdapter._rollout_begins,
                    ends=HearingAdapter._rollout_ends,
                )
        self._hear_lookers([one for held in self._lookers if (one := held()) is not None], stack)

    def _hear_lookers(self, models: list[nn.Module], stack: Undo) -> None:
        self.hear_calls(models, stack, begins=HearingAdapter._look_begins, ends=HearingAdapter._look_ends)

    @safe
    def looks(self, model: nn.Module) -> None:
        """*model* is called without gradients, the first time: its later calls are heard, and the end of this one."""
        marks = self.run.window.marks
        is_free = not (any(self.run.phases) or self.run.outside_of) and self.facts.loop == "training"
        if is_free and marks is not None and next(model.parameters(), None) is not None:
            self._lookers += (weakref.ref(model),)
            self._hear_lookers([model], marks)
            self._look_begins(model)

    @safe
    def _look_begins(self, model: Any, *_: Any) -> None:
        is_free = not (torch.is_grad_enabled() or self.run.outside_of or any(self.run.phases))
        if is_free and any(model is asked for asked, *_ in self._asked):
            self.run.phases[-len(self._asked)] = ROLLOUT  # of a ``generate`` that switches gradients off by itself
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
