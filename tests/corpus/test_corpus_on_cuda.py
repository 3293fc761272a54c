"""The corpus on a GPU: the same products, found in the backward by autograd's own threads."""

from __future__ import annotations

import pytest
import torch

from lightning_flops.pytorch import count_flops
from lightning_flops.records import OUTSIDE, PhaseFlops

from . import Network, all_networks

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

DEVICE = "cuda"

# What a CPU and a GPU do alike. Recurrent and fused attention kernels repeat and skip other things on a GPU, and
# wrapped and compiled networks are built for a CPU.
FAMILIES = (
    "mlp",
    "products",
    "convolutional",
    "training",
    "optimizers",
    "checkpointed",
    "programs",
    "autograd_forms",
    "transformers_encoders",
    "transformers_decoders",
    "transformers_pairs",
)
# Other kernels, layouts or sizes than a GPU takes.
OTHERWISE_ON_A_GPU = (
    "integer_matrix_product",
    "packed_eight_bit_weight",
    "conv_tbc",
    "sparse_adjacency_times_features",
    "autocast",
    "mixtral_with_grouped_experts",
)


def is_alike(network: Network) -> bool:
    """Whether the truth does not depend on the device."""
    return (
        network.family in FAMILIES
        and network.name not in OTHERWISE_ON_A_GPU
        and "fused" not in network.name
        and "padding_mask" not in network.name
    )


NETWORKS = tuple(network for network in all_networks() if is_alike(network))


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated")
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True:UserWarning:torch.utils.checkpoint")
@pytest.mark.filterwarnings("ignore:`torch.jit.(script|trace):DeprecationWarning")
@pytest.mark.parametrize("network", NETWORKS, ids=[f"{network.family}.{network.name}" for network in NETWORKS])
def test_a_network_costs_the_same_on_a_gpu(network: Network) -> None:
    """Phase by phase and module by module."""
    with torch.device(DEVICE):
        example = network.example()
        with count_flops(example.model) as counts:
            example.run()
    by_module = counts.by_module()
    assert counts.total == network.expected.phases
    assert {name: by_module.get(name, PhaseFlops()) for name in network.expected.by_module} == dict(
        network.expected.by_module
    )
    assert by_module.get("", PhaseFlops()) + by_module.get(OUTSIDE, PhaseFlops()) == network.expected.phases
