"""Arithmetic intensity of modules and operators as text: FLOPs per byte, and what can be reached with it."""

from __future__ import annotations

from collections.abc import Iterable

from lightning_flops.report.layout import paragraph, shortened, table, title
from lightning_flops.schema.profile import Profile
from lightning_flops.schema.roofline import Roofline
from lightning_flops.units import plain, si

_MODULES_SHOWN = 8
_OPERATORS_SHOWN = 8
_NAME_CHARS = 48


def intensity_lines(profile: Profile) -> list[str]:
    """A section of the report; empty where no bytes were counted."""
    # A module inside which all FLOPs are another's would only repeat that one.
    modules = [(one.name or "(root)", one.own.total, one.roofline) for one in profile.modules if one.own.total]
    operators = [(one.operator, one.flops.total, one.roofline) for one in profile.operators]
    parts = [
        *_table(profile, "module", modules, most=_MODULES_SHOWN),
        *_table(profile, "operator", operators, most=_OPERATORS_SHOWN),
    ]
    if not parts:
        return []
    bandwidth = profile.memory_bytes_per_sec
    given = ", as given" if profile.settings.memory_given else ""
    attainable = (
        "Attainable: the least of the peak and FLOP/byte x "
        f"{si(bandwidth, 'B/s')}, the memory's bandwidth{given}; what stays in a cache or is fused can be faster."
        if bandwidth is not None
        else "What is attainable is n/a: the memory's bandwidth is not known for this device; set memory_bytes_per_sec."
    )
    word = profile.context.step_word
    return [
        title("Arithmetic intensity"),
        *paragraph(
            f"FLOPs and bytes of the counted {word}, forward, backward and recomputation together; achieved: these "
            f"FLOPs over the time of the traced {word}. {attainable}"
        ),
        *parts,
    ]


def _table(
    profile: Profile, what: str, rooflines: Iterable[tuple[str, int, Roofline | None]], *, most: int
) -> list[str]:
    known = [(name, flops, one) for name, flops, one in rooflines if one is not None and one.flops_per_byte is not None]
    known.sort(key=lambda row: -row[1])
    if not known:
        return []
    timed = any(one.achieved_flops_per_sec is not None for _, _, one in known)
    roofed = any(one.attainable_flops_per_sec is not None for _, _, one in known)
    head = [what, "FLOPs", "FLOP/byte", *(["achieved"] if timed else []), *(["attainable"] if roofed else [])]
    rows = [
        [
            shortened(name, chars=_NAME_CHARS),
            si(profile.per_step(flops)),
            plain(one.flops_per_byte),
            *([si(one.achieved_flops_per_sec, "FLOP/s")] if timed else []),
            *([si(one.attainable_flops_per_sec, "FLOP/s")] if roofed else []),
        ]
        for name, flops, one in known[:most]
    ]
    more = len(known) - len(rows)
    return ["", *table(head, rows), *([f"And {plain(more)} more in profile.json."] if more else [])]
