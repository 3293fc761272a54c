"""What a loop says of itself: a clock at its own fetches, what it handled in each step, and FLOPs by hand."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from lightning_flops import Profile
from lightning_flops.pytorch import profile_training
from lightning_flops.schema.profile import ThroughputSummary

SETTINGS: dict[str, Any] = {"profile_step": 3, "timing_steps": 16, "trace": False}
STEPS = 36
BATCH, IN, HIDDEN, OUT = 8, 16, 32, 4
PAUSE_SEC, FETCH_SEC = 0.004, 0.002
"""What a forward and a fetch take: a busy machine must not decide, and what they compute takes far less."""

_SHARE, _LEAST_SEC = 0.05, 0.0002
_LEAST_WAIT_SEC = 0.0005  # in a loop's own fetch are our hooks, where it ends a step, and what accelerate does there


@dataclass(slots=True)
class Step:
    """One step of a loop, by its own account."""

    samples: float = 0
    micro_steps: int = 0
    forward: int = 0  # FLOPs of all its models; a multiply-add is two
    backward: int = 0
    recompute: int = 0
    optimizer: int = 0
    seconds: float = 0.0  # without what is outside of steps
    waited: float = 0.0  # for data
    outside: float = 0.0  # what the loop itself would not call training, before or in this step
    undecided: float = 0.0  # seconds of what nobody can tell from that
    undecided_forward: int = 0  # and its FLOPs

    @property
    def flops(self) -> tuple[int, int, int, int]:
        """By phase."""
        return self.forward, self.backward, self.recompute, self.optimizer

    def left_out(self) -> Step:
        """This step, if what is undecided in it is no training."""
        seconds, outside = self.seconds - self.undecided, self.outside + self.undecided
        return replace(self, seconds=seconds, outside=outside, forward=self.forward - self.undecided_forward)


class Account:
    """The account that one loop keeps while it trains; with *alone* nothing of this package is around it."""

    def __init__(
        self,
        *,
        now: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], None] = time.sleep,
        alone: bool = False,
        settings: Mapping[str, Any] = MappingProxyType(SETTINGS),
    ) -> None:
        self.steps: list[Step] = []
        self.run: Any = None  # what has the profile
        self.now, self.sleep = now, sleep  # of the clock that the profiler has, too
        self.settings = dict(settings)  # none: not even a block in DeepSpeed's config
        self.alone = alone
        self._step = Step()
        self._since = self.now()
        self._is_outside = False

    def pause(self, share: float = 1.0) -> None:
        """Stands for *share* of what a model of some size would compute."""
        self.sleep(share * PAUSE_SEC)

    def fetch_pause(self) -> None:
        """Stands for what a loader of some size would load."""
        self.sleep(FETCH_SEC)

    @contextmanager
    def profiled(self, model: Any, optimizer: Any = None, **more: Any) -> Iterator[Any]:
        """What is put around the loop; the account begins with it."""
        if self.alone:
            self.begins()
            yield None
            return
        with profile_training(model, optimizer, **self.settings, **more) as self.run:
            self.begins()
            yield self.run

    def by(self, made: Callable[[], Any]) -> list[Any]:
        """The callback that *made* makes, in a list; an empty one if nothing of this package is around the loop."""
        if self.alone:
            return []
        self.run = made()
        return [self.run]

    def begins(self) -> None:
        """The first step begins."""
        self._step, self._since = Step(), self.now()

    def fetches(self, source: Iterable[Any]) -> Iterator[Any]:
        """*source*, with the clock at the loop's own fetches."""
        iterator = iter(source)
        while True:
            asked = self.now()
            try:
                batch = next(iterator)
            except StopIteration:
                return
            self._step.waited += self.now() - asked
            yield batch

    def handled(self, samples: float, micro_steps: int = 1) -> None:
        """So much was trained on."""
        self._step.samples += samples
        self._step.micro_steps += micro_steps

    def forward(self, model: nn.Module, rows: int) -> None:
        """*model* was called with *rows* rows."""
        self._step.forward += forward_flops(model, rows)

    def backward(self, model: nn.Module, rows: int, *, inputs: bool = False, weights: bool = True) -> None:
        """Gradients went back through *model*: to its *weights*, and to its *inputs*."""
        self._step.backward += backward_flops(model, rows, inputs=inputs, weights=weights)

    def computed(self, **flops: int) -> None:
        """FLOPs of other kinds, by phase."""
        for phase, number in flops.items():
            setattr(self._step, phase, getattr(self._step, phase) + number)

    def trained(self, model: nn.Module, rows: int, *, samples: float | None = None, micro_steps: int = 1) -> None:
        """*model* went forward and backward on *rows* rows, which are the step's samples unless it says otherwise."""
        self.forward(model, rows)
        self.backward(model, rows)
        self.handled(rows if samples is None else samples, micro_steps)

    @contextmanager
    def outside(self) -> Iterator[None]:
        """What runs inside is no training: neither its time, nor its waits, nor its FLOPs."""
        if self._is_outside:
            yield
            return
        asked, waited, self._is_outside = self.now(), self._step.waited, True
        yield
        self._step.outside += self.now() - asked
        self._step.waited, self._is_outside = waited, False

    def mark(self) -> tuple[Any, ...]:
        """Where the account is, for ``back_to``."""
        return len(self.steps), replace(self._step), self._since, self._is_outside, self.now()

    def back_to(self, mark: tuple[Any, ...]) -> None:
        """What ran since *mark* is outside of steps."""
        number, self._step, self._since, self._is_outside, asked = mark
        del self.steps[number:]
        if not self._is_outside:
            self._step.outside += self.now() - asked

    @contextmanager
    def undecided(self) -> Iterator[None]:
        """What runs inside may be the step's or outside of it, as far as anybody can tell from what is called."""
        asked, forward = self.now(), self._step.forward
        yield
        self._step.undecided += self.now() - asked
        self._step.undecided_forward += self._step.forward - forward

    def step(self) -> None:
        """A step is over, here."""
        now, step = self.now(), self._step
        step.seconds = now - self._since - step.outside
        self.steps.append(step)
        self._step, self._since = Step(), now


