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

_RUN_WHAT_THEY_ARE_HANDED = frozenset(
    (
        "cond while_loop while_loop_stack_output scan map_impl associative_scan strict_mode hints_wrapper "
        "invoke_subgraph wrap"
    ).split()
)

_RUN_MORE = frozenset(("flex_attention", "flex_attention_backward"))

_FORWARD_OF = {"flex_attention_backward": 7}
"""Position of the function that a backward calls to repeat the forward."""

_TAG, _FORWARD = "partitioner_tag", "is_forward"
"""What torch writes on the nodes of a graph that has a forward and its backward in one."""

Repeating = Callable[[], AbstractContextManager[None]]


def runs_only_functions(operator: Any) -> bool:
    """Whether a higher-order operator is no more than the functions it is handed, and no tracer is there to ask."""
    return higher_order_name(operator) in _RUN_WHAT_THEY_ARE_HANDED and not is_traced()


def with_seen_functions(
    mode: DispatchMode, operator: Any, args: tuple[Any, ...], repeating: Repeating
) -> tuple[Any, ...]:
    """The arguments of a higher-order operator, with functions in it that *mode* sees at work where that is safe.

    Args:
        mode: is off the stack, because its handler runs.
        operator: the higher-order operator.
        args: its positional arguments.
        repeating: says that what runs within it repeats a forward, inside a backward.
    """
    name = higher_order_name(operator)
    if name not in _RUN_WHAT_THEY_ARE_HANDED | _RUN_MORE or is_traced():
        return args
    again = _FORWARD_OF.get(name)
    return tuple(_with_functions(mode, value, repeating, place == again) for place, value in enumerate(args))


def _with_functions(mode: DispatchMode, value: Any, repeating: Repeating, again: bool) -> Any:
    if isinstance(value, tuple):  # a block mask, of which one part is its function
        return tuple(_seen(mode, item, repeating, again) if _is_function(item) else item for item in value)
    return _seen(mode, value, repeating, again) if _is_function(value) else value


def _is_function(value: Any) -> bool:
    return callable(value) and not isinstance(value, (torch.Tensor, type))


def _seen(mode: DispatchMode, function: Any, repeating: Repeating, again: bool) -> Callable[..., Any]:
    joint = graph_task_id() != NO_GRAPH_TASK and isinstance(function, GraphModule) and _has_a_forward(function)

    def run(*args: Any) -> Any:
        with pushed(mode):
            if joint:
                return _Joint(function, repeating).run(*args)
            with repeating() if again else nullcontext():
                return function(*args)

    return run


def _has_a_forward(graph: GraphModule) -> bool:
    return any(node.op == "call_function" and node.meta.get(_TAG) == _FORWARD for node in graph.graph.nodes)


class _Joint(Interpreter):
    """Runs a graph that repeats a forward for its backward, and says which is which."""

    def __init__(self, graph: GraphModule, repeating: Repeating) -> None:
        super().__init__(graph)
        self.extra_traceback = False  # an error's words are those that the graph's own code would have
        self._repeating = repeating

    def run_node(self, n: Node) -> Any:
        """One call of the graph's."""
        with self._repeating() if n.meta.get(_TAG) == _FORWARD else nullcontext():
            return super().run_node(n)

    def output(self, target: Any, args: Any, kwargs: Any) -> Any:
        """The graph's result, in a plain list where its own code has one: callers compare the kinds."""
        result = super().output(target, args, kwargs)
        return list(result) if isinstance(result, list) else result
