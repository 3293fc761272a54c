"""Waits for data: the rules on them, which of these applies, what it saves, and its words."""

from __future__ import annotations

import math
from collections.abc import Mapping

from lightning_flops.analysis.evidence import DATA_WAIT, Evidence
from lightning_flops.analysis.rates import ratio
from lightning_flops.units import duration, percent, plain

_BY_BATCHES = ("data_wait_short", "data_wait_samples")  # rules whose remedy is to take whole batches
_WHOLE = (
    "Take a whole batch from the data at once: give the Dataset __getitems__(indices), which returns data[indices], "
    "and the DataLoader collate_fn=lambda batch: batch."
)
#: Of each rule on waits its name, whether it is a ceiling or about so much (loading on all cores slows the rest, too),
#: the ceiling, what to do, and when not.
WAITS: tuple[tuple[str, bool, str, str, str], ...] = (
    (
        "data_wait",
        True,
        "the wait, less what it takes so many workers to load and at least, where that computes, to hand over",
        "{more}, with persistent_workers=True{pin}.",
        "where the wait is for a disk or a network that is at its limit",
    ),
    (
        "data_wait_full",
        False,
        "",
        "No core is idle for more workers: prepare once, before training, what is made anew for each sample (decoded, "
        "resized, tokenized), or load fewer bytes.",
        "where each epoch needs other random changes of a sample",
    ),
    (
        "data_wait_short",
        True,
        "the wait, less the least that a fetch takes",
        f"Workers would cost more than such a wait. {_WHOLE}",
        "where samples differ in shape",
    ),
    (
        "data_wait_samples",
        False,
        "the wait, less the least that a fetch takes",
        f"No core is idle for more workers, and a sample takes {{sample}}, mostly as each is taken by itself. {_WHOLE}",
        "where samples differ in shape",
    ),
)

# A worker process hands a batch over in about a millisecond: no shorter wait is saved by one. That is its own work, at
# least what a worker takes more than the loop for batches of 32 KB: ``python -m benchmarks.loading``.
LEAST_WAIT_SEC, HAND_OVER_SEC = 0.001, 0.0004
# A sample that takes less is only taken and stacked, or little is done to it: most is Python's work for each. Of a
# TensorDataset 2 to 11 us, of random changes by torch or of tokenizing a sentence 22 to 40.
SHORT_SAMPLE_SEC = 0.00002


def _wait_of_batch(evidence: Evidence) -> float:
    return evidence.data_wait_share * (evidence.step_sec or 0.0) / max(1.0, evidence.batches)


def _rule(evidence: Evidence) -> str:
    """The rule on waits that applies."""
    if _wait_of_batch(evidence) < LEAST_WAIT_SEC:
        return "data_wait_short"
    if _more_workers(evidence) != 0:
        return "data_wait"
    return "data_wait_samples" if _sec_of_sample(evidence) < SHORT_SAMPLE_SEC else "data_wait_full"


def share_of_wait(rule: str, evidence: Evidence) -> float | None:
    """The wait's share of the step, or what whole batches save of it, for the *rule* on loading that applies."""
    fetch_sec = evidence.fetch_sec[1] * (rule in _BY_BATCHES)
    return _without(fetch_sec, evidence) if rule == _rule(evidence) else None


def _sec_of_sample(evidence: Evidence) -> float:
    """At most so long one worker, or the loop, takes to load a sample; infinite where that is not known."""
    if not evidence.samples or evidence.step_sec is None:
        return math.inf
    return _work_and_loads(evidence, evidence.step_sec)[1] / evidence.samples


def _without(fetch_sec: float, evidence: Evidence) -> float:
    """The wait's share of the step without what a fetch takes of it."""
    fetch = ratio(part=fetch_sec * evidence.batches, whole=evidence.step_sec)
    return max(0.0, evidence.data_wait_share - (fetch or 0.0))


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
    wait_sec, now = evidence.data_wait_share * step_sec, evidence.facts.loader_workers
    return max(step_sec - wait_sec, step_sec / 100), step_sec * now if now else wait_sec


def saved_of_wait(evidence: Evidence, measured: float) -> float:
    """What whole batches save, or workers: a step is then as long as its work, or as their loading."""
    if _rule(evidence) in _BY_BATCHES:
        return _without(evidence.fetch_sec[0], evidence)
    more, now, step_sec = _more_workers(evidence), evidence.facts.loader_workers or 0, evidence.step_sec
    if not more or step_sec is None:  # loaded in another way, or by an unknown number
        return measured
    work_sec, loads_sec = _work_and_loads(evidence, step_sec)
    handed_sec = 0.0 if now else evidence.batches * HAND_OVER_SEC  # what workers load now they hand over, too
    if evidence.loads_without_processor:  # a worker, whose caches stay warm, computes and hands over as good as at once
        loads_sec, handed_sec = min(loads_sec, step_sec * (1.0 - evidence.processor_share)), 0.0
    return max(0.0, 1.0 - max(work_sec, (loads_sec + handed_sec) / (now + more)) / step_sec)


def words_of_loader(evidence: Evidence) -> Mapping[str, str]:
    """What the rules on waits say of a loader."""
    cores, now, room = evidence.facts.cores, evidence.facts.loader_workers, _more_workers(evidence)
    idle = "" if evidence.idle_cores is None else f", {evidence.idle_cores:.1f} of them idle"
    idle = ", and loading hardly uses them" if evidence.loads_without_processor else idle
    pins = evidence.device.pins_memory and evidence.shares.get("pageable_copies") != 0
    # Of the user's lines that most of the wait is in; no sample sees those of worker processes.
    lines = [one.words for one in evidence.causes.get(DATA_WAIT, ())[:1] if one.share > evidence.data_wait_share / 2]
    return {
        "sample": duration(_sec_of_sample(evidence)),
        "wait": duration(_wait_of_batch(evidence)),
        "measured": percent(evidence.data_wait_share),
        "line": "".join(f" Most of it is {words}." for words in lines),
        "workers": "" if now is None else f", with {plain(now)} loader workers",
        "cores": "" if cores is None else f"; this process may use {plain(cores)} cores{idle}",
        "more": "Raise the DataLoader's num_workers"
        if room is None
        else f"Set the DataLoader's num_workers={plain((now or 0) + room)}",
        "pin": ", pin_memory=True" if pins else "",
    }
