"""The phases of a step of reinforcement learning or distillation: FLOPs, seconds, MFU and tokens of each."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace

from lightning_flops.analysis.rates import mean, peak_seconds, per_second, ratio
from lightning_flops.records import REST, ROLLOUT, SCORING, TRAINING, BucketFlops, StepRecord, WindowRecord
from lightning_flops.schema.step import PhaseProfile

_LEAST = 0.005  # of the step: a phase without FLOPs that takes less is none
_SEQUENCES = re.compile(r"\[(\d+), (\d+)\]")  # the shape of a batch of them


def build_phases(
    window: WindowRecord,
    *,
    timed: Sequence[StepRecord],
    peaks: Mapping[str, float],
    model_flops: int,
    tokens: float | None,
) -> dict[str, PhaseProfile]:
    """The phases of *window* by name, which add up to a step of so many *model_flops*; none where all is training.

    *tokens* are those of a step's batches.
    """
    steps = max(1, len(window.counted_steps))
    spent = {name: _model_flops(flops) for name, flops in window.phases.items()}
    of_step = [one.phase_sec for one in timed]
    names = dict.fromkeys((ROLLOUT, SCORING, TRAINING, *spent, *(name for one in of_step for name in one)))
    seconds = {name: math.fsum(one.get(name, 0.0) for one in of_step) / max(1, len(of_step)) for name in names}
    step_sec = math.fsum(seconds.values())
    made = _rollout_tokens(timed or window.counted_steps)
    whole = {name: (2 * sum(spent.get(name, {}).values()) + steps) // (2 * steps) for name in names}
    own = [
        name
        for name in names
        if name not in (TRAINING, REST)
        and (whole[name] or (name == ROLLOUT and made) or seconds[name] > _LEAST * step_sec)
    ]
    if not own:
        return {}
    shown = [*(name for name in names if name in own or name == TRAINING), REST]
    seconds[REST] = step_sec - math.fsum(seconds[name] for name in shown[:-1])  # with those that are none
    whole[TRAINING] = model_flops - sum(whole[name] for name in shown if name != TRAINING)  # a mean is rounded
    found = {}
    for name in shown:
        took = seconds[name] if timed else None
        peak_sec = mean(total=peak_seconds(spent.get(name, {}), peaks), steps=steps)
        mfu = ratio(part=peak_sec, whole=took)
        found[name] = PhaseProfile(
            flops=whole[name],
            seconds=took,
            ratio=ratio(part=took, whole=step_sec),
            mfu=None if mfu is None or mfu > 1 else mfu,
            tokens=tokens if name == TRAINING else None,
        )
    if made is not None and ROLLOUT in found:
        found[ROLLOUT] = _with_tokens(found[ROLLOUT], made, _flops_a_token(window))
    return found


def _model_flops(flops: BucketFlops) -> dict[str, int]:
    """Forward and backward by dtype."""
    found: dict[str, int] = {}
    for (bucket, dtype), amount in flops.items():
        if bucket in ("forward", "backward") and amount:
            found[dtype] = found.get(dtype, 0) + amount
    return found


def _rollout_tokens(steps: Sequence[StepRecord]) -> tuple[float, float] | None:
    """Mean tokens of prompts and of completions in *steps*; None without any."""
    rollouts = [tokens for one in steps for tokens in one.rollouts]
    prompts, completions = (sum(tokens[place] for tokens in rollouts) for place in (0, 1))
    return (prompts / len(steps), completions / len(steps)) if rollouts else None


def _flops_a_token(window: WindowRecord) -> float | None:
    """Forward FLOPs of a token of the sequences that are trained on, which are those of the rollout."""
    batches = [batch for step in window.counted_steps for batch in step.signature.batches]
    shapes = [shape for batch in batches if (shape := _SEQUENCES.search(batch)) is not None]
    tokens = sum(int(rows) * int(length) for rows, length in (shape.groups() for shape in shapes))
    trained = window.phases.get(TRAINING, {})
    forward = sum(flops for (bucket, _), flops in trained.items() if bucket == "forward")
    return ratio(part=forward, whole=tokens) if len(shapes) == len(batches) else None


def _with_tokens(rollout: PhaseProfile, made: tuple[float, float], flops_a_token: float | None) -> PhaseProfile:
    """The *rollout* that *made* tokens; where nothing of it was counted a server ran, and its FLOPs are an estimate."""
    is_elsewhere, flops = not rollout.flops, rollout.flops
    if is_elsewhere:
        flops = None if flops_a_token is None else round(flops_a_token * sum(made))
    return replace(
        rollout,
        flops=flops,
        estimated=is_elsewhere and flops is not None,
        mfu=None if is_elsewhere else rollout.mfu,
        tokens=sum(made),
        completion_tokens=made[1],
        tokens_per_sec=per_second(amount=made[1], seconds=rollout.seconds),
    )
