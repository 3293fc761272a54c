"""What the steps of a run take, in a window and outside of it: seconds, samples, tokens and FLOPs, and their rates."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from lightning_flops.analysis.peaks import measured_peaks, peak_for
from lightning_flops.analysis.rates import padding_ratio, peak_seconds
from lightning_flops.analysis.step_flops import StepFlops, seed_of_run
from lightning_flops.analysis.throughput import build_throughput
from lightning_flops.config import ProfilerConfig
from lightning_flops.measure.batches import BatchMeter
from lightning_flops.measure.counting.part_counter import CountedStep
from lightning_flops.records import BatchTokens, Shapes, UnprofiledFlops, together
from lightning_flops.report.scalars import monitor_scalars
from lightning_flops.run.adapter import Adapter
from lightning_flops.run.monitor import Monitor
from lightning_flops.schema.throughput import ThroughputSummary

Batch = tuple[Any, Shapes, BatchTokens | None]  # what the loop gave the model, its shapes, its tokens


@dataclass(slots=True)
class RunningStep:
    """What is known of the step that is running."""

    batches: list[Shapes] = field(default_factory=list)
    tokens: list[BatchTokens | None] = field(default_factory=list)
    updates: int = 0
    profiled: bool = False  # the profiler slowed a batch of it down
    random: bool = False  # it was drawn to be counted before anything was known of it
    counted: CountedStep | None = None  # its FLOPs, if they were counted


class Throughput:
    """Adds up the steps of one run."""

    def __init__(self, adapter: Adapter, config: ProfilerConfig, *, note: Callable[[str], None]) -> None:
        self.monitor = Monitor()
        self.step = RunningStep()
        self.counts_steps = config.monitor and not config.timer_only  # those outside of windows, too
        self.config = config
        self._context = adapter.context()
        self.flops = StepFlops(seed=seed_of_run(self._context.world_size))
        self._measured = measured_peaks(self._context.host, self._context.device_name)
        self._meter = BatchMeter(
            batch_size=config.batch_size,
            tokens_per_sample=config.tokens_per_sample,
            note=note,
            declared=adapter.declared_batch_size,
        )

    def counted(self, step: CountedStep) -> None:
        """The running *step* was counted to its end."""
        self.step.counted = step

    def samples(self, batches: Sequence[Batch], rows: Sequence[int | None] | None) -> list[int | None]:
        """Samples of each of *batches*, of which the adapter may know the *rows*; None: not known."""
        if rows is None:
            return [self._meter.samples(given, shapes) for given, shapes, _ in batches]
        return [self._meter.given(given, known) for (given, _, _), known in zip(batches, rows, strict=True)]

    def tokens_of(self, batch: Batch, samples: int | None) -> int | None:
        """Tokens of *batch*, which has so many *samples*; None: not known, or not asked for."""
        given, _, tokens = batch
        real = None if tokens is None else tokens.real
        return self._meter.tokens(given, samples) if real is None else real

    def batches_done(
        self,
        batches: Sequence[Batch],
        samples_of: Sequence[int | None],
        *,
        updates: int,
        profiled: bool,
        ends_step: bool,
        counts_each: bool,
    ) -> float:
        """*batches* of so many samples went through the loop together; returns their step's seconds until now.

        Micro-batches of a pipeline are one batch of the loop's, unless it *counts_each*.
        """
        step = self.step
        for _, shapes, tokens in batches:
            step.batches.append(shapes)
            step.tokens.append(tokens)
        step.updates += updates
        step.profiled |= profiled
        return self.monitor.batch(
            samples=None if None in samples_of else sum(one or 0 for one in samples_of),
            tokens=together([one for *_, one in batches]),
            profiled=step.profiled,
            ends_step=ends_step,
            batches=len(batches) if counts_each else 1,
        )

    def step_ends(self, seconds: float) -> None:
        """The running step is over, and took so many *seconds*."""
        step, self.step = self.step, RunningStep()
        key = tuple(step.batches), tuple(step.tokens), step.updates
        if (counted := step.counted) is not None:
            self.flops.counted(
                *key,
                counted.flops,
                seconds=seconds,
                random=step.random,
                data_dependent=counted.data_dependent,
                lower_bound=counted.lower_bound,
            )
        elif self.counts_steps:
            self.flops.ran(*key, seconds=seconds, profiled=step.profiled)

    def read(self, *, prefix: str) -> dict[str, float]:
        """Scalars of what went by since the last reading, and what its steps cost; none if no batch did."""
        reading, flops = self.monitor.read(), self.flops.reading()
        if not reading.batches:
            return {}
        return monitor_scalars(
            seconds=reading.seconds,
            data_wait_sec=reading.data_wait_sec,
            batches=reading.batches,
            samples=reading.samples,
            dp_size=self._context.dp_size,
            tokens=self._tokens_in(reading.samples, reading.tokens),
            padding_ratio=None if reading.tokens.real is None else padding_ratio(reading.tokens),
            model_flops=None if flops is None else sum(flops.by_dtype.values()),
            estimated_ratio=None if flops is None else flops.estimated_ratio,
            prefix=prefix,
            **self._peak_sec(flops),
        )

    def summary(self, *, notes: tuple[str, ...]) -> ThroughputSummary | None:
        """Throughput of the whole run, with *notes*; None if nothing was monitored."""
        totals, flops = self.monitor.totals(), self.flops.totals()
        return build_throughput(
            totals,
            dp_size=self._context.dp_size,
            flops=flops,
            notes=notes,
            tokens=self.monitor.all_tokens,
            timed_tokens=self._tokens_in(totals.samples, totals.tokens),
            **self._peak_sec(None if flops is None else flops.unprofiled),
        )

    def _tokens_in(self, samples: int | None, tokens: BatchTokens) -> int | None:
        """Tokens of so many *samples*, as the user has said, or else the real ones among *tokens*."""
        per_sample = self.config.tokens_per_sample
        if per_sample is None:
            return tokens.real
        return samples * per_sample if samples is not None and isinstance(per_sample, int) else None

    def _peak(self, dtype: str) -> float:
        """The peak of this device in *dtype*; 0: not known."""
        given = self.config.peak_flops_per_sec
        return peak_for(self._context.device_name, dtype, given=given, measured=self._measured) or 0.0

    def _peak_sec(self, flops: UnprofiledFlops | None) -> dict[str, float | None]:
        """Seconds that model FLOPs, and the useful ones among them, take at this device's peaks; None: not known."""
        by_dtype, useful = (None, None) if flops is None else (flops.by_dtype, flops.useful_by_dtype)
        parts = {"model_flops_peak_sec": by_dtype, "useful_flops_peak_sec": useful}
        return {
            name: None if part is None else peak_seconds(part, {dtype: self._peak(dtype) for dtype in part})
            for name, part in parts.items()
        }
