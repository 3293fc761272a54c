"""Fake tensors whose storages are followed from their allocation to the end of their last reference."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from lightning_flops.measure.counting.offline import Fakes, tensors_of
from lightning_flops.records import OUTSIDE, MemoryKind, TensorLife

_ASKS_VALUE = "aten._local_scalar_dense.default"


class LiveTensors(Fakes):  # type: ignore[no-untyped-call]
    """The fake tensors of some training steps.

    Args:
        mode: makes fake tensors.
        where: returns the module and the phase of the operator that has just run.
        block: sizes are rounded up to a multiple of it, as an allocator does.
    """

    def __init__(self, mode: Any, where: Callable[[], tuple[str, str]], *, block: int) -> None:
        super().__init__(mode)
        self._where = where
        self._block = block
        self._events = 0
        self.lives: list[TensorLife] = []
        """Every allocation so far."""
        self._alive: dict[weakref.ref[Any], TensorLife] = {}
        """By their storages."""
        self._part, self._part_began = "", 0
        self._on_cpu: dict[int, torch.Tensor] = {}
        """Fake tensors for those on the meta device, by the ids of these."""
        self.failed: tuple[Exception | None, str] = None, ""
        """What an operator last raised, and its name."""
        self.has_sparse = False
        self.last_forward = 0
        """Number of the event after which the last forward began."""

    # ---- what is held before the step

    def fake(self, real: torch.Tensor) -> torch.Tensor:
        """A fake tensor like *real*, the same one whenever the same is asked for; one on the CPU for a meta tensor."""
        if not real.is_meta:
            return super().fake(real)
        if (known := self._on_cpu.get(id(real))) is None:
            known = torch.empty_strided(real.shape, real.stride(), dtype=real.dtype)
            known = nn.Parameter(known, real.requires_grad) if isinstance(real, nn.Parameter) else known
            self._on_cpu[id(real)] = known.requires_grad_(real.requires_grad)
        return known

    def hold(self, tensors: Iterable[torch.Tensor], kind: MemoryKind, module: str = OUTSIDE) -> None:
        """From here on *tensors* are held, if they were not."""
        for tensor in tensors:
            self._allocated(tensor, kind, module, "")

    # ---- the step

    def begin(self, part: str) -> None:
        """A *part* of the step begins."""
        self._part, self._part_began = part, len(self.lives)
        if part == "forward":
            self.last_forward = self._events

    def end_forward(self) -> None:
        """What the forward made and is still held is kept for the backward; only that can be."""
        for life in self.lives[self._part_began :]:
            life.kind = "temporary" if life.died else "activations"

    def name_kind(self, tensors: Iterable[torch.Tensor], kind: MemoryKind) -> None:
        """Those of *tensors* that this part made are of this *kind*."""
        for tensor in tensors:
            life = self._alive.get(weakref.ref(tensor.untyped_storage()))
            if life is not None and life.part == self._part:
                life.kind = kind

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._part == "optimizer" and str(func) == _ASKS_VALUE:
            return 1 if not args[0].is_floating_point() else 1.0  # its step goes by norms, its memory does not
        try:
            out = super().__torch_dispatch__(func, types, args, kwargs)
        except Exception as error:
            self.failed = error, str(func)
            raise
        module, phase = self._where()
        repeats = self._part == "backward" and phase == "recompute"
        for tensor in tensors_of(out):
            self._allocated(tensor, "activations" if repeats else "temporary", module, str(func))
        return out

    def _allocated(self, tensor: torch.Tensor, kind: MemoryKind, module: str, operator: str) -> None:
        try:
            storage = tensor.untyped_storage()
        except NotImplementedError:  # a sparse tensor has two
            self.has_sparse = True
            return
        if weakref.ref(storage) in self._alive:
            return
        self._events += 1
        size = -(-storage.nbytes() // self._block) * self._block
        life = TensorLife(size=size, born=self._events, part=self._part, module=module, operator=operator, kind=kind)
        self.lives.append(life)
        self._alive[weakref.ref(storage, self._freed)] = life

    def _freed(self, storage: Any) -> None:
        self._events += 1
        self._alive.pop(storage).died = self._events
