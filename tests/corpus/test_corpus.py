"""Every network of the corpus costs what its layer sizes say, to the last FLOP."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_flops.analysis.flop_counts import FlopCounts
from lightning_flops.pytorch import count_flops
from lightning_flops.records import OUTSIDE, PhaseFlops

from . import Network, all_networks

NETWORKS = all_networks()

# Torch's own words about features that some networks are there to use.
pytestmark = [
    pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN"),
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage"),
    pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile"),
    pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated"),
    pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True:UserWarning:torch.utils.checkpoint"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf Tensor:UserWarning"),
    pytest.mark.filterwarnings("ignore:`torch.jit.(script|trace):DeprecationWarning"),
]


def each(networks: tuple[Network, ...]) -> pytest.MarkDecorator:
    """One test for each of *networks*."""
    return pytest.mark.parametrize(
        "network", networks, ids=[f"{network.family}.{network.name}" for network in networks]
    )


@dataclass(frozen=True)
class Ran:
    """One run of a network, forward and backward."""

    state: dict[str, Tensor]
    """Weights, buffers, gradients and the state of the random generator, afterwards."""
    counts: FlopCounts | None
    """None where nothing was counted."""
    names: frozenset[str]
    """Of the model's modules."""


def ran(network: Network, *, counted: bool) -> Ran:
    """What one run of *network* came to, for all tests that ask."""
    key = (network.family, network.name, counted)
    if key not in _RAN:
        _RAN[key] = _run(network, counted=counted)
    return _RAN[key]


_RAN: dict[tuple[str, str, bool], Ran] = {}


def _run(network: Network, *, counted: bool) -> Ran:
    example = network.example()
    counts = None
    try:
        if counted:
            with count_flops(example.model) as counts:
                example.run()
        else:
            example.run()
        state = {**state_of(example.model), "random state": torch.get_rng_state()}
    finally:
        example.teardown()
    names = frozenset(name for name, _ in example.model.named_modules(remove_duplicate=False))
    return Ran(state, counts, names)


@each(NETWORKS)
def test_a_network_costs_what_its_layer_sizes_say(network: Network, request: pytest.FixtureRequest) -> None:
    """Phase by phase and module by module, as integers."""
    if network.known_gap:
        request.applymarker(pytest.mark.xfail(strict=True, reason=network.known_gap))
    run, expected = ran(network, counted=True), network.expected
    counts = run.counts
    assert counts is not None
    by_module = counts.by_module()
    counted: dict[str, Any] = {
        "all": counts.total,
        "causal_skipped": counts.causal_skipped,
        "without_backward": None if expected.without_backward is None else counts.without_backward,
        "modules": {name: by_module.get(name, PhaseFlops()) for name in expected.by_module},
        "heavy and not counted": heavy(counts),
    }
    assert counted == {
        "all": expected.phases,
        "causal_skipped": expected.causal_skipped,
        "without_backward": expected.without_backward,
        "modules": dict(expected.by_module),
        "heavy and not counted": [],
    }
    assert counts.model_flops == expected.forward + expected.backward
    assert counts.hardware_flops == expected.phases.total - expected.causal_skipped
    if network.family not in ("compiled", "wrapped"):  # there, names are not named_modules()'s own
        assert by_module.keys() <= run.names | {OUTSIDE}
    assert by_module.get("", PhaseFlops()) + by_module.get(OUTSIDE, PhaseFlops()) == expected.phases
    assert sum(counts.by_operator().values(), start=PhaseFlops()) == expected.phases


def can_infer(network: Network) -> bool:
    """Whether one forward in inference mode is something torch can run and the truth is for."""
    # TorchScript keeps the plan that it made with gradients, which inference mode then cannot run.
    return network.one_call and network.family not in ("compiled", "wrapped") and network.name != "scripted_block"


@each(tuple(filter(can_infer, NETWORKS)))
def test_a_forward_in_inference_mode_costs_the_same(network: Network) -> None:
    """There operators arrive undecomposed: a linear layer or an LSTM is one operator instead of its products."""
    example = network.example()
    with torch.inference_mode(), count_flops(example.model) as counts:
        example.forward()
    assert counts.total == PhaseFlops(forward=network.expected.forward)
    assert heavy(counts) == []


@each(NETWORKS)
def test_counting_changes_no_weight_no_gradient_and_no_random_number(network: Network) -> None:
    """The same network without the counter ends with the same bits."""
    plain, counted = ran(network, counted=False).state, ran(network, counted=True).state
    assert plain.keys() == counted.keys()
    assert [name for name, tensor in plain.items() if not torch.equal(tensor, counted[name])] == []


def test_the_corpus_is_large_and_its_names_are_unique() -> None:
    """At least sixty networks, each of them addressable."""
    names = [(network.family, network.name) for network in NETWORKS]
    assert len(set(names)) == len(names) >= 60


def heavy(counts: FlopCounts) -> list[str]:
    """Operators that may have spent FLOPs and were not counted."""
    return [name for name, operator in counts.uncounted.items() if operator.heavy]


def state_of(model: nn.Module) -> dict[str, Tensor]:
    """Copies of weights, buffers and gradients; of distributed tensors this rank's part."""
    state = dict(model.named_buffers())
    for name, parameter in model.named_parameters():
        state[name] = parameter.detach()
        if parameter.grad is not None:
            state[f"{name}.grad"] = parameter.grad
    local = {name: value.to_local() if isinstance(value, DTensor) else value for name, value in state.items()}
    return {name: value.clone() for name, value in local.items()}
