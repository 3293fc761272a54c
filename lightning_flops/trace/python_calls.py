"""Where in the user's Python an operator was called: by the calls around it, or by the stack that it carries."""

from __future__ import annotations

import re
import sys
from functools import lru_cache

import numpy as np

from lightning_flops.trace.columns import Trace
from lightning_flops.trace.intervals import Ints, Mask
from lightning_flops.trace.names import Kind
from lightning_flops.trace.structure import enclosing, in_nesting_order, nest

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
    of_row = np.full(len(trace), -1, dtype=np.int64)
    operators = trace.links.operators

    def numbers(texts: list[str | None]) -> Ints:
        return np.array([-1 if text is None else found.setdefault(text, len(found)) for text in texts], dtype=np.int64)

    if len(trace.stacks):
        with_stack = operators[trace.stack[operators] >= 0]
        of_row[with_stack] = numbers([place_in_stack(stack) for stack in trace.stacks])[trace.stack[with_stack]]
    calls, around = python_calls(trace)
    if len(calls):
        used = np.unique(trace.name[calls])
        of_name = np.full(len(trace.names), -1, dtype=np.int64)
        of_name[used] = numbers([place_of(trace.names[name]) for name in used.tolist()])
        of_call = np.full(len(trace), -1, dtype=np.int64)
        of_call[calls] = of_name[trace.name[calls]]
        _take_over(of_call, calls, around)
        within = enclosing(trace, calls, around, lanes=trace.lane[operators], moments_ns=trace.start_ns[operators])
        known = (of_row[operators] < 0) & (within >= 0)
        of_row[operators[known]] = of_call[within[known]]
    # What stands around a backward is at most its caller: the place of the forward says more.
    backward = operators[trace.links.is_backward[operators]]
    called_at = of_row[backward]
    of_row[backward] = -1
    _hand_to_backward(trace, of_row, backward)
    of_row[backward] = np.where(of_row[backward] < 0, called_at, of_row[backward])
    return tuple(found), of_row


def python_calls(trace: Trace) -> tuple[Ints, Ints]:
    """Rows of Python calls, thread by thread, callers first; for each row of the trace the call around it, or -1."""
    rows = in_nesting_order(trace, np.flatnonzero(trace.kind == Kind.PYTHON))
    around = np.full(len(trace), -1, dtype=np.int64)
    nest(trace, rows, around)
    return rows, around


def _take_over(values: Ints, rows: Ints, around: Ints) -> None:
    """Give every one of *rows* that has no value that of the nearest row around it."""
    lacking = rows[values[rows] < 0]
    above = around[lacking]
    while len(lacking := lacking[above >= 0]):
        above = above[above >= 0]
        values[lacking] = values[above]
        still = values[lacking] < 0
        lacking, above = lacking[still], around[above[still]]


def _hand_to_backward(trace: Trace, of_row: Ints, backward: Ints) -> None:
    """Operators of a backward have the place of the operator with the sequence number of the node that runs them."""
    operators = trace.links.operators
    numbered = operators[(trace.sequence[operators] >= 0) & (of_row[operators] >= 0)]
    makers = numbered[trace.forward_thread[numbered] <= 0]
    if len(makers):
        makers = makers[np.lexsort((trace.start_ns[makers], trace.sequence[makers]))]
        nodes = operators[(trace.forward_thread[operators] > 0) & (trace.sequence[operators] >= 0)]
        last = np.searchsorted(trace.sequence[makers], trace.sequence[nodes], side="right") - 1
        known = (last >= 0) & (trace.sequence[makers[np.maximum(last, 0)]] == trace.sequence[nodes])
        known &= of_row[nodes] < 0
        of_row[nodes[known]] = of_row[makers[last[known]]]
        _take_over(of_row, backward, trace.links.parent)


def called_modules(trace: Trace) -> dict[int, str]:
    """By row of a module's call, its name: the classes and numbers of the modules around it and its own.

    ``ResNet_0.Bottleneck_3.Conv2d_5``: the numbers are those of the trace, which has no names of attributes. A module
    that is called in several places, such as again in a backward, has the name of its first call.
    """
    is_module = trace.where(lambda name: name.startswith(MODULE), Kind.PYTHON)
    if not is_module.any():
        return {}
    rows, around = python_calls(trace)
    modules = rows[is_module[rows]]
    above = _nearest(modules, around, is_module)
    names: dict[int, str] = {}
    of_module: dict[str, str] = {}
    order = np.lexsort((-trace.duration_ns[modules], trace.start_ns[modules]))
    for row, outer in zip(modules[order].tolist(), above[order].tolist(), strict=True):
        own = trace.names[trace.name[row]].removeprefix(MODULE).replace(".", "_")
        names[row] = of_module.setdefault(own, f"{names[outer]}.{own}" if outer in names else own)
    return names


def forwards_of_modules(trace: Trace, modules: dict[int, str]) -> dict[str, str]:
    """By a module's name, the file and line of the ``forward`` that its call ran first."""
    if not modules:
        return {}
    rows, around = python_calls(trace)
    forwards = rows[trace.where(lambda name: name.endswith(": forward"), Kind.PYTHON)[rows]]
    is_module = trace.where(lambda name: name.startswith(MODULE), Kind.PYTHON)
    found: dict[str, str] = {}
    for row, outer in zip(forwards.tolist(), _nearest(forwards, around, is_module).tolist(), strict=True):
        match = _FRAME.match(trace.names[trace.name[row]])
        if outer in modules and match is not None:
            found.setdefault(modules[outer], f"{match[1]}:{match[2]}")
    return found


def _nearest(rows: Ints, around: Ints, wanted: Mask) -> Ints:
    """For each of *rows* the nearest call around it that is *wanted*, or -1."""
    above = around[rows]
    while len(passed := np.flatnonzero((above >= 0) & ~wanted[above])):
        above[passed] = around[above[passed]]
    return above
