"""Storages of a step's tensors, followed from their allocation to the end of their last reference."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from itertools import count
from typing import Any

import torch

from lightning_flops.records import OUTSIDE, MemoryKind, TensorLife

CUDA_BLOCK = 512  # bytes, to which CUDA's caching allocator rounds sizes up; the CPU's gives what is asked for


class TensorLives:
    """Every storage that was there before a step, or was made in it.

    Weak references show when one is freed, on whatever thread that is: nothing here keeps a tensor.

    Args:
        block: sizes are rounded up to a multiple of it, as an allocator does.
        device_type: whose storages are followed; None: those of every device.
    """

    def __init__(self, *, block: int = 1, device_type: str | None = None) -> None:
        self._block, self._device_type = block, device_type
        self._events = count(1)
        self._now = 0  # number of the last event
        self._alive: dict[weakref.ref[Any], TensorLife] = {}  # by their storages
        self._parts: list[tuple[str, int]] = [("", 0)]  # name, and number of the event before it, of all that run
        self._before_forward = 0  # lives before the last forward
        self.lives: list[TensorLife] = []  # every allocation so far
        self.has_sparse = self.has_unseen = False  # what no operator that is seen allocates is not in it
        self.last_forward = 0  # number of the event after which the last forward began

    @property
    def part(self) -> str:
        """The part of the step that runs."""
        return self._parts[-1][0]

    def enter(self, part: str) -> None:
        """A *part* of the step begins, inside whatever part is running."""
        self._parts.append((part, self._now))
        if part == "forward":
            self.last_forward, self._before_forward = self._now, len(self.lives)
        elif part == "backward":
            self._keep()

    def leave(self) -> None:
        """The part entered last ends."""
        if self._parts.pop()[0] == "forward":
            self._keep()

    def _keep(self) -> None:
        """What a forward, or a loss behind it, made and is still held is kept for the backward."""
        for life in self.lives[self._before_forward :]:
            if life.kind == "temporary" and life.died is None:
                life.kind = "activations"

    def hold(self, tensors: Iterable[Any], kind: MemoryKind, module: str = OUTSIDE, *, born: int | None = None) -> None:
        """*tensors* are held, if they were not: since an event, or from here on."""
        for tensor in tensors:
            self._add(tensor, kind, module, "", born)

    def name_kind(self, tensors: Iterable[torch.Tensor], kind: MemoryKind) -> None:
        """What a step has made of *tensors*, and what seemed temporary, is of this *kind*."""
        for tensor in tensors:
            storage = self._storage(tensor)
            life = None if storage is None else self._alive.get(weakref.ref(storage))
            if life is not None and life.kind == "temporary":
                life.kind = kind

    def ran(self, operator: str, module: str, phase: str, made: Iterable[Any]) -> None:
        """An *operator* in the code of *module* has *made* these."""
        repeats = self.part == "backward" and phase == "recompute"
        for tensor in made if self.lives else ():  # a step is followed once something is held
            self._add(tensor, "activations" if repeats else "temporary", module, operator)

    def read(self, tensors: Iterable[Any]) -> None:
        """What an operator reads that nothing here knows was there before: an optimizer's state, or the batch."""
        part, began = self._parts[-1]
        if part == "optimizer" and self.lives:
            self.hold(tensors, "optimizer", born=0)
        elif part in ("forward", "") and self.lives:  # a loss may stand behind the forward
            self.hold(tensors, "batch", born=began)

    def resized(self) -> bool:
        """Whether a storage that is still held has another size now."""
        held = [(reference(), life) for reference, life in list(self._alive.items())]
        return any(storage is not None and self._size(storage) != life.size for storage, life in held)

    def _add(self, tensor: Any, kind: MemoryKind, module: str, operator: str, born: int | None = None) -> None:
        storage = self._storage(tensor)
        if storage is None or weakref.ref(storage) in self._alive:
            return
        self._now = next(self._events)
        at, size = self._now if born is None else born, self._size(storage)
        life = TensorLife(size=size, born=at, part=self.part, module=module, operator=operator, kind=kind)
        self.lives.append(life)
        self._alive[weakref.ref(storage, self._freed)] = life

    def _storage(self, tensor: Any) -> Any:
        """A tensor's storage, if it has one, and on a device that is followed."""
        try:
            storage = tensor.untyped_storage()
        except (NotImplementedError, RuntimeError, ValueError):  # a sparse tensor has two, a lazy parameter none yet
            self.has_sparse |= tensor.layout is not torch.strided
            return None
        return storage if self._device_type in (None, storage.device.type) else None

    def _size(self, storage: Any) -> int:
        return int(-(-storage.nbytes() // self._block) * self._block)

    def _freed(self, storage: Any) -> None:
        self._now = next(self._events)
        self._alive.pop(storage).died = self._now
