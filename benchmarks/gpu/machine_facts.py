"""Part 0: what all the rest was seen on."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from lightning_flops.analysis.peak_flops import peak_flops_per_sec

from ..machine import code_in_words, machine_in_words, versions
from .here import Check, Here
from .judge import told
from .results import Row


def _host(here: Here) -> Iterator[Row]:
    yield told("code", code_in_words())
    yield told("host", machine_in_words())
    found = versions(("torch", "lightning", "pytorch-lightning", "triton", "transformers", "deepspeed", "nvidia-ml-py"))
    yield told("versions", ", ".join(f"{name} {version}" for name, version in found.items()))


def _gpu(here: Here) -> Iterator[Row]:
    properties = torch.cuda.get_device_properties(here.device)
    yield told("device", f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB")
    yield told("compute capability", f"{properties.major}.{properties.minor}")
    yield told("multiprocessors", properties.multi_processor_count)
    yield told("devices", torch.cuda.device_count())
    yield told("CUDA, cuDNN", f"{torch.version.cuda}, {torch.backends.cudnn.version()}")  # type: ignore[no-untyped-call]
    peak = peak_flops_per_sec(properties.name, "bfloat16")
    yield told("dense bfloat16 peak in the table", "n/a" if peak is None else f"{peak / 1e12:g} TFLOP/s")


def _driver(here: Here) -> Iterator[Row]:
    try:
        import pynvml
    except ImportError:
        yield told("driver", "not known: nvidia-ml-py is not installed")
        return
    pynvml.nvmlInit()
    try:
        yield told("driver", pynvml.nvmlSystemGetDriverVersion())
    finally:
        pynvml.nvmlShutdown()


CHECKS = (
    Check(claim="host", look=_host),
    Check(claim="device", look=_gpu, needs_gpu="it is the host"),
    Check(claim="driver", look=_driver, needs_gpu="it has none"),
)
