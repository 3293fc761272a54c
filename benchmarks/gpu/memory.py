"""Part 6: memory of each phase is what the allocator's totals say of a run that nobody watches."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

import torch

from .checks import Check, Here, Row, at_most, exactly, reported, within
from .nets import FIRST_STEP, SETTLES, Net, fit, forget, layers, profiler

_STEPS = FIRST_STEP + 1 + SETTLES + 2 + 1
_RESETS = ("reset_peak_memory_stats", "reset_accumulated_memory_stats", "reset_max_memory_allocated")


class _Read(Net):
    """Reads the allocator's totals where its phases end; its activations outweigh a rounding."""

    def __init__(self, here: Here) -> None:
        super().__init__(layers(here, here.pick(2048, 64), here.pick(8, 2)))
        self.seen: dict[str, list[int]] = {"forward": [], "backward": [], "optimizer": []}

    def _look(self, phase: str) -> None:
        self.seen[phase].append(int(torch.cuda.memory_stats(self.device)["allocated_bytes.all.current"]))

    def on_before_backward(self, loss: torch.Tensor) -> None:
        self._look("forward")

    def on_after_backward(self) -> None:
        self._look("backward")

    def on_train_batch_end(self, *args: Any) -> None:
        self._look("optimizer")


def _phases(here: Here) -> Iterator[Row]:
    """Held at the end of each phase of the counted step; a run that is not watched is the truth."""
    plain, resets = _trained(here, None), list[str]()
    forget(here)
    with ExitStack() as undo:
        for name in _RESETS:
            if hasattr(torch.cuda, name):
                undo.enter_context(patch.object(torch.cuda, name, lambda *_, name=name, **__: resets.append(name)))
        callback = profiler(here, timing_steps=2)
        _trained(here, callback)
    record = None if callback.profile is None else callback.profile.memory
    if record is None:
        raise RuntimeError("the profile has no memory")
    yield exactly("whose memory it is", record.kind, "allocated")
    found = {phase.name: phase.current_bytes for phase in record.phases}
    mebibytes: dict[str, Any] = {"share": 0.01, "least": 2**20, "unit": "MiB", "scale": 2**-20}
    for phase, seen in plain.seen.items():
        claim = f"held at the end of the {phase}, beside a run that nobody watches"
        yield within(claim, found.get(phase), seen[FIRST_STEP], **mebibytes)
    yield exactly("resets of the allocator's peaks", resets, [])
    peak = int(torch.cuda.memory_stats(here.device)["allocated_bytes.all.peak"])
    yield at_most("the peak that is reported is not above the allocator's own", record.run_peak_bytes, peak)


def _trained(here: Here, callback: Any) -> _Read:
    torch.manual_seed(0)
    net = _Read(here)
    batch = torch.randn(here.pick(4096, 32), here.pick(2048, 64), device=here.device)
    fit(here, net, [batch] * _STEPS, callback)
    return net


def _resident(here: Here) -> Iterator[Row]:
    """On a CPU: the process's resident memory, with every phase."""
    torch.manual_seed(0)
    batch = torch.randn(32, 64, device=here.device)
    record = fit(here, Net(layers(here, 64, 2)), [batch] * _STEPS, profiler(here, timing_steps=2)).profile.memory
    yield reported("kind of memory", "none" if record is None else record.kind)
    phases = [] if record is None else [phase.name for phase in record.phases]
    yield exactly("phases that have one", phases, ["forward", "backward", "optimizer"])


CHECKS = (
    Check("phases on the device", _phases, "it has no allocator with totals"),
    Check("phases of any device", _resident),
)