# ---- small models, what they cost by hand, and what they are trained on


def net(*sizes: int) -> nn.Sequential:
    """Linear layers of these sizes, or of the usual ones, with a ReLU between two."""
    torch.manual_seed(0)
    sizes = sizes or (IN, HIDDEN, OUT)
    layers: list[nn.Module] = []
    for before, after in zip(sizes, sizes[1:], strict=False):
        layers += [nn.Linear(before, after), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def _products(model: nn.Module) -> list[int]:
    """Multiply-adds of one row in each linear layer of *model*, in their order."""
    return [one.in_features * one.out_features for one in model.modules() if isinstance(one, nn.Linear)]


def forward_flops(model: nn.Module, rows: int) -> int:
    """FLOPs of a forward."""
    return 2 * rows * sum(_products(model))


def backward_flops(model: nn.Module, rows: int, *, inputs: bool = False, weights: bool = True) -> int:
    """FLOPs of a backward: one product for a layer's weights, one for its input, which the first may not need."""
    first, *others = _products(model)
    return 2 * rows * (weights * (first + sum(others)) + inputs * first + sum(others))


def loss_of(output: torch.Tensor) -> torch.Tensor:
    """A loss without any product."""
    return output.square().mean()


class Rows(Dataset[Any]):
    """*length* rows, loaded a batch at a time, which takes its time."""

    def __init__(self, account: Account, length: int, *widths: int) -> None:
        generator = torch.Generator().manual_seed(1)
        self._rows = [torch.randn(length, width, generator=generator) for width in widths or (IN,)]
        self._pause = account.fetch_pause

    def __len__(self) -> int:
        return len(self._rows[0])

    def __getitems__(self, places: Sequence[int]) -> list[Any]:
        self._pause()
        taken = [rows[list(places)] for rows in self._rows]
        return list(zip(*taken, strict=True)) if len(taken) > 1 else list(taken[0])


def loader(account: Account, batches: int = STEPS, size: int = BATCH, *widths: int, **more: Any) -> DataLoader[Any]:
    """A torch DataLoader of so many batches."""
    return DataLoader(Rows(account, batches * size, *widths), batch_size=size, **more)


def sgd(*models: nn.Module) -> torch.optim.SGD:
    """An optimizer of all parameters of *models*."""
    return torch.optim.SGD([weight for one in models for weight in one.parameters()], lr=1e-3)


def update(optimizer: Any) -> None:
    """An optimizer's step, and no gradients after it."""
    optimizer.step()
    optimizer.zero_grad()


# ---- the account beside what was reported


class Figure(NamedTuple):
    """One figure of both."""

    name: str
    own: object  # by the loop's account
    said: object
    right: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Allowed:
    """What a loop cannot be held to."""

    unknown: bool = False  # its samples: n/a with its reason is right, too
    no_wait: bool = False  # it waits for nothing that could be seen: n/a is right
    optimizer: bool = True  # FLOPs of its optimizer were worked out by hand
    varies: bool = False  # FLOPs of its steps differ: those of the run are an estimate
    first_unseen: bool = False  # the profiler finds the loop by its first update


@dataclass(slots=True)
class _Judge:
    figures: list[Figure] = field(default_factory=list)

    def exact(self, name: str, own: object, said: object, *, right: bool | None = None) -> None:
        self.figures.append(Figure(name, own, said, own == said if right is None else right))

    def near(
        self,
        name: str,
        own: float,
        said: float | None,
        *,
        least: float = 0.0,
        share: float = _SHARE,
        bare: Sequence[float] = (),
    ) -> None:
        """It is the loop's *own* one, or between that and those of *bare* runs, without the profiler."""
        low, high = min([own, *bare]), max([own, *bare])
        right = said is not None and low - max(share * low, least) <= said <= high + max(share * high, least)
        self.figures.append(Figure(name, own, said, right))


def mean(values: Iterable[float]) -> float:
    """The mean of *values*; not a number if there are none."""
    known = list(values)
    return math.fsum(known) / len(known) if known else math.nan


def figures(
    steps: Sequence[Step],
    profile: Profile | None,
    throughput: ThroughputSummary | None,
    allowed: Allowed,
    *,
    times: bool,
    bare: Sequence[Sequence[Step]] = (),
) -> list[Figure]:
    """Every figure that is held to the account of *steps*; those of *times* only where nothing else runs.

    *bare* are the steps of the same loop in runs without the profiler.
    """
    runs = [steps, *bare]
    either = [
        _figures(own, profile, throughput, allowed, times=times, bare=without)
        for own, *without in (runs, [[step.left_out() for step in run] for run in runs])
    ]
    return min(either, key=lambda found: sum(not one.right for one in found))


def _figures(
    steps: Sequence[Step],
    profile: Profile | None,
    throughput: ThroughputSummary | None,
    allowed: Allowed,
    *,
    times: bool,
    bare: Sequence[Sequence[Step]],
) -> list[Figure]:
    judge = _Judge()
    if profile is None:
        judge.exact("profile", "one", "none")
        return judge.figures
    counted = [steps[one] for one in profile.counted_steps if one < len(steps)]
    timed = [steps[one] for one in profile.timed_steps if one < len(steps)]
    judge.exact("timed steps", len(profile.timed_steps), len(timed))
    samples = mean(one.samples for one in timed or counted)
    unknown = profile.samples is None and bool(profile.unavailable.get("samples_per_sec"))
    judge.exact("samples", samples, profile.samples, right=(allowed.unknown and unknown) or samples == profile.samples)
    judge.exact("micro-steps", mean(one.micro_steps for one in counted), float(profile.micro_steps))
    said, phases = profile.flops, slice(4 if allowed.optimizer else 3)
    own = tuple(round(mean(one)) for one in zip(*(one.flops for one in counted), strict=True))[phases]
    judge.exact("FLOPs", own, (said.forward, said.backward, said.recompute, said.optimizer)[phases])
    if throughput is None:
        judge.exact("throughput", "one", "none")
        return judge.figures
    known = throughput.steps_counted + throughput.steps_by_formula + throughput.steps_estimated
    seen = _heard(steps, profile, throughput)[allowed.first_unseen :]
    judge.exact("steps of the run", len(seen), known)
    in_all = sum(one.forward + one.backward for one in seen)
    # Each step that is called an estimate may be off by as much as a step; where steps differ, all may be estimates.
    share = 0.1 if allowed.varies else throughput.steps_estimated / max(1, known)
    judge.near("FLOPs of the run", in_all, throughput.model_flops, share=share)
    if times:
        _hold_times(judge, steps, timed, profile, throughput, allowed, bare)
    return judge.figures


def _heard(steps: Sequence[Step], profile: Profile, throughput: ThroughputSummary) -> list[Step]:
    """*steps* without those that the summary says to have run without hooks, after the ones timed as a whole."""
    said = [one.split()[0] for one in throughput.notes if "ran without hooks" in one]
    first = (whole_steps(steps, profile) or [0])[-1] + 1
    return [*steps[:first], *steps[first + int(said[0] if said else 0) :]]


def whole_steps(steps: Sequence[Step], profile: Profile) -> list[int]:
    """Places of those of *steps* that were timed as a whole; none: each was timed by parts.

    They come after those, one after the other. A step of a kind that was left out among those is left out here, too.
    """
    number = 0 if profile.timing is None else profile.timing.whole_steps
    known = {_kind(steps[one]) for one in (*profile.counted_steps, *profile.timed_steps) if one < len(steps)}
    after = range(profile.timed_steps[-1] + 1, len(steps)) if number else ()
    return [one for one in after if _kind(steps[one]) in known][:number]


def _kind(step: Step) -> tuple[float, ...]:
    return step.samples, step.micro_steps, step.forward, step.backward


def _rate(steps: Sequence[Step]) -> float:
    """Samples per second of *steps* together."""
    return sum(one.samples for one in steps) / math.fsum(one.seconds for one in steps)


def _hold_times(
    judge: _Judge,
    steps: Sequence[Step],
    timed: Sequence[Step],
    profile: Profile,
    throughput: ThroughputSummary,
    allowed: Allowed,
    bare: Sequence[Sequence[Step]],
) -> None:
    timing = profile.timing
    if timing is None:
        judge.exact("timing", "one", "none")
        return
    # How long steps are is of those that were timed as a whole, where there are such steps.
    places = whole_steps(steps, profile) or [one for one in profile.timed_steps if one < len(steps)]
    judge.exact("steps timed as a whole", len(places) if timing.whole_steps else 0, timing.whole_steps)
    bare = [run for run in bare if len(run) == len(steps)]
    # At the end of the last one the window is closed, which the loop's clock takes for a part of that step: without the
    # profiler it took what it takes.
    last = mean(run[places[-1]].seconds for run in bare) if bare else steps[places[-1]].seconds
    seconds = mean([*(steps[one].seconds for one in places[:-1]), last])
    # On a CPU what the profiler takes is not in a step, and in the loop's clock it is.
    without = [mean(run[one].seconds for one in places) for run in bare]
    said = mean(timing.global_step.steps_sec)
    judge.near("step ms", 1e3 * seconds, 1e3 * said, least=1e3 * _LEAST_SEC, bare=[1e3 * one for one in without])
    if not (allowed.unknown and profile.samples is None):
        rate = mean(steps[one].samples for one in places) / seconds
        least = rate * _LEAST_SEC / seconds
        judge.near(
            "samples/s",
            rate,
            profile.rates.samples_per_sec,
            least=least,
            bare=[rate * seconds / one for one in without],
        )
        # Steps that the profiler slowed down are left out of it, and it alone knows which: counted ones, those beside a
        # report, perhaps the first. So it is between the rates of all steps and of those after the window, or of the
        # timed ones where they are faster, or of all without the profiler, which may count a step after the window;
        # with a first step that took its time, as compiled code's, between the rates of that and of all or a third of
        # the others.
        first, *others = steps[allowed.first_unseen :]
        timed_rates = _rate([steps[one] for one in places[:-1]]), profile.rates.samples_per_sec or 0.0
        last_third = others[-len(others) // 3 :]
        undisturbed = _rate(steps[places[-1] + 1 :] or last_third)
        of_bare = [_rate(run[1:]) for run in bare]
        ranges = (
            [_rate(others), undisturbed, *timed_rates, *of_bare],
            [_rate([first, *others]), _rate([first, *last_third])],
        )
        ips = throughput.ips.average if throughput.ips is not None and throughput.ips_unit == "samples/s" else None
        inside = [(1 - _SHARE) * min(one) <= ips <= (1 + _SHARE) * max(one) for one in ranges if ips is not None]
        judge.exact("samples/s of the run", _rate(others), ips, right=any(inside))
    wait = timing.data_wait_sec
    # It is timed by parts, and scaled to those steps.
    waited = mean(one.waited for one in timed)
    of_whole = [1e3 * mean(run[one].waited for one in places) for run in (steps, *bare)]
    if allowed.no_wait:
        judge.exact("data wait ms", None, wait, right=wait is None or wait <= waited + _LEAST_SEC)
    else:
        said_ms = None if wait is None else 1e3 * wait
        judge.near("data wait ms", 1e3 * waited, said_ms, least=1e3 * _LEAST_WAIT_SEC, bare=of_whole)
    outside = math.fsum(steps[one].outside for one in {*profile.timed_steps, *places} if one < len(steps))
    judge.near("outside ms", 1e3 * outside, 1e3 * math.fsum(timing.excluded_sec.values()), least=3.0)
