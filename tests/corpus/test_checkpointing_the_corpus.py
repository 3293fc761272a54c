"""Checkpointing a whole network adds its forward to what is recomputed, and changes nothing else."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from lightning_flops.analysis.flop_counts import FlopCounts
from lightning_flops.pytorch import count_flops
from lightning_flops.records import PhaseFlops

from . import Network, all_networks
from .case import total
from .test_corpus import each, pytestmark  # noqa: F401  # torch's words about features, as there

Call = Callable[[Callable[[Tensor], Tensor], Tensor], Any]
"""Calls a function of a tensor, checkpointed in one way or another."""

OTHER_WITHOUT_GRAD = {
    "attention_layers.transformer_encoder_layer_on_its_fast_path": "one operator for the whole layer",
    "attention_layers.transformer_encoder_over_nested_samples": "samples without their padding",
    "compiled.compiled_common_subexpression": "a graph of its own, in which the same product runs twice",
}
"""Networks that run otherwise where grad is off, as it is in a reentrant checkpoint's first pass: what they run."""

NOT_REPEATED = {
    "autograd_forms.towers_in_their_own_threads": "a thread does not say that a repetition started it",
}
"""Networks whose repetition is not seen, not all of it: why."""

CANNOT_BE_SAVED = {
    "attention_layers.attention_over_jagged_samples": "torch cannot read the shapes of what it saved",
    "control_flow.scan_over_a_sequence": "torch cannot trace it a second time within a backward",
}
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


def counted(network: Network, call: Call) -> FlopCounts:
    """A forward of *network* and the backward of the sum of its outputs, times a number that needs its gradient.

    That last product saves its factors, so that even a checkpoint that stops early stops behind the network.
    """
    example = network.example()

    def run(x: Tensor) -> Tensor:
        return total(example.forward()) * x

    try:
        with count_flops(example.model) as counts:
            call(run, torch.ones((), requires_grad=True)).backward()
    finally:
        example.teardown()
    return counts


def named(network: Network) -> str:
    """As the exceptions above name it."""
    return f"{network.family}.{network.name}"


def with_forward_repeated(flops: PhaseFlops) -> PhaseFlops:
    """The same with its forward as recompute, once more than before."""
    return replace(flops, recompute=flops.recompute + flops.forward)


@each(tuple(network for network in all_networks() if network.one_call and named(network) not in NOT_REPEATED))
def test_checkpointing_a_network_adds_its_forward_to_recompute(network: Network) -> None:
    """Module by module, in both kinds of checkpoint; forward and backward stay what they were."""
    kinds = {
        "reentrant": (reentrant, OTHER_WITHOUT_GRAD),
        "other": (other, CANNOT_BE_SAVED),
    }
    plain = counted(network, at_once)
    expected = {name: with_forward_repeated(flops) for name, flops in plain.by_module().items()}
    counts = {
        kind: counted(network, call) for kind, (call, exceptions) in kinds.items() if named(network) not in exceptions
    }
    assert {kind: found.by_module() for kind, found in counts.items()} == dict.fromkeys(counts, expected)
    if network.expected.without_backward is not None:  # else torch's tensors do not tell
        without_backward = {kind: found.without_backward for kind, found in counts.items()}
        assert without_backward == dict.fromkeys(counts, plain.without_backward)


@each(tuple(network for network in all_networks() if network.family in ("checkpointed", "repeated")))
def test_a_checkpoint_around_checkpoints_that_do_not_stop_repeats_all_that_is_in_them(network: Network) -> None:
    """The same where every checkpoint, those inside as well, goes on to its end."""
    if not network.one_call:
        pytest.skip("a gradient in its forward has a checkpoint around it repeat it then and there")
    with set_checkpoint_early_stop(False):
        plain, checkpointed = counted(network, at_once), counted(network, other)
    assert checkpointed.by_module() == {name: with_forward_repeated(flops) for name, flops in plain.by_module().items()}
