"""Memory by phase of the counted step, and its use: read where a phase begins and ends, without a synchronization.

On CUDA we read the caching allocator's own statistics. They are kept on the host, so they are as of the launch, which
is when memory is taken and given back. Its peaks are since the process began, or since the user reset them. We do not
reset them, because that would change what the user reads later. On other devices we read the process's resident memory.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from lightning_flops.measure.optimizer_hooks import with_inner
from lightning_flops.measure.torch_private.optional import on_this_rank
from lightning_flops.records import MemoryRecord

_ZERO_3_UPDATES = "fp32_partitioned_groups_flat"
"""Where DeepSpeed's ZeRO-3 optimizer keeps the tensors that it updates: the shards themselves, or copies of them."""

_PHASES = ("forward", "backward", "optimizer")
"""The parts of a step that a report shows."""


class MemoryReading(NamedTuple):
    """Memory held now, the most that ever was, and the most that an allocator ever took, in bytes; None: not known."""

    current: int | None
    peak: int | None
    reserved_peak: int | None = None


class MemoryWatch:
    """Follows the parts of one step.

    *read* reads the memory that is held now, exactly where it is *on_device*, as an allocator's statistics have it.
    """

    def __init__(self, root: nn.Module, *, read: Callable[[], MemoryReading], on_device: bool) -> None:
        self._root, self._read, self._on_device = root, read, on_device
        self._open: list[tuple[str | None, int | None]] = []
        """Each part that is running, None for one without an end of its own, and what was held when it began."""
        self._held: dict[str, int | None] = {}
        """What each phase held when it ended."""
        self._kept: int | None = None
        self._gradients = 0

    def enter(self, part: str, *, counts: bool = True) -> None:
        """*part* begins, inside whatever part is running.

        An optimizer's part that is no update (not *counts*) has no end of its own: Lightning drops the gradients
        between the forward and the backward.
        """
        self._open.append((part if counts or part != "optimizer" else None, self._read().current))

    def leave(self) -> None:
        """The part entered last ends."""
        if not self._open:
            return
        now, (part, before) = self._read().current, self._open.pop()
        if part is not None:
            self._held[part] = _larger(self._held.get(part), now)
        if part == "forward" and self._on_device and now is not None and before is not None:
            self._kept = _larger(self._kept, now - before)
        if part == "backward":
            self._gradients = max(self._gradients, _bytes(one.grad for one in self._root.parameters()))

    def record(self, *, optimizers: Iterable[Any] | None) -> MemoryRecord | None:
        """What was measured, with the current bytes of the model's and the optimizers' own tensors.

        None if no part was followed. The optimizers are torch's or wrappers of such; None if not known.
        """
        if not self._held:
            return None
        _, peak, reserved_peak = self._read()
        return MemoryRecord(
            kind="allocated" if self._on_device else "resident",
            held_bytes={name: self._held[name] for name in _PHASES if name in self._held},
            run_peak_bytes=peak,
            run_reserved_peak_bytes=reserved_peak,
            parameter_bytes=_bytes(self._root.parameters()),
            buffer_bytes=_bytes(self._root.buffers()),
            gradient_bytes=self._gradients or None,
            optimizer_bytes=None if optimizers is None else _optimizer_bytes(self._root, optimizers),
            kept_by_forward_bytes=self._kept,
        )


def memory_reader(device: torch.device) -> Callable[[], MemoryReading]:
    """A function that reads the memory that this process uses for training on *device*."""
    if device.type == "cuda":
        names = ("allocated_bytes.all.current", "allocated_bytes.all.peak", "reserved_bytes.all.peak")
        # Of an allocator that is not torch's own, the statistics may be empty.
        return lambda: MemoryReading(*map(torch.cuda.memory_stats(device).get, names))
    return _of_process


def _of_process() -> MemoryReading:
    """Resident memory; None on a system that is no Linux."""
    try:
        status = Path("/proc/self/status").read_text(encoding="ascii", errors="replace")
        kilobytes = dict(re.findall(r"^(VmRSS|VmHWM):\s+(\d+) kB", status, re.MULTILINE))
        current, peak = (1024 * int(kilobytes[name]) for name in ("VmRSS", "VmHWM"))
    except (OSError, KeyError):
        return MemoryReading(None, None)
    return MemoryReading(current, max(peak, current))  # the system's peak may lag behind


def _larger(one: int | None, other: int | None) -> int | None:
    return max((value for value in (one, other) if value is not None), default=None)


# ---- bytes of tensors


def _bytes(tensors: Iterable[torch.Tensor | None]) -> int:
    """Bytes of this rank's part of *tensors*; each tensor counts once."""
    local = {id(tensor): on_this_rank(tensor) for tensor in tensors if tensor is not None}.values()
    return sum(0 if is_lazy(tensor) else tensor.numel() * tensor.element_size() for tensor in local)


def _storage(tensor: torch.Tensor) -> object:
    """A key that is equal for two tensors with the same memory."""
    try:
        return on_this_rank(tensor).untyped_storage().data_ptr() or id(tensor)
    except (RuntimeError, ValueError, NotImplementedError):  # a lazy parameter, a subclass without a storage
        return id(tensor)


def _optimizer_bytes(root: nn.Module, optimizers: Iterable[Any]) -> int | None:
    """Bytes of the optimizers' states, and of their own copies of parameters; None if one of them cannot be read."""
    own = {_storage(parameter) for parameter in root.parameters()}
    tensors: list[torch.Tensor] = []
    for optimizer in optimizers:
        inner = with_inner(optimizer)[-1]
        state, groups = getattr(inner, "state", None), getattr(inner, "param_groups", None)
        if not isinstance(state, Mapping) or groups is None:
            return None
        tensors += _tensors_in(list(state.values()))
        # ZeRO-3 gives its optimizer only one of them at a time, during the update.
        updated = _tensors_in([[group["params"] for group in groups], getattr(optimizer, _ZERO_3_UPDATES, None)])
        tensors += [one for one in updated if _storage(one) not in own]
    return _bytes(tensors)


def _tensors_in(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (Mapping, list, tuple)):
        for inner in value.values() if isinstance(value, Mapping) else value:
            yield from _tensors_in(inner)
