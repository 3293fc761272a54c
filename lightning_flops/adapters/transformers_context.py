"""What a transformers Trainer knows about its run, and where its reports go. Nothing here asks another rank."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
import transformers
from transformers import Trainer

from lightning_flops.adapters.place import run_context_on, sizes_along
from lightning_flops.config import BLOCK
from lightning_flops.instrument.deepspeed_groups import parallel_sizes
from lightning_flops.instrument.timing.settling import steps_to_settle
from lightning_flops.instrument.torch_private.loading import fetched_ahead
from lightning_flops.records import RunContext
from lightning_flops.run.adapter import Facts
from lightning_flops.run.output import LoggedOutput
from lightning_flops.run.private_names import PrivateNames
from lightning_flops.sinks.console import to_standard_output
from lightning_flops.text.printable import page, printable

if TYPE_CHECKING:
    from transformers import TrainerCallback

    from lightning_flops.config import ProfilerConfig
    from lightning_flops.sinks.services import TrainerLog

LOST = {
    "_run_epoch": "if the training raises, what the profiler put on the Trainer stays until it trains again",
    "_save_checkpoint": "saving a checkpoint is in other",
    "_prepare_inputs": "moving a batch to the device is in other",
    "send_to_device": "moving a batch to the device in its loader is in other",
    "_config": "DeepSpeed's own profiler is not told to stand down",
}
"""Private names of transformers, of accelerate and of a DeepSpeed engine that a training uses, and what is lost if one
is missing."""

NO_TOKENS = (
    "Tokens could not be counted, because a batch has no attention_mask on the host, and not every token has a label: "
    "those without one may be padding or a prompt. tokens/s needs tokens_per_sample=... to be given."
)


def private_names() -> PrivateNames:
    """The private names of the installed transformers."""
    return PrivateNames(f"transformers ({transformers.__version__})", LOST)


def trainer_of(callback: TrainerCallback) -> Trainer | None:
    """The Trainer that is calling an event of *callback*; None if no Trainer of transformers does.

    A Trainer tells its callbacks the model, the optimizer and much more, but never itself, and nothing that it tells
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


def facts_of(
    trainer: Trainer,
    loader: Any,
    config: ProfilerConfig,
    *,
    log: TrainerLog,
    mark_parts: Callable[[ExitStack], None],
) -> Facts:
    """A training of *trainer* on the batches of accelerate's *loader*; scalars go to the Trainer's *log*."""
    args, engine, context = trainer.args, engine_of(trainer), run_context(trainer)
    batches = getattr(loader, "base_dataloader", loader)
    ahead = 1 + fetched_ahead(batches)  # accelerate fetches one more
    model: Any = trainer.model
    return Facts(
        root=model,
        device=args.device,
        output=training_output(trainer, config, log=log),
        context=lambda: replace(context, accumulate=args.gradient_accumulation_steps),
        x_axis=lambda: int(trainer.state.global_step),
        optimizers=lambda: (getattr(trainer.optimizer, "optimizer", trainer.optimizer),),
        whole_model=lambda: trainer.model_wrapped if engine is None else engine.module,
        rank=args.process_index,
        world_size=args.world_size,
        profile_step=config.next_profile_step(steps_done=0),
        settle_steps=steps_to_settle(batches_ahead=ahead, batches_a_step=args.gradient_accumulation_steps),
        loader_workers=lambda: getattr(batches, "num_workers", None),
        mark_parts=mark_parts,
    )


def run_context(trainer: Trainer) -> RunContext:
    """Where this training runs, as far as a rank knows without asking the others."""
    args, engine, wrapped = trainer.args, engine_of(trainer), trainer.model_wrapped
    if engine is None:
        settings = getattr(trainer.accelerator, "parallelism_config", None)
        known = {kind: int(getattr(settings, f"{kind}_size", 1) or 1) for kind in ("tp", "cp", "sp")}
        sizes = sizes_along(known, world_size=args.world_size)
        strategy = type(wrapped).__name__ if wrapped is not trainer.model else ""
    else:
        sizes, strategy = parallel_sizes(engine), f"ZeRO-{int(engine.zero_optimization_stage())}"
    return run_context_on(
        args.device,
        sizes,
        framework="transformers",
        framework_version=transformers.__version__,
        precision=_precision(trainer),
        rank=args.process_index,
        world_size=args.world_size,
        accumulate=args.gradient_accumulation_steps,
        strategy=strategy,
    )


def _precision(trainer: Trainer) -> str:
    """The name that accelerate has for mixed precision, or the dtype of the parameters without it."""
    mixed = str(trainer.accelerator.mixed_precision)
    if mixed != "no":
        return f"{mixed}-mixed"
    model: Any = trainer.model
    floating = (one.dtype for one in model.parameters() if one.is_floating_point())
    return str(next(floating, torch.float32)).removeprefix("torch.")


def training_output(trainer: Trainer, config: ProfilerConfig, *, log: TrainerLog) -> LoggedOutput:
    """Where rank 0 shows the reports of this training: in the Trainer's *log*, on the console and in files."""
    return LoggedOutput(
        config,
        loggers=log,
        folder=lambda: _log_folder(trainer),
        announce=lambda sentence: _announce(trainer, sentence),
    )


def _log_folder(trainer: Trainer) -> str:
    """TensorBoard's folder of this training, so that its tab finds ours; without TensorBoard, that of checkpoints."""
    writers = (getattr(one, "tb_writer", None) for one in trainer.callback_handler.callbacks)
    folders = (getattr(one, "log_dir", None) for one in writers)
    return next((one for one in folders if isinstance(one, str)), str(trainer.args.output_dir))


def _announce(trainer: Trainer, sentence: str) -> None:
    """Say *sentence* where this Trainer shows its own log, unless our own log is shown.

    That is above its progress bar, or on standard output without one, as in a notebook. If the user has taken both
    away, the log of transformers gets it, which does not show such lines by default.
    """
    ours = logging.getLogger("lightning_flops")
    if ours.isEnabledFor(logging.INFO) and ours.hasHandlers():  # its INFO lines have named each file
        return
    callbacks = trainer.callback_handler.callbacks
    bars = [getattr(one, "training_bar", None) for one in callbacks]
    bar: Any = next((one for one in bars if one is not None), None)
    if hasattr(type(bar), "write"):
        bar.write(printable(sentence))
    elif any(type(one).__name__.endswith(("PrinterCallback", "ProgressCallback")) for one in callbacks):
        to_standard_output(page([sentence]))
    else:
        logging.getLogger("transformers.trainer").info("%s", printable(sentence))
