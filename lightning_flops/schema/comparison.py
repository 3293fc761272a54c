"""Two runs compared, by profiles or by traces: what in a step takes longer, with its causes, and its JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from lightning_flops.schema import codec

STARTS = 0.05  # two starts of one program may differ by this share, which one run a side does not show
SHARED = 0.3  # and by this on a CPU, whose caches, memory and cores other programs or machines use as well
CONFIDENCE = 0.99  # of noise: at 95% one or two of a step's thirty parts and kernels would seem to differ in any runs

#: What a difference comes from. Work: FLOPs changed, bytes changed, modules are new or gone. Efficiency: the same work,
#: slower. Waiting: for the next batch; for communication that no computation hides, and a pipeline's bubble; of the
#: device, for the host that prepares; for the loop, which moves batches, logs, and calls callbacks and schedulers.
Cause = Literal["flops", "bytes", "modules", "efficiency", "data", "communication", "idle", "loop"]


def _sum_of(*causes: Cause) -> property:
    """Nanoseconds of *causes* together."""
    return property(lambda one: sum(one.causes.get(cause, 0) for cause in causes))


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeDifference:
    """The time of something in one step of A and of B: means over the steps, and over the ranks of traces."""

    name: str  #: What took the time: a part of the step, a module, a kernel.
    a_ns: int  #: Time in a step of A.
    b_ns: int  #: Time in a step of B.
    #: How far the difference may be chance; of a module in one run a side four standard errors over the traced steps.
    #: Where the slower side was starved, with all that it may have waited for processors there. None: not known; of a
    #: module also where the step's own difference may be chance.
    noise_ns: int | None

    @property
    def difference_ns(self) -> int:
        """Time that B takes longer than A."""
        return self.b_ns - self.a_ns

    @property
    def beyond_noise(self) -> bool | None:
        """Whether the difference is more than chance explains; None if that is not known."""
        return None if self.noise_ns is None else abs(self.difference_ns) > self.noise_ns


@dataclass(frozen=True, slots=True, kw_only=True)
class CausedDifference(TimeDifference):
    """A difference with its causes, which add up to it, to the nanosecond."""

    #: Nanoseconds by cause, without what is zero; below zero: less work, faster, less waiting. Empty of traces.
    causes: Mapping[Cause, int]

    work_ns = _sum_of("flops", "bytes", "modules")  #: Time for more work.
    efficiency_ns = _sum_of("efficiency")  #: Time by which the same work is slower.
    waiting_ns = _sum_of("data", "communication", "idle", "loop")  #: Time of more waiting.


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleSide:
    """One module in one of the runs; counts are of one step, without the modules below it."""

    name: str  #: Qualified name; the root is ``""``, what no module owns ``(outside)``.
    flops: int  #: Forward, backward and recomputation.
    bytes: int  #: Bytes read and written by its operators.


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleDifference(CausedDifference):
    """One module in both runs, or in one of them, named as in B, or as in A if it is gone.

    Its time is forward and backward without the modules below it, zero where times of modules are not known.
    """

    a: ModuleSide | None  #: The module in A; None if it is new in B.
    #: The module in B, by its name, or by an equal tree of classes, settings and FLOPs; None if it is gone.
    b: ModuleSide | None

    @property
    def other_counts(self) -> bool:
        """Whether its FLOPs or bytes differ, or only one of the runs has it: evidence that needs no times."""
        return self.a is None or self.b is None or (self.a.flops, self.a.bytes) != (self.b.flops, self.b.bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class CalledDifference(TimeDifference):
    """A row of a trace's table in both runs."""

    calls_a: float  #: How often it runs in a step of A.
    calls_b: float  #: How often it runs in a step of B.


#: What the rows of a table are. ``kernels`` has copies and memsets too; ``operators``: on the host, without callees.
TableName = Literal["kernels", "operators", "collectives"]


