"""What torch before 2.9 needs so that a step can be counted; it goes when these versions are no longer served.

Their compiler leaves out of compiled code what a dispatch mode would see, and their operators of higher order refuse a
mode that they have no rule for.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from lightning_flops.measure.torch_private.needed import DispatchMode, hide, take
from lightning_flops.signals import Undo

IS_HERE = not hasattr(DispatchMode, "ignore_compile_internals")  #: Whether this torch is older than 2.9.


def run_uncompiled(undo: Undo, mode: type[DispatchMode]) -> None:
    """Torch before 2.9 runs what is compiled as its Python until *undo* is closed; a newer one stays as it is.

    Operators of higher order (flex attention, ``torch.cond``) get a rule for modes of the class *mode* for so long.
    """
    if not IS_HERE:
        return
    undo.enter_context(torch.compiler.set_stance("force_eager"))
    for higher in take("torch._ops:_higher_order_ops", {}).values():
        if mode not in higher.python_key_table:  # a counter around this one has it there, and takes it out
            higher.python_key_table[mode] = partial(_run_through, higher)
            undo.callback(higher.python_key_table.pop, mode, None)


def _run_through(higher: Any, mode: Any, *args: Any, **kwargs: Any) -> Any:
    return mode.__torch_dispatch__(higher, (), args, kwargs)


hide(_run_through)
