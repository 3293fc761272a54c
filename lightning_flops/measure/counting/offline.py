"""Counts a model's training step on fake tensors, shapes without the work, for a batch or others of other sizes."""

from __future__ import annotations

import functools
import gc
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from lightning_flops.errors import ConfigError, LightningFlopsError
from lightning_flops.measure.batches import held_in
from lightning_flops.measure.counting.flop_counter import CausalAttention, FlopCounter
from lightning_flops.measure.torch_private.needed import DispatchMode, new_fake_mode, tree_map_only
from lightning_flops.measure.torch_private.optional import put_tensors
from lightning_flops.records import FlopRecord
from lightning_flops.units import shown


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
    counter, fakes = FlopCounter(model, causal_attention=causal_attention), Fakes(new_fake_mode())
    refuse_lazy(model)
    with caches_cleared(fakes), attributes_put_back(model):
        _run(fakes, counter, model, batch)
    return counter.record()


def refuse_lazy(model: nn.Module) -> None:
    """Raise a LightningFlopsError if a module of *model* gets its parameters in its first call."""
    states = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))
    if lazy := sorted(name for name, tensor in states.items() if is_lazy(tensor)):
        raise LightningFlopsError(f"{', '.join(lazy)} of lazy modules have no shapes yet: call the model once before")


class Fakes(DispatchMode):  # type: ignore[no-untyped-call]
    """Entered above *mode*: knows which of its fake tensors are still held, and shapes that torch refuses to give."""

    def __init__(self, mode: Any) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.mode = mode
        #: By operator, what is called in its place.
        self.answers: dict[str, Callable[..., Any]] = {"aten._grouped_mm.default": _grouped_product}
        self.held: weakref.WeakValueDictionary[int, torch.Tensor] = weakref.WeakValueDictionary()  #: By their ids.
        self._of_meta: dict[int, torch.Tensor] = {}  #: Fakes of tensors on the meta device, by the ids of these.

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
        dict(put_in(fakes, model))
        inputs = tree_map_only(torch.Tensor, fakes.fake, batch)
        with counter:
            roots = [tensor for tensor in tensors_of(called(model, inputs)) if tensor.requires_grad]
            if roots:
                torch.autograd.backward(roots, [torch.ones_like(root) for root in roots])


def called(function: Callable[..., Any], batch: Any) -> Any:
    """What *function* returns for *batch*: a tuple of arguments, a dict of them by name, or the one argument."""
    if isinstance(batch, Mapping):
        return function(**batch)
    # Exactly a tuple: a named one, such as a PackedSequence, is an argument.
    return function(*batch) if type(batch) is tuple else function(batch)


def tensors_of(output: Any) -> Iterator[torch.Tensor]:
    """The tensors in a module's output, a few containers deep."""
    return (one for one in held_in(output, 3) if isinstance(one, torch.Tensor))


