"""Memory by phase of the counted step, and its use: read where a phase begins and ends, without a synchronization.

On CUDA we read the caching allocator's own statistics. They are kept on the host, so they are as of the launch, which
is when memory is taken and given back. Its peaks are since the process began, or since the user reset them. We do not
reset them, because that would change what the user reads later. On other devices we read the process's resident memory.
"""

from __future__ import annotations

import re
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from copy import copy
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from lightning_flops.measure.module_hooks import with_inner
from lightning_flops.measure.torch_private.needed import PIECES, modes_off, tree_leaves
from lightning_flops.measure.torch_private.optional import on_this_rank
from lightning_flops.records import OUTSIDE, MemoryKind, MemoryRecord, PhaseFlops, StepRecord, StepTensors, TensorLife
from lightning_flops.signals import Quiet

_ZERO_3_UPDATES = "fp32_partitioned_groups_flat"
# Where DeepSpeed's ZeRO-3 optimizer keeps the tensors that it updates: the shards themselves, or copies of them.
_PHASES = ("forward", "backward", "optimizer")  # the parts of a step that a report shows

_FOR_TENSORS = 0.9  # of a device's memory: the rest is for workspaces, buffers of NCCL and fragmentation


# ---- storages of a step's tensors, followed from their allocation to the end of their last reference

_CUDA_BLOCK = 512  # bytes, to which CUDA's caching allocator rounds sizes up; the CPU's gives what is asked for

# By part, what a tensor is for that an operator reads there and nothing has shown before: a loss may stand behind the
# forward.
_READ_FIRST: dict[str, MemoryKind] = {"optimizer": "optimizer", "forward": "batch", "": "batch"}


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
            if not self._before_forward:  # the first: what the code before it has made, as by moving a batch
                self._become("batch", self._lives)
            self._before_forward = len(self._lives)
        elif part == "backward":
            self._become("activations", self._lives[self._before_forward :])

    def leave(self) -> None:
        """The part entered last ends."""
        if self.parts.pop()[0] == "forward":
            self._become("activations", self._lives[self._before_forward :])

    def _become(self, kind: MemoryKind, lives: Iterable[TensorLife]) -> None:
        """What is still held is for later: what a forward, or a loss behind it, has made is kept for the backward."""
        for life in lives:
            if life.kind == "temporary" and life.died is None:
                life.kind = kind

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
        if not self._lives and not self.parts[1:]:  # a step is followed once something is held, or a part has begun
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
        """Every allocation of the step, to divide its peak; None where some cannot be seen.

        That is so where compiled graphs ran, and where storages changed their sizes.

        Args:
            states: the tensors of the optimizers' states, which were there before the step.
            flops: what the step cost, by phase.
            batch_size: samples of the step; None: not known.
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
        return self._alive.get(weakref.ref(storage)) or self._begin(storage, kind, module, operator, born)

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


# ---- what was read while they were followed


class MemoryReading(NamedTuple):
    """Memory held now, the most that ever was, and the most that an allocator ever took, in bytes; None: not known."""

    current: int | None
    peak: int | None
    reserved_peak: int | None = None


class MemoryWatch(TensorLives):
    """Follows the parts of one step, and, where a counter has it, the storages of its tensors.

    *read* reads the memory that is held now, exactly on a CUDA *device*, as its allocator's statistics have it.
    """

    def __init__(self, root: nn.Module, *, read: Callable[[], MemoryReading], device: torch.device) -> None:
        self._on_device = device.type == "cuda"
        super().__init__(on_cuda=self._on_device, device_type="cuda" if self._on_device else None)
        self._root, self._read, self._device = root, read, device
        self._peak: int | None = None  # the most that was held until now
        self._lazy = [one for one in (*root.parameters(), *root.buffers()) if is_lazy(one)]  # until a forward
        self._follows = False
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
        if not self._follows:
            self._follows = True
            self.hold(map(on_this_rank, (*self._root.parameters(), *self._root.buffers())), "parameters", born=0)
            self.hold(gradients_of(self._root), "gradients", born=0)
        super().enter(part)
        self._open.append((part if counts or part != "optimizer" else None, now))

    def leave(self) -> None:
        """The part entered last ends."""
        if not self._open:
            return
        now, (part, before) = self._look(), self._open.pop()
        self.hold(self._lazy, "parameters")  # those that the part has made
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
        return taken and replace(taken, available_bytes=_available(self._device) if self._on_device else None)

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


def _available(device: torch.device) -> int:
    """Bytes of *device* that this process has or may take, without a tenth for what is no tensor."""
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
    with modes_off():  # not counted: we ask
        return sum(
            piece.nbytes
            for one in local
            if not is_lazy(one)
            for piece in [getattr(one, name)() for name in PIECES.get(one.layout, ())] or [one]
        )


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
