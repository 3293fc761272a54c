"""Throughput of a whole run over all its batches, and its JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from lightning_flops.schema import codec


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """A mean between the least and the greatest of what it is the mean of."""

    average: float  #: Total over total.
    maximum: float  #: Of a single batch.
    minimum: float  #: Of a single batch.


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class ThroughputSummary(codec.Shown):
    """Throughput of a run over all its batches, counted and traced ones left out.

    The names and the table are those of the benchmark summary of Paddle's profiler; its averages are not, which divide
    sums over some batches by the number of others. Here every average is a total over a total.
    """

    VERSION = 5
    schema_version: int = VERSION  #: Version of the JSON; another one has other fields.
    batches: int  #: Batches of this rank.
    reader_ratio: float | None  #: Share of the batches' time inside the data loader; None if no wait was seen.
    reader_cost_sec: Spread | None  #: Host seconds of a batch inside the data loader.
    #: Wall time of a batch, the wait for it included; validation, checkpoints and epoch restarts are not.
    batch_cost_sec: Spread
    #: Items per second of this rank, times the ranks that see different data; None if no batch took any time.
    ips: Spread | None
    ips_unit: Literal["samples/s", "batches/s"]  #: Batches where the number of samples was not known.
    #: Forward and backward of this rank, of all steps of the run; None if no step was counted.
    model_flops: int | None = None
    hardware_flops: int | None = None  #: Model FLOPs, recompute and optimizer of the same steps.
    #: Half of the 95% interval of model FLOPs and MFU, as a share. 0.0: every step was counted, or a formula covers it.
    #: None: all *checks* agreed, or there were under three.
    flops_error: float | None = None
    lower_bound: bool = False  #: FLOPs and MFU are lower bounds: an operator that may have FLOPs could not be counted.
    #: Sentences on these FLOPs, and what became known of the run when its windows had been reported.
    notes: tuple[str, ...] = ()
    steps_counted: int = 0  #: Steps that were counted, and all others of the same shapes where these counts agreed.
    steps_by_formula: int = 0  #: Steps whose FLOPs follow from an exact formula of the batch's sizes.
    steps_estimated: int = 0  #: All other steps: estimated by counted ones.
    checks: int = 0  #: Steps that were counted at random and compared with what was predicted.
    checks_seed: int = 0  #: Seed of the schedule that drew them, which differs from run to run.
    #: Model FLOPs over the batches' time, over the device's peak, each dtype by its own; without profiled steps.
    mfu: float | None = None
    #: MFU of the model FLOPs that these steps would have without padding, by the formula.
    useful_mfu: float | None = None
    tokens: int | None = None  #: Tokens that this rank processed in all steps of the run, padding included.
    #: Tokens that are no padding, as attention masks and offsets of packed sequences show.
    real_tokens: int | None = None
    padding_ratio: float | None = None  #: (tokens - real_tokens) / tokens
    #: Real tokens per second (or by tokens_per_sample) of unprofiled steps, times the ranks with different data.
    tokens_per_sec: float | None = None
    #: Why ``mfu`` or ``useful_mfu`` is None, in a few words.
    unavailable: Mapping[str, str] = field(default_factory=dict)
    #: Mean batch cost in each of at most 63 stretches of equally many batches in a row: what of a difference is noise.
    batch_stretches_sec: tuple[float, ...] = ()
    reader_stretches_sec: tuple[float, ...] = ()  #: Mean reader cost in these stretches; empty if no wait was seen.
