"""What the report of thousands of ranks takes: size of a record, time and memory of merging, length of the report.

Written by ``make bench-ranks``. Each rank has 1,000 modules, 20 timed steps and 3,000 collective calls in a traced
step, the times drawn at random, as nothing compresses less; the last but one is late, and is named. Merging is
unpacking all records and ``with_ranks``, in a process of its own: least and greatest. Memory is the peak over what the
process had with the packed records.
"""

from __future__ import annotations

import random
import resource
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from lightning_flops.analysis.profile import build_profile
from lightning_flops.analysis.rank_record import (
    RECORD_LIMIT_BYTES,
    RankAbsence,
    RankRecord,
    TracedRank,
    make_rank_record,
    pack,
    unpack,
)
from lightning_flops.analysis.ranks import with_ranks
from lightning_flops.config import ProfilerConfig
from lightning_flops.records import FlopPhase, FlopRecord, PhaseSeconds
from lightning_flops.report.layout import VIEW, draw
from lightning_flops.report.ranks_document import ranks_section
from lightning_flops.schema.profile import Profile
from lightning_flops.schema.trace import TracedPart
from tests.report import jobs, windows

from .machine import RESULTS
from .page import described, met, table, write_page
from .runner import run_apart, start

MODULES = 1_000
CALLS = 3_000
TIMED_STEPS = 20
LATE_SEC = 0.1  # How much longer the one late rank waits for data

TARGET_SEC = 2.0
TARGET_BYTES = 500_000_000


def synthetic_profile(ranks: int) -> Profile:
    """Rank 0 of a job of *ranks*: a thousand modules in blocks of ten, each a product of 2 GFLOP and its backward."""
    base = jobs.in_context(windows.mlp_window(), world_size=ranks, dp_size=ranks, strategy="DDPStrategy")
    names = ["", "layers", *(f"layers.{i // 10}" for i in range(0, MODULES, 10))]
    leaves = [f"layers.{i // 10}.projection_{i % 10}" for i in range(MODULES - len(names))]
    phases: tuple[tuple[FlopPhase, int], ...] = (("forward", 1), ("backward", 2))
    cells = tuple(
        windows.cell(leaf, phase, calls * 2 * 10**9, dtype="bfloat16", calls=calls)
        for leaf in leaves
        for phase, calls in phases
    )
    seconds = PhaseSeconds(data_wait=0.01, transfer=0.002, forward=0.12, backward=0.24, optimizer=0.02, other=0.008)
    window = replace(
        base,
        modules=tuple(windows.module(name, "Module", 10**6) for name in names + leaves),
        flops=FlopRecord(cells=cells, module_calls=dict.fromkeys(names + leaves, 1)),
        counted_steps=(windows.step(base.profile_step),),
        timed_steps=tuple(windows.step(5 + i, seconds=seconds, reader_sec=0.0) for i in range(TIMED_STEPS)),
        timing_steps=TIMED_STEPS,
    )
    return build_profile(window, config=ProfilerConfig(detailed=False, peak_flops_per_sec=989e12))


