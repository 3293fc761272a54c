"""Memory by phase of the counted step, and its use: read where a phase begins and ends, without a synchronization.

On CUDA we read the caching allocator's own statistics. They are kept on the host, so they are as of the launch, which
is when memory is taken and given back. Its peaks are since the process began, or since the user reset them. We do not
reset them, because that would change what the user reads later. On other devices we read the process's resident memory.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from lightning_flops.measure.module_hooks import with_inner
from lightning_flops.measure.tensor_lives import TensorLives, gradients_of
from lightning_flops.measure.torch_private.needed import tree_leaves
from lightning_flops.measure.torch_private.optional import on_this_rank
from lightning_flops.records import MemoryRecord, PhaseFlops, StepRecord, StepTensors
from lightning_flops.signals import Quiet

_ZERO_3_UPDATES = "fp32_partitioned_groups_flat"
# Where DeepSpeed's ZeRO-3 optimizer keeps the tensors that it updates: the shards themselves, or copies of them.
_PHASES = ("forward", "backward", "optimizer")  # the parts of a step that a report shows

_FOR_TENSORS = 0.9  # of a device's memory: the rest is for workspaces, buffers of NCCL and fragmentation


class MemoryReading(NamedTuple):
    """Memory held now, the most that ever was, and the most that an allocator ever took, in bytes; None: not known."""

    current: int | None
    peak: int | None
    reserved_peak: int | None = None


class MemoryWatch(TensorLives):
    """Follows the parts of one step, and, where a counter has it, the storages of its tensors.

    *read* reads the memory that is held now, exactly where it is *on_device*, as an allocator's statistics have it.
    """

    def __init__(self, root: nn.Module, *, read: Callable[[], MemoryReading], on_device: bool) -> None:
        super().__init__(on_cuda=on_device, device_type="cuda" if on_device else None)
        self._root, self._read, self._on_device = root, read, on_device
        self._peak: int | None = None  # the most that was held until now
        self._grew_in: str | None = None  # the part in which that last grew
        # Each part that is running, None for one without an end of its own, and what was held when it began.
        self._open: list[tuple[str | None, int | None]] = []
        self._held: dict[str, int | None] = {}  # what each phase held when it ended
        self._kept: int | None = None
        self._gradients = 0

    def enter(self, part: str, *, counts: bool = True) -> None:
        """*part* begins, inside whatever part is running.

        An optimizer's part that is no update (not *counts*) has no end of its own: Lightning drops the gradients
        between the forward and the backward.
        """
        now = self._look()
        if not self._lives:
            self.hold(map(on_this_rank, (*self._root.parameters(), *self._root.buffers())), "parameters", born=0)
            self.hold(gradients_of(self._root), "gradients", born=0)
        super().enter(part)
        self._open.append((part if counts or part != "optimizer" else None, now))

    def leave(self) -> None:
        """The part entered last ends."""
        if not self._open:
            return
        now, (part, before) = self._look(), self._open.pop()
        super().leave()
        if part is not None:
            self._held[part] = None if now is None else max(now, self._held.get(part) or 0)
        if part == "forward" and self._on_device and now is not None and before is not None:
            self._kept = max(now - before, self._kept or 0)
        if part == "backward":
            made = gradients_of(self._root)
            self.hold(made, "gradients")
            self._gradients = max(self._gradients, _bytes(made))

    def _look(self) -> int | None:
        """What is held now; the part that is running gets what the peak has grown by."""
        now, peak, _ = self._read()
        if peak is not None and self._peak is not None and peak > self._peak and self._open:
            self._grew_in = self.parts[-1][0]
        self._peak = peak
        return now

    def tensors(self, *, optimizers: Iterable[Any] | None, step: StepRecord, samples: int | None) -> StepTensors | None:
        """Every allocation of *step*; None where some cannot be seen, as of compiled graphs or FSDP's own storages."""
        states = [getattr(with_inner(one)[-1], "state", None) for one in optimizers or ()]
        taken = self.taken(map(on_this_rank, _tensors_in(states)), step.flops or PhaseFlops(), samples)
        return taken and replace(taken, available_bytes=_available(self._root) if self._on_device else None)

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
            peak_grew_in=self._grew_in,
        )


def memory_reader(device: torch.device) -> Callable[[], MemoryReading]:
    """A function that reads the memory that this process uses for training on *device*."""
    if device.type == "cuda":
        names = ("allocated_bytes.all.current", "allocated_bytes.all.peak", "reserved_bytes.all.peak")
        # Of an allocator that is not torch's own, the statistics may be empty.
        return lambda: MemoryReading(*map(torch.cuda.memory_stats(device).get, names))
    return _of_process


def _available(root: nn.Module) -> int:
    """Bytes of the model's device that this process has or may take, without a tenth for what is no tensor."""
    device = next(root.parameters()).device
    free, _ = torch.cuda.mem_get_info(device)
    return int(_FOR_TENSORS * (free + torch.cuda.memory_reserved(device)))


def _of_process() -> MemoryReading:
    """Resident memory; None on a system that is no Linux."""
    with Quiet(OSError, KeyError):
        status = Path("/proc/self/status").read_text(encoding="ascii", errors="replace")
        kilobytes = dict(re.findall(r"^(VmRSS|VmHWM):\s+(\d+) kB", status, re.MULTILINE))
        current, peak = (1024 * int(kilobytes[name]) for name in ("VmRSS", "VmHWM"))
        return MemoryReading(current, max(peak, current))  # the system's peak may lag behind
    return MemoryReading(None, None)


# ---- bytes of tensors


def _bytes(tensors: Iterable[torch.Tensor | None]) -> int:
    """Bytes of this rank's part of *tensors*; each tensor counts once."""
    local = {id(tensor): on_this_rank(tensor) for tensor in tensors if tensor is not None}.values()
    return sum(tensor.nbytes for tensor in local if not is_lazy(tensor))


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
    return (one for one in tree_leaves(value) if isinstance(one, torch.Tensor))
