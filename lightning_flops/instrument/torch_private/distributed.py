"""The key-value store of the default process group, which every launcher has set up."""

from lightning_flops.instrument.torch_private.names import optional

store_getter = optional("torch.distributed.distributed_c10d:_get_default_store")
"""Answers with the function that answers with the store; with None in a torch that has no such function."""
