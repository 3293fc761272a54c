"""The phases of a step of reinforcement learning or distillation: FLOPs, seconds, MFU and tokens of each."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace

from lightning_flops.analysis.counts import summed
from lightning_flops.analysis.rates import peak_seconds, per_second, ratio, sum_if_all_known, utilization, whole
from lightning_flops.records import REST, ROLLOUT, SCORING, TRAINING, BucketFlops, StepRecord, WindowRecord
from lightning_flops.schema.step import PhaseProfile


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
    spent_sec = ((name, spent / len(timed)) for step in timed for name, spent in step.phase_sec.items())
    seconds = defaultdict(float, summed(spent_sec, 0.0))
    ran = {TRAINING, *window.phases, *seconds} - {REST}
    if ran == {TRAINING}:
        return {}
    steps = max(1, len(window.counted_steps))
    in_order = dict.fromkeys((ROLLOUT, SCORING, TRAINING, *window.phases, *seconds))
    flops = {name: _model_flops(window.phases.get(name, {})) for name in (*filter(ran.__contains__, in_order), REST)}
    of_step = {name: whole(sum(spent.values()), of=steps) for name, spent in flops.items()}
    of_step[TRAINING] += model_flops - sum(of_step.values())  # each is rounded
    found = {}
    for name, spent_in in flops.items():
        peak_sec = peak_seconds({dtype: spent / steps for dtype, spent in spent_in.items()}, peaks)
        found[name] = PhaseProfile(
            flops=of_step[name],
            dtype=max(spent_in, key=spent_in.__getitem__, default=None) if of_step[name] else None,
            seconds=seconds[name] if timed else None,
            ratio=ratio(part=seconds[name], whole=sum(seconds.values())),
            mfu=utilization({"mfu": peak_sec}, seconds[name])[0]["mfu"],
            tokens=tokens if name == TRAINING else None,
        )
    if ROLLOUT in found:
        found[ROLLOUT] = _with_tokens(found[ROLLOUT], window, timed or window.counted_steps)
    return found


def _model_flops(flops: BucketFlops) -> dict[str, int]:
    """Forward and backward by dtype."""
    return summed(((dtype, spent * (bucket in ("forward", "backward"))) for (bucket, dtype), spent in flops.items()), 0)


def _with_tokens(rollout: PhaseProfile, window: WindowRecord, steps: Sequence[StepRecord]) -> PhaseProfile:
    """The *rollout* with the tokens of *steps*; where nothing of it was counted a server ran: FLOPs are estimated."""
    made = [tokens for one in steps for tokens in one.rollouts]
    if made:
        prompts, completions = (sum(amounts) / len(steps) for amounts in zip(*made, strict=True))
        speed = per_second(amount=completions, seconds=rollout.seconds)
        rollout = replace(rollout, tokens=prompts + completions, completion_tokens=completions, tokens_per_sec=speed)
    if rollout.flops:
        return rollout
    forward = sum(spent for (bucket, _), spent in window.phases.get(TRAINING, {}).items() if bucket == "forward")
    a_token = ratio(part=forward, whole=sum_if_all_known(one.tokens for one in window.counted_steps))
    flops = None if a_token is None or rollout.tokens is None else round(a_token * rollout.tokens)
    return replace(rollout, flops=flops, estimated=flops is not None, mfu=None)


# ---- what advice goes by


def rate(name: str, phases: Mapping[str, PhaseProfile]) -> float | None:
    """FLOP/s of a phase that ran here."""
    one = phases.get(name)
    return None if one is None or one.estimated else per_second(amount=one.flops, seconds=one.seconds)


def rate_of_rollout(phases: Mapping[str, PhaseProfile]) -> float:
    """What a rollout's FLOP/s are of the training's; 1 where they are not known."""
    return ratio(part=rate(ROLLOUT, phases), whole=rate(TRAINING, phases)) or 1.0


def scoring_gain(phases: Mapping[str, PhaseProfile], peaks: Mapping[str, float]) -> float:
    """The share of its time that a model which is only asked saves in bfloat16; 0 where that is not known."""
    dtype = phases[SCORING].dtype if SCORING in phases else None
    left = ratio(part=peaks.get(dtype or ""), whole=peaks.get("bfloat16"))
    return 0.0 if left is None else max(0.0, 1.0 - left)
