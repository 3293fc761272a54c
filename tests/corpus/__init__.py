"""Networks that carry their own FLOP counts, worked out by hand from their layer sizes.

``all_networks()`` is the whole corpus. See ``case.py`` for what a network is and how its truth is written.
"""

from __future__ import annotations

from importlib import import_module

from .case import Example, Expected, Family, Network

FAMILY_MODULES = (
    "mlp",
    "products",
    "convolutional",
    "recurrent",
    "attention",
    "attention_layers",
    "training",
    "optimizers",
    "programs",
    "checkpointed",
    "repeated",
    "autograd_forms",
    "wrapped",
    "subclasses",
    "compiled",
    "transformers_encoders",
    "transformers_decoders",
    "transformers_pairs",
)


def all_networks() -> tuple[Network, ...]:
    """Every network of every family, in the order they are written."""
    families = [import_module(f".{name}", __name__).FAMILY for name in FAMILY_MODULES]
    return tuple(network for family in families for network in family.networks)


__all__ = ["Example", "Expected", "Family", "Network", "all_networks"]
