"""What the report of thousands of ranks takes: size of a record, time and memory of merging, length of the report.

Written by ``make bench-ranks``. Each rank has 1,000 modules, 20 timed steps and 3,000 collective calls in a traced
step, the times drawn at random, as nothing compresses less; the last but one is late, and is named. Merging is
unpacking all records and ``with_ranks``, in a process of its own: least and greatest. Memory is the peak, with the
packed records, over what the process had before it read them.
"""

from __future__ import annotations

import random
import resource
import struct
import tempfile
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from lightning_flops import records
from lightning_flops.analysis.profile import build_profile
from lightning_flops.analysis.rank_record import RECORD_LIMIT_BYTES, RankRecord, make_rank_record, pack, unpack
from lightning_flops.analysis.ranks import with_ranks
from lightning_flops.config import ProfilerConfig
from lightning_flops.report.document import draw
from lightning_flops.report.layout import VIEW
from lightning_flops.report.ranks_document import ranks_section
from lightning_flops.schema.communication import CollectiveCalls, Overlap
from lightning_flops.schema.profile import Profile
from lightning_flops.schema.ranks import RankAbsence
from lightning_flops.schema.trace import TracedPart, TracedStep

from .machine import RESULTS
from .page import described, met, table, write_page
from .runner import run_apart, start

MODULES = 1_000
CALLS = 3_000
TIMED_STEPS = 20
TRACED_STEP = 30
STEP_SEC = 0.4
LATE_SEC = 0.1  # How much longer the one late rank waits for data

TARGET_SEC = 2.0
TARGET_BYTES = 500_000_000


def synthetic_profile(ranks: int) -> Profile:
    """Rank 0 of a job of *ranks*: a thousand modules in blocks of ten, each a product of 2 GFLOP and its backward."""
    names = ["", "layers", *(f"layers.{i // 10}" for i in range(0, MODULES, 10))]
    leaves = [f"layers.{i // 10}.projection_{i % 10}" for i in range(MODULES - len(names))]
    names += leaves
    phases: tuple[tuple[records.FlopPhase, int], ...] = (("forward", 1), ("backward", 2))
    sizes: dict[str, Any] = dict.fromkeys(("params", "trainable_params", "local_params"), 10**6)
    product: dict[str, Any] = {"operator": "aten.mm", "dtype": "bfloat16"}
    cells = tuple(
        records.OperatorCell(module=leaf, phase=phase, calls=calls, flops=calls * 2 * 10**9, **product)
        for leaf in leaves
        for phase, calls in phases
    )
    signature = records.StepSignature(batches=("8x4096",), forwards=1, backwards=1, updates=1)
    step = records.StepRecord(index=1, signature=signature, micro_steps=1, samples=8, tokens=8 * 4096)
    seconds = records.PhaseSeconds(
        data_wait=0.01, transfer=0.002, forward=0.12, backward=0.24, optimizer=0.02, other=0.008
    )
    window = records.WindowRecord(
        profile_step=1,
        context=records.RunContext(
            framework="lightning.pytorch", framework_version="2.6.6", torch_version="2.13.0", device_type="cuda",
            device_name="NVIDIA H100 80GB HBM3", precision="bf16-mixed", strategy="DDPStrategy", host="node-000000",
            world_size=ranks, dp_size=ranks,
        ),
        modules=tuple(records.ModuleRecord(name=name, type_name="Module", **sizes) for name in names),
        flops=records.FlopRecord(cells=cells, module_calls=dict.fromkeys(names, 1)),
        counted_steps=(step,),
        timed_steps=tuple(replace(step, index=4 + i, seconds=seconds, reader_sec=0.0) for i in range(TIMED_STEPS)),
        timing_steps=TIMED_STEPS,
    )  # fmt: skip
    return build_profile(window, config=ProfilerConfig(detailed=False))


def synthetic_records(profile: Profile, ranks: int, *, seed: int = 0) -> Iterator[RankRecord]:
    """What *ranks* ranks like that of *profile* send; the last but one waits long for data, and the others for it."""
    draw = random.Random(seed)
    base = make_rank_record(profile)
    names = tuple(module.name for module in profile.modules)
    timing = base.profile.timing
    assert timing is not None
    for rank in range(ranks):
        late = rank == ranks - 2
        waits = {"data wait": LATE_SEC if late else 0.0}
        means = {part.name: part.mean_sec * draw.uniform(0.98, 1.02) + waits.get(part.name, 0) for part in timing.parts}
        parts = tuple(replace(part, mean_sec=means[part.name]) for part in timing.parts)
        waited_us = 0 if late else 1e6 * LATE_SEC
        exposed = {"backward": 1e-6 * waited_us + 0.01}
        overlap = Overlap(
            wall_us=1e6 * STEP_SEC, computation_us=draw.uniform(199e3, 201e3), overlap_us=50e3, other_us=90e3,
            communication_us=draw.uniform(59e3, 61e3) + waited_us, overlap_ratio=0.5,
        )  # fmt: skip
        latency_ns = _nanoseconds(draw, CALLS)
        latency_ns[-1] += int(1_000 * waited_us)
        traced = TracedStep(
            index=TRACED_STEP,
            like_counted=True,
            files=(),
            tables=None,
            own_forward_sec=None,
            parts=tuple(
                TracedPart(name=name.replace(" ", "_"), wall_sec=seconds, exposed_sec=exposed.get(name, 0.0))
                for name, seconds in means.items()
            ),
            collectives=tuple(
                CollectiveCalls(
                    name=name, group="world", group_size=ranks, step=TRACED_STEP, calls=CALLS // 3,
                    bytes=CALLS // 3 * 10**6, total_ns=sum(latency_ns[place::3]), latency_ns=latency_ns[place::3],
                )
                for place, name in enumerate(("all_gather", "reduce_scatter", "allreduce"))
            ),
        )  # fmt: skip
        mine = replace(
            base.profile,
            context=replace(base.profile.context, rank=rank, host=f"node-{rank // 8:06}"),
            timing=replace(timing, parts=parts),
            traced=traced,
        )
        yield replace(
            base,
            profile=mine,
            overlap=overlap,
            module_names=names,
            own_forward_ns=_nanoseconds(draw, len(names)),
            own_backward_ns=_nanoseconds(draw, len(names)),
            clock="device",
        )


