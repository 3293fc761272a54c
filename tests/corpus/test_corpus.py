"""Every network of the corpus costs what its layer sizes say, to the last FLOP."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lightning_flops.analysis.flop_counts import FlopCounts
from lightning_flops.pytorch import count_flops
from lightning_flops.records import OUTSIDE, PhaseFlops

from . import Example, Network, all_networks

NETWORKS = all_networks()

# Torch's own words about features that some networks are there to use.
pytestmark = [
    pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN"),
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage"),
    pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile"),
    pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated"),
]

every_network = pytest.mark.parametrize(
    "network", NETWORKS, ids=[f"{network.family}.{network.name}" for network in NETWORKS]
)


def counted(example: Example) -> FlopCounts:
    """The counts of one run, and the example torn down."""
    try:
        with count_flops(example.model) as counts:
            example.run()
    finally:
        example.teardown()
    return counts


@every_network
def test_a_network_costs_what_its_layer_sizes_say(network: Network) -> None:
    """Phase by phase and module by module, as integers."""
    counts = counted(network.example())
    by_module = counts.by_module()
    expected = network.expected

    counted_facts: dict[str, Any] = {
        "all": PhaseFlops(
            forward=counts.forward,
            backward=counts.backward,
            recompute=counts.recompute,
            optimizer=counts.optimizer,
        ),
        "causal_skipped": counts.causal_skipped,
        "without_backward": None if expected.without_backward is None else counts.without_backward,
        "modules": {name: by_module.get(name, PhaseFlops()) for name in expected.by_module},
        "heavy and not counted": [name for name, operator in counts.uncounted.items() if operator.heavy],
    }
    assert counted_facts == {
        "all": expected.phases,
        "causal_skipped": expected.causal_skipped,
        "without_backward": expected.without_backward,
        "modules": dict(expected.by_module),
        "heavy and not counted": [],
    }
    assert counts.model_flops == expected.forward + expected.backward
    assert counts.hardware_flops == expected.phases.total - expected.causal_skipped
    root_and_outside = by_module.get("", PhaseFlops()) + by_module.get(OUTSIDE, PhaseFlops())
    assert root_and_outside == expected.phases
    assert sum(counts.by_operator().values(), start=PhaseFlops()) == expected.phases


@every_network
def test_counting_changes_no_gradient(network: Network) -> None:
    """The same network without the counter ends with the same weights and gradients, bit for bit."""
    plain = network.example()
    try:
        plain.run()
    finally:
        plain.teardown()
    watched = network.example()
    counted(watched)
    for expected, actual in zip(plain.model.parameters(), watched.model.parameters(), strict=True):
        assert torch.equal(expected, actual)
        assert (expected.grad is None) == (actual.grad is None)
        if expected.grad is not None and actual.grad is not None:
            assert torch.equal(expected.grad, actual.grad)


def test_the_corpus_is_large_and_its_names_are_unique() -> None:
    """At least sixty networks, each of them addressable."""
    names = [(network.family, network.name) for network in NETWORKS]
    assert len(set(names)) == len(names) >= 60
