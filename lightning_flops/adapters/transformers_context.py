"""What a transformers Trainer knows about its run, and where its reports go. Nothing here asks another rank."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from transformers import Trainer

from lightning_flops.adapters.loop_context import Frame, accelerate_frame
from lightning_flops.adapters.place import announce_in_log, log_is_shown
from lightning_flops.config import BLOCK
from lightning_flops.instrument.deepspeed_groups import parallel_sizes
from lightning_flops.run.output import LoggedOutput
from lightning_flops.sinks.console import to_standard_output
from lightning_flops.text.printable import page, printable

if TYPE_CHECKING:
    from transformers import TrainerCallback

    from lightning_flops.config import ProfilerConfig
    from lightning_flops.sinks.services import TrainerLog

NO_TOKENS = (
    "Tokens could not be counted, because a batch has no attention_mask on the host, and not every token has a label: "
    "those without one may be padding or a prompt. tokens/s needs tokens_per_sample=... to be given."
)


def trainer_of(callback: TrainerCallback) -> Trainer | None:
    """The Trainer that is calling an event of *callback*; None if no Trainer of transformers does.

    A Trainer gives its callbacks the model, the optimizer and much more, but never itself, and nothing that it gives
    leads to it. The method of it that runs its loop is on the stack, so we look there, once in a training.
    """
    frame = inspect.currentframe()
    while frame is not None:
        first = frame.f_code.co_varnames[:1]
        owner = frame.f_locals.get(first[0]) if first else None
        handler = getattr(owner, "callback_handler", None) if isinstance(owner, Trainer) else None
        if handler is not None and any(other is callback for other in handler.callbacks):
            return owner
        frame = frame.f_back
    return None


# ---- DeepSpeed, if the Trainer's arguments name a config of it


def engine_of(trainer: Trainer) -> Any:
    """The DeepSpeed engine that *trainer* trains with; None without one."""
    return trainer.model_wrapped if getattr(trainer, "is_deepspeed_enabled", False) else None


def block_of(trainer: Trainer) -> object | None:
    """The ``"flops_profiler"`` block of *trainer*'s DeepSpeed config; None if there is none."""
    plugin = getattr(trainer.accelerator.state, "deepspeed_plugin", None) if engine_of(trainer) is not None else None
    config = getattr(plugin, "deepspeed_config", None)
    return config.get(BLOCK) if isinstance(config, Mapping) else None


# ---- the run


def trainer_frame(trainer: Trainer) -> Frame:
    """What *trainer* knows of its run."""
    engine = engine_of(trainer)
    frame = replace(accelerate_frame(trainer.accelerator, trainer.model_wrapped, framework="transformers"), writers=())
    if engine is not None:
        strategy = f"ZeRO-{int(engine.zero_optimization_stage())}"
        frame = replace(frame, sizes=parallel_sizes(engine), strategy=strategy)
    return frame


def training_output(trainer: Trainer, config: ProfilerConfig, *, log: TrainerLog) -> LoggedOutput:
    """Where rank 0 shows the reports of this training: in the Trainer's *log*, on the console and in files."""
    return LoggedOutput(
        config,
        loggers=log,
        folder=lambda: log.folder() or str(trainer.args.output_dir),  # so that TensorBoard's tab finds ours
        announce=lambda sentence: _announce(trainer, sentence),
    )


def _announce(trainer: Trainer, sentence: str) -> None:
    """Say *sentence* where this Trainer shows its own log, unless our own log is shown.

    That is above its progress bar, or on standard output without one, as in a notebook. If the user has taken both
    away, the log of transformers gets it, which does not show such lines by default.
    """
    if log_is_shown():
        return
    callbacks = trainer.callback_handler.callbacks
    bars = [getattr(one, "training_bar", None) for one in callbacks]
    bar: Any = next((one for one in bars if one is not None), None)
    if hasattr(type(bar), "write"):
        bar.write(printable(sentence))
    elif any(type(one).__name__.endswith(("PrinterCallback", "ProgressCallback")) for one in callbacks):
        to_standard_output(page([sentence]))
    else:
        announce_in_log("transformers.trainer", sentence)
