"""Where in the user's Python an operator was called: by the calls around it, or by the stack that it carries."""

from __future__ import annotations

import re
import sys
from functools import lru_cache

import numpy as np

from lightning_flops.trace.columns import Trace
from lightning_flops.trace.intervals import Ints, Mask
from lightning_flops.trace.names import Kind
from lightning_flops.trace.structure import enclosing, in_nesting_order, nearest, nest

MODULE = "nn.Module: "
"""What the event of a module's call begins with; the class and a number follow: ``Linear_0``."""
_FRAME = re.compile(r"(.+?)\((\d+)\): ")
_OF_TORCH = re.compile(r"(^|/)torch/|/lib/python3\.\d+/(?!site-packages/|dist-packages/)|^<")


@lru_cache(maxsize=65536)
def place_of(frame: str) -> str | None:
    """``net.py:7`` of ``net.py(7): forward``; None for code of torch and of Python itself, built-ins and modules."""
    match = _FRAME.match(frame)
    if match is None or _OF_TORCH.search(match[1]) is not None:
        return None
    if match[1].partition("/")[0].removesuffix(".py") in sys.stdlib_module_names:
        return None
    return f"{match[1]}:{match[2]}"


@lru_cache(maxsize=65536)
def place_in_stack(stack: str) -> str | None:
    """The innermost place of the user's in a stack of text."""
    return next((place for frame in stack.split(";") if (place := place_of(frame)) is not None), None)


def places(trace: Trace) -> tuple[tuple[str, ...], Ints]:
    """The places that there are, and for each row of an operator the index of its own; -1 where none is known.

    An operator of a backward has the place of the forward operator that made its node.
    """
    found: dict[str, int] = {}
    operators, of_row = trace.links.operators, np.full(len(trace), -1, dtype=np.int64)

    def numbers(texts: list[str | None]) -> Ints:
        known = [-1 if text is None else found.setdefault(text, len(found)) for text in texts]
        return np.array([*known, -1], dtype=np.int64)

    of_row[operators] = numbers([place_in_stack(stack) for stack in trace.stacks])[trace.stack[operators]]
    calls, around = python_calls(trace)
    if len(calls):
        used, of_name = np.unique(trace.name[calls], return_inverse=True)
        of_call = np.full(len(trace) + 1, -1, dtype=np.int64)  # the last is that of no call
        of_call[calls] = numbers([place_of(trace.names[name]) for name in used.tolist()])[of_name.reshape(-1)]
        within = enclosing(trace, calls, around, lanes=trace.lane[operators], moments_ns=trace.start_ns[operators])
        lacking = np.flatnonzero((within >= 0) & (of_call[within] < 0))
        within[lacking] = nearest(within[lacking], around, of_call[:-1] >= 0)
        of_row[operators] = np.where(of_row[operators] < 0, of_call[within], of_row[operators])
    # What stands around a backward is at most its caller: the place of the forward says more.
    backward = operators[trace.links.is_backward[operators]]
    called_at = of_row[backward]
    of_row[backward] = -1
    _hand_to_backward(trace, of_row, backward)
    of_row[backward] = np.where(of_row[backward] < 0, called_at, of_row[backward])
    return tuple(found), of_row


def python_calls(trace: Trace) -> tuple[Ints, Ints]:
    """Rows of Python calls, thread by thread, callers first; for each row of the trace the call around it, or -1."""
    rows = in_nesting_order(trace, trace.of(Kind.PYTHON))
    return rows, nest(trace, rows)[0]


def _hand_to_backward(trace: Trace, of_row: Ints, backward: Ints) -> None:
    """Operators of a backward have the place of the operator with the sequence number of the node that runs them."""
    operators, parent = trace.links.operators, trace.links.parent
    numbered = operators[trace.sequence[operators] >= 0]
    is_node = trace.forward_thread[numbered] > 0
    makers, nodes = numbered[~is_node & (of_row[numbered] >= 0)], numbered[is_node]
    if not len(makers):
        return
    makers = makers[np.lexsort((trace.start_ns[makers], trace.sequence[makers]))]
    last = makers[np.searchsorted(trace.sequence[makers], trace.sequence[nodes], side="right") - 1]
    known = (trace.sequence[last] == trace.sequence[nodes]) & (of_row[nodes] < 0)
    of_row[nodes[known]] = of_row[last[known]]
    inner = backward[of_row[backward] < 0]
    around = nearest(inner, parent, of_row >= 0)
    of_row[inner[around >= 0]] = of_row[around[around >= 0]]


def called_modules(trace: Trace) -> dict[int, str]:
    """By row of a module's call, its name: the classes and numbers of the modules around it and its own.

    ``ResNet_0.Bottleneck_3.Conv2d_5``: the numbers are those of the trace, which has no names of attributes. A module
    that is called in several places, such as again in a backward, has the name of its first call.
    """
    is_module = _module_calls(trace)
    rows, around = python_calls(trace) if is_module.any() else (np.zeros(0, dtype=np.int64),) * 2
    modules = rows[is_module[rows]]
    modules = modules[np.lexsort((-trace.duration_ns[modules], trace.start_ns[modules]))]
    names: dict[int, str] = {}
    of_module: dict[str, str] = {}
    for row, outer in zip(modules.tolist(), nearest(modules, around, is_module).tolist(), strict=True):
        own = trace.name_of(row).removeprefix(MODULE).replace(".", "_")
        names[row] = of_module.setdefault(own, f"{names[outer]}.{own}" if outer in names else own)
    return names


def _module_calls(trace: Trace) -> Mask:
    return trace.where(lambda name: name.startswith(MODULE), Kind.PYTHON)


def forwards_of_modules(trace: Trace, modules: dict[int, str]) -> dict[str, str]:
    """By a module's name, the file and line of the ``forward`` that its call ran first."""
    found: dict[str, str] = {}
    rows, around = python_calls(trace) if modules else (np.zeros(0, dtype=np.int64),) * 2
    forwards = rows[trace.where(lambda name: name.endswith(": forward"), Kind.PYTHON)[rows]]
    for row, outer in zip(forwards.tolist(), nearest(forwards, around, _module_calls(trace)).tolist(), strict=True):
        if outer in modules and (match := _FRAME.match(trace.name_of(row))) is not None:
            found.setdefault(modules[outer], f"{match[1]}:{match[2]}")
    return found
