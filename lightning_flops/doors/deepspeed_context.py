"""What a DeepSpeed engine tells about its run, and its places for reports. Nothing here asks another rank."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from lightning_flops.config import OWN_FOLDER
from lightning_flops.doors.run_place import run_context_on
from lightning_flops.instrument.deepspeed_groups import parallel_sizes
from lightning_flops.instrument.timing.settling import steps_to_settle
from lightning_flops.instrument.torch_private.loading import fetched_ahead
from lightning_flops.records import RunContext
from lightning_flops.session.output import LoggedOutput, RunFiles
from lightning_flops.session.private_names import PrivateNames
from lightning_flops.sinks.console import StandardOutputSink
from lightning_flops.sinks.deepspeed_monitor import DeepSpeedMonitorSink
from lightning_flops.text.printable import page

if TYPE_CHECKING:
    from lightning_flops.config import ProfilerConfig


LOST = {
    "_config": "DeepSpeed's own profiler is not told to stand down, and the block of its config is not found",
    "_param_dict": "the block of a config is found only if DeepSpeed read the config after install()",
    "_grad_acc_hooks": "an engine that was destroyed is not told from one that can train",
    "_is_gradient_accumulation_boundary": "where the loop itself says that a step ends, its micro-steps are not seen",
    "_INSTRUCTION_MAP": "the parts of a pipeline's step cannot be told apart",
    "_next_batch": "neither the wait for a stage's micro-batches nor their sizes are seen",
    "_aggregate_total_loss": "the stages' exchange of the loss is in other",
    "_backward_epilogue": "",  # newer engines have it
    "_take_model_step": "",
}
"""Private names of a DeepSpeed engine that its door uses, and what is lost if one is missing."""


def private_names() -> PrivateNames:
    """The private names of the installed DeepSpeed."""
    import deepspeed

    return PrivateNames(f"DeepSpeed ({deepspeed.__version__})", LOST)


def run_context(engine: Any) -> RunContext:
    """Where *engine* trains, as far as a rank knows without asking the others."""
    import deepspeed

    return run_context_on(
        engine_device(engine),
        parallel_sizes(engine),
        framework="deepspeed",
        framework_version=str(deepspeed.__version__),
        precision=_precision(engine),
        rank=int(engine.global_rank),
        world_size=int(engine.world_size),
        pp_rank=int(getattr(engine, "stage_id", 0)),
        accumulate=int(engine.gradient_accumulation_steps()),
        strategy=f"ZeRO-{int(engine.zero_optimization_stage())}",
    )


def engine_device(engine: Any) -> torch.device:
    """The device that this rank of *engine* trains on."""
    return torch.device(engine.device)


def settle_steps(engine: Any) -> int:
    """Steps to leave alone after a counted one, as far as the engine's own loader shows."""
    loader = getattr(vars(engine).get("training_dataloader"), "dataloader", None)
    return steps_to_settle(
        batches_ahead=fetched_ahead(loader), batches_a_step=int(engine.gradient_accumulation_steps())
    )


def _precision(engine: Any) -> str:
    if engine.fp16_enabled():
        return "fp16"
    if engine.bfloat16_enabled():
        return "bf16"
    return "fp32"


def engine_output(engine: Any, config: ProfilerConfig) -> LoggedOutput:
    """Where rank 0 shows the reports of *engine*'s run.

    The x-axis is ``engine.global_samples``, as for DeepSpeed's own scalars; the step of a report is in its text.
    """
    monitors = DeepSpeedMonitorSink(engine.monitor, tensorboard_dir=config.tensorboard_dir)
    # As DeepSpeed's profiler does: users who keep the block look for the report in the job's output.
    console = StandardOutputSink()

    def announce(sentence: str) -> None:
        """Name our own folder, because the user did not choose it; a folder of the monitors the user knows."""
        if monitors.folder() is None:
            console.write_text("", page([sentence]), step=0)

    return LoggedOutput(
        config,
        loggers=monitors,
        console=console,
        files=RunFiles(
            output_file=config.output_file,
            folder=lambda: monitors.folder() or OWN_FOLDER,
            timer_only=config.timer_only,
            html=config.html,
        ),
        text_file=False,
        x_axis=lambda step: int(engine.global_samples),
        announce=announce,
    )
