"""Training steps on fake tensors, which have shapes and no values: followed as the counted step of a run is."""

from __future__ import annotations

import inspect
import sys
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import cache, partial
from traceback import walk_tb
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from lightning_flops.errors import LightningFlopsError
from lightning_flops.measure.counting.flop_counter import CausalAttention, FlopCounter
from lightning_flops.measure.counting.offline import (
    Fakes,
    attributes_put_back,
    caches_cleared,
    called,
    put_in,
    refuse_lazy,
    tensors_of,
)
from lightning_flops.measure.module_hooks import with_inner
from lightning_flops.measure.module_scope import named_modules, unwrapped
from lightning_flops.measure.random_state import random_state_kept
from lightning_flops.measure.tensor_lives import TensorLives
from lightning_flops.measure.torch_private.needed import modes_off, new_fake_mode, tree_leaves, tree_map_only
from lightning_flops.measure.torch_private.optional import forget_hooks, on_this_rank
from lightning_flops.records import Shapes, StepTensors
from lightning_flops.signals import Quiet, Undo, words_of

_MOST_WORDS = 300  # of an error of the model's

_ASKS_VALUE = "aten._local_scalar_dense.default"
_ATTENTION = "scaled_dot_product_attention"
_MASKS, _ASKS = "transformers.masking_utils", "find_packed_sequence_indices"

_NOT_IN_IT = {
    "aten.mkldnn_rnn_layer": (
        "What the CPU's LSTM keeps for its backward in a workspace of its own, as cuDNN's does, is not in it."
    )
}  # sentences by the operators whose memory shapes do not show


_PLAIN = (torch.dtype, bool, int, float, str, type(None))  # what holds no tensor


def two_steps(
    model: nn.Module,
    rounds: Sequence[Sequence[Any]],
    update: Callable[[], object] | None,
    loss_of: Callable[[Any], torch.Tensor],
    followed: tuple[TensorLives, TensorLives],
    *,
    causal_attention: CausalAttention = "full",
    around: AbstractContextManager[object] | None = None,
) -> FlopCounter:
    """Make two training steps, whose storages are *followed*, as an optimizer's states are born in the first.

    Of each round of batches all forwards, then their backwards; an *update*; gradients are dropped. *loss_of* gets a
    batch and returns the loss: what the model has put out may be dropped with it. *around* is entered for each step.
    The counter of the second is returned.
    """
    for lives in followed:
        counter = FlopCounter(model, causal_attention=causal_attention, lives=lives)
        with around or nullcontext(), counter:
            for batches in rounds:
                losses = []
                for batch in batches:
                    lives.enter("forward")
                    with counter.in_root():
                        losses.append(loss_of(batch))
                    lives.leave()
                while losses:
                    loss = losses.pop(0)
                    if loss.requires_grad:
                        lives.enter("backward")
                        loss.backward()  # type: ignore[no-untyped-call]
                        made = (on_this_rank(one.grad) for one in model.parameters() if one.grad is not None)
                        lives.hold(made, "gradients")
                        lives.leave()
                    del loss
            lives.enter("optimizer")
            if update is not None:
                with counter.in_optimizer():
                    update()
            lives.leave()
            for one in model.parameters():
                one.grad = None
    return counter


def loss_in(output: Any) -> torch.Tensor:
    """The ``loss`` of what a model has put out, or the sum of all of it."""
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    found = tensors_of(loss if isinstance(loss, torch.Tensor) else output)
    sums = [one.sum() if one.ndim else one for one in found if one.is_floating_point()]
    if not sums:
        raise LightningFlopsError("the model returns no floating tensor: say what the loss is")
    return sum(sums[1:], sums[0])


