"""A training loop of the user's own: torch's public hooks of its models and optimizers, and autograd's two entries.

Where a batch begins, where a step ends and what belongs to none, ``adapters/steps.py`` decides. What runs between the
forward and the backward is the loss, and is forward, too.
"""

from __future__ import annotations

import itertools
import sys
import weakref
from functools import partial
from typing import Any

import torch
from torch import nn

from lightning_flops.adapters.loop_steps import LoopSteps
from lightning_flops.adapters.place import called_in
from lightning_flops.adapters.wrapping import Hook, hear, hear_calls, hear_fetches
from lightning_flops.measure.batches import first_tensor, tensor_shapes
from lightning_flops.measure.module_hooks import hear_steps
from lightning_flops.measure.torch_private.optional import CLIPS, loader_of
from lightning_flops.records import TimePhase
from lightning_flops.run.run import failed, safe
from lightning_flops.signals import Undo

_numbers = itertools.count()  # names of objects that events are of


def _nothing(*_: Any) -> None:
    """As torch does, which calls no hook after a step that has raised."""


class LoopAdapter(LoopSteps):
    """The adapter of one loop, on one rank, as of ``LoopSteps``: what is read of its events.

    The loop also says itself what its batches are, what belongs to no step, and where a step ends.
    """

    # ---- what is heard

    def begin(self) -> None:
        """The loop begins."""
        self._hear(self.run.undo)
        self.run.begin()

    def _hear(self, undo: Undo) -> None:
        kind = type(self)
        self._hear_models(undo)
        self._hear_updates(undo)
        begins, ends, raises = kind.backward_begins, kind.backward_ends, getattr(kind, "raised", None)
        hear(self, torch.autograd, "backward", undo, begins=begins, ends=ends, raises=raises)
        begins, ends = partial(kind.backward_begins, grad_only=True), partial(kind.backward_ends, grad_only=True)
        hear(self, torch.autograd, "grad", undo, begins=begins, ends=ends)
        hear_fetches(self, undo)

    def _hear_models(self, undo: Undo) -> None:
        hear_calls(self, called_in(self._model), undo, begins=type(self).forward_begins, ends=type(self).forward_ends)

    def _hear_updates(self, undo: Undo) -> None:
        kind = type(self)
        begins, ends = Hook(self, kind.update_begins), Hook(self, kind.update_ends)
        for one in self._optimizers:
            if hasattr(one, "register_step_pre_hook"):
                undo.callback(one.register_step_pre_hook(begins).remove)
                undo.callback(one.register_step_post_hook(ends).remove)
            else:  # several in one, or another thing with a step
                over = partial(kind.update_ends, name=id(one))
                hear(self, type(one), "step", undo, begins=kind.update_begins, ends=over, raises=_nothing, of=one)
        if not self._optimizers:
            hear_steps(undo, begins, ends, failed=partial(failed, self.run))

    # ---- the parts of a step

    def forward_begins(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A model is called."""
        given, grads, same = self._given(args, kwargs), torch.is_grad_enabled(), None
        first = given if isinstance(given, torch.Tensor) else first_tensor(given)
        if grads and first is not None:  # the same as one that a forward of this step with gradients had
            same = False
            for one in self._inputs:
                same = same or one() is first
            if not same:
                self._inputs.append(weakref.ref(first))
        if self._known.keeps_batches or (self._known.on_host and first is not given and self.run.tokens.reads):
            self._repeats.spoil()
        self._read = given, args, kwargs
        self._repeats.hear(LoopAdapter._apply_forward, id(module), tensor_shapes(given), grads, module.training, same)
        self._read = ()

    def _given(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What a model is called with, as the user calls it."""
        if args and kwargs:
            return (*args, *kwargs.values())
        return kwargs or (args[0] if len(args) == 1 else args)

    def forward_ends(self, module: nn.Module, args: Any, output: Any) -> None:
        """A model's forward is over, or has raised."""
        self._repeats.hear(LoopAdapter._apply_forward_end, output is None)

    def update_ends(self, optimizer: Any = None, *_: Any, name: int | None = None) -> None:
        """An optimizer's step is over, of the one of that *name*."""
        # A traced step ends with what comes next: here torch's own scope of the update is still open.
        later = self.run.window.marks is not None and self.run.window.recorder.tracing
        self._repeats.hear(LoopAdapter._apply_update_end, id(optimizer) if name is None else name, later)

    def mark_parts(self, stack: Undo) -> None:
        """Hear what belongs to an update and is none: clipping, and dropping gradients."""
        super().mark_parts(stack)
        names = "zero_grad", "clip_grad_norm_"  # as FSDP's models have it
        own = [(type(one), name, one) for one in (*self._optimizers, *called_in(self._model)) for name in names]
        accelerator = getattr(sys.modules.get("accelerate"), "Accelerator", object)
        for owner, name, of in [*own, *((*one, None) for one in [*CLIPS, (accelerator, "clip_grad_norm_")])]:
            if hasattr(owner, name):
                begins, ends = partial(LoopAdapter._part_begins, part="optimizer"), LoopAdapter._part_ends
                hear(self, owner, name, stack, begins=begins, ends=ends, of=of)

    def _part_begins(self, *_: Any, part: TimePhase, **__: Any) -> None:
        if self._machine.step.in_round:  # it is between the loss and its backward
            self.run.claim("forward")
        self.run.enter(part, counts=False)

    def _part_ends(self, _: Any) -> None:
        self.run.leave()

    # ---- batches

    def fetch_begins(self, source: Any) -> None:
        """A DataLoader's iterator, or ``batches``, is asked for a batch."""
        fetches = self._fetches
        if fetches.asked() is not source:
            names = self._name(source), self._name(loader_of(source))
            fetches.asked, fetches.asked_names = weakref.ref(source), names
        names, grads = fetches.asked_names, torch.is_grad_enabled()
        feeds = names[0] in self._machine.known.feeders
        training = feeds or any(one.training for one in called_in(self.facts.root))
        self._repeats.hear(LoopAdapter._apply_fetch, fetches.asked, names, grads, training)

    def _name(self, one: object) -> int:
        """A number for an object that a loop's events are of, which is not held."""
        return self._names.setdefault(one, next(_numbers))

    def fetch_ends(self, batch: Any, *, handed_out: bool = False) -> None:
        """A fetch has brought *batch*, which ``batches`` has *handed_out*, or None: the loader is at its end."""
        tokens, known = None, self._known
        # A fetch that is left out was one for a step.
        is_used = (self._fetches.waits or self._repeats.at is not None) and batch is not None and not handed_out
        if is_used and known.reads_fetched and self.run.tokens.reads:
            tokens = self.run.tokens.of(batch)
        if known.keeps_batches:
            self._repeats.spoil()
        shapes, self._read = self._fetches.brings(batch), (batch,)
        self._repeats.hear(LoopAdapter._apply_fetch_end, batch is None, shapes, self._fetches.sizes, handed_out, tokens)
        self._read = ()

    # ---- what the loop says itself

    @safe
    def names_phase(self, *, begins: bool) -> None:
        """A phase of the step *begins*, or ends: nothing in it is an evaluation."""
        steps = self._steps
        steps.inside.phases += 1 if begins else -1
        steps.away &= steps.inside.left_out > 0 or steps.known.says_outside
        self._follow()

    @safe
    def leave_out(self, what: str) -> None:
        """*what* begins, which belongs to no step, until ``take_in``."""
        steps = self._steps
        if steps.step.in_round and not steps.inside.left_out:
            self.run.claim("forward")
        steps.leave_out()
        self._follow()
        self.run.outside(what)

    @safe
    def take_in(self) -> None:
        """End of what belonged to no step."""
        self._steps.take_in()
        self.run.inside()

    @safe
    def end_step(self, *, updated: bool | None = None) -> None:
        """A batch is through, and with it a step, if it was *updated*; None: if an optimizer's step was seen."""
        self._repeats.hear(LoopAdapter._apply_mark, updated)

    @safe
    def finish(self, error: BaseException | None = None) -> None:
        """The loop is over, or has raised *error*."""
        self._steps.finish()
        self._follow()
        self.run.finish(interrupted_by=error)
