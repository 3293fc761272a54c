"""Functions that operators are handed: what runs inside ``torch.cond``, ``while_loop``, ``scan``, ``map`` is counted.

Higher-order operators call functions below the mode that sees the operator. So each function is handed over in a
wrapper that has the mode see what it runs, as often as it runs. Control flow runs nothing else; attention with a
function on its scores or its mask has a formula for the rest.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.fx import GraphModule, Interpreter, Node

from lightning_flops.instrument.torch_private.autograd import NO_GRAPH_TASK, graph_task_id
from lightning_flops.instrument.torch_private.dispatch import DispatchMode, is_traced, pushed
from lightning_flops.instrument.torch_private.operators import higher_order_name

_CONTROL_FLOW = frozenset(
    (
        "cond while_loop while_loop_stack_output scan map_impl associative_scan strict_mode hints_wrapper "
        "invoke_subgraph wrap"
    ).split()
)

_FLEX_BACKWARD = "flex_attention_backward"
_REPEATS_FORWARD = 7
"""Position of the function with which that one repeats the forward."""

Repeating = Callable[[], AbstractContextManager[None]]
"""Inside, what runs repeats a forward, within a backward."""


def runs_only_functions(operator: Any) -> bool:
    """Whether a higher-order operator is no more than the functions it is handed, and no tracer is there to ask."""
    return higher_order_name(operator) in _CONTROL_FLOW and not is_traced()


def with_seen_functions(
    mode: DispatchMode, operator: Any, args: tuple[Any, ...], repeating: Repeating
) -> tuple[Any, ...]:
    """The arguments of a higher-order operator, with functions that *mode*, whose handler runs, sees at work."""
    name = higher_order_name(operator)
    if (name not in _CONTROL_FLOW and name not in ("flex_attention", _FLEX_BACKWARD)) or is_traced():
        return args

    def seen(value: Any, again: bool) -> Any:
        if isinstance(value, tuple):  # a block mask, of which one part is its function
            return tuple(seen(item, again) for item in value)
        is_function = callable(value) and not isinstance(value, (torch.Tensor, type))
        return _seen(mode, value, repeating, again) if is_function else value

    backward = name == _FLEX_BACKWARD
    return tuple(seen(value, backward and place == _REPEATS_FORWARD) for place, value in enumerate(args))


def _seen(mode: DispatchMode, function: Any, repeating: Repeating, again: bool) -> Callable[..., Any]:
    joint = graph_task_id() != NO_GRAPH_TASK and isinstance(function, GraphModule)
    joint = joint and any(map(_is_forward, function.graph.nodes))

    def run(*args: Any) -> Any:
        with pushed(mode):
            if joint:
                return _Joint(function, repeating).run(*args)
            with repeating() if again else nullcontext():
                return function(*args)

    return run


def _is_forward(node: Node) -> bool:
    """Whether torch has written on a node that it is of the forward, in a graph that has the backward as well."""
    return node.op == "call_function" and node.meta.get("partitioner_tag") == "is_forward"


class _Joint(Interpreter):
    """Runs a graph that repeats a forward for its backward, and says which is which."""

    def __init__(self, graph: GraphModule, repeating: Repeating) -> None:
        super().__init__(graph)
        self.extra_traceback = False  # an error's words are those that the graph's own code would have
        self._repeating = repeating

    def run_node(self, n: Node) -> Any:
        """One call of the graph's."""
        with self._repeating() if _is_forward(n) else nullcontext():
            return super().run_node(n)

    def output(self, target: Any, args: Any, kwargs: Any) -> Any:
        """The graph's result, in a plain list where its own code has one: callers compare the kinds."""
        result = super().output(target, args, kwargs)
        return list(result) if isinstance(result, list) else result
