"""Attention on fake tensors takes the kernel that it takes in the run, which is chosen by what is not there."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch.nn import functional

_MASKS, _ASKS = "transformers.masking_utils", "find_packed_sequence_indices"
_ATTENTION = "scaled_dot_product_attention"


@contextmanager
def as_in_the_run(*, on_cuda: bool) -> Iterator[None]:
    """Inside, also where a backward repeats a forward, attention takes the kernel of the run.

    On a GPU the fused one has dropout, which the CPU's refuses: it gets none, as values do not matter. transformers
    asks the positions' values whether sequences are packed; where there are none it makes a mask, as if they were.
    """
    attention: Any = functional.scaled_dot_product_attention

    def without_dropout(*args: Any, **kwargs: Any) -> Any:
        kwargs = {key: value for key, value in kwargs.items() if key != "dropout_p"}
        return attention(*args[:4], *((0.0,) if len(args) > 4 else ()), *args[5:], **kwargs)

    stand_ins = [(functional, _ATTENTION, without_dropout)] if on_cuda else []
    if hasattr(masks := sys.modules.get(_MASKS), _ASKS):
        stand_ins.append((masks, _ASKS, lambda *args, **kwargs: None))  # type: ignore[arg-type]
    with ExitStack() as undo:
        for module, name, stand_in in stand_ins:
            undo.callback(setattr, module, name, getattr(module, name))
            setattr(module, name, stand_in)
        yield
