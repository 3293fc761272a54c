"""Two training steps on fake tensors: the optimizer's states are born in the first."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Mapping
from contextlib import nullcontext
from copy import copy
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.utils.checkpoint import checkpoint

from lightning_flops.errors import LightningFlopsError
from lightning_flops.measure.counting.flop_counter import FlopCounter
from lightning_flops.measure.counting.offline import attributes_put_back, caches_cleared, put_in, tensors_of
from lightning_flops.measure.module_scope import named_modules, unwrapped
from lightning_flops.measure.optimizer_hooks import with_inner
from lightning_flops.measure.predicted_memory.live_tensors import LiveTensors
from lightning_flops.measure.predicted_memory.stand_ins import as_in_the_run
from lightning_flops.measure.random_state import random_state_kept
from lightning_flops.measure.tensor_lives import CUDA_BLOCK
from lightning_flops.measure.torch_private.needed import new_fake_mode, tree_map_only
from lightning_flops.measure.torch_private.optional import forget_hooks
from lightning_flops.records import PhaseFlops, StepTensors
from lightning_flops.signals import words_of

_MOST_WORDS = 300  # of an error of the model's

_NOT_IN_IT = {
    "aten.mkldnn_rnn_layer.default": (
        "What the CPU's LSTM keeps for its backward in a workspace of its own, as cuDNN's does, is not in it."
    )
}  # sentences by the operators whose memory shapes do not show


class FakeSteps:
    """Training steps of a model as its user runs them, on fake tensors.

    The forward, the loss, the backward, so *accumulate* times; the optimizer's step; then the gradients are dropped.
    What the model returns is dropped when the loss is known, the batch is held all the time.

    Args:
        model: compiled parts of it run eagerly.
        batch: a tuple of positional arguments, a dict of keyword arguments, or the one argument.
        optimizer: made again on fake parameters; None: none.
        loss: from the model's output to a scalar; None: its ``loss``, or the sum of all that it returns.
        autocast: dtype of an autocast around the forward; None: there is none.
        accumulate: forwards and backwards of a step.
        on_cuda: the step is to run on a GPU: optimizers work on all parameters at once there, and the allocator rounds.
        method: what of the model is called with the batch.
        without: methods of the model that do nothing meanwhile.
    """

    def __init__(
        self,
        model: nn.Module,
        batch: Any,
        optimizer: Any,
        *,
        loss: Callable[[Any], torch.Tensor] | None,
        autocast: torch.dtype | None,
        accumulate: int,
        on_cuda: bool,
        method: str = "__call__",
        without: Collection[str] = (),
    ) -> None:
        self._model, self._batch, self._optimizer = unwrapped(model), batch, optimizer
        self._loss, self._autocast, self._accumulate, self._on_cuda = (
            loss or _default_loss,
            autocast,
            accumulate,
            on_cuda,
        )
        self._method, self._without = method, without
        states = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        if lazy := sorted(name for name, tensor in states.items() if is_lazy(tensor)):
            raise LightningFlopsError(
                f"{', '.join(lazy)} of lazy modules have no shapes yet: call the model once before"
            )
        self._own = {id(tensor) for tensor in states.values()}
        self.batch_size = next((one.shape[0] for one in tensors_of(batch) if one.ndim), None)

    def run(self, batch_size: int | None = None, checkpointed: Collection[str] = ()) -> StepTensors:
        """Every allocation of two steps on a batch of this size, by default its own.

        The modules named *checkpointed* are called through ``torch.utils.checkpoint``.

        Raises:
            LightningFlopsError: the step cannot be run without values; the message names the operator and the module.
        """
        counter = FlopCounter(self._model)
        live = LiveTensors(new_fake_mode(), counter.where, block=CUDA_BLOCK if self._on_cuda else 1)
        notes: list[str] = []
        try:
            with random_state_kept(), caches_cleared(live), attributes_put_back(self._model):
                flops = self._run(live, counter, batch_size, checkpointed, notes)
        except Exception as error:
            raise LightningFlopsError(self._words(error, live)) from error
        operators = {life.operator for life in live.storages.lives}
        notes += [words for name, words in _NOT_IN_IT.items() if name in operators]
        return StepTensors(
            lives=live.storages.lives,
            last_forward=live.storages.last_forward,
            flops=flops,
            batch_size=self.batch_size if batch_size is None else batch_size,
            notes=tuple(notes),
        )

    def blocks(self) -> list[tuple[str, ...]]:
        """Names of modules of one class that follow one another in a list, each with modules inside."""
        found = defaultdict[tuple[str, type], list[str]](list)
        for name, module in self._model.named_modules():
            if isinstance(module, (nn.ModuleList, nn.Sequential)):
                for key, child in module.named_children():
                    if next(child.children(), None) is not None:
                        found[name, type(child)].append(f"{name}.{key}" if name else key)
        return [tuple(names) for names in found.values() if len(names) > 1]

    def _run(
        self,
        live: LiveTensors,
        counter: FlopCounter,
        batch_size: int | None,
        checkpointed: Collection[str],
        notes: list[str],
    ) -> PhaseFlops:
        with live.mode, torch.compiler.set_stance("force_eager"):
            parameters = self._parameters(live)
            self._checkpoint(checkpointed)
            vars(self._model).update(dict.fromkeys(self._without, _do_nothing))
            optimizer = self._remade(live, notes)
            batch = tree_map_only(torch.Tensor, partial(self._fake_input, live, batch_size), self._batch)
            live.storages.hold(tensors_of(batch), "batch")
            before = PhaseFlops()
            for _ in range(2):
                before = counter.total()
                with live, counter, as_in_the_run(on_cuda=self._on_cuda):
                    self._forwards(live, counter, batch, parameters)
                    if optimizer is not None and not self._updates(live, counter, optimizer, notes):
                        optimizer = None
                    for one in parameters:
                        one.grad = None
        if live.storages.has_sparse:
            notes.append("Sparse tensors are not counted.")
        return counter.total() - before

    def _forwards(self, live: LiveTensors, counter: FlopCounter, batch: Any, parameters: list[torch.Tensor]) -> None:
        """The forwards and backwards of a step."""
        # Exactly a tuple: a named one is an argument.
        args = batch if type(batch) is tuple else () if isinstance(batch, Mapping) else (batch,)
        kwargs = dict(batch) if isinstance(batch, Mapping) else {}
        for _ in range(self._accumulate):
            live.storages.enter("forward")
            device = "cuda" if any(one.is_cuda for one in parameters) else "cpu"
            with nullcontext() if self._autocast is None else torch.autocast(device, self._autocast), counter.in_root():
                output = getattr(self._model, self._method)(*args, **kwargs)
                loss = self._loss(output)
            del output
            live.storages.leave()
            if loss.requires_grad:
                live.storages.enter("backward")
                loss.backward()  # type: ignore[no-untyped-call]
                live.storages.name_kind((one.grad for one in parameters if one.grad is not None), "gradients")
                live.storages.leave()
            del loss

    def _updates(self, live: LiveTensors, counter: FlopCounter, optimizer: Any, notes: list[str]) -> bool:
        """The optimizer's step; whether it can be made."""
        live.storages.enter("optimizer")
        try:
            with counter.in_optimizer():
                optimizer.step()
        except Exception as error:
            words = f"is left out, as its step fails on fake parameters: {words_of(error)}."
            notes.append(f"{type(optimizer).__name__} {words}")
            return False
        finally:
            live.storages.leave()
        live.storages.name_kind((one for state in optimizer.state.values() for one in tensors_of(state)), "optimizer")
        return True

    # ---- the user's objects as fake ones

    def _parameters(self, live: LiveTensors) -> list[torch.Tensor]:
        """The fake parameters that are trained; with all else that modules have, they are held from here on."""
        modules, found = dict(self._model.named_modules()), dict[int, torch.Tensor]()
        for name, own in put_in(live, self._model):
            others = [one for one in vars(modules[name]).values() if isinstance(one, torch.Tensor)]
            live.storages.hold([*own.values(), *map(live.fake, others)], "parameters", name)
            found |= {id(one): one for one in own.values() if one.requires_grad}
        return list(found.values())

    def _fake_input(self, live: LiveTensors, batch_size: int | None, real: torch.Tensor) -> torch.Tensor:
        """A tensor of the batch, in another batch size where its first axis is the batch."""
        if batch_size is None or not real.ndim or real.shape[0] != self.batch_size:
            return live.fake(real)
        device = "cpu" if real.is_meta else real.device
        fake = torch.empty((batch_size, *real.shape[1:]), dtype=real.dtype, device=device)
        return fake.requires_grad_(real.requires_grad)

    def _remade(self, live: LiveTensors, notes: list[str]) -> Any:
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
                group["params"] = list(map(live.fake, group["params"]))
                if self._on_cuda and not group.get("fused") and group.get("foreach", False) is None:
                    group["foreach"] = True  # what torch chooses on a GPU
            made.param_groups = groups
        except Exception as error:
            notes.append(f"{left_out}: {words_of(error)}.")
            return None
        return made

    def _checkpoint(self, names: Collection[str]) -> None:
        for name, module in named_modules(self._model):
            if name in names:
                vars(module)["forward"] = partial(checkpoint, module.forward, use_reentrant=False)

    def _words(self, error: Exception, live: LiveTensors) -> str:
        """What could not be run, and where."""
        names = {id(module): name or type(module).__name__ for name, module in self._model.named_modules()}
        module, trace = "", error.__traceback__
        while trace is not None:
            module = names.get(id(trace.tb_frame.f_locals.get("self")), module)
            trace = trace.tb_next
        failed, operator = live.failed
        what = f"{operator} in {module}" if failed is error and module else module or type(self._model).__name__
        return f"the step cannot be predicted: {what} fails on tensors without values: {words_of(error)[:_MOST_WORDS]}"


def _do_nothing(*args: Any, **kwargs: Any) -> None:
    """Stands in for a method that would reach beyond the model."""


def _default_loss(output: Any) -> torch.Tensor:
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if isinstance(loss, torch.Tensor):
        return loss.sum() if loss.ndim else loss
    sums = [one.sum() if one.ndim else one for one in tensors_of(output) if one.is_floating_point()]
    if not sums:
        raise LightningFlopsError("the model returns no floating tensor: say what the loss is")
    return sum(sums[1:], sums[0])
