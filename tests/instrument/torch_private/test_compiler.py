"""Functions of ours stay out of torch's compiler, with and without its help."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lightning_flops.instrument.torch_private.compiler import hide


def doubling() -> Callable[[Tensor], Tensor]:
    """A new function with a code object of its own, so that a mark on it is seen by no other test."""
    namespace: dict[str, Any] = {}
    exec("def double(x):\n    return x * 2", namespace)
    double: Callable[[Tensor], Tensor] = namespace["double"]
    return double


def graphs_compiled_of(function: Callable[[Tensor], Tensor]) -> int:
    """How many graphs torch makes of a call of *function*."""
    graphs: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    result = torch.compile(function, backend=backend)(torch.ones(3))
    assert torch.equal(result, torch.full((3,), 2.0))
    torch._dynamo.reset()
    return len(graphs)


def test_a_function_that_is_not_hidden_is_compiled() -> None:
    assert graphs_compiled_of(doubling()) == 1


def test_a_hidden_function_is_not_compiled() -> None:
    double = doubling()
    assert hide(double)
    assert graphs_compiled_of(double) == 0


WITHOUT_COMPILER = """
import sys
import torch
sys.modules["torch._dynamo"] = None
from lightning_flops import count_flops
layer = torch.nn.Linear(3, 4)
with count_flops(layer) as counts:
    layer(torch.ones(2, 3)).sum().backward()
print(counts.total.forward, counts.total.backward)
"""


def test_where_the_compiler_cannot_be_imported_counting_goes_on_as_nothing_is_compiled() -> None:
    done = subprocess.run([sys.executable, "-c", WITHOUT_COMPILER], capture_output=True, text=True)
    # 2 x 3 x 4 for each of 2 rows, and as many for the weight's gradient; and no word, because nothing is lost.
    assert (done.stdout, done.stderr) == ("48 48\n", "")
