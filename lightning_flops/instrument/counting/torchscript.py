"""Products that TorchScript runs out of sight, as instructions of its own and not as operators of the dispatcher."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from lightning_flops.instrument.counting.formulas.registry import RULES
from lightning_flops.instrument.torch_private.operators import last_torchscript_graph

_PRODUCTS = frozenset(("prim::mkldnn_convolution",))
"""Instructions that multiply, such as ``torch.jit.optimize_for_inference`` makes of convolutions."""

_FUSED = frozenset(("prim::oneDNNFusionGroup", "prim::TensorExprGroup", "prim::CudaFusionGroup", "prim::FusionGroup"))
"""Instructions that stand for a graph, which another compiler has made one kernel of."""


def unseen_products() -> list[str]:
    """What multiplied unseen in the TorchScript code that ran last on this thread, an entry for each instruction."""
    graph = last_torchscript_graph()
    return [] if graph is None else [kind.replace("::", ".") for kind in _unseen(graph)]


def _unseen(block: Any) -> Iterator[str]:
    for node in block.nodes():
        kind = node.kind()
        if kind in _PRODUCTS or (kind in _FUSED and _multiplies(node.g("Subgraph"))):
            yield kind
        for inner in node.blocks():
            yield from _unseen(inner)


def _multiplies(block: Any) -> bool:
    return any(node.kind() in RULES or any(map(_multiplies, node.blocks())) for node in block.nodes())
