"""What a profiler might leave behind on a Trainer of transformers."""

from __future__ import annotations

from typing import Any

from accelerate import data_loader as accelerate_loaders

from tests.left_on_objects import is_ours, written_on
from tests.left_on_torch import torch_state


def footprint(trainer: Any) -> dict[str, Any]:
    """Everything of a Trainer, of what it holds and of torch that a profiler might write on, as names and numbers."""
    loader = trainer.callback_handler.train_dataloader
    objects = {
        "trainer": trainer,
        "arguments": trainer.args,
        "state": trainer.state,
        "control": trainer.control,
        "callbacks": trainer.callback_handler,
        "accelerator": trainer.accelerator,
        "optimizer": trainer.optimizer,
        "inner optimizer": trainer.optimizer.optimizer,
        "loader": getattr(loader, "base_dataloader", loader),
        "wrapped": trainer.model_wrapped,
    }
    torchs = torch_state()
    return {
        **written_on(objects, trainer.model),
        "send_to_device": is_ours(accelerate_loaders.send_to_device),
        **{f"torch's {name}": torchs[name] for name in ("functions", "dispatch modes", "function modes", "grad")},
        "torch's hooks": {table: len(hooks) for table, hooks in torchs["hooks"].items()},
    }
