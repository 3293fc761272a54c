"""Training steps on fake tensors, which have shapes and no values: followed as the counted step of a run is."""

from __future__ import annotations

import inspect
import sys
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
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
from lightning_flops.measure.memory import TensorLives, gradients_of
from lightning_flops.measure.module_hooks import with_inner
from lightning_flops.measure.module_scope import named_modules, unwrapped
from lightning_flops.measure.random_state import random_state_kept
from lightning_flops.measure.torch_private.needed import modes_off, new_fake_mode, tree_leaves, tree_map_only
from lightning_flops.measure.torch_private.optional import forget_hooks, on_this_rank
from lightning_flops.records import Shapes, StepTensors
from lightning_flops.signals import Quiet, Undo, words_of

_ASKS_VALUE = "aten._local_scalar_dense.default"
_MASKS, _ASKS = "transformers.masking_utils", "find_packed_sequence_indices"

_PLAIN = (torch.dtype, bool, int, float, str, type(None))  # what holds no tensor


def two_steps(
    model: nn.Module,
    rounds: Sequence[Sequence[Any]],
    optimizer: Any,
    fakes: Fakes,
    loss_of: Callable[[Any], torch.Tensor],
    followed: tuple[TensorLives, TensorLives],
    *,
    causal_attention: CausalAttention = "full",
    around: AbstractContextManager[object] | None = None,
) -> tuple[FlopCounter, StepTensors | None]:
    """Make two training steps, whose storages are *followed*, as an optimizer's states are born in the first.

    Of each round of batches all forwards, then their backwards; an update of *optimizer*, if there is one; gradients
    are dropped. *loss_of* gets a batch and returns the loss: what the model has put out may be dropped with it.
    *around* is entered for each step. The counter of the second step is returned, and what is known then of all that
    was followed.
    """
    batches = [batch for one in rounds for batch in one]
    for batch in batches:
        followed[-1].hold(tensors_of(batch), "batch")
    for lives in followed:
        counter = FlopCounter(model, causal_attention=causal_attention, lives=lives)
        with around or nullcontext(), counter:
            for one in rounds:
                losses = []
                for batch in one:
                    lives.enter("forward")
                    with counter.in_root():
                        losses.append(loss_of(batch))
                    lives.leave()
                while losses:
                    loss = losses.pop(0)
                    if loss.requires_grad:
                        lives.enter("backward")
                        loss.backward()  # type: ignore[no-untyped-call]
                        lives.hold(gradients_of(model), "gradients")
                        lives.leave()
                    del loss
            lives.enter("optimizer")
            if optimizer is not None:
                with counter.in_optimizer() as inside:
                    inside.callback(fakes.answers.pop, _ASKS_VALUE, None)
                    fakes.answers[_ASKS_VALUE] = _one  # what the step takes does not go by values
                    optimizer.step()
            lives.leave()
            for parameter in model.parameters():
                parameter.grad = None
    size = next((one.shape[0] for one in tensors_of(batches[0]) if one.ndim), None)
    states = map(on_this_rank, tensors_of([*getattr(optimizer, "state", {}).values()]))
    return counter, lives.taken(states, counter.total(), size)


def loss_in(output: Any) -> torch.Tensor:
    """The ``loss`` of what a model has put out, or the sum of all of it."""
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    found = tensors_of(loss if isinstance(loss, torch.Tensor) else output)
    sums = [one.sum() if one.ndim else one for one in found if one.is_floating_point()]
    if not sums:
        raise LightningFlopsError("the model returns no floating tensor: say what the loss is")
    return sum(sums[1:], sums[0])


def fake_steps(
    model: nn.Module,
    batch: Any,
    optimizer: Any,
    batch_size: int | None = None,
    checkpointed: Collection[str] = (),
    *,
    loss: Callable[[Any], torch.Tensor] | None = None,
    autocast: torch.dtype | None = None,
    accumulate: int = 1,
    on_cuda: bool,
    method: str = "__call__",
) -> StepTensors:
    """Every allocation of two training steps of a model as its user runs them, made on fake tensors.

    The optimizer's states are born in the first. What the model returns is dropped when the loss is known, the batch is
    held all the time.

    Args:
        model: compiled parts of it run eagerly.
        batch: a tuple of positional arguments, a dict of keyword arguments, or the one argument.
        optimizer: makes its steps on fake parameters; what it held is put back. None: none. One that cannot is left
            out, and a note says so.
        batch_size: what the first axis of the batch's tensors becomes; None: it stays.
        checkpointed: names of the modules that are called through ``torch.utils.checkpoint``.
        loss: from the model's output to a scalar; None: as ``loss_in``.
        autocast: dtype of an autocast around the forward; None: there is none.
        accumulate: forwards and backwards of a step.
        on_cuda: the step is to run on a GPU: optimizers work on all parameters at once there, and the allocator rounds.
        method: what of the model is called with the batch; another one than the model gets the batch's number, too, and
            what hands values to a Trainer does nothing meanwhile.

    Raises:
        LightningFlopsError: the step cannot be run without values; the message names the operator and the module.
    """
    refuse_lazy(model)
    arguments = (
        batch if method == "__call__" else (batch, 0)[: len(inspect.signature(getattr(model, method)).parameters)]
    )
    root, inner, fakes = unwrapped(model), with_inner(optimizer)[-1], Fakes(new_fake_mode())
    own, lives = {id(tensor) for tensor in (*root.parameters(), *root.buffers())}, TensorLives(on_cuda=on_cuda)

    def loss_of(inputs: Any) -> torch.Tensor:
        with nullcontext() if autocast is None else torch.autocast(device.type, autocast):
            return (loss or loss_in)(called(getattr(root, method), inputs))

    try:
        with (
            random_state_kept(),
            caches_cleared(fakes),
            attributes_put_back(root, inner),
            Undo() as undo,
            fakes.mode,
            fakes,
            torch.compiler.set_stance("force_eager"),
        ):
            _as_in_the_run(undo, root, method, on_cuda=on_cuda)
            modules = dict(root.named_modules())
            for name, made in put_in(fakes, root):
                others = [one for one in vars(modules[name]).values() if isinstance(one, torch.Tensor)]
                lives.hold([*made.values(), *map(fakes.fake, others)], "parameters")
            for name, module in named_modules(root):
                if name in checkpointed:
                    vars(module)["forward"] = partial(checkpoint, module.forward, use_reentrant=False)
            device = next((one.device for one in root.parameters()), torch.device("cpu"))
            inputs = _faked(arguments, batch_size, fakes, device)
            if inner is not None:
                lives.enter("optimizer")
                _give(inner, fakes, own, on_cuda=on_cuda)
                lives.leave()
            _, found = two_steps(root, [[inputs]] * accumulate, inner, fakes, loss_of, (lives, lives))
            if found is None:
                raise LightningFlopsError("its storages change their sizes, which no operator shows")
            return replace(found, blocks=tuple(_blocks(root)))
    except Exception as error:
        if lives.parts[-1][0] != "optimizer":
            raise LightningFlopsError(f"the step cannot be predicted: {_words(root, error)}") from error
        is_ours = isinstance(error, LightningFlopsError)
        why = error if is_ours else f"its step fails on fake parameters: {words_of(error)}"
    options: Any = {"loss": loss, "autocast": autocast, "accumulate": accumulate, "on_cuda": on_cuda, "method": method}
    found = fake_steps(model, batch, None, batch_size, checkpointed, **options)
    return replace(found, notes=(f"{type(inner).__name__} is left out: {why}.", *found.notes))


