"""Counts networks on a CPU and on a device whose memory is the host's, and prints both: run it as a program.

The device stays registered with torch until the process ends.
"""

from __future__ import annotations

import fcntl
import json
import sys
import threading
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from lightning_flops.measure.counting.flop_counter import FlopCounter
from tests.ranks import DEEPSPEED_ON_CPU

DEVICE = "host"


def register_device() -> None:
    """Build the device if it is not yet, and have torch know it."""
    from torch.utils import cpp_extension

    folder = Path(DEEPSPEED_ON_CPU["TORCH_EXTENSIONS_DIR"]) / "device_of_host_memory"
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "compiling").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)  # let go when this process ends, however it ends
        (folder / "lock").unlink(missing_ok=True)  # a run that was killed leaves torch's
        source, flags = str(Path(__file__).with_suffix(".cpp")), ["-O0"]
        cpp_extension.load(
            "device_of_host_memory",
            [source],
            extra_cflags=flags,
            build_directory=str(folder),
            is_python_module=False,
        )
    torch.utils.rename_privateuse1_backend(DEVICE)  # type: ignore[attr-defined]
    module: Any = SimpleNamespace(
        _is_in_bad_fork=lambda: False,
        is_initialized=lambda: True,
        is_available=lambda: True,
        device_count=lambda: 1,
        current_device=lambda: 0,
        manual_seed_all=lambda seed: None,
        get_amp_supported_dtype=lambda: [torch.bfloat16],
    )
    torch._register_device_module(DEVICE, module)  # type: ignore[no-untyped-call]


class Repeating(torch.autograd.Function):
    """A product with a ReLU, whose backward repeats its forward, with gradients or without."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, weight: torch.Tensor, with_gradients: bool) -> torch.Tensor:
        ctx.save_for_backward(rows, weight)
        ctx.with_gradients = with_gradients
        return (rows @ weight).relu()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        rows, weight = ctx.saved_tensors
        if not ctx.with_gradients:
            gradient = gradient * ((rows @ weight) > 0)
            return gradient @ weight.t(), rows.t() @ gradient, None
        leaves = [one.detach().requires_grad_() for one in (rows, weight)]
        with torch.enable_grad():
            out = (leaves[0] @ leaves[1]).relu()
        return *torch.autograd.grad(out, leaves, gradient), None


class Custom(nn.Module):
    def __init__(self, with_gradients: bool) -> None:
        super().__init__()
        self.weight, self.with_gradients = nn.Parameter(torch.randn(6, 6)), with_gradients

    def forward(self, rows: torch.Tensor) -> Any:
        return Repeating.apply(rows, self.weight, self.with_gradients)  # type: ignore[no-untyped-call]


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mixed, self.out = nn.Linear(6, 18), nn.Linear(6, 6)

    def forward(self, rows: torch.Tensor) -> Any:
        query, key, value = self.mixed(rows).chunk(3, -1)
        return rows + self.out((query @ key.transpose(-1, -2)).softmax(-1) @ value)


class Repeated(nn.Module):
    """Its parts inside of a checkpoint."""

    def __init__(self, *parts: nn.Module, reentrant: bool) -> None:
        super().__init__()
        self.parts, self.reentrant = nn.Sequential(*parts), reentrant

    def forward(self, rows: torch.Tensor) -> Any:
        return checkpoint(self.parts, rows, use_reentrant=self.reentrant, preserve_rng_state=False)


class Hooked(nn.Module):
    """Another module, and a gradient of its own, run in the hook of what its first one puts out."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.other = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, rows: torch.Tensor) -> Any:
        out = self.first(rows)
        out.register_hook(self.hook)
        return out

    def hook(self, gradient: torch.Tensor) -> Any:
        with torch.enable_grad():
            leaf = gradient.detach().requires_grad_()
            return self.other(gradient) + torch.autograd.grad((leaf @ self.first.weight).sum(), leaf)[0]


