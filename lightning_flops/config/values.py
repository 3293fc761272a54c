"""Names that users write in settings, and the settings that are more than one value."""

from __future__ import annotations

from dataclasses import dataclass

BLOCK = "flops_profiler"  # the block in a DeepSpeed config; every message about a setting begins with it
OWN_FOLDER = "lightning_flops"  # of our files: in that of a run's logs, or by itself where a run has none

# Dtypes whose peak a profile names whether they ran or not; and all that the counter names, which may have peaks.
DTYPE_NAMES = ("bfloat16", "float16", "tf32", "float32", "float64", "float8", "int8")
_MORE_DTYPES = ("float4", "uint8", "int16", "int32", "int64", "complex32", "complex64", "complex128")
PEAK_DTYPES = DTYPE_NAMES + _MORE_DTYPES


@dataclass(frozen=True, slots=True, kw_only=True)
class AdviceThresholds:
    """The limits from which on advice is given; the setting ``advice_thresholds`` changes them.

    A share is a share of the step; 1 is the whole step. The values come from the sources that ``analysis.advice``
    names, or are this project's own.
    """

    data_wait: float = 0.05  # waiting for data above this share
    exposed_communication: float = 0.10  # communication that no computation hides above this share
    tensor_core_eligible: float = 0.05  # no tensor cores, though more than this share of kernels' time could use them
    float32: float = 0.05  # float32 products, TF32 off, above this share of the model FLOPs
    misaligned: float = 0.05  # 16-bit products with a dimension that is no multiple of 8 above this share of FLOPs
    optimizer: float = 0.15  # optimizer that updates tensor by tensor above this share
    idle: float = 0.20  # idle device above this share, the wait for data left out
    straggler: float = 1.1  # the slowest rank's own time above this many times the median
    straggler_sec: float = 0.001  # ... and longer by more than so many seconds a step
    waiting: float = 0.10  # waiting for other ranks above this share, though none of them is a straggler
    padding: float = 0.20  # padding above this share of the tokens
    pageable_copies: float = 0.05  # copies from pageable host memory above this share
    dropout: float = 0.10  # dropout above this share
    norm: float = 0.10  # norms that are written out in Python above this share
    line: float = 0.10  # a line or callback of the program around the model above this share
    line_in_module: float = 0.25  # many short operations of one function inside a module above this share
    calls: float = 0.10  # a module that a batch calls many times above this share
    unused_forward: float = 0.05  # forwards whose output no backward used above this share
    attention: float = 0.10  # attention that is written out above this share
    rollout: float = 0.20  # generation at less than half of the training's FLOP/s above this share
    scoring: float = 0.05  # a model that is only asked, in float32 where bfloat16 is faster, above this share
    recompute: float = 0.10  # forwards that the backward repeats above this share
    closure: float = 3.0  # runs of the model that a batch has in an LBFGS's closure above this number
    host_wait: float = 0.05  # idle device above this share where numbers are read from it
    other_operators: float = 0.25  # operators without products above this share
    part: float = 0.25  # a part of the step that no other rule explains above this share
    float64: float = 0.05  # products in float64 above this share
    tf32: float = 0.05  # products in TF32 where bfloat16 is faster above this share of the model FLOPs
    heat_limited: float = 0.05  # heat held the GPU's clock down above this share of the timed steps
    starved: float = 0.05  # a thread of this process was ready and had no processor above this share of the timed steps


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceSchedule:
    """Which steps after the timed ones are traced; the names are those of ``torch.profiler.schedule``."""

    wait: int = 0  # steps before each cycle that run without the profiler
    warmup: int = 1  # steps that run under the profiler and are not kept
    active: int = 5  # steps that are kept: times of modules and operators are medians over them
    repeat: int = 1  # how many cycles of the three
