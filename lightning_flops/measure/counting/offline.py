"""Counts a model's training step on fake tensors: shapes without the work."""

from __future__ import annotations

import functools
import gc
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from lightning_flops.errors import LightningFlopsError
from lightning_flops.measure.counting.flop_counter import CausalAttention, FlopCounter
from lightning_flops.measure.torch_private.needed import DispatchMode, new_fake_mode, push, remove, tree_map_only
from lightning_flops.measure.torch_private.optional import put_tensors
from lightning_flops.records import FlopRecord


def count_on_fake_tensors(model: nn.Module, batch: Any, *, causal_attention: CausalAttention = "full") -> FlopRecord:
    """FLOPs of one eager forward of *model* on a batch of these shapes, and of the backward of all that it puts out.

    Neither the model nor the random state is touched, no memory is taken, and compiled modules run eagerly. What the
    forward keeps in attributes of modules is put back, and a ``functools.lru_cache`` that holds a fake tensor is
    cleared; what it keeps elsewhere is not put back.

    Args:
        model: its parameters' shapes, dtypes and devices are what counts.
        batch: a tuple of positional arguments, a dict of keyword arguments, or the one argument (a named tuple is one).
        causal_attention: as for ``FlopCounter``.

    Raises:
        LightningFlopsError: a lazy module has no shapes yet.
        Exception: whatever the model raises where its forward needs values: fake tensors have none.
    """
    counter = FlopCounter(model, causal_attention=causal_attention)
    states = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))
    lazy = sorted(name for name, tensor in states.items() if is_lazy(tensor))
    if lazy:
        raise LightningFlopsError(
            f"count_offline needs the shapes of all parameters, and {', '.join(lazy)} of lazy modules have none yet: "
            "call the model once before"
        )
    fakes = Fakes(new_fake_mode())
    with caches_cleared(fakes), attributes_put_back(model):
        _run(fakes, counter, model, batch)
    return counter.record()


class Fakes(DispatchMode):  # type: ignore[no-untyped-call]
    """Entered above *mode*: knows which of its fake tensors are still held, and shapes that torch refuses to give."""

    supports_higher_order_operators = True

    def __init__(self, mode: Any) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.mode = mode
        self.answers: dict[str, Callable[..., Any]] = {"aten._grouped_mm.default": _grouped_product}
        """By operator, what is called in its place."""
        self.held: weakref.WeakValueDictionary[int, torch.Tensor] = weakref.WeakValueDictionary()
        """By their ids."""
        self._of_meta: dict[int, torch.Tensor] = {}
        """Fakes of tensors on the meta device, by the ids of these."""

    def __enter__(self) -> None:
        push(self)

    def __exit__(self, *exc: object) -> None:
        remove(self)

    def fake(self, real: torch.Tensor) -> torch.Tensor:
        """A fake tensor like *real*, the same one whenever the same is asked for: tied weights stay tied.

        One on the meta device has a fake one on the CPU, whose kernels are then those of a real model.
        """
        if real.is_meta and id(real) not in self._of_meta:
            like = torch.empty_strided(real.shape, real.stride(), dtype=real.dtype, device="cpu")
            made: torch.Tensor = nn.Parameter(like, real.requires_grad) if isinstance(real, nn.Parameter) else like
            self._of_meta[id(real)] = made.requires_grad_(real.requires_grad)
        fake: torch.Tensor = self._of_meta[id(real)] if real.is_meta else self.mode.from_tensor(real)
        self.held[id(fake)] = fake
        return fake

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = self.answers.get(str(func), func)(*args, **(kwargs or {}))
        self.held.update((id(one), one) for one in tensors_of(out))
        return out


def _grouped_product(first: torch.Tensor, second: torch.Tensor, offs: Any = (), *rest: Any) -> torch.Tensor:
    """``_grouped_mm``'s result: torch's own shape function takes bfloat16 alone, its kernels take other dtypes."""
    groups = [len(offs)] if second.dim() == 2 else first.shape[:-2]
    return first.new_empty([*(groups if first.dim() == second.dim() else ()), first.shape[-2], second.shape[-1]])


def put_in(fakes: Fakes, model: nn.Module) -> Iterator[tuple[str, dict[str, torch.Tensor]]]:
    """Each module's name, and its own parameters and buffers as fake tensors, with which it computes from now on.

    Not only in its forward: a backward that repeats a forward looks them up again. ``attributes_put_back`` ends it.
    """
    for name, module in model.named_modules():
        own = {**dict(module.named_parameters(recurse=False)), **dict(module.named_buffers(recurse=False))}
        made = {key: fakes.fake(tensor) for key, tensor in own.items()}
        put_tensors(module, made)
        yield name, made


def _run(fakes: Fakes, counter: FlopCounter, model: nn.Module, batch: Any) -> None:
    """Runs the forward and the backward on fake tensors, under *counter*; keeps none of them."""
    with fakes.mode, fakes, torch.compiler.set_stance("force_eager"):
        for _ in put_in(fakes, model):
            pass
        inputs = tree_map_only(torch.Tensor, fakes.fake, batch)
        with counter:
            output = called(model, inputs)
            roots = [tensor for tensor in tensors_of(output) if tensor.requires_grad]
            if roots:
                torch.autograd.backward(roots, [torch.ones_like(root) for root in roots])


def called(function: Callable[..., Any], batch: Any) -> Any:
    """What *function* returns for *batch*: a tuple of arguments, a dict of them by name, or the one argument."""
    if isinstance(batch, Mapping):
        return function(**batch)
    # Exactly a tuple: a named one, such as a PackedSequence, is an argument.
    return function(*batch) if type(batch) is tuple else function(batch)


def tensors_of(output: Any, depth: int = 3) -> Iterator[torch.Tensor]:
    """The tensors in a module's output, a few containers deep."""
    if isinstance(output, torch.Tensor):
        yield output
    elif depth and isinstance(output, (list, tuple, Mapping)):
        for item in output.values() if isinstance(output, Mapping) else output:
            yield from tensors_of(item, depth - 1)


@contextmanager
def attributes_put_back(model: nn.Module) -> Iterator[None]:
    """Afterwards every module has the attributes it had before, and their plain containers hold what they held.

    A forward may keep what it computes, such as a rotary table, with which the next real one computes.
    """
    plain = (dict, OrderedDict, list, set)
    before = [
        (vars(module), dict(vars(module)), [(one, one.copy()) for one in vars(module).values() if type(one) in plain])
        for module in model.modules()
        if not isinstance(module, torch.jit.ScriptModule)
    ]
    try:
        yield
    finally:
        for attributes, kept, containers in before:
            attributes.clear()
            attributes.update(kept)
            for container, held in containers:
                container.clear()
                container.extend(held) if isinstance(container, list) else container.update(held)


@contextmanager
def caches_cleared(fakes: Fakes) -> Iterator[None]:
    """Afterwards no ``functools.lru_cache`` holds one of these fake tensors, with which the next real forward computes.

    Only a walk through all objects of this process finds such a cache, so it is made only where a fake tensor is left.
    """
    try:
        yield
    finally:
        for cache in gc.get_objects() if fakes.held else ():
            if type(cache) is functools._lru_cache_wrapper and any(
                getattr(tensor, "fake_mode", None) is fakes.mode
                for held in gc.get_referents(cache)
                for tensor in tensors_of(held)
            ):
                cache.cache_clear()
