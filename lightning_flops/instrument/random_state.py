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
    put_back: list[tuple[Callable[[Any], object], Any]] = [(random.setstate, random.getstate())]
    if (numpy := sys.modules.get("numpy.random")) is not None:
        put_back.append((numpy.set_state, numpy.get_state()))
    with suppress(AttributeError):
        if torch.backends.mps.is_available():
            put_back.append((torch.mps.set_rng_state, torch.mps.get_rng_state()))
    backends = (getattr(torch, name, None) for name in ("cuda", "xpu"))
    on_devices = [
        one for backend in backends if backend and backend.is_initialized() for one in backend.default_generators
    ]
    for generator in (torch.default_generator, *on_devices):
        with suppress(Exception):  # such as in a CUDA graph that is being captured
            put_back.append((generator.set_state, generator.get_state()))
    try:
        yield
    finally:
        for restore, state in put_back:
            with suppress(Exception):
                restore(state)
