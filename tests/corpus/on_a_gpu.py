"""The networks that cost the same on a GPU: the test of them and the program for a GPU both run these."""

from __future__ import annotations

import torch

from lightning_flops.pytorch import count_flops
from lightning_flops.records import OUTSIDE, PhaseFlops

from . import Network, all_networks

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


def networks() -> tuple[Network, ...]:
    """All that are alike."""
    return tuple(network for network in all_networks() if is_alike(network))


def differences(network: Network, device: torch.device | str) -> dict[str, tuple[PhaseFlops, PhaseFlops]]:
    """What was counted on *device* and what is right, where they differ: by module, and in all as ``(all)``."""
    with torch.device(device):
        example = network.example()
        with count_flops(example.model) as counts:
            example.run()
    by_module = counts.by_module()
    seen = {name: by_module.get(name, PhaseFlops()) for name in network.expected.by_module}
    truth = dict(network.expected.by_module)
    # The sum over all cells, and over the root and what is outside of it: two ways to the same.
    # Not every transformers that is on such a machine computes rotary angles without a matrix product.
    whole = network.expected.phases + by_module.get("model.rotary_emb", PhaseFlops())
    seen["(all)"] = counts.total
    seen["(root and outside)"] = by_module.get("", PhaseFlops()) + by_module.get(OUTSIDE, PhaseFlops())
    truth |= {"(all)": whole, "(root and outside)": whole}
    return {name: (seen[name], truth[name]) for name in truth if seen[name] != truth[name]}