def synthetic_records(profile: Profile, ranks: int, *, seed: int = 0) -> Iterator[RankRecord]:
    """What *ranks* ranks like that of *profile* send; the last but one waits long for data, and the others for it."""
    draw = random.Random(seed)
    base = make_rank_record(profile)
    names, timing = tuple(module.name for module in profile.modules), base.profile.timing
    assert timing is not None
    for rank in range(ranks):
        late = rank == ranks - 2
        means = {part.name: part.mean_sec * draw.uniform(0.98, 1.02) for part in timing.parts}
        means["data wait"] += LATE_SEC if late else 0.0
        waited_sec = 0.0 if late else LATE_SEC
        latency_ns = _nanoseconds(draw, CALLS)
        latency_ns[-1] += int(1e9 * waited_sec)
        kinds = enumerate(("all_gather", "reduce_scatter", "allreduce"))
        collectives = [replace(jobs.all_reduces(*latency_ns[at::3], group_size=ranks), name=name) for at, name in kinds]
        exposed = {"backward": waited_sec + 0.01}
        parts = tuple(
            TracedPart(name=name.replace(" ", "_"), wall_sec=seconds, exposed_sec=exposed.get(name, 0.0))
            for name, seconds in means.items()
        )
        mine = replace(
            base.profile,
            context=replace(base.profile.context, rank=rank, host=f"node-{rank // 8:06}"),
            timing=replace(timing, parts=tuple(replace(part, mean_sec=means[part.name]) for part in timing.parts)),
            traced=windows.traced(parts=parts),
        )
        overlap = jobs.overlap(draw.uniform(2_900, 3_100) + 1e5 * waited_sec)
        own: dict[str, Any] = {key: _nanoseconds(draw, len(names)) for key in ("own_forward_ns", "own_backward_ns")}
        called = TracedRank(rank=rank, steps=1, overlap=overlap, collectives=tuple(collectives))
        yield replace(base, profile=mine, traced=called, module_names=names, **own)


def _nanoseconds(draw: random.Random, number: int) -> array[int]:
    """Times below 66 us, each as likely as any other."""
    return array("q", array("H", draw.randbytes(2 * number)))


def _merge(packed: Sequence[bytes], ranks: int, send: Callable[[Any], None]) -> dict[str, float]:
    """Merge what *ranks* ranks sent: seconds, bytes of memory over those before, and lines of the report's section."""
    profile, before = synthetic_profile(ranks), _peak_bytes()
    wall, cpu = time.perf_counter(), time.process_time()
    answers: list[RankRecord | RankAbsence] = [unpack(one) for one in packed]
    merged = with_ranks(profile, answers)
    cpu_sec, wall_sec, grown = time.process_time() - cpu, time.perf_counter() - wall, _peak_bytes() - before
    assert merged.ranks is not None and merged.ranks.answered == ranks
    assert [one.rank for one in merged.ranks.stragglers] == [ranks - 2], "the late rank is named, and no other"
    section = ranks_section(merged)
    assert section is not None
    return {"cpu": cpu_sec, "wall": wall_sec, "grown": grown, "lines": len(list(draw(section, VIEW)))}


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def main() -> None:
    """Makes the records, merges them in processes of their own, writes the result."""
    options = start(__file__, __doc__, RESULTS / "ranks.md", ranks=4096, rounds=5)
    rows, most = list[list[object]](), dict[str, float]()
    for ranks in (4, options.ranks):
        packed = [pack(record) for record in synthetic_records(synthetic_profile(ranks), ranks)]
        answers = [run_apart(partial(_merge, packed, ranks), timeout_sec=600) for _ in range(options.rounds)]
        if words := [answer.traceback or answer.words for answer in answers if answer.kind != "answered"]:
            raise RuntimeError(words[0])
        found = [answer.value for answer in answers]
        least, most = ({name: pick(one[name] for one in found) for name in found[0]} for pick in (min, max))
        seconds = [f"{least[name]:.2f}–{most[name]:.2f}" for name in ("cpu", "wall")]
        rows.append([f"{ranks:,}", f"{max(map(len, packed)):,}", *seconds, f"{most['grown'] / 1e6:.0f}", most["lines"]])
    columns = [">ranks", ">record, bytes", ">merge, CPU s", ">merge, wall s", ">memory, MB", ">section, lines"]
    lines = [
        *described(__doc__, "torch"),
        *table(columns, rows),
        f"""
Targets: a record of at most {RECORD_LIMIT_BYTES:,} bytes; merging {options.ranks:,} ranks in at most {TARGET_SEC:g} s
({met(most["wall"] <= TARGET_SEC)}) and {TARGET_BYTES / 1e6:g} MB ({met(most["grown"] <= TARGET_BYTES)}); a section as
long as that of 4 ranks.
""",
    ]
    write_page(options.output, lines)


if __name__ == "__main__":
    main()
