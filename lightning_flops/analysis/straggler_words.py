"""What a report says of a rank that the others wait for."""

from __future__ import annotations

from lightning_flops.schema.ranks import Straggler
from lightning_flops.units import duration, percent

_NO_NAMED_PART = "other"


def straggler_evidence(straggler: Straggler, *, name: str | None = None) -> str:
    """Who waits for whom, how long, where that comes from, and what shows it; one or two sentences.

    Args:
        straggler: the rank that the others wait for.
        name: what it is called; None for its number.
    """
    late = f"The other ranks wait {duration(straggler.late_sec)} a step ({percent(straggler.share)} of it) for "
    late += name or f"rank {straggler.rank}"
    if straggler.part is None:
        cause = ": no part of its step stands out alone"
    elif straggler.part != _NO_NAMED_PART:
        cause = f": its {straggler.part} takes {duration(straggler.part_sec)} longer than theirs"
    elif straggler.part_sec != straggler.late_sec:
        cause = f": what is in no named part of its step takes {duration(straggler.part_sec)} longer than theirs"
    else:
        cause = ""  # the trace names no part
    sentence = f"{late}{cause}"
    if straggler.module is not None:
        # Not by how much: that is of the traced step, and the part's figure may be of all timed ones.
        sentence += f", mostly in {straggler.module or 'the root module'}"
    sentence += "."
    if straggler.exposed_sec is None or straggler.others_exposed_sec is None:
        return sentence
    return (
        f"{sentence} In the traced step its communication took {duration(straggler.exposed_sec)} that no computation "
        f"hid, theirs {duration(straggler.others_exposed_sec)}."
    )


def straggler_action(straggler: Straggler) -> str:
    """What to try, in a sentence."""
    if straggler.part == "data wait":
        return "Look at how that rank gets its data: its storage, its workers, the lengths of its samples."
    if straggler.module is not None:
        return f"Look at what {straggler.module or 'the root module'} is given there, and at that rank's device."
    return "Balance the work between ranks, and look at that rank's device."
