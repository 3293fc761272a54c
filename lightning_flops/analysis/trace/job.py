"""The FLOPs of a job from the traces of all its ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from lightning_flops.schema.trace_flops import JobFlops, JobStepFlops, TracedStepFlops, TraceFlops, of_all


def job_flops(ranks: Mapping[int, TraceFlops | None], *, world_sizes: Sequence[int | None]) -> JobFlops:
    """The FLOPs of each step that all ranks of a job have, added up.

    Args:
        ranks: what the trace of each rank says.
        world_sizes: how many ranks each of the traces says that there are.
    """
    reason = _why_not(ranks, set(world_sizes))
    steps: tuple[JobStepFlops, ...] = ()
    if reason is None:
        steps = _steps([{step.step: step for step in flops.steps} for flops in ranks.values() if flops is not None])
        reason = None if steps else "no marked step is in the traces of all ranks"
    return JobFlops(ranks=world_sizes[0] if len(set(world_sizes)) == 1 else None, steps=steps, reason=reason)


def _why_not(ranks: Mapping[int, TraceFlops | None], sizes: set[int | None]) -> str | None:
    size = next(iter(sizes), None)
    if size is None or None in sizes:
        return "not every trace says how many ranks there are"
    if len(sizes) > 1:
        return "the traces say different numbers of ranks"
    if set(ranks) != set(range(size)):
        return f"the job has {size:,} ranks, and there are traces of {len(ranks):,}"
    if without := [rank for rank in sorted(ranks) if ranks[rank] is None]:
        return f"those of rank {without[0]} are not known"
    return None


def _steps(ranks: Sequence[Mapping[int | None, TracedStepFlops]]) -> tuple[JobStepFlops, ...]:
    common = [number for number in ranks[0] if number is not None and all(number in steps for steps in ranks)]
    return tuple(_step(number, [steps[number] for steps in ranks]) for number in common)


def _step(number: int, parts: Sequence[TracedStepFlops]) -> JobStepFlops:
    return JobStepFlops(
        step=number,
        forward=sum(part.forward for part in parts),
        backward=sum(part.backward for part in parts),
        recompute=sum(part.recompute for part in parts),
        optimizer=sum(part.optimizer for part in parts),
        causal_skipped=sum(part.causal_skipped for part in parts),
        wall_us=sum(part.wall_us for part in parts) / len(parts),
        mfu=of_all([(part.mfu, part.wall_us) for part in parts]),
        hfu=of_all([(part.hfu, part.wall_us) for part in parts]),
        lower_bound=any(part.lower_bound for part in parts),
    )
