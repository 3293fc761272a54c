"""What torch is asked of in vain when a profiler has left it as it was."""

from __future__ import annotations

import sys
import warnings
from typing import Any

import torch
from torch.nn.modules import module as torch_module
from torch.optim import optimizer as torch_optimizer
from torch.utils.data import DataLoader, dataloader as torch_dataloader

from tests.left_on_objects import is_ours


def global_hooks() -> dict[str, dict[int, Any]]:
    """Every hook that torch calls for any module or optimizer, by the table it is in."""
    return {
        f"{holder.__name__}.{name}": dict(hooks)
        for holder in (torch_module, torch_optimizer)
        for name, hooks in vars(holder).items()
        if name.startswith("_global_") and isinstance(hooks, dict)
    }


def compiler_callbacks() -> list[Any]:
    """What torch calls when a compilation begins and when it ends, once the compiler was imported."""
    handler = getattr(sys.modules.get("torch._dynamo.callback"), "callback_handler", None)
    return [None] if handler is None else [*handler.start_callbacks, None, *handler.end_callbacks]


def clipping() -> list[Any]:
    """Where a program finds what it clips gradients by, and drops them by."""
    accelerator = getattr(sys.modules.get("accelerate"), "Accelerator", object)
    return [torch.nn.utils, torch.nn.utils.clip_grad, torch.nn.Module, torch.optim.Optimizer, accelerator]


def torch_state() -> dict[str, Any]:
    """Everything of torch and Python that this package touches while it measures; the same again if nothing is left."""
    return {
        "hooks": global_hooks(),
        "recursion_limit": sys.getrecursionlimit(),
        "functions": [
            torch.autograd.backward,
            torch.autograd.grad,
            torch.autograd.graph._engine_run_backward,
            torch.Tensor.backward,
            torch.nn.Module.__call__,
            torch.nn.functional.linear,
            torch.matmul,
            torch.optim.SGD.step,
            torch.optim.Optimizer.zero_grad,
            torch.nn.Module.zero_grad,
            torch.nn.utils.clip_grad_norm_,
            torch.nn.utils.clip_grad_value_,
            torch.jit._recursive.create_script_module,
            torch.utils.checkpoint.checkpoint,
            DataLoader.__iter__,
            torch_dataloader._BaseDataLoaderIter.__next__,
            torch.enable_grad.__enter__,
            torch.set_grad_enabled.__exit__,
            torch.cuda.CUDAGraph.replay,
            repr(torch._C._InferenceMode.__enter__),  # pickles know no instance methods
            repr(torch._C._InferenceMode.__exit__),
        ],
        "ours": [name for kind in clipping() for name, value in vars(kind).items() if is_ours(value)],
        "grad": (torch.is_grad_enabled(), torch.is_inference_mode_enabled()),
        "callbacks of the compiler": compiler_callbacks(),
        "dispatch modes": torch._C._len_torch_dispatch_stack(),
        "function modes": torch._C._len_torch_function_stack(),
        "hooks on saved tensors": getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", lambda _: None)(
            False
        ),
        "profiler": torch.autograd.profiler._is_profiler_enabled,
        "kineto": torch._C._autograd._profiler_enabled(),
    }


def torch_state_and_warnings() -> dict[str, Any]:
    """The same, and the filters of warnings: for where nothing is imported in between that sets filters of its own."""
    return {**torch_state(), "filters": list(warnings.filters)}
