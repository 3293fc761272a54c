"""Part 0: what all the rest was seen on."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from lightning_flops.analysis.peak_flops import peak_flops_per_sec

from ..machine import code_in_words, machine_in_words, versions
from .checks import Check, Here, Row, reported


def _host(here: Here) -> Iterator[Row]:
    yield reported("code", code_in_words())
    yield reported("host", machine_in_words())
    found = versions(("torch", "lightning", "pytorch-lightning", "triton", "transformers", "deepspeed", "nvidia-ml-py"))
    yield reported("versions", ", ".join(f"{name} {version}" for name, version in found.items()))


def _gpu(here: Here) -> Iterator[Row]:
    properties = torch.cuda.get_device_properties(here.device)
    yield reported("device", f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB")
    yield reported("compute capability", f"{properties.major}.{properties.minor}")
    yield reported("multiprocessors", properties.multi_processor_count)
    yield reported("devices", torch.cuda.device_count())
    yield reported("CUDA, cuDNN", f"{torch.version.cuda}, {torch.backends.cudnn.version()}")  # type: ignore[no-untyped-call]
    peak = peak_flops_per_sec(properties.name, "bfloat16")
    yield reported("dense bfloat16 peak in the table", "n/a" if peak is None else f"{peak / 1e12:g} TFLOP/s")


def _driver(here: Here) -> Iterator[Row]:
    try:
        import pynvml
    except ImportError:
        yield reported("driver", "not known: nvidia-ml-py is not installed")
        return
    pynvml.nvmlInit()
    try:
        yield reported("driver", pynvml.nvmlSystemGetDriverVersion())
    finally:
        pynvml.nvmlShutdown()


CHECKS = (Check("host", _host), Check("device", _gpu, "it is the host"), Check("driver", _driver, "it has none"))
