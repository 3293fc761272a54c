"""The key-value store of the default process group, which every launcher has set up."""

from __future__ import annotations

from lightning_flops.instrument.torch_private.names import take_later

store_getter = take_later(
    "torch.distributed.distributed_c10d:_get_default_store",
    None,
    "does not show its key-value store: ranks cannot tell each other anything, and a report is of one rank",
    reported=False,
)
"""Answers with the function that answers with the store; with None in a torch that has no such function."""
