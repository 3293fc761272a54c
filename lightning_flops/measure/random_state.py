"""What asks the user's own code a question that training would not: the random numbers of training stay the same."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy
import torch


@contextmanager
def random_state_kept() -> Iterator[None]:
    """Inside, whoever draws random numbers draws none of training's: of torch on CPU and CUDA, numpy and Python."""
    of_python, of_numpy = random.getstate(), numpy.random.get_state()
    is_up = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    devices = range(torch.cuda.device_count()) if is_up else ()
    try:
        with torch.random.fork_rng(devices):
            yield
    finally:
        random.setstate(of_python)
        numpy.random.set_state(of_numpy)
