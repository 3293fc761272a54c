"""Every network of the corpus costs what its layer sizes say, to the last FLOP, and checkpointed its forward again.

All of it is one file, so that a network is run once for the tests that ask for the same run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from lightning_flops.analysis.counts import FlopCounts
from lightning_flops.pytorch import count_flops
from lightning_flops.records import OUTSIDE, PhaseFlops

from . import Example, Network, all_networks
from .case import forward_and_backward, tensors_in, total
from .compiled import SLOW

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
        "network",
        [pytest.param(network, marks=pytest.mark.slow if network.name in SLOW else ()) for network in networks],
        ids=[f"{network.family}.{network.name}" for network in networks],
    )


@dataclass(frozen=True)
class Ran:
    """One run of a network, forward and backward."""

    state: dict[str, Tensor]  #: Weights, buffers, gradients and the state of the random generator, afterwards.
    counts: FlopCounts | None  #: None where nothing was counted.
    names: frozenset[str]  #: Of the model's modules.
    is_one_backward: bool  #: It was one forward and the backward of all that it put out, and nothing else.


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
    return Ran(state, counts, names, example.step in (None, forward_and_backward))


@each(NETWORKS)
def test_a_network_costs_what_its_layer_sizes_say(network: Network) -> None:
    """Phase by phase and module by module, as integers."""
    run, expected = ran(network, counted=True), network.expected
    counts = run.counts
    assert counts is not None
    by_module = counts.by_module()
    counted: dict[str, Any] = {
        "all": counts.total,
        "skipped": counts.skipped,
        "modules": {name: by_module.get(name, PhaseFlops()) for name in expected.by_module},
        "may_have_flops and not counted": may_have_flops(counts),
    }
    assert counted == {
        "all": expected.phases,
        "skipped": expected.skipped,
        "modules": expected.by_module,
        "may_have_flops and not counted": [],
    }
    assert counts.model_flops == expected.forward + expected.backward
    assert counts.hardware_flops == expected.phases.total
    assert counts.hardware_flops - counts.skipped == expected.phases.total - expected.skipped
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
    assert may_have_flops(counts) == []


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


def may_have_flops(counts: FlopCounts) -> list[str]:
    """Operators that may have FLOPs and were not counted."""
    return [name for name, operator in counts.uncounted.items() if operator.may_have_flops]


def state_of(model: nn.Module) -> dict[str, Tensor]:
    """Copies of weights, buffers and gradients; of distributed tensors this rank's part."""
    state = dict(model.named_buffers())
    for name, parameter in model.named_parameters():
        state[name] = parameter.detach()
        if parameter.grad is not None:
            state[f"{name}.grad"] = parameter.grad
    local = {name: value.to_local() if isinstance(value, DTensor) else value for name, value in state.items()}
    return {name: value.clone() for name, value in local.items()}


# ---- checkpointed as a whole

Call = Callable[[Callable[[Tensor], Tensor], Tensor], Any]
"""Calls a function of a tensor, checkpointed in one way or another."""

OTHER_WITHOUT_GRAD = {
    "attention_layers.transformer_encoder_layer_on_its_fast_path": "one operator for the whole layer",
    "attention_layers.transformer_encoder_over_nested_samples": "samples without their padding",
    "compiled.compiled_common_subexpression": "a graph of its own, in which the same product runs twice",
}
"""Networks that run otherwise where grad is off, as it is in a reentrant checkpoint's first pass: what they run."""

NOT_REPEATED = {"autograd_forms.towers_in_their_own_threads": "a thread does not say that a repetition started it"}
"""Networks whose repetition is not seen, not all of it: why."""

CANNOT_BE_SAVED = {"attention_layers.attention_over_jagged_samples": "torch cannot read the shapes of what it saved"}
"""Networks that only a reentrant checkpoint can repeat: why."""


def at_once(function: Callable[[Tensor], Tensor], x: Tensor) -> Any:
    """Not checkpointed."""
    return function(x)


def reentrant(function: Callable[[Tensor], Tensor], x: Tensor) -> Any:
    """The whole function is repeated in a node of its own."""
    return checkpoint(function, x, use_reentrant=True)


def other(function: Callable[[Tensor], Tensor], x: Tensor) -> Any:
    """The whole function is repeated when the first saved tensor is asked for."""
    return checkpoint(function, x, use_reentrant=False)


def counted(example: Example, call: Call) -> FlopCounts:
    """A forward of *example* and the backward of the sum of its outputs, times a number that needs its gradient.

    That last product saves its factors, so that even a checkpoint that stops early stops behind the network.
    """
    # Adding to a gradient that is there would be one more operator, in a module that may have no other.
    for tensor in (*example.model.parameters(), *tensors_in([*example.args, *example.kwargs.values()])):
        tensor.grad = None

    def run(x: Tensor) -> Tensor:
        return total(example.forward()) * x

    with count_flops(example.model) as counts:
        call(run, torch.ones((), requires_grad=True)).backward()
    return counts


def counted_each(network: Network, calls: Iterable[Call]) -> list[FlopCounts]:
    """The same for each of *calls*, one after the other, on one example."""
    example = network.example()
    try:
        return [counted(example, call) for call in calls]
    finally:
        example.teardown()


def named(network: Network) -> str:
    """As the exceptions above name it."""
    return f"{network.family}.{network.name}"


def with_forward_repeated(flops: PhaseFlops) -> PhaseFlops:
    """The same with its forward as recompute, once more than before."""
    return replace(flops, recompute=flops.recompute + flops.forward)


@each(tuple(network for network in NETWORKS if network.one_call and named(network) not in NOT_REPEATED))
def test_checkpointing_a_network_adds_its_forward_to_recompute(network: Network) -> None:
    """Module by module, in both kinds of checkpoint; forward and backward stay what they were."""
    kinds = {"reentrant": (reentrant, OTHER_WITHOUT_GRAD), "other": (other, CANNOT_BE_SAVED)}
    calls = {kind: call for kind, (call, exceptions) in kinds.items() if named(network) not in exceptions}
    run = ran(network, counted=True)
    if not run.is_one_backward:
        calls = {"plain": at_once, **calls}
    counts = dict(zip(calls, counted_each(network, calls.values()), strict=True))
    plain = counts.pop("plain", run.counts)
    assert plain is not None
    expected = {name: with_forward_repeated(flops) for name, flops in plain.by_module().items()}
    assert {kind: found.by_module() for kind, found in counts.items()} == dict.fromkeys(counts, expected)


@each(tuple(network for network in NETWORKS if network.family in ("checkpointed", "repeated")))
def test_a_checkpoint_around_checkpoints_that_do_not_stop_repeats_all_that_is_in_them(network: Network) -> None:
    """The same where every checkpoint, those inside as well, goes on to its end."""
    if not network.one_call:
        pytest.skip("a gradient in its forward has a checkpoint around it repeat it then and there")
    with set_checkpoint_early_stop(False):
        plain, checkpointed = counted_each(network, [at_once, other])
    assert checkpointed.by_module() == {name: with_forward_repeated(flops) for name, flops in plain.by_module().items()}
