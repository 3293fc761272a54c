"""What a DeepSpeed engine says of its run, and where its reports go. Nothing here imports DeepSpeed or asks a rank."""

from __future__ import annotations

import importlib
import logging
import math
import sys
from collections.abc import Mapping
from typing import Any

import torch

from lightning_flops.adapters.place import run_context_on
from lightning_flops.config import OWN_FOLDER, ProfilerConfig, TakenBlock
from lightning_flops.measure.deepspeed_groups import parallel_sizes
from lightning_flops.measure.patches import listen
from lightning_flops.records import RunContext
from lightning_flops.run.delivery import OUTCOMES
from lightning_flops.run.output import LoggedOutput
from lightning_flops.run.run import Run
from lightning_flops.signals import Undo
from lightning_flops.sinks.console import to_standard_output
from lightning_flops.sinks.services import monitors_in
from lightning_flops.units import package_logger, page

logger = package_logger(__name__)

_STEPS_BETWEEN_READINGS = 10  # if ``steps_per_print`` does not say it; DeepSpeed's default


def version() -> str:
    """Version of DeepSpeed."""
    return str(getattr(sys.modules.get("deepspeed"), "__version__", "unknown"))


def steps_between_readings(engine: Any) -> int:
    """How often throughput is written: as often as DeepSpeed prints, which accelerate silences by infinity."""
    every = engine.steps_per_print() or 0
    return int(every) if 1 <= every < math.inf else _STEPS_BETWEEN_READINGS


def switch_off_builtin(engine: Any, run: Run) -> None:
    """Switch off DeepSpeed's own profiler, if *engine* was made with it, for as long as *run*."""
    settings = getattr(getattr(engine, "_config", None), "flops_profiler_config", None)
    if settings is not None and settings.enabled:
        settings.enabled = False
        run.undo.callback(setattr, settings, "enabled", True)


def make_without_builtin(undo: Undo) -> None:
    """Have engines made with DeepSpeed's own profiler off, and so without its timers, until *undo* is closed."""

    def was_read(settings: Any, error: BaseException | None) -> None:
        if error is None and isinstance(settings.enabled, int):  # DeepSpeed refuses anything else later
            settings.enabled = False

    owner = importlib.import_module("deepspeed.runtime.config")
    listen(undo, owner, "DeepSpeedFlopsProfilerConfig", lambda *_: was_read)


def run_context(engine: Any) -> RunContext:
    """Where *engine* trains, as far as a rank knows without asking the others."""
    return run_context_on(
        torch.device(engine.device),
        parallel_sizes(engine),
        framework="deepspeed",
        framework_version=version(),
        precision="fp16" if engine.fp16_enabled() else "bf16" if engine.bfloat16_enabled() else "fp32",
        rank=int(engine.global_rank),
        world_size=int(engine.world_size),
        pp_rank=int(getattr(engine, "stage_id", 0)),
        accumulate=int(engine.gradient_accumulation_steps()),
        strategy=f"ZeRO-{int(engine.zero_optimization_stage())}",
    )


def engine_output(engine: Any, config: ProfilerConfig) -> LoggedOutput:
    """Where rank 0 shows the reports of *engine*'s run."""
    monitors = monitors_in(engine.monitor, tensorboard_dir=config.tensorboard_dir)
    return LoggedOutput(
        config,
        loggers=monitors,
        # As DeepSpeed's profiler does: users who keep the block look for the report in the job's output.
        console=to_standard_output,
        folder=lambda: monitors.folder() or OWN_FOLDER,
        text_file=False,
        announce=lambda sentence: to_standard_output(page([sentence])),
    )


# ---- the block of a DeepSpeed config, whatever framework got it


def settings_of(
    block: object | None, given: Mapping[str, Any], *, enabled: bool = True, run: str, logs: bool, expected: bool = True
) -> TakenBlock:
    """The settings of a *run*: those of the *block* (None: there is none), and those *given*, which win.

    A block without the key ``enabled`` is *enabled* or not. With *logs*, what is wrong is logged, and that the run is
    not profiled, which is a warning where a profile is *expected*.
    """
    if block is None:
        taken = TakenBlock(ProfilerConfig(**given), (), None, says_enabled=False)
    else:
        taken = ProfilerConfig.taken_over(block, given=given, enabled=enabled)
    if logs:
        log_mistakes(taken, run=run)
        if not (taken.wrong or taken.settings.enabled):
            level = logging.WARNING if expected else logging.INFO
            logger.log(level, "flops_profiler.enabled is not true: this %s is not profiled", run)
    return taken


def log_mistakes(taken: TakenBlock, *, run: str) -> None:
    """Log which keys of a block are ignored, and whether a wrong value keeps the *run* from being profiled."""
    for words in taken.unknown:
        logger.warning("in the DeepSpeed config, %s", words)
    if taken.wrong:
        OUTCOMES.warned = True
        logger.warning("this %s is not profiled: %s", run, taken.wrong)