class FakeSteps:
    """Calls make two training steps of a model as its user runs them, on fake tensors, and return every allocation.

    The optimizer's states are born in the first. What the model returns is dropped when the loss is known, the batch is
    held all the time.

    Args:
        model: compiled parts of it run eagerly.
        batch: a tuple of positional arguments, a dict of keyword arguments, or the one argument.
        optimizer: makes its steps on fake parameters; what it held is put back. None: none.
        loss: from the model's output to a scalar; None: as ``loss_in``.
        autocast: dtype of an autocast around the forward; None: there is none.
        accumulate: forwards and backwards of a step.
        on_cuda: the step is to run on a GPU: optimizers work on all parameters at once there, and the allocator rounds.
        method: what of the model is called with the batch; another one than the model gets the batch's number, too, and
            what hands values to a Trainer does nothing meanwhile.
    """

    def __init__(
        self,
        model: nn.Module,
        batch: Any,
        optimizer: Any,
        *,
        loss: Callable[[Any], torch.Tensor] | None = None,
        autocast: torch.dtype | None = None,
        accumulate: int = 1,
        on_cuda: bool,
        method: str = "__call__",
    ) -> None:
        self._model, self._optimizer = unwrapped(model), optimizer
        takes = inspect.signature(getattr(model, method)).parameters
        self._batch = batch if method == "__call__" else (batch, 0)[: len(takes)]
        self._loss, self._autocast = loss or loss_in, autocast
        self._accumulate, self._on_cuda, self._method = accumulate, on_cuda, method
        refuse_lazy(model)
        self._own = {id(tensor) for tensor in (*model.parameters(), *model.buffers())}
        self._size = next((one.shape[0] for one in tensors_of(batch) if one.ndim), None)

    def __call__(self, batch_size: int | None = None, checkpointed: Collection[str] = ()) -> StepTensors:
        """Every allocation of two steps on a batch of this size, by default its own.

        The modules named *checkpointed* are called through ``torch.utils.checkpoint``.

        Raises:
            LightningFlopsError: the step cannot be run without values; the message names the operator and the module.
        """
        fakes, optimizer = Fakes(new_fake_mode()), with_inner(self._optimizer)[-1]
        try:
            with (
                random_state_kept(),
                caches_cleared(fakes),
                attributes_put_back(self._model, optimizer),
                Undo() as undo,
                fakes.mode,
                fakes,
                torch.compiler.set_stance("force_eager"),
            ):
                _as_in_the_run(undo, on_cuda=self._on_cuda)
                return self._run(fakes, optimizer, self._size if batch_size is None else batch_size, checkpointed)
        except Exception as error:
            raise LightningFlopsError(f"the step cannot be predicted: {self._words(error)}") from error

    def _run(self, fakes: Fakes, optimizer: Any, size: int | None, checkpointed: Collection[str]) -> StepTensors:
        model, lives, notes = self._model, TensorLives(on_cuda=self._on_cuda), list[str]()
        modules = dict(model.named_modules())
        for name, own in put_in(fakes, model):
            others = [one for one in vars(modules[name]).values() if isinstance(one, torch.Tensor)]
            lives.hold([*own.values(), *map(fakes.fake, others)], "parameters", name)
        for name, module in named_modules(model):
            if name in checkpointed:
                vars(module)["forward"] = partial(checkpoint, module.forward, use_reentrant=False)
        if self._method != "__call__":
            vars(model).update(log=_do_nothing, log_dict=_do_nothing)
        batch = tree_map_only(torch.Tensor, cache(partial(self._fake_input, fakes, size)), self._batch)
        lives.hold(tensors_of(batch), "batch")
        updates = () if optimizer is None else self._updates(optimizer, fakes, notes)
        step = partial(next, iter(updates), None)
        counter = two_steps(model, [[batch]] * self._accumulate, step, self._loss_of, (lives, lives))
        states = () if optimizer is None or notes else tensors_of([*optimizer.state.values()])
        blocks = _blocks(model)
        tensors = lives.taken(states, counter.total(), size, notes=notes, blocks=blocks)
        if tensors is None:
            raise LightningFlopsError("its storages change their sizes, which no operator shows")
        seen = {life.operator for life in tensors.lives}
        return replace(tensors, notes=(*tensors.notes, *(words for name, words in _NOT_IN_IT.items() if name in seen)))

    def _loss_of(self, batch: Any) -> torch.Tensor:
        device = "cuda" if any(one.is_cuda for one in self._model.parameters()) else "cpu"
        with nullcontext() if self._autocast is None else torch.autocast(device, self._autocast):
            return self._loss(called(getattr(self._model, self._method), batch))

    # ---- the user's objects as fake ones

    def _fake_input(self, fakes: Fakes, size: int | None, real: torch.Tensor) -> torch.Tensor:
        """A tensor of the batch, resized if its first axis is the batch's; one on "meta" lies where the model does."""
        resized = size != self._size and real.ndim and real.shape[0] == self._size
        if not (resized or real.is_meta):
            return fakes.fake(real)
        shape = (size, *real.shape[1:]) if resized else real.shape
        device = next((one.device for one in self._model.parameters()), "cpu") if real.is_meta else real.device
        return torch.empty(shape, dtype=real.dtype, device=device).requires_grad_(real.requires_grad)

    def _updates(self, optimizer: Any, fakes: Fakes, notes: list[str]) -> Iterator[None]:
        """Makes steps of *optimizer* on fake parameters, until one fails, which a note says."""
        try:
            groups = [dict(group) for group in optimizer.param_groups]
            if not self._own.issuperset(id(one) for group in groups for one in group["params"]):
                notes.append(f"{type(optimizer).__name__} is left out: it has parameters that are not the model's.")
                return
            for group in groups:
                group["params"] = list(map(fakes.fake, group["params"]))
                if self._on_cuda and not group.get("fused") and group.get("foreach", False) is None:
                    group["foreach"] = True  # what torch chooses on a GPU
            vars(optimizer).pop("step", None)  # a scheduler's
            forget_hooks(optimizer)
            optimizer.state, optimizer.param_groups = defaultdict(dict), groups
            while True:
                update(optimizer, fakes)
                yield
        except Exception as error:
            words = f"is left out, as its step fails on fake parameters: {words_of(error)}."
            notes.append(f"{type(optimizer).__name__} {words}")

    def _words(self, error: Exception) -> str:
        """What could not be run, and where."""
        names = {id(module): name or type(module).__name__ for name, module in self._model.named_modules()}
        module, operator = "", ""
        for frame, _ in walk_tb(error.__traceback__):
            own = frame.f_locals.get("self")
            if (name := names.get(id(own))) is not None:
                module, operator = name, ""
            elif isinstance(own, Fakes):
                operator = operator or str(frame.f_locals.get("func", ""))  # what it calls it is made of
        what = f"{operator} in {module}" if operator and module else module or type(self._model).__name__
        return f"{what} fails on tensors without values: {words_of(error)[:_MOST_WORDS]}"


