"""What stands at the top of a trace, beside its events: the devices, and the place of the rank in its run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning_flops.analysis.trace.columns import DeviceProperties
from lightning_flops.analysis.trace.event_values import whole
from lightning_flops.analysis.trace_marks import METADATA_KEY

WITH_MODULES = "with_modules"
"""The key under which torch.profiler writes that it was asked for modules."""

_NOTHING: Mapping[str, Any] = {}
_MOST_RANKS = 1 << 20


def place_in_run(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """What the head of a trace says of its rank's place in the run, by the fields of ``Trace``."""
    found = metadata.get("distributedInfo")
    distributed: Mapping[str, Any] = found if isinstance(found, dict) else _NOTHING
    found = metadata.get(METADATA_KEY)  # torch names no rank in a run of one process, this package always does
    own: Mapping[str, Any] = found if isinstance(found, dict) else _NOTHING
    backend, world_size = distributed.get("backend"), whole(distributed.get("world_size"))
    if world_size is not None and not 0 < world_size <= _MOST_RANKS:
        world_size = None  # no job has as many, and its ranks are listed
    return {
        "rank": whole(distributed.get("rank", own.get("rank"))),
        "world_size": world_size,
        "backend": backend if isinstance(backend, str) else None,
        "groups": _groups(distributed.get("pg_config"), world_size),
    }


def _groups(listed: Any, world_size: int | None) -> tuple[tuple[int, ...], ...] | None:
    if not isinstance(listed, list):
        return None
    groups = []
    everyone = tuple(range(world_size or 0))
    for group in listed:
        ranks = group.get("ranks") if isinstance(group, dict) else None
        if not isinstance(ranks, list) or not all(type(rank) is int for rank in ranks):
            return None
        groups.append(tuple(sorted(ranks)) or everyone)  # a group of all may be written as none
    return tuple(groups)


def devices_of(properties: Any) -> tuple[DeviceProperties, ...]:
    """The devices that the head of a trace lists; what is no list of devices has none."""
    found = []
    for entry in properties if isinstance(properties, list) else ():
        if not isinstance(entry, dict) or type(entry.get("id")) is not int:
            continue
        major, minor = whole(entry.get("computeMajor")), whole(entry.get("computeMinor"))
        found.append(
            DeviceProperties(
                index=entry["id"],
                name=str(entry.get("name", "")),
                sm_count=whole(entry.get("numSms")),
                memory_bytes=whole(entry.get("totalGlobalMem")),
                compute_capability=None if major is None or minor is None else (major, minor),
            )
        )
    return tuple(found)
