"""The forwards of one model: what was heard of them, and what the report in DeepSpeed's layout is made of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from lightning_flops.records import FlopRecord, PhaseFlops, UncountedOperator
from lightning_flops.schema.modules import ModuleProfile


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedCalls:
    """Calls of the model that were timed as a whole, while nothing listened to its modules."""

    number: int
    mean_sec: float
    minimum_sec: float
    median_sec: float
    maximum_sec: float
    samples: int | None
    """Samples in each call; None if its input does not tell."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedGeneration:
    """One call of ``generate`` that was timed, while nothing listened to the modules."""

    forwards: int
    """Calls of the model in it."""
    prefill_sec: float
    """Up to the model's second call; all of it if there was none."""
    decode_sec: float
    """The rest."""


class NewTokens(NamedTuple):
    """What a call of ``generate`` has added to its input."""

    prompt: int
    """Tokens of the input, its padding included."""
    sequences: int
    each: int
    """Tokens of each sequence, with the padding behind one that ended early."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """One call of ``generate``; what could not be told is None, with the reason."""

    forwards: int
    """Calls of the model in it."""
    prefill_flops: int | None
    """All up to the model's second call."""
    decode_flops: int | None
    """All from there on."""
    why_no_phases: str
    """Why prefill and decode cannot be told apart; empty if they can."""
    sequences: int | None
    new_tokens: int | None
    """Of all sequences together."""
    why_no_tokens: str
    """Why the new tokens are not known; empty if they are."""
    prompt_tokens: int | None
    """Of the input, padding included; None if they are not known."""
    prefill_sec: float | None
    """Mean over the timed calls, up to the model's second call; its FLOPs are ``prefill_flops``."""
    decode_sec: float | None
    """Mean of the rest, whose FLOPs are ``decode_flops``."""
    why_no_seconds: str
    """Why the times of prefill and decode are not known apart; empty if they are."""

    @property
    def decoded_tokens(self) -> int | None:
        """New tokens without the first of each sequence, which the prefill makes; None if they are not known."""
        if self.new_tokens is None or self.sequences is None:
            return None
        return max(0, self.new_tokens - self.sequences)


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardMeasurement:
    """What was heard of one model's forwards, some of which were counted and some timed."""

    flops: FlopRecord
    own_sec: Mapping[str, float] | None
    """Seconds of each module without those below it; None if the device's time cannot be read."""
    counted_calls: int
    """Outermost calls that were counted."""
    timed_calls: int
    """Outermost calls that were timed."""
    timed_while_counted: bool
    """The timed calls are the counted ones, which take longer than others."""
    calls: TimedCalls | None = None
    """Calls to which nothing listened, if there were any, each like all of the counted ones together."""
    generation: Generation | None = None
    """What the counted call was, if it was one of ``generate``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRecord:
    """What a training engine knows of the run around the model; the seconds are of its last step."""

    world_size: int
    dp_size: int
    """Ranks that see different data."""
    tp_size: int
    micro_batch_size: int
    backward_sec: float | None = None
    """None unless the engine times its steps."""
    optimizer_sec: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardModule:
    """One module with everything below it."""

    module: ModuleProfile
    seconds: float | None

    @property
    def macs(self) -> int:
        """Multiply-adds of the forward."""
        return self.module.total.forward // 2


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardProfile:
    """The forwards of one model, ready for a report."""

    modules: tuple[ForwardModule, ...]
    """In tree order; the first is the root."""
    outside: PhaseFlops
    """FLOPs of what no module of the model owns."""
    uncounted: Mapping[str, UncountedOperator]
    notes: tuple[str, ...]
    timed_while_counted: bool
    """The seconds are upper bounds and the rates lower bounds: counting takes time."""
    calls: TimedCalls | None = None
    """The same calls when nothing listened to the modules; None if there were no such calls."""
    generation: Generation | None = None
    """What the counted call was, if it was one of ``generate``."""
    engine: EngineRecord | None = None

    @property
    def root(self) -> ForwardModule:
        """The model itself, all of it."""
        return self.modules[0]

    @property
    def forward_sec(self) -> float | None:
        """Seconds of the model: those that no module was timed in, where they are known."""
        return self.root.seconds if self.calls is None else self.calls.mean_sec

    @property
    def flops(self) -> PhaseFlops:
        """FLOPs of the model by phase; DeepSpeed's total is ``forward``."""
        return self.root.module.total

    @property
    def lower_bound(self) -> bool:
        """Whether something that may have spent FLOPs could not be counted."""
        return any(operator.heavy for operator in self.uncounted.values())