def _nanoseconds(draw: random.Random, number: int) -> array[int]:
    """Times below 66 us, each as likely as any other."""
    return array("q", array("H", draw.randbytes(2 * number)))


def write_records(path: Path, ranks: int) -> int:
    """Write what *ranks* ranks send to *path*; the greatest size of a record in bytes."""
    greatest = 0
    with path.open("wb") as file:
        for record in synthetic_records(synthetic_profile(ranks), ranks):
            packed = pack(record)
            greatest = max(greatest, len(packed))
            file.write(struct.pack("<I", len(packed)) + packed)
    return greatest


def _read_records(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while head := file.read(4):
            yield file.read(*struct.unpack("<I", head))


def _merge(path: Path, ranks: int, send: Callable[[Any], None]) -> dict[str, float]:
    """Read what *path* holds and merge it; what that took, CPU time and wall time."""
    profile = synthetic_profile(ranks)
    before = _peak_bytes()
    packed = list(_read_records(path))
    wall, cpu = time.perf_counter(), time.process_time()
    answers: list[RankRecord | RankAbsence] = [unpack(one) for one in packed]
    unpacked = time.process_time()
    merged = with_ranks(profile, answers)
    found: dict[str, float] = {
        "cpu_sec": time.process_time() - cpu,
        "wall_sec": time.perf_counter() - wall,
        "unpack_sec": unpacked - cpu,
        "peak_bytes": _peak_bytes() - before,
        "base_bytes": before,
    }
    assert merged.ranks is not None and merged.ranks.answered == ranks
    assert [one.rank for one in merged.ranks.stragglers] == [ranks - 2], "the late rank is named, and no other"
    begun = time.process_time()
    of_ranks = ranks_section(merged)
    found["lines"] = len(() if of_ranks is None else list(draw(of_ranks, VIEW)))
    found["text_sec"], begun = time.process_time() - begun, time.process_time()
    found["json_bytes"] = len(merged.to_json().encode())
    found["json_sec"] = time.process_time() - begun
    return found


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def main(arguments: Sequence[str] | None = None) -> int:
    """Makes the records, merges them in processes of their own, writes the result, and returns 0."""
    options = start(__file__, __doc__, RESULTS / "ranks.md", arguments, ranks=4096, rounds=5)
    rows, most = [], {}
    for ranks in (4, options.ranks):
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "records")
            size = write_records(path, ranks)
            work = partial(_merge, path, ranks)
            answers = [run_apart(work, timeout_sec=600, method="spawn") for _ in range(options.rounds)]
        if words := [answer.traceback or answer.words for answer in answers if answer.kind != "answered"]:
            raise RuntimeError(words[0])
        found = [answer.value for answer in answers]
        least, most = ({name: pick(one[name] for one in found) for name in found[0]} for pick in (min, max))
        seconds = [f"{least[name]:.2f}–{most[name]:.2f}" for name in ("cpu_sec", "wall_sec")]
        megabytes = [f"{most[name] / 1e6:.0f}" for name in ("peak_bytes", "base_bytes")]
        json = [f"{most['json_bytes'] / 1e6:.1f}", f"{most['json_sec']:.2f}"]
        text = [f"{most['lines']:.0f}", f"{most['text_sec']:.2f}"]
        rows.append([f"{ranks:,}", f"{size:,}", *seconds, f"{most['unpack_sec']:.2f}", *megabytes, *text, *json])
    columns = "ranks|record, bytes|merge, CPU s|merge, wall s|of it unpacking, CPU s|peak over base, MB|base, MB"
    columns += "|section, lines|text, CPU s|profile.json, MB|its writing, CPU s"
    lines = [
        *described(__doc__, "torch"),
        *table([f">{column}" for column in columns.split("|")], rows),
        f"""
Targets: a record of at most {RECORD_LIMIT_BYTES:,} bytes; merging {options.ranks:,} ranks in at most {TARGET_SEC:g} s
({met(most["wall_sec"] <= TARGET_SEC)}) and {TARGET_BYTES / 1e6:g} MB ({met(most["peak_bytes"] <= TARGET_BYTES)}); a
section as long as that of 4 ranks.
""",
    ]
    write_page(options.output, lines)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