def kept_call(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], given: Any) -> tuple[Any, ...]:
    """What of *model* is called, and with what: *given*, or arguments by name; tensors are on "meta" and hold nothing.

    The name alone if other things that are given may hold tensors, or *model* is several.
    """
    with Quiet(Exception), modes_off():  # of classes of the user's
        if args and kwargs:
            given = dict(zip(inspect.signature(model.forward).parameters, args, strict=False)) | kwargs
        found = tree_map_only(torch.Tensor, cache(partial(torch.empty_like, device="meta")), given)
        is_plain = all(isinstance(one, (torch.Tensor, *_PLAIN)) for one in tree_leaves(found))
        if is_plain and not isinstance(model, nn.ModuleDict):
            return "__call__", found
    return ("__call__",)


def in_shapes(call: tuple[Any, ...], shapes: Shapes) -> tuple[str, Any] | None:
    """What ``kept_call`` returned, in the *shapes* of another call; None: that one had other tensors."""
    tensors = [one for one in tree_leaves(call) if isinstance(one, torch.Tensor)]
    if not shapes or list(map(len, shapes)) != [one.ndim for one in tensors]:
        return None
    made = {one: one.new_empty(shape) for one, shape in zip(tensors, shapes, strict=True)}
    name, arguments = tree_map_only(torch.Tensor, made.__getitem__, call)
    return name, arguments


def update(optimizer: Any, fakes: Fakes) -> None:
    """The optimizer's step; *fakes* have values meanwhile: what it takes does not go by them."""
    fakes.answers[_ASKS_VALUE] = _one
    try:
        optimizer.step()
    finally:
        del fakes.answers[_ASKS_VALUE]


def _one(tensor: torch.Tensor) -> float:
    return 1.0 if tensor.is_floating_point() else 1


def _blocks(model: nn.Module) -> list[tuple[str, ...]]:
    """Names of modules of one class that follow one another in a list, each with modules inside."""
    found = defaultdict[tuple[str, type], list[str]](list)
    for name, module in model.named_modules():
        if isinstance(module, (nn.ModuleList, nn.Sequential)):
            for key, child in module.named_children():
                if next(child.children(), None) is not None:
                    found[name, type(child)].append(f"{name}.{key}" if name else key)
    return [tuple(names) for names in found.values() if len(names) > 1]


def _as_in_the_run(undo: Undo, *, on_cuda: bool) -> None:
    """From here on, also where a backward repeats a forward, attention takes the kernel that it takes in the run.

    On a GPU the fused one has dropout, which the CPU's refuses: it gets none, as values do not matter. transformers
    asks the positions' values whether sequences are packed; where there are none it makes a mask, as if they were.
    """
    attention: Any = functional.scaled_dot_product_attention

    def without_dropout(*args: Any, **kwargs: Any) -> Any:
        kwargs = {key: value for key, value in kwargs.items() if key != "dropout_p"}
        return attention(*args[:4], *((0.0,) if len(args) > 4 else ()), *args[5:], **kwargs)

    if on_cuda:
        undo.replace(functional, _ATTENTION, without_dropout)
    if hasattr(masks := sys.modules.get(_MASKS), _ASKS):
        undo.replace(masks, _ASKS, _do_nothing)


def _do_nothing(*args: Any, **kwargs: Any) -> None:
    """Stands in for what would reach beyond the model, or asks for values."""
