"""Where the time of a trace's steps went: by kind of work, phase, device and module.

Times are in microseconds, as in the file; what a trace does not contain is None.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class Durations:
    """Lengths of several events; min <= mean <= max, and total = calls × mean."""

    total_us: float
    """All of them together."""
    mean_us: float
    """Of one of them."""
    max_us: float
    """Of the longest."""
    min_us: float
    """Of the shortest."""
    ratio: float | None
    """Total over the whole that the table names; None where that whole is empty."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """All events of one name; what its table has no figure for is None."""

    name: str
    """What they have in common."""
    calls: int
    """How many there are."""
    host: Durations | None = None
    """On the host."""
    device: Durations | None = None
    """On the device: what they are there, or what they launched. None without a device."""
    bytes: int | None = None
    """What they moved; None where the trace does not say."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    """Microseconds of a step by what filled them; the parts add up to the step's wall time.

    A moment that several kinds of events share belongs to the first of them in the order of the fields, the priority
    of the PyTorch profiler's step-time breakdown: so ``communication_us`` is only what no kernel or copy hides, and
    ``data_loader_us`` only what the device and its launches leave.
    """

    number: int | None
    """The profiler's number of the step; None for the mean of several, and where the whole trace stands as one."""
    wall_us: float
    """Of the whole step."""
    kernel_us: float | None
    """Kernels other than collectives'. None, like the next two and the runtime's, when the trace has no device."""
    memcpy_us: float | None
    """Copies to, from and on the device that no kernel hides."""
    memset_us: float | None
    """Memory filled on the device."""
    communication_us: float | None
    """None when the trace has no collectives at all."""
    runtime_us: float | None
    """Calls on the host that launch work or wait for it."""
    data_loader_us: float | None
    """None when the trace shows no ``DataLoader``."""
    cpu_us: float | None
    """Operators on the host; None when none was recorded."""
    other_us: float
    """What is left: no event of these kinds ran."""


STEP_PARTS = tuple((one.name.removesuffix("_us").replace("_", " "), one.name) for one in fields(StepTime)[2:])
"""What fills a step, as reports call it, by priority; and the field of ``StepTime`` that holds it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimes:
    """Every step's breakdown, and their mean."""

    marked: bool
    """False when the trace has no profiler steps; the whole trace is then one step."""
    steps: tuple[StepTime, ...]
    """In the order of the trace."""
    mean: StepTime
    """Part by part over all steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceMetrics:
    """One device over all steps; ratios are of the steps' wall time."""

    device: int
    """Its number."""
    name: str | None
    """As the driver has it; None where the trace does not say."""
    sm_count: int | None
    """Streaming multiprocessors; None where the trace does not say."""
    utilization: float
    """Union of the kernels within the steps ÷ steps."""
    sm_efficiency: float | None
    """Estimated: ∫ min(1, Σ blocks per SM of the kernels then running) dt ÷ steps; None if a kernel lacks them."""
    occupancy_percent: float | None
    """Estimated achieved occupancy, averaged over the kernels with their durations as weights."""
    blocks_per_sm: float | None
    """Averaged in the same way."""
    busy_us: float
    """Union of the kernels over the whole trace."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleRow:
    """One module over all steps of a trace; totals are with the modules below it, own times without."""

    name: str
    """Qualified name; the root is ``""``."""
    calls: int
    """Forward calls; those that a backward repeats are none."""
    forward_us: float
    """All of its forward calls together."""
    own_forward_us: float
    """Without the modules below it."""
    backward_us: float
    """With what the backward repeats of the forward (activation checkpointing)."""
    own_backward_us: float
    """Without the modules below it."""
    own_error_us: float | None = None
    """Standard error of ``own_forward_us`` and ``own_backward_us`` together, by the middle half of the steps of a run's
    own trace; None for fewer than four."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleTable:
    """Where the time of forward and backward went, module by module; there when the trace's modules are marked."""

    clock: Literal["host", "device"]
    """``device``: time in which work that was launched there ran, overlaps counted once. ``host``: without a device."""
    steps: int
    """All times and counts are of so many steps together; 1 for medians over the steps of a run's own trace."""
    rows: tuple[ModuleRow, ...]
    """By name, the root first."""
    forward_us: float
    """All of the forward; its own work outside every module's call is the root's."""
    backward_us: float
    """All of the backward: the modules', gradient accumulation, and what is unattributed."""
    optimizer_us: float
    """The optimizer, without forward and backward in its closure."""
    gradient_accumulation_us: float
    """Adding gradients to parameters, and the hooks that run there."""
    unattributed_forward_us: float
    """Work in the forward that no module's call accounts for."""
    unattributed_backward_us: float
    """The autograd engine between nodes, hooks in Python there, collectives that no module's node waits for, what
    wrappers put off to the backward's end, and nodes whose forward is not in the trace."""
