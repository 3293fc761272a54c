"""What a DeepSpeed engine tells about its run, and where the run's reports go. Nothing here asks another rank."""

from __future__ import annotations

import logging
import math
import os
import platform
import sys
from typing import TYPE_CHECKING, Any

import torch

from lightning_flops.instrument.deepspeed_groups import parallel_sizes
from lightning_flops.records import RunContext
from lightning_flops.report.advice_text import render_advice_markdown
from lightning_flops.report.markdown import fenced, render_markdown
from lightning_flops.report.scalars import MONITOR_PREFIX, monitor_scalars, profile_scalars
from lightning_flops.report.text import render_text
from lightning_flops.report.throughput_text import render_throughput
from lightning_flops.sinks.console import ConsoleSink
from lightning_flops.sinks.deepspeed_monitor import DeepSpeedMonitorSink
from lightning_flops.sinks.file import free_path, write_text_file

if TYPE_CHECKING:
    from lightning_flops.analysis.profile import Profile
    from lightning_flops.analysis.throughput import ThroughputSummary
    from lightning_flops.config import ProfilerConfig
    from lightning_flops.instrument.monitor import MonitorReading

logger = logging.getLogger(__name__)


def run_context(engine: Any) -> RunContext:
    """Where *engine* trains, as far as a rank can tell without asking the others."""
    import deepspeed

    device = engine_device(engine)
    sizes = parallel_sizes(engine)
    return RunContext(
        framework="deepspeed",
        framework_version=str(deepspeed.__version__),
        torch_version=torch.__version__,
        device_type=device.type,
        device_name=torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine(),
        precision=_precision(engine),
        host=platform.node(),
        rank=int(engine.global_rank),
        world_size=int(engine.world_size),
        dp_size=sizes.dp_size,
        tp_size=sizes.tp_size,
        pp_size=sizes.pp_size,
        cp_size=sizes.cp_size,
        sp_size=sizes.sp_size,
        ep_size=sizes.ep_size,
        pp_rank=int(getattr(engine, "stage_id", 0)),
        accumulate=int(engine.gradient_accumulation_steps()),
        strategy=f"ZeRO-{int(engine.zero_optimization_stage())}",
    )


def engine_device(engine: Any) -> torch.device:
    """The device that this rank of *engine* trains on."""
    return torch.device(engine.device)


def settle_steps(engine: Any) -> int:
    """Steps until the batches that the engine's own loader fetched ahead are used up; two at least."""
    loader = getattr(vars(engine).get("training_dataloader"), "dataloader", None)
    ahead = (getattr(loader, "num_workers", 0) or 0) * (getattr(loader, "prefetch_factor", 0) or 0)
    return max(2, math.ceil(ahead / int(engine.gradient_accumulation_steps())))


def _precision(engine: Any) -> str:
    if engine.fp16_enabled():
        return "fp16"
    if engine.bfloat16_enabled():
        return "bf16"
    return "fp32"


class EngineOutput:
    """The places where the reports of one engine go, on the rank that writes them.

    The x-axis is ``engine.global_samples``, as for DeepSpeed's own scalars; the *step* of the report is in its text.
    """

    def __init__(self, engine: Any, config: ProfilerConfig) -> None:
        self._engine = engine
        self._config = config
        self._monitors = DeepSpeedMonitorSink(engine.monitor, tensorboard_dir=config.tensorboard_dir)
        self._profiles_written = 0

    def write_profile(self, profile: Profile, *, step: int) -> None:
        """Give the report to everything that shows it; what one of them refuses, the others still get."""
        config, samples = self._config, int(self._engine.global_samples)
        text = render_text(profile)
        self._monitors.write_scalars(profile_scalars(profile, prefix=config.tag_prefix), step=samples)
        self._monitors.write_text(f"{config.tag_prefix}/profile", render_markdown(profile), step=samples)
        self._monitors.write_text(f"{config.tag_prefix}/advice", render_advice_markdown(profile.advice), step=samples)
        self._profiles_written += 1
        if config.output_file is not None:
            # The first report of a run takes the place of another run's; those that follow lie beside it.
            _write_file(config.output_file if self._profiles_written == 1 else free_path(config.output_file), text)
        else:
            # As the built-in profiler does: who keeps the block looks for the report in the job's output.
            sys.stdout.write(text)
            sys.stdout.flush()
        _write_file(free_path(f"{self._monitors.folder() or '.'}/profile.json"), profile.to_json())

    def write_reading(
        self, reading: MonitorReading, *, dp_size: int, model_flops_peak_sec: float | None, step: int
    ) -> None:
        """Give the monitor's *reading* to the monitors; *model_flops_peak_sec* is None where the steps differ."""
        scalars = monitor_scalars(
            seconds=reading.seconds,
            data_wait_sec=reading.data_wait_sec,
            batches=reading.batches,
            steps=reading.steps,
            samples=reading.samples,
            dp_size=dp_size,
            model_flops_peak_sec=model_flops_peak_sec,
        )
        self._monitors.write_scalars(scalars, step=int(self._engine.global_samples))

    def write_throughput(self, summary: ThroughputSummary, *, step: int) -> None:
        """Give what the whole run's batches came to to the log, to monitors that show text, and to a file."""
        tag, text = f"{MONITOR_PREFIX}/summary", render_throughput(summary)
        self._monitors.write_text(tag, fenced(text), step=int(self._engine.global_samples))
        ConsoleSink().write_text(tag, text, step=step)
        _write_file(free_path(f"{self._monitors.folder() or '.'}/throughput.json"), summary.to_json())


class StageOutput:
    """Where a later stage of a pipeline leaves its profile: in files beside those of stage 0, on its first rank."""

    def __init__(self, engine: Any, config: ProfilerConfig, *, stage: int) -> None:
        self._config = config
        self._stage = stage
        self._folder = _monitors_folder(engine)
        self._profiles_written = 0

    def write_profile(self, profile: Profile, *, step: int) -> None:
        """Write the text if a file was named for it, and the profile."""
        self._profiles_written += 1
        if self._config.output_file is not None:
            path = self._path(self._config.output_file)
            _write_file(path if self._profiles_written == 1 else free_path(path), render_text(profile))
        _write_file(free_path(self._path(f"{self._folder}/profile.json")), profile.to_json())

    def write_reading(
        self, reading: MonitorReading, *, dp_size: int, model_flops_peak_sec: float | None, step: int
    ) -> None:
        """Nothing: throughput is the whole pipeline's, and stage 0 writes it."""

    def write_throughput(self, summary: ThroughputSummary, *, step: int) -> None:
        """Nothing, likewise."""

    def _path(self, path: str) -> str:
        """Where this stage writes what stage 0 writes to *path*: ``flops.txt`` -> ``flops_stage1.txt``."""
        root, suffix = os.path.splitext(path)
        return f"{root}_stage{self._stage}{suffix}"


def _monitors_folder(engine: Any) -> str:
    """The folder of rank 0's first monitor that has one; the other ranks have no monitors, but their settings."""
    monitors = engine._config.monitor_config
    for settings in (monitors.tensorboard, monitors.csv_monitor):
        if settings.enabled:
            return str(os.path.join(settings.output_path, settings.job_name))
    return "."


def _write_file(path: str, text: str) -> None:
    try:
        write_text_file(path, text)
    except OSError as error:
        logger.warning("the FLOPs report was not written: %s", error)
    else:
        logger.info("wrote %s", path)
