"""What torch is asked of in vain when a profiler has left it as it was."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.modules import module as torch_module
from torch.optim import optimizer as torch_optimizer
from torch.utils.data import DataLoader
from torch.utils.data import dataloader as torch_dataloader


def torch_state() -> dict[str, Any]:
    """Everything of torch that this package touches while it measures; equal before and after if nothing is left."""
    return {
        "hooks": [
            list(hooks)
            for holder in (torch_module, torch_optimizer)
            for name, hooks in sorted(vars(holder).items())
            if name.startswith("_global_") and isinstance(hooks, dict)
        ],
        "functions": [
            torch.autograd.backward,
            torch.autograd.grad,
            torch.Tensor.backward,
            torch.nn.Module.__call__,
            torch.utils.checkpoint.checkpoint,
            DataLoader.__iter__,
            torch_dataloader._BaseDataLoaderIter.__next__,
        ],
        "dispatch modes": torch._C._len_torch_dispatch_stack(),
        "function modes": torch._C._len_torch_function_stack(),
        "hooks on saved tensors": torch._C._autograd._top_saved_tensors_default_hooks(False),
        "profiler": torch.autograd.profiler._is_profiler_enabled,
        "kineto": torch._C._autograd._profiler_enabled(),
    }