def _faked(batch: Any, size: int | None, fakes: Fakes, device: torch.device) -> Any:
    """*batch* as fake tensors, of so many samples; what lies on "meta" lies on the model's *device*."""
    before = next((one.shape[0] for one in tensors_of(batch) if one.ndim), None)
    resizes = size is not None and size != before

    @cache
    def faked(real: torch.Tensor) -> torch.Tensor:
        fake = fakes.fake(real)
        has_samples = resizes and real.ndim and real.shape[0] == before
        if not (has_samples or real.is_meta):
            return fake
        shape = (size, *real.shape[1:]) if has_samples else real.shape
        where = device if real.is_meta else real.device
        return fake.new_empty(shape, device=where).requires_grad_(real.requires_grad)

    return tree_map_only(torch.Tensor, faked, batch)


def _give(optimizer: Any, fakes: Fakes, own: Collection[int], *, on_cuda: bool) -> None:
    """Have *optimizer* work on the fakes of the model's tensors, which have these ids, from here on."""
    groups = [dict(group) for group in optimizer.param_groups]
    for group in groups:
        if any(id(one) not in own for one in group["params"]):
            raise LightningFlopsError("it has parameters that are not the model's")
        group["params"] = list(map(fakes.fake, group["params"]))
        if on_cuda and not group.get("fused") and group.get("foreach", False) is None:
            group["foreach"] = True  # what torch chooses on a GPU
    vars(optimizer).pop("step", None)  # a scheduler's
    forget_hooks(optimizer)
    optimizer.state, optimizer.param_groups = defaultdict(dict), groups


def _words(model: nn.Module, error: Exception) -> str:
    """What of *model* could not be run, and where."""
    names = {id(module): name or type(module).__name__ for name, module in model.named_modules()}
    module, operator = "", ""
    for frame, _ in walk_tb(error.__traceback__):
        own = frame.f_locals.get("self")
        if (name := names.get(id(own))) is not None:
            module, operator = name, ""
        elif isinstance(own, Fakes):
            operator = operator or str(frame.f_locals.get("func", ""))  # what it calls it is made of
    what = f"{operator} in {module}" if operator and module else module or type(model).__name__
    return f"{what} fails on tensors without values: {words_of(error)[:300]}"


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


def _as_in_the_run(undo: Undo, model: nn.Module, method: str, *, on_cuda: bool) -> None:
    """From here on, also where a backward repeats a forward, attention takes the kernel that it takes in the run.

    On a GPU the fused one has dropout, which the CPU's refuses: it gets none, as values do not matter. Other dropout
    keeps one byte of each number there, the CPU's a number. transformers asks the positions' values whether sequences
    are packed; where there are none it makes a mask, as if they were. A *method* of the model's hands nothing to a
    Trainer.
    """
    if method != "__call__":
        vars(model).update(log=_do_nothing, log_dict=_do_nothing)
    attention: Any = functional.scaled_dot_product_attention
    dropout = functional.dropout

    def without_dropout(*args: Any, **kwargs: Any) -> Any:
        kwargs = {key: value for key, value in kwargs.items() if key != "dropout_p"}
        return attention(*args[:4], *((0.0,) if len(args) > 4 else ()), *args[5:], **kwargs)

    def fused_dropout(
        input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
    ) -> torch.Tensor:
        is_fused = training and 0.0 < p < 1.0 and not inplace
        return torch.native_dropout(input, p, True)[0] if is_fused else dropout(input, p, training, inplace)

    if on_cuda:
        undo.replace(functional, "scaled_dot_product_attention", without_dropout)
        undo.replace(functional, "dropout", fused_dropout)
    if hasattr(masks := sys.modules.get(_MASKS), _ASKS):
        undo.replace(masks, _ASKS, _do_nothing)


def _do_nothing(*args: Any, **kwargs: Any) -> None:
    """Stands in for what would reach beyond the model, or asks for values."""
