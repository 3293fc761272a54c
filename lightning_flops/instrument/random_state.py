"""What asks the user's own code a question that training would not: the random numbers of training stay the same."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch


@contextmanager
def random_state_kept() -> Iterator[None]:
    """Inside, whoever draws random numbers draws none of training's: of torch on every device, numpy and Python."""
    put_back = list(_states())
    try:
        yield
    finally:
        for restore, state in put_back:
            with suppress(Exception):  # such as in a CUDA graph that is being captured
                restore(state)


def _states() -> Iterator[tuple[Callable[[Any], object], Any]]:
    """How each generator of the process is put back, and where it stands."""
    yield random.setstate, random.getstate()
    numpy = sys.modules.get("numpy.random")
    if numpy is not None:
        yield numpy.set_state, numpy.get_state()
    generators = [torch.default_generator]
    for device_type in ("cuda", "xpu"):
        backend = getattr(torch, device_type, None)
        if backend is not None and backend.is_initialized():
            generators += backend.default_generators
    with suppress(AttributeError):
        if torch.backends.mps.is_available():
            yield torch.mps.set_rng_state, torch.mps.get_rng_state()
    for generator in generators:
        with suppress(Exception):
            yield generator.set_state, generator.get_state()
