"""Puts a dispatch mode on this thread's stack and takes it off: torch's private stack functions, in one place.

``with mode:`` would do on one thread; but it keeps process-wide flags, which threads that enter and leave in turn leave
wrong.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.utils._python_dispatch import TorchDispatchMode


def push(mode: TorchDispatchMode) -> None:
    """Puts *mode* on top of this thread's stack."""
    torch._C._push_on_torch_dispatch_stack(mode)


def depth() -> int:
    """How many modes are on this thread's stack; those whose handlers run are not."""
    return int(torch._C._len_torch_dispatch_stack())


def is_pushed(mode: TorchDispatchMode) -> bool:
    """Whether *mode* is on this thread's stack, under whatever other modes."""
    return any(torch._C._get_dispatch_stack_at(place) is mode for place in range(torch._C._len_torch_dispatch_stack()))


def remove(mode: TorchDispatchMode) -> None:
    """Takes the uppermost *mode* off this thread's stack, and leaves the modes above it in place."""
    if not is_pushed(mode):
        return
    above = []
    while (popped := torch._C._pop_torch_dispatch_stack(None)) is not mode:
        above.append(popped)
    for other in reversed(above):
        torch._C._push_on_torch_dispatch_stack(other)


@contextmanager
def pushed(mode: TorchDispatchMode) -> Iterator[None]:
    """Inside, *mode* is on top of the stack: within its own handler it would not be."""
    push(mode)
    try:
        yield
    finally:
        remove(mode)
