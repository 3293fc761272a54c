"""What the times of a window do not tell, in sentences for the report."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from lightning_flops.records import TimePhase


def notes_on_times(
    *,
    counted: int,
    watched: int,
    timed: int,
    wanted: int,
    clocked: bool,
    variable: bool,
    same_shapes: bool,
    mixed: Sequence[TimePhase],
    closed_early: bool,
    activity: str,
) -> Iterator[str]:
    """Sentences on a window's times, for whoever reads rates made of them.

    Args:
        counted: steps that were counted.
        watched: steps that ran while some were timed.
        timed: those of them whose times are in the record.
        wanted: how many were to be timed.
        clocked: the device can be timed.
        variable: steps differed in what they spent.
        same_shapes: the counted ones had the same signature all the same.
        mixed: phases whose work ran, in part, while the loop was in another of them.
        closed_early: the window ended before counts and times were complete.
        activity: what the run does, as the subject of a sentence.
    """
    if closed_early:
        yield f"{activity} ended before the window closed."
    if mixed:
        names = " and ".join(mixed)
        yield (
            f"In the counted step, work of one phase ran where the loop was in another ({names}), as with "
            "autograd.grad in a forward, a backward the loop does not see, or a forward in a callback: these times "
            "cannot be told apart, their sum is true."
        )
    if not clocked:
        yield "This device has no clock this profiler can read without stopping it, so no phase was timed."
        return
    if variable:
        why = (
            "Numbers in tensors, such as the lengths of packed sequences, decide what a step of the same shapes spends"
            if same_shapes
            else "Batch shapes or the numbers of forwards, backwards and updates keep changing from step to step"
        )
        yield (
            f"{why}: FLOPs are of {counted} steps and times of {timed} other steps of the same run, so rates compare "
            "averages."
        )
        return
    if timed < watched:
        yield (
            f"Steps differ: only {timed} of the {watched} steps watched had the counted step's batch shapes and "
            "numbers of forwards, backwards and updates. FLOPs, times and rates are of such steps."
        )
    if timed < wanted:
        yield f"{timed} of the {wanted} steps asked for were timed: the run was too short."
