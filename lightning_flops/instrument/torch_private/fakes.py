"""What counting offline needs: fake tensors, which have shapes and no values, and torch's walk through containers."""

from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_map_only

LOGGER = "torch._subclasses.fake_tensor"
"""Where torch writes the trace of what it could not run on fake tensors, before it raises it."""

__all__ = ["LOGGER", "FakeTensorMode", "tree_map_only"]
