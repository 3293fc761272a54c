"""Part 6: memory of each phase is what the allocator's books say of a run that nobody watches."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import torch

from .here import Check, Here
from .judge import at_most, exactly, told, within
from .results import Row
from .runs import FIRST_STEP, SETTLES, Net, fit, forget, layers, profiler

_STEPS = FIRST_STEP + 1 + SETTLES + 2 + 1
_SHARE, _LEAST_BYTES = 0.01, 2**20
_RESETS = ("reset_peak_memory_stats", "reset_accumulated_memory_stats", "reset_max_memory_allocated")


class _Read(Net):
    """Reads the allocator's books where its phases end."""

    def __init__(self, here: Here) -> None:
        """Makes layers whose activations outweigh a rounding."""
        super().__init__(layers(here, here.pick(2048, 64), here.pick(8, 2)))
        self.seen: dict[str, list[int]] = {"forward": [], "backward": [], "optimizer": []}

    def _look(self, phase: str) -> None:
        self.seen[phase].append(int(torch.cuda.memory_stats(self.device)["allocated_bytes.all.current"]))

    def on_before_backward(self, loss: torch.Tensor) -> None:
        """The forward is over."""
        self._look("forward")

    def on_after_backward(self) -> None:
        """The backward is over."""
        self._look("backward")

    def on_train_batch_end(self, *args: Any) -> None:
        """The optimizer is done."""
        self._look("optimizer")


def _phases(here: Here) -> Iterator[Row]:
    """Held at the end of each phase of the counted step; a run that is not watched is the truth."""
    plain = _trained(here, None)
    truth = {phase: seen[FIRST_STEP] for phase, seen in plain.seen.items()}
    forget(here)
    with _resets_counted() as resets:
        callback = profiler(here, timing_steps=2)
        _trained(here, callback)
    record = None if callback.profile is None else callback.profile.memory
    if record is None:
        raise RuntimeError("the profile has no memory")
    yield exactly("whose memory it is", record.kind, "allocated")
    found = {phase.name: phase.current_bytes for phase in record.phases}
    for phase, expected in truth.items():
        yield within(
            f"held at the end of the {phase}, beside a run that nobody watches",
            found.get(phase),
            expected,
            share=_SHARE,
            least=_LEAST_BYTES,
            unit="MiB",
            scale=2**-20,
        )
    yield exactly("resets of the allocator's peaks", resets, [])
    peak = int(torch.cuda.memory_stats(here.device)["allocated_bytes.all.peak"])
    yield at_most("the peak that is told is not above the allocator's own", record.run_peak_bytes, peak)


def _trained(here: Here, callback: Any) -> _Read:
    torch.manual_seed(0)
    net = _Read(here)
    batch = torch.randn(here.pick(4096, 32), here.pick(2048, 64), device=here.device)
    fit(here, net, [batch] * _STEPS, callback)
    return net


@contextlib.contextmanager
def _resets_counted() -> Iterator[list[str]]:
    called: list[str] = []
    with contextlib.ExitStack() as undo:
        for name in _RESETS:
            if hasattr(torch.cuda, name):
                undo.enter_context(patch.object(torch.cuda, name, lambda *_, name=name, **__: called.append(name)))
        yield called


def _resident(here: Here) -> Iterator[Row]:
    """On a CPU: the process's resident memory, with every phase."""
    torch.manual_seed(0)
    batch = torch.randn(32, 64, device=here.device)
    done = fit(here, Net(layers(here, 64, 2)), [batch] * _STEPS, profiler(here, timing_steps=2))
    record = done.profile.memory
    kind, phases = ("none", ()) if record is None else (record.kind, record.phases)
    yield told("kind of memory", kind)
    yield exactly("phases that have one", [phase.name for phase in phases], ["forward", "backward", "optimizer"])


CHECKS = (
    Check(claim="phases on the device", look=_phases, needs_gpu="it has no allocator with books"),
    Check(claim="phases of any device", look=_resident),
)
