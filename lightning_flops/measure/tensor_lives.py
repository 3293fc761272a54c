"""Storages of a step's tensors, followed from their allocation to the end of their last reference."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from copy import copy
from itertools import count
from typing import Any

import torch
from torch import nn

from lightning_flops.measure.torch_private.optional import on_this_rank
from lightning_flops.records import OUTSIDE, MemoryKind, PhaseFlops, StepTensors, TensorLife

_CUDA_BLOCK = 512  # bytes, to which CUDA's caching allocator rounds sizes up; the CPU's gives what is asked for

_READ_FIRST: dict[str, MemoryKind] = {"optimizer": "optimizer", "forward": "batch", "": "batch"}
"""By part, what a tensor is for that an operator reads there and nothing has shown before: a loss may stand behind the
forward."""


class TensorLives:
    """Every storage that was there before a step, or was made in it.

    Weak references show when one is freed, on whatever thread that is: nothing here keeps a tensor.

    Args:
        on_cuda: sizes are rounded up, as CUDA's allocator does.
        device_type: whose storages are followed; None: those of every device.
    """

    def __init__(self, *, on_cuda: bool = False, device_type: str | None = None) -> None:
        self._block, self._device_type = _CUDA_BLOCK if on_cuda else 1, device_type
        self._events = count(1)
        self._now = 0  # number of the last event
        self._alive: dict[weakref.ref[Any], TensorLife] = {}  # by their storages
        self.parts: list[tuple[str, int]] = [("", 0)]  # name, and number of the event before it, of all that run
        self._lives: list[TensorLife] = []  # every allocation so far
        self._before_forward = 0  # lives before the last forward
        self._has_sparse = False
        self.has_unseen = False  # what no operator that is seen allocates is not in it

    def enter(self, part: str) -> None:
        """A *part* of the step begins, inside whatever part is running."""
        self.parts.append((part, self._now))
        if part == "forward":
            self._before_forward = len(self._lives)
        elif part == "backward":
            self._keep()

    def leave(self) -> None:
        """The part entered last ends."""
        if self.parts.pop()[0] == "forward":
            self._keep()

    def _keep(self) -> None:
        """What a forward, or a loss behind it, made and is still held is kept for the backward."""
        for life in self._lives[self._before_forward :]:
            if life.kind == "temporary" and life.died is None:
                life.kind = "activations"

    def hold(self, tensors: Iterable[Any], kind: MemoryKind, *, born: int | None = None) -> None:
        """*tensors* are of this *kind*. Those that nothing has shown are held since an event, or from here on."""
        for tensor in tensors:
            life = self._life(tensor, kind, born=born)
            if life is not None and life.kind == "temporary":
                life.kind = kind

    def ran(self, operator: str, module: str, phase: str, reads: Iterable[Any], made: Iterable[Any]) -> None:
        """An *operator* in the code of *module* has *made* some tensors.

        What it *reads* that nothing here knows was there before: an optimizer's state, or the batch.
        """
        part, began = self.parts[-1]
        before = _READ_FIRST.get(part)
        if not self._lives:  # a step is followed once something is held
            return
        if before is not None:
            for tensor in reads:
                self._life(tensor, before, born=0 if part == "optimizer" else began)
        for tensor in made:
            repeats = part == "backward" and phase == "recompute"
            self._life(tensor, "activations" if repeats else "temporary", module, operator)

    def resized(self, storage: Any) -> None:
        """*storage*, of a parameter that FSDP gathers, has other bytes from now on, or none."""
        life = self._alive.pop(weakref.ref(storage), None)
        if life is not None:
            self._now = life.died = next(self._events)
        self._begin(storage, "parameters")

    def taken(self, states: Iterable[Any], flops: PhaseFlops, batch_size: int | None) -> StepTensors | None:
        """Every allocation; None where some cannot be seen, as of compiled graphs, or storages that change their sizes.

        *states* are an optimizer's, the rest is as there.
        """
        self.hold(states, "optimizer", born=0)
        held = [(reference(), life) for reference, life in list(self._alive.items())]
        resized = any(storage is not None and self._size(storage) != life.size for storage, life in held)
        if self.has_unseen or resized or not self._lives:
            return None
        return StepTensors(
            lives=list(map(copy, self._lives)),  # what is freed from here on, on whatever thread, is none of the step's
            before_forward=self._before_forward,
            flops=flops,
            batch_size=batch_size,
            notes=("Sparse tensors are not counted.",) * self._has_sparse,
        )

    def _life(
        self, tensor: Any, kind: MemoryKind, module: str = OUTSIDE, operator: str = "", born: int | None = None
    ) -> TensorLife | None:
        """The life of a tensor's storage, which begins if nothing has shown it; None: it has none that is followed."""
        try:
            storage = tensor.untyped_storage()
        except (NotImplementedError, RuntimeError, ValueError):  # a sparse tensor has two, a lazy parameter none yet
            self._has_sparse |= tensor.layout is not torch.strided
            return None
        if self._device_type not in (None, storage.device.type):
            return None
        known = self._alive.get(weakref.ref(storage))
        return known or self._begin(storage, kind, module, operator, born)

    def _begin(
        self, storage: Any, kind: MemoryKind, module: str = OUTSIDE, operator: str = "", born: int | None = None
    ) -> TensorLife:
        self._now = next(self._events)
        at, size = self._now if born is None else born, self._size(storage)
        life = TensorLife(size=size, born=at, part=self.parts[-1][0], module=module, operator=operator, kind=kind)
        self._lives.append(life)
        self._alive[weakref.ref(storage, self._freed)] = life
        return life

    def _size(self, storage: Any) -> int:
        return int(-(-storage.nbytes() // self._block) * self._block)

    def _freed(self, storage: Any) -> None:
        self._now = next(self._events)
        self._alive.pop(storage).died = self._now


def gradients_of(model: nn.Module) -> list[torch.Tensor]:
    """What this rank holds of the gradients of *model*'s parameters that are made."""
    return [on_this_rank(one.grad) for one in model.parameters() if one.grad is not None]