@contextmanager
def attributes_put_back(model: nn.Module, *others: Any) -> Iterator[None]:
    """Afterwards every module, and each of *others*, has the attributes it had, and plain ones hold what they held.

    A forward may keep what it computes, such as a rotary table, with which the next real one computes.
    """
    plain = (dict, OrderedDict, list, set)
    before = [
        (vars(owner), dict(vars(owner)), [(one, one.copy()) for one in vars(owner).values() if type(one) in plain])
        for owner in (*model.modules(), *others)
        if hasattr(owner, "__dict__") and not isinstance(owner, torch.jit.ScriptModule)
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


Key = str | int  #: Of a tensor in the batch: the name of an argument, or its position.

Vary = Mapping[Key, "Sequence[int] | Mapping[int, str]"]


def _arguments_of(batch: Any) -> dict[Key, Any]:
    if isinstance(batch, Mapping):
        return dict(batch)
    return dict(enumerate(batch if type(batch) is tuple else (batch,)))


class VariedBatch:
    """A batch whose sizes can be changed.

    Args:
        batch: a tuple of positional arguments, a dict of keyword arguments, or the one argument.
        vary: by tensor, the axes that vary, or their names by axis. Axes of one name are of one size.

    Raises:
        ConfigError: a tensor or an axis is not there, or axes of one name have different sizes.
    """

    def __init__(self, batch: Any, vary: Vary) -> None:
        self._batch = batch
        self._arguments = _arguments_of(batch)
        tensors = {key: one for key, one in self._arguments.items() if isinstance(one, torch.Tensor)}
        self.sizes: dict[str, int] = {}  # each variable's size in the batch
        self.batch_names: set[str] = set()  # variables that are the first axis of a tensor: samples
        if not isinstance(vary, Mapping) or not vary:
            raise ConfigError(f"vary must be a mapping from a tensor of the batch to its axes, got {shown(vary)}")
        if unknown := [key for key in vary if key not in tensors]:
            known = ", ".join(f"{key} (by position)" if isinstance(key, int) else shown(key) for key in tensors)
            raise ConfigError(f"vary names {shown(unknown[0])}; the batch's tensors are {known or 'hidden'}")
        given = {key: self._named_axes(key, tensors[key], axes) for key, axes in vary.items()}
        named = {(axis, self.sizes[name]): name for axes in given.values() for axis, name in axes.items()}
        # Axes that the user did not name go with those that he did, where they agree in place and size.
        self._axes = {
            key: {place[0]: named[place] for place in enumerate(tensor.shape) if place in named} | given.get(key, {})
            for key, tensor in tensors.items()
        }

    @classmethod
    def like(cls, batch: Any, at: Mapping[str, int]) -> Any:
        """*batch* in the sizes of *at*, by the names that the axes of its first tensor have if none are named.

        Raises:
            ConfigError: no axis has such a name.
        """
        axes = [(key, range(one.ndim)) for key, one in _arguments_of(batch).items() if isinstance(one, torch.Tensor)]
        varied = cls(batch, dict(axes[:1]))
        if unknown := sorted({*at} - {*varied.sizes}):
            raise ConfigError(f"at must be by size of the batch, {', '.join(varied.sizes)}, got {', '.join(unknown)}")
        return varied.resized(varied.sizes | dict(at))

    def _named_axes(self, key: Key, tensor: torch.Tensor, axes: object) -> dict[int, str]:
        """The *axes* of one tensor that the user gave, with their names."""
        if not isinstance(axes, Iterable) or isinstance(axes, str):
            raise ConfigError(f"vary[{shown(key)}] must be axes, or a mapping from axes to names, got {shown(axes)}")
        usual = ("batch", "axis_1", "height", "width") if tensor.ndim == 4 else ("batch", "sequence")
        found: dict[int, str] = {}
        for axis in axes:
            if type(axis) is not int or not 0 <= axis < tensor.ndim:
                raise ConfigError(f"vary names axis {shown(axis)} of {shown(key)}, which has {tensor.ndim} axes")
            name = axes[axis] if isinstance(axes, Mapping) else usual[axis] if axis < len(usual) else f"axis_{axis}"
            size = int(tensor.shape[axis])
            if not isinstance(name, str):
                raise ConfigError(f"vary must name axis {axis} of {shown(key)} by a text, got {shown(name)}")
            if self.sizes.setdefault(name, size) != size:
                raise ConfigError(
                    f"vary has axes of sizes {self.sizes[name]} and {size} that are both named {name}: "
                    f"name them, as in vary={{{key!r}: {{{axis}: 'another name'}}}}"
                )
            found[axis] = name
            self.batch_names |= {name} if axis == 0 else set()
        return found

    def resized(self, sizes: Mapping[str, int]) -> Any:
        """The batch in these *sizes*; what its tensors hold is not set."""
        arguments = dict(self._arguments)
        made: dict[Any, torch.Tensor] = {}  # one tensor in several places stays one
        for key, axes in self._axes.items():
            if axes:
                tensor = self._arguments[key]
                wanted = [sizes[axes[axis]] if axis in axes else size for axis, size in enumerate(tensor.shape)]
                new = tensor.new_empty(wanted).requires_grad_(tensor.requires_grad)
                arguments[key] = made.setdefault((id(tensor), *wanted), new)
        if isinstance(self._batch, Mapping):
            return arguments
        values = tuple(arguments.values())
        return values if type(self._batch) is tuple else values[0]
