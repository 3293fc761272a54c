"""Fake tensors whose storages are followed through the steps that run on them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from lightning_flops.measure.counting.offline import Fakes, tensors_of
from lightning_flops.measure.tensor_lives import TensorLives

_ASKS_VALUE = "aten._local_scalar_dense.default"


class LiveTensors(Fakes):  # type: ignore[no-untyped-call]
    """The fake tensors of some training steps.

    Args:
        mode: makes fake tensors.
        where: returns the module and the phase of the operator that has just run.
        block: as of ``TensorLives``.
    """

    def __init__(self, mode: Any, where: Callable[[], tuple[str, str]], *, block: int) -> None:
        super().__init__(mode)
        self._where = where
        self.storages = TensorLives(block=block)
        self._on_cpu: dict[int, torch.Tensor] = {}  # fakes of tensors on the meta device, by the ids of these
        self.failed: tuple[Exception | None, str] = None, ""  # what an operator last raised, and its name

    def fake(self, real: torch.Tensor) -> torch.Tensor:
        """A fake tensor like *real*, the same one whenever the same is asked for; one on the CPU for a meta tensor."""
        if not real.is_meta:
            return super().fake(real)
        if (known := self._on_cpu.get(id(real))) is None:
            known = torch.empty_strided(real.shape, real.stride(), dtype=real.dtype)
            known = nn.Parameter(known, real.requires_grad) if isinstance(real, nn.Parameter) else known
            self._on_cpu[id(real)] = known.requires_grad_(real.requires_grad)
        return known

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.storages.part == "optimizer" and str(func) == _ASKS_VALUE:
            return 1 if not args[0].is_floating_point() else 1.0  # its step goes by norms, its memory does not
        try:
            out = super().__torch_dispatch__(func, types, args, kwargs)
        except Exception as error:
            self.failed = error, str(func)
            raise
        self.storages.ran(str(func), *self._where(), tensors_of(out))
        return out
