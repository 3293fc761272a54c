"""Training steps on fake tensors, which have shapes and no values: followed as the counted step of a run is."""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from copy import copy
from dataclasses import replace
from functools import partial
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
from lightning_flops.measure.torch_private.needed import new_fake_mode, tree_map_only
from lightning_flops.measure.torch_private.optional import forget_hooks, on_this_rank
from lightning_flops.records import StepTensors
from lightning_flops.signals import Undo, words_of

_MOST_WORDS = 300  # of an error of the model's

_ASKS_VALUE = "aten._local_scalar_dense.default"
_ATTENTION = "scaled_dot_product_attention"
_MASKS, _ASKS = "transformers.masking_utils", "find_packed_sequence_indices"

_NOT_IN_IT = {
    "aten.mkldnn_rnn_layer": (
        "What the CPU's LSTM keeps for its backward in a workspace of its own, as cuDNN's does, is not in it."
    )
}  # sentences by the operators whose memory shapes do not show


_STEPS = {"forward": "__call__", "training_step": "training_step"}  # by function, what is called with a batch
# Precisions, as frameworks name them, that are an autocast.
_HALF = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}


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
                _forwards_and_backwards(model, batches, loss_of, counter, lives)
            lives.enter("optimizer")
            if update is not None:
                with counter.in_optimizer():
                    update()
            lives.leave()
            for one in model.parameters():
                one.grad = None
    return counter


def _forwards_and_backwards(
    model: nn.Module,
    batches: Sequence[Any],
    loss_of: Callable[[Any], torch.Tensor],
    counter: FlopCounter,
    lives: TensorLives,
) -> None:
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
        optimizer: made again on fake parameters; None: none.
        loss: from the model's output to a scalar; None: as ``loss_in``.
        autocast: dtype of an autocast around the forward; None: there is none.
        accumulate: forwards and backwards of a step.
        on_cuda: the step is to run on a GPU: optimizers work on all parameters at once there, and the allocator rounds.
        method: what of the model is called with the batch; what else hands values to a Trainer does nothing meanwhile.
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
        self._model, self._batch, self._optimizer = unwrapped(model), batch, optimizer
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
        fakes = Fakes(new_fake_mode())
        try:
            with (
                random_state_kept(),
                caches_cleared(fakes),
                attributes_put_back(self._model),
                Undo() as undo,
                fakes.mode,
                fakes,
                torch.compiler.set_stance("force_eager"),
            ):
                _as_in_the_run(undo, on_cuda=self._on_cuda)
                return self._run(fakes, self._size if batch_size is None else batch_size, checkpointed)
        except Exception as error:
            raise LightningFlopsError(f"the step cannot be predicted: {self._words(error)}") from error

    def _run(self, fakes: Fakes, size: int | None, checkpointed: Collection[str]) -> StepTensors:
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
        optimizer = self._remade(fakes, notes)
        batch = tree_map_only(torch.Tensor, partial(self._fake_input, fakes, size), self._batch)
        lives.hold(tensors_of(batch), "batch")
        updates = None if optimizer is None else partial(_try_update, optimizer, fakes, notes)
        counter = two_steps(model, [[batch]] * self._accumulate, updates, self._loss_of, (lives, lives))
        states = () if optimizer is None else tensors_of([*optimizer.state.values()])
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
        """A tensor of the batch, in another batch size where its first axis is the batch."""
        if size == self._size or not real.ndim or real.shape[0] != self._size:
            return fakes.fake(real)
        device = "cpu" if real.is_meta else real.device
        fake = torch.empty((size, *real.shape[1:]), dtype=real.dtype, device=device)
        return fake.requires_grad_(real.requires_grad)

    def _remade(self, fakes: Fakes, notes: list[str]) -> Any:
        """The optimizer on fake parameters; None if there is none, or it cannot be made."""
        if self._optimizer is None:
            return None
        real = with_inner(self._optimizer)[-1]
        left_out = f"{type(real).__name__} cannot be made on fake parameters and is left out"
        try:
            groups = [dict(group) for group in real.param_groups]
            if not all(id(one) in self._own for group in groups for one in group["params"]):
                notes.append(f"{left_out}: it has parameters that are not the model's.")
                return None
            made = object.__new__(type(real))
            # Its step may be a scheduler's, which would call the real one. Containers of its own are copied.
            plain = (dict, list, set)
            own = {key: copy(value) if type(value) in plain else value for key, value in vars(real).items()}
            vars(made).update({key: value for key, value in own.items() if key != "step"})
            made.state = defaultdict(dict)
            forget_hooks(made)
            for group in groups:
                group["params"] = list(map(fakes.fake, group["params"]))
                if self._on_cuda and not group.get("fused") and group.get("foreach", False) is None:
                    group["foreach"] = True  # what torch chooses on a GPU
            made.param_groups = groups
        except Exception as error:
            notes.append(f"{left_out}: {words_of(error)}.")
            return None
        return made

    def _words(self, error: Exception) -> str:
        """What could not be run, and where."""
        names = {id(module): name or type(module).__name__ for name, module in self._model.named_modules()}
        module, operator, trace = "", "", error.__traceback__
        while trace is not None:
            given, trace = trace.tb_frame.f_locals, trace.tb_next
            if (name := names.get(id(given.get("self")))) is not None:
                module, operator = name, ""
            elif isinstance(given.get("self"), Fakes) and "func" in given:
                operator = operator or str(given["func"])  # what it calls it is made of
        what = f"{operator} in {module}" if operator and module else module or type(self._model).__name__
        return f"{what} fails on tensors without values: {words_of(error)[:_MOST_WORDS]}"


def failed_steps(
    error: BaseException, model: nn.Module, optimizers: Iterable[Any] | None, *, precision: str
) -> FakeSteps | None:
    """The steps of *model* like the one that raised *error*; None: the model was not called with a batch then."""
    trace = error.__traceback__
    while trace is not None:
        code, given, trace = trace.tb_frame.f_code, trace.tb_frame.f_locals, trace.tb_next
        if code.co_name in _STEPS and given.get("self") is model:
            return FakeSteps(
                model,
                {name: given[name] for name in code.co_varnames[1 : code.co_argcount] if name in given},
                next(iter(optimizers or ()), None),
                autocast=_HALF.get(precision),
                on_cuda=any(one.is_cuda for one in model.parameters()),
                method=_STEPS[code.co_name],
            )
    return None


def update(optimizer: Any, fakes: Fakes) -> None:
    """The optimizer's step; *fakes* have values meanwhile: what it takes does not go by them."""
    fakes.answers[_ASKS_VALUE] = _one
    try:
        optimizer.step()
    finally:
        del fakes.answers[_ASKS_VALUE]


def _try_update(optimizer: Any, fakes: Fakes, notes: list[str]) -> None:
    if notes:  # it has failed
        return
    try:
        update(optimizer, fakes)
    except Exception as error:
        words = f"is left out, as its step fails on fake parameters: {words_of(error)}."
        notes.append(f"{type(optimizer).__name__} {words}")


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
