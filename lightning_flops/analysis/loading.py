"""What rules say of waiting for data: the wait of a batch, the workers that keep up with it, and what they save."""

from __future__ import annotations

import math
from collections.abc import Mapping

from lightning_flops.analysis.evidence import DATA_WAIT, Evidence
from lightning_flops.units import duration, plain

LEAST_WAIT_SEC = 0.001  # a worker process hands a batch over in about a millisecond: no shorter wait is saved by one


def _wait_of_batch(evidence: Evidence) -> float:
    return (evidence.data_wait_sec or 0.0) / max(1.0, evidence.batches)


def share_of_wait(rule: str, evidence: Evidence) -> float | None:
    """The wait's share of the step, for the *rule* of the three on loading that applies; None for the others."""
    is_short, is_full = _wait_of_batch(evidence) < LEAST_WAIT_SEC, _more_workers(evidence) == 0
    applies = "data_wait_short" if is_short else "data_wait_full" if is_full else "data_wait"
    return evidence.data_wait_share if rule == applies else None


def _more_workers(evidence: Evidence) -> int | None:
    """Workers to add: as many as keep up and find a core, idle where loading computes; None: cores unknown."""
    cores, now = evidence.facts.cores, evidence.facts.loader_workers or 0
    if cores is None or evidence.step_sec is None:
        return None
    work_sec, loads_sec = _work_and_loads(evidence, evidence.step_sec)
    idle = cores - 1 - now if evidence.idle_cores is None else min(evidence.idle_cores, cores - now)
    room = cores if evidence.loads_without_processor else math.floor(idle + 0.5)
    return max(0, min(room, math.ceil(loads_sec / work_sec) - now))


def _work_and_loads(evidence: Evidence, step_sec: float) -> tuple[float, float]:
    """Seconds of a step without its wait for data, and those in which one worker would load its batches."""
    wait_sec, now = evidence.data_wait_sec or 0.0, evidence.facts.loader_workers
    return max(step_sec - wait_sec, step_sec / 100), step_sec * now if now else wait_sec


def kept_up_with(evidence: Evidence, measured: float) -> float:
    """What the workers that are advised save: a step is then as long as its work, or as their loading."""
    more, step_sec = _more_workers(evidence), evidence.step_sec
    if not more or step_sec is None:  # loaded in another way, or by an unknown number
        return measured
    work_sec, loads_sec = _work_and_loads(evidence, step_sec)
    return max(0.0, 1.0 - max(work_sec, loads_sec / ((evidence.facts.loader_workers or 0) + more)) / step_sec)


def _line_of_loader(evidence: Evidence) -> str:
    """The user's line that most of the wait is in; without worker processes, which no sample sees."""
    found = next(iter(evidence.causes.get(DATA_WAIT, ())), None)
    is_most = found is not None and found.share > (evidence.data_wait_share or 0.0) / 2
    return f" Most of it is {found.words}." if found is not None and is_most else ""


def words_of_loader(evidence: Evidence) -> Mapping[str, str]:
    """What the three rules say of a loader."""
    cores, now, room = evidence.facts.cores, evidence.facts.loader_workers, _more_workers(evidence)
    idle = "" if evidence.idle_cores is None else f", {evidence.idle_cores:.1f} of them idle"
    idle = ", and loading hardly uses them" if evidence.loads_without_processor else idle
    pins = evidence.device.pins_memory and evidence.shares.get("pageable_copies") != 0
    return {
        "wait": duration(_wait_of_batch(evidence)),
        "line": _line_of_loader(evidence),
        "workers": "" if now is None else f", with {plain(now)} loader workers",
        "cores": "" if cores is None else f"; this process may use {plain(cores)} cores{idle}",
        "more": "Raise the DataLoader's num_workers"
        if room is None
        else f"Set the DataLoader's num_workers={plain((now or 0) + room)}",
        "pin": ", pin_memory=True" if pins else "",
    }