def _around(*parts: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(6, 6), *parts, nn.Linear(6, 2))


def _frozen() -> nn.Module:
    model = _around(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 6))
    model[0].requires_grad_(False)  # type: ignore[index]
    model[3].requires_grad_(False)  # type: ignore[index]
    return model


def _shared() -> nn.Module:
    shared = nn.Linear(6, 6)
    return _around(shared, nn.Tanh(), shared)


def _block(reentrant: bool) -> nn.Module:
    return Repeated(Attention(), nn.ReLU(), nn.Linear(6, 6), reentrant=reentrant)


def _nested(outer: bool, inner: bool) -> nn.Module:
    return _around(Repeated(nn.Linear(6, 6), _block(inner), reentrant=outer))


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "dense": lambda: _around(nn.ReLU(), nn.Linear(6, 6)),
    "attention": lambda: _around(Attention()),
    "shared": _shared,
    "frozen": _frozen,
    "hooked": lambda: _around(Hooked()),
    "custom": lambda: _around(Custom(False), Custom(True)),
    "reentrant": lambda: _around(_block(True), _block(True)),
    "not reentrant": lambda: _around(_block(False), _block(False), Repeated(Custom(True), reentrant=False)),
    **{f"nested {outer} {inner}": partial(_nested, outer, inner) for outer in (True, False) for inner in (True, False)},
}


def backward(model: nn.Module, rows: torch.Tensor, counter: FlopCounter) -> None:
    model(rows).sum().backward()


def twice(model: nn.Module, rows: torch.Tensor, counter: FlopCounter) -> None:
    loss = model(rows).sum()
    loss.backward(retain_graph=True)
    loss.backward()


def penalty(model: nn.Module, rows: torch.Tensor, counter: FlopCounter) -> None:
    loss = model(rows).pow(2).sum()
    (of_rows,) = torch.autograd.grad(loss, rows, create_graph=True)
    (of_rows.pow(2).sum() + loss).backward()


def paused(model: nn.Module, rows: torch.Tensor, counter: FlopCounter) -> None:
    loss, pause = model(rows).sum(), counter.pause()
    loss.backward()
    pause.close()
    backward(model, rows, counter)


def elsewhere(model: nn.Module, rows: torch.Tensor, counter: FlopCounter) -> None:
    loss = model(rows).sum()
    thread = threading.Thread(target=loss.backward)
    thread.start()
    thread.join()


def counted(make: Callable[[], nn.Module], step: Callable[..., None], device: str) -> dict[str, Any]:
    """What three steps cost there by module and phase, and which forwards no backward used."""
    torch.manual_seed(0)
    model = make().to(device)
    rows = torch.randn(3, 6).to(device).requires_grad_()
    counter = FlopCounter(model)
    with counter:
        for _ in range(3):
            step(model, rows, counter)
    record, flops = counter.record(), Counter[str]()
    for cell in record.cells:
        flops[f"{cell.module} {cell.phase}"] += cell.flops
    return {"flops": dict(sorted(flops.items())), "unused": dict(record.unused_calls), "notes": list(record.notes)}


def main() -> None:
    """Print each network's counts on the CPU and on the device, and whether backwards ran on a thread of the device."""
    register_device()
    pairs = [(name, make, backward) for name, make in NETWORKS.items()]
    pairs += [(step.__name__, NETWORKS["dense"], step) for step in (twice, penalty, paused, elsewhere)]
    counts = {name: [counted(make, step, device) for device in ("cpu", DEVICE)] for name, make, step in pairs}
    seen = list[bool]()
    leaf = torch.ones(1).to(DEVICE).requires_grad_()
    double: Any = leaf * 2
    double.register_hook(lambda _: seen.append(threading.current_thread() is threading.main_thread()))
    double.sum().backward()
    sys.stdout.write(json.dumps({"counts": counts, "on_its_thread": seen == [False]}))


if __name__ == "__main__":
    main()
