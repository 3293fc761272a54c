"""What a profiler might leave behind on a Lightning run."""

from __future__ import annotations

from typing import Any

import torch

from tests.left_on_objects import written_on
from tests.left_on_torch import global_hooks


def footprint(run: Any, net: Any) -> dict[str, Any]:
    """Everything of a trainer, its loops, its strategy, a model and torch that a profiler might write on."""
    fit_loop = run.fit_loop
    objects = {
        "trainer": run,
        "strategy": run.strategy,
        "precision": run.strategy.precision_plugin,
        "epoch loop": fit_loop.epoch_loop,
        "validation loop": fit_loop.epoch_loop.val_loop,
        "predict loop": run.predict_loop,
        "test loop": run.test_loop,
        "validate loop": run.validate_loop,
        "automatic": fit_loop.epoch_loop.automatic_optimization,
        "manual": fit_loop.epoch_loop.manual_optimization,
    }
    return {
        **written_on(objects, net),
        "global hooks": {table: len(hooks) for table, hooks in global_hooks().items()},
        "dispatch modes": torch._C._len_torch_dispatch_stack(),
    }
