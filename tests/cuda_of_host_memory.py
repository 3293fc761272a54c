"""Torch's device "cuda" where there is none: memory of the host, kernels of the CPU, events by the host's clock.

``python -m tests.cuda_of_host_memory`` builds it if it is not yet built, and prints, as JSON, what a loop that is
profiled there says, and which networks of the corpus cost on it what they cost by hand. What torch.cuda answers is as
its documentation has it; how long anything takes there means nothing.
"""

from __future__ import annotations

import ctypes
import json
import logging
import os
import subprocess
import sys
import time
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

FOLDER = Path(__file__).resolve().parents[1] / ".cache" / "torch_extensions" / "cuda_of_host_memory"
SOURCE = Path(__file__).resolve().parent / "measure" / "counting" / "device_of_host_memory.cpp"
LIBRARY = FOLDER / "cuda_of_host_memory.so"

_BUILD = """
import sys
from torch.utils import cpp_extension
name, source, folder = sys.argv[1:]
flags = ["-O0", "-DAS_CUDA"]
cpp_extension.load(name, [source], extra_cflags=flags, build_directory=folder, is_python_module=False)
"""


def built() -> None:
    """Build the library, unless its source is what it was."""
    if not LIBRARY.exists() or LIBRARY.stat().st_mtime < SOURCE.stat().st_mtime:
        FOLDER.mkdir(parents=True, exist_ok=True)
        (FOLDER / "lock").unlink(missing_ok=True)  # a run that was killed leaves torch's
        command = [sys.executable, "-c", _BUILD, LIBRARY.stem, str(SOURCE), str(FOLDER)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def stand_in() -> Any:
    """Load the device, before torch, which asks for it only once; returns torch."""
    from importlib.util import find_spec

    assert "torch" not in sys.modules
    spec = find_spec("torch")
    assert spec is not None and spec.origin is not None
    folder = Path(spec.origin).parent / "lib"
    for name in ("libc10.so", "libtorch_cpu.so", "libtorch.so"):
        ctypes.CDLL(str(folder / name), mode=ctypes.RTLD_GLOBAL)
    library = ctypes.CDLL(str(LIBRARY), mode=ctypes.RTLD_GLOBAL)
    library.held_bytes.restype = library.peak_bytes.restype = ctypes.c_int64
    import torch

    recorded: dict[Any, None] = {}  # events that nothing has waited for, in order

    class Stream:
        """The only one."""

    class Event:
        """One that is done once something has waited for a later one of its stream."""

        def __init__(self, enable_timing: bool = False) -> None:
            self.timed, self.done = enable_timing, False
            self.at: float | None = None

        def record(self, stream: Any = None) -> None:
            assert isinstance(stream, Stream)
            self.at, self.done = time.perf_counter(), False
            recorded.pop(self, None)  # it may have been recorded before
            recorded[self] = None

        def synchronize(self) -> None:
            while not self.done:  # those that were recorded before it are done first
                first = next(iter(recorded))
                first.done = True
                del recorded[first]

        def elapsed_time(self, end: Event) -> float:
            if not (self.timed and end.timed):
                raise ValueError("Both events must be created with argument 'enable_timing=True'.")
            if self.at is None or end.at is None:
                raise ValueError("Both events must be recorded before calculating elapsed time.")
            if not (self.done and end.done):
                raise RuntimeError("CUDA error: device not ready")
            return (end.at - self.at) * 1e3

    def memory_stats(device: Any = None) -> dict[str, int]:
        held, peak = library.held_bytes(), library.peak_bytes()
        totals = {"allocated_bytes.all.current": held, "allocated_bytes.all.peak": peak}
        return {**totals, "reserved_bytes.all.peak": peak}

    stream, gibibyte = Stream(), 2**30
    chip = {"name": "NVIDIA H200", "total_memory": 140 * gibibyte, "major": 9, "minor": 0, "uuid": "0" * 32}
    answers: dict[str, Any] = {
        "is_available": True,
        "is_initialized": True,
        "_lazy_init": None,
        "device_count": 1,
        "current_device": 0,
        "set_device": None,
        "get_device_name": chip["name"],
        "get_device_properties": SimpleNamespace(**chip, multi_processor_count=132),
        "get_device_capability": (9, 0),
        "current_stream": stream,
        "synchronize": None,
        "empty_cache": None,
        "mem_get_info": (100 * gibibyte, 140 * gibibyte),
        "is_current_stream_capturing": False,
        "get_rng_state": torch.zeros(16, dtype=torch.uint8),
        "set_rng_state": None,
        "manual_seed_all": None,
        "is_bf16_supported": True,
    }
    for name, answer in answers.items():
        setattr(torch.cuda, name, lambda *_, answer=answer, **__: answer)
    functions = {"memory_stats": memory_stats, "memory_reserved": lambda *_: library.held_bytes()}
    for name, function in {**functions, "Event": Event, "Stream": Stream}.items():
        setattr(torch.cuda, name, function)
    return torch


def profiled(torch: Any) -> dict[str, Any]:
    """What a loop of one's own says there."""
    from lightning_flops import profile_training
    from tests.listening import listening

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 10)).to("cuda")
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    batches = torch.utils.data.DataLoader([torch.randn(32, 64) for _ in range(40)], batch_size=None)
    settings: dict[str, Any] = {"profile_step": 3, "timing_steps": 20, "trace": False, "lines": False}
    with (
        listening("lightning_flops", level=logging.WARNING) as log,
        profile_training(model, optimizer, **settings) as profiler,
    ):
        for rows in batches:
            with torch.autocast("cuda", torch.bfloat16):
                loss = model(rows.to("cuda")).float().square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    profile = profiler.profile
    assert profile is not None and profile.timing is not None and profile.memory is not None, log
    step_sec = profile.timing.global_step_sec
    return {
        "log": log,
        "notes": list(profile.notes),
        "device": profile.context.device_name,
        "memory": profile.memory.kind,
        "held": dict(profile.memory.held_bytes),
        "kept": profile.memory.kept_by_forward_bytes,
        "flops": [profile.flops.forward, profile.flops.backward],
        "mfu": [profile.rates.mfu, profile.flops.model / step_sec / 989.4e12],
        "parts": sum(one.mean_sec for one in profile.timing.parts) / step_sec,
    }


def corpus() -> dict[str, str]:
    """Of each network that a GPU test has: nothing if it is exact, or what is not, or which kernel is not here."""
    from tests.corpus import on_a_gpu

    found: dict[str, str] = {}
    for network in on_a_gpu.networks():
        try:
            wrong = on_a_gpu.differences(network, "cuda")
            found[f"{network.family}.{network.name}"] = str(next(iter(wrong.items()), ""))
        except (RuntimeError, NotImplementedError) as error:
            words = str(error).partition("\n")[0]
            if "missing kernel" not in words and "Could not run" not in words:
                raise
            found[f"{network.family}.{network.name}"] = f"no kernel: {words}"
    return found


def main() -> None:
    """See the module."""
    built()
    torch = stand_in()
    warnings.simplefilter("ignore")
    sys.stdout.write(json.dumps({"profiled": profiled(torch), "corpus": corpus()}))
    sys.stdout.flush()
    os._exit(0)  # torch's own end asks for a CUDA that it has not


if __name__ == "__main__":
    main()
