"""Hooks on the autograd nodes of one forward, for backwards that no thread-local state of ours would reach.

They are put on nodes, never on tensors: a tensor with hooks does not pickle in silence. Nodes that accumulate a
parameter's gradient outlive the forward and are left alone; the others, and our hooks with them, go with the graph.
That may be kept for long: an action holds nothing that should not be.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch

from lightning_flops.instrument.torch_private.autograd import ACCUMULATES_GRADIENT, node_sequence

_MOST_NODES = 1_000_000


def tensors_of(output: Any, depth: int = 3) -> Iterator[torch.Tensor]:
    """The tensors in a module's inputs or output, a few containers deep."""
    if isinstance(output, torch.Tensor):
        yield output
    elif depth and isinstance(output, (list, tuple)):
        for item in output:
            yield from tensors_of(item, depth - 1)
    elif depth and isinstance(output, Mapping):
        for item in output.values():
            yield from tensors_of(item, depth - 1)


def nodes_of(output: Any) -> list[Any]:
    """The autograd nodes that made the tensors in a module's inputs or output, each once."""
    nodes = []
    for tensor in tensors_of(output):
        node = tensor.grad_fn
        if node is not None and node not in nodes:
            nodes.append(node)
    return nodes


def nodes_behind(outputs: Iterable[Any], inputs: Iterable[Any] = ()) -> Iterator[Any]:
    """The nodes from *outputs* back to *inputs*, the latter left out; nor those that accumulate gradients."""
    seen = set(inputs)
    pending = [node for node in outputs if node not in seen]
    seen.update(pending)
    while pending and len(seen) < _MOST_NODES:
        node = pending.pop()
        yield node
        for following, _ in node.next_functions:
            if following is not None and following not in seen and node_sequence(following) < ACCUMULATES_GRADIENT:
                seen.add(following)
                pending.append(following)


def before_backward_of(
    nodes: Iterable[Any], action: Callable[[int], None], *, failed: Callable[[Exception], None]
) -> None:
    """Has *action* called with each node's sequence number, on the thread that runs its backward, just before it.

    What it raises goes to *failed*, which raises nothing.
    """
    for node in nodes:
        node.register_prehook(_calling(action, node_sequence(node), failed))


def _calling(
    action: Callable[[int], None], sequence: int, failed: Callable[[Exception], None]
) -> Callable[[Any], None]:
    # The node itself must not be held: it holds the hook.
    def hook(gradients: Any) -> None:
        try:
            action(sequence)
        except Exception as error:
            failed(error)

    return hook
