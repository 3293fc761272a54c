"""What TorchScript multiplies out of the dispatcher's sight is listed as what it is: heavy, and not counted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_flops.analysis.flop_counts import FlopCounts
from lightning_flops.pytorch import count_flops

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.*:DeprecationWarning")

BATCH = 2
FIRST = 2 * (BATCH * 4 * 6 * 6) * 3 * 9
SECOND = 2 * (BATCH * 5 * 4 * 4) * 4 * 9
HEAD = 2 * BATCH * (5 * 4 * 4) * 6


class Net(nn.Module):
    """Two convolutions of 8 × 8 pixels that some kind of TorchScript runs, and a layer that Python runs."""

    def __init__(self, script: Callable[[nn.Module], Any]) -> None:
        super().__init__()
        body = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 5, 3), nn.ReLU(), nn.Flatten())
        self.body = script(body.eval())
        self.head = nn.Linear(5 * 4 * 4, 6)

    def forward(self, x: Tensor) -> Tensor:
        """Body and head."""
        result: Tensor = self.head(self.body(x))
        return result


def counted(model: nn.Module) -> FlopCounts:
    x = torch.randn(BATCH, 3, 8, 8)
    with torch.no_grad(), count_flops(model) as counts:
        model(x)
    return counts


def test_convolutions_that_the_interpreter_runs_itself_are_listed_where_they_run() -> None:
    counts = counted(Net(lambda body: torch.jit.optimize_for_inference(torch.jit.script(body))))
    assert counts.forward == HEAD
    (name,) = counts.uncounted
    listed = counts.uncounted[name]
    assert (name, listed.calls, listed.modules, listed.heavy) == ("prim.mkldnn_convolution", 2, ("body",), True)


def test_a_module_that_is_not_the_models_is_listed_as_well() -> None:
    body = Net(lambda body: torch.jit.optimize_for_inference(torch.jit.script(body))).body
    with torch.no_grad(), count_flops(None) as counts:
        body(torch.randn(BATCH, 3, 8, 8))
    assert counts.uncounted["prim.mkldnn_convolution"].calls == 2


@pytest.mark.parametrize(
    "script", [torch.jit.script, lambda body: torch.jit.freeze(torch.jit.script(body))], ids=["scripted", "frozen"]
)
def test_operators_of_the_dispatcher_are_counted(script: Callable[[nn.Module], Any]) -> None:
    counts = counted(Net(script))
    assert counts.forward == FIRST + SECOND + HEAD
    assert not counts.uncounted


def test_graphs_that_another_compiler_runs_are_listed_if_they_multiply() -> None:
    """Three: each convolution with its activation, and the layer behind them."""
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 5, 3), nn.ReLU(), nn.Flatten(), nn.Linear(80, 6))
    x = torch.randn(BATCH, 3, 8, 8)
    enabled = torch.jit.onednn_fusion_enabled()  # type: ignore[no-untyped-call]
    torch.jit.enable_onednn_fusion(True)
    try:
        fused: Any = torch.jit.freeze(torch.jit.trace(model.eval(), x))  # type: ignore[no-untyped-call]
        with torch.no_grad():
            for _ in range(2):  # TorchScript compiles what it has seen
                fused(x)
            with count_flops(fused) as counts:
                fused(x)
    finally:
        torch.jit.enable_onednn_fusion(enabled)
    seen = counts.forward
    unseen = counts.uncounted.get("prim.oneDNNFusionGroup")
    assert (seen, unseen.calls if unseen else 0) in ((FIRST + SECOND + HEAD, 0), (0, 3))
    assert unseen is None or unseen.heavy
