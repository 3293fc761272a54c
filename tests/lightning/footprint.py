"""What a profiler might leave behind on a Lightning run."""

from __future__ import annotations

from typing import Any

from torch.nn.modules import module as torch_module
from torch.optim import optimizer as torch_optimizer
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack


def footprint(run: Any, net: Any) -> dict[str, Any]:
    """Everything of a trainer, its loops, its strategy, a model and torch that a profiler might write on."""
    fit_loop = run.fit_loop
    objects = {
        "trainer": run,
        "strategy": run.strategy,
        "precision": run.strategy.precision_plugin,
        "epoch loop": fit_loop.epoch_loop,
        "validation loop": fit_loop.epoch_loop.val_loop,
        "automatic": fit_loop.epoch_loop.automatic_optimization,
        "manual": fit_loop.epoch_loop.manual_optimization,
        **{f"module {name}": module for name, module in net.named_modules()},
        **{f"parameter {name}": parameter for name, parameter in net.named_parameters()},
    }
    return {
        **{name: sorted(vars(thing)) for name, thing in objects.items()},
        "module hooks": {
            name: len(getattr(module, name))
            for module in net.modules()
            for name in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
        },
        **torch_footprint(),
    }


def torch_footprint() -> dict[str, Any]:
    """What torch itself holds: global hooks and dispatch modes."""
    return {
        "global module hooks": [
            len(getattr(torch_module, name)) for name in vars(torch_module) if name.startswith("_global_")
            and hasattr(getattr(torch_module, name), "__len__")
        ],
        "optimizer hooks": [
            len(torch_optimizer._global_optimizer_pre_hooks),
            len(torch_optimizer._global_optimizer_post_hooks),
        ],
        "modes": len(_get_current_dispatch_mode_stack()),
    }  # fmt: skip