@dataclass(frozen=True, slots=True, kw_only=True)
class FigureDifference:
    """One figure in both runs: of ``Profile.summary()``, or step time, MFU, FLOPs, waiting and memory of traces."""

    name: str  #: Name of the figure.
    a: float | None  #: Value in run A; None if it is not known there.
    b: float | None  #: Value in run B.
    ratio: float | None  #: B / A; 1 if both are 0. None if it is not known, or only A is 0.
    #: What the ratio may be multiplied or divided by through chance: 1 for a count. None if it is not known.
    noise_factor: float | None
    reason: str  #: Why the ratio or its noise is None; empty if neither is.

    @property
    def ends(self) -> tuple[float, float] | None:
        """Least and largest ratio within the noise; None if they are not known."""
        ratio, factor = self.ratio, self.noise_factor
        return None if ratio is None or factor is None else (ratio / factor, ratio * factor)


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedRun:
    """One of the two sides: a run, or several runs of the same program."""

    #: File, folder or URL it was read from, or ``A`` and ``B``; of several runs the first, and how many more.
    source: str
    runs: int = 1  #: How many runs the times are means of; from two on each side noise is that between runs.
    about: str  #: Its model, device, ranks and steps, in words.
    #: How long its threads together were ready to run and had no processor, as a share of the time, at most 1, if that
    #: is over 5%; of several runs the median.
    starved_share: float = 0.0
    starved_runs: str = ""  #: Of several, which runs had too little, and what to do; also where the median had enough.
    #: By which share of a step another start of its program may differ, beyond the noise within it: ``STARTS``, or
    #: ``SHARED`` where it computes on a CPU, or its device is not known.
    starts_share: float = STARTS


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Comparison(codec.Shown):
    """Run B held against run A; immutable."""

    schema_version: int = 8  #: Version of the JSON; another one has other fields.
    kind: Literal["profiles", "traces", "throughput"]  #: What of the runs is compared.
    a: ComparedRun  #: The run that is compared with.
    b: ComparedRun  #: The run that is compared.
    #: Versions, device, ranks, batch and settings that differ, with both values as text; of profiles.
    settings: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    figures: tuple[FigureDifference, ...]  #: Numbers of both runs, with their ratios.
    step: CausedDifference  #: The whole step, or the ``whole trace`` if it has no marks of steps: the sum of its parts.
    #: Parts of a step, as in ``PartTiming`` or ``StepTime``; what one run cannot separate stands together. Of
    #: throughput the wait for a batch, and the rest.
    parts: tuple[CausedDifference, ...]
    #: Modules of profiles in B's tree order, each that is gone behind those of B; last what no module owns.
    modules: tuple[ModuleDifference, ...] = ()
    #: Rows of each kind that one of the runs shows, the largest difference first; of traces.
    tables: Mapping[TableName, tuple[CalledDifference, ...]] = field(default_factory=dict)
    notes: tuple[str, ...]  #: What is not known, or was joined to something else, in sentences.

    @property
    def has_several_runs(self) -> bool:
        """Whether noise is that between runs, of which there are at least two a side."""
        return min(self.a.runs, self.b.runs) > 1

    @property
    def starved(self) -> tuple[str, ...]:
        """The sides that were starved of processors, ``A`` and ``B``."""
        return tuple(name for name, side in (("A", self.a), ("B", self.b)) if side.starved_share)

    @property
    def is_told(self) -> bool:
        """Whether the step differs so that there is something to explain.

        Its difference is beyond noise, of one run a side by what two starts of a program may differ by.
        """
        return (
            self.step.noise_ns is not None
            and abs(self.step.difference_ns) > self.step.noise_ns + self.starts_share * self.step.a_ns
        )

    @property
    def starts_share(self) -> float:
        """By which share of a step two starts of one program may differ beyond noise; 0 where runs show that."""
        return 0.0 if self.has_several_runs else max(self.a.starts_share, self.b.starts_share)

    def to_html(self) -> str:
        """The comparison as a page: one HTML file with everything in it, which needs no network and opens from disk."""
        return str(codec.above("report.html_page").render_comparison_page(self))
