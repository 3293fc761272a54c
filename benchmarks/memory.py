"""Predicted peak memory beside the CPU allocator's own events, and what torch's MemTracker and gpu-estimator say of it.

``make bench-memory`` writes this. Each program makes two training steps in a process of its own, while torch.profiler
records every allocation; the predictions come from ``predict_memory`` on the same model, batch and optimizer. A program
holds its batch all the time, and drops its gradients after each step.

*Kernels' own* is the part of the allocator's peak that is no tensor of the program: what is allocated and freed inside
one operator that has a kernel (scratch and reordered weights of the CPU's convolutions and batch norms), and the
workspace that its LSTM keeps for the backward. *Without kernels' own* is the peak of all other events.

*Largest batch* is the one that three times the peak hold, beside what bisection finds by running every size that it
tries. MemTracker follows the same two steps on fake tensors. gpu-estimator is a package on PyPI "for estimating GPU
memory requirements": it is told the parameters, batch, length of a sequence, dtype, optimizer, and whether
blocks are checkpointed, and its four parts are added up, without the fifth that it adds for frameworks. It is n/a of
images, of optimizers that it does not know, and where parameters are frozen, of which it cannot be told.
"""

from __future__ import annotations

import gc
import io
import logging
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import nullcontext, redirect_stdout
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_flops import MemoryPrediction, predict_memory

from .machine import RESULTS, code_in_words
from .memory_programs import Program, programs
from .page import described, table, write_page
from .runner import answer_of, start

logger = logging.getLogger("benchmarks.memory")

TIMEOUT_SEC = 300.0
CLOSE, NEAR = 0.005, 0.05
KEEPS_WORKSPACE = "aten.mkldnn_rnn_layer.default"


@dataclass(frozen=True, slots=True, kw_only=True)
class Allocator:
    """What the CPU allocator did in two steps."""

    peak: int  # of all events
    without_kernels: int  # of those that are no kernel's own
    kernels: tuple[str, ...]  # whose own bytes are held at the peak, the most first


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One program."""

    name: str
    predicted: int
    allocator: Allocator
    tracker: int | None  # None: MemTracker raises
    estimate: int | None  # of gpu-estimator; None: n/a
    largest: tuple[int, int]  # predicted, and by bisection


def train(program: Program) -> None:
    """Two steps, as a user writes them."""
    model = program.model()
    batch = program.batch(program.size)
    optimizer = program.optimizer(model)
    for _ in range(2):
        for _ in range(program.accumulate):
            device = batch[0].device.type
            with nullcontext() if program.autocast is None else torch.autocast(device, program.autocast):
                loss = model(*batch)
            loss.backward()
            del loss
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


class _Workspaces(TorchDispatchMode):
    """Sizes of the workspaces that the CPU's LSTM returns as its last output."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.sizes: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if str(func) == KEEPS_WORKSPACE:
            self.sizes.add(out[3].untyped_storage().nbytes())
        return out


def measured(program: Program) -> Allocator:
    """What the allocator did."""
    with _Workspaces() as workspaces:
        program.model()(*program.batch(program.size))
    gc.collect()
    gc.disable()  # it would free what cycles hold at moments of its own
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
        train(program)
    gc.enable()
    results: Any = profiler.profiler
    events = sorted(_allocations(results.kineto_results.experimental_event_tree()), key=lambda event: event[0])
    return _account(events, workspaces.sizes)


def _allocations(events: Any, kernel: Any = None) -> Iterator[tuple[int, int, int, Any]]:
    """Time, address and bytes of every allocation (above 0) and release, and the kernel inside of which it is."""
    for event in events:
        if event.tag.name == "Allocation":
            yield event.start_time_ns, event.extra_fields.ptr, event.extra_fields.alloc_size, kernel
        else:
            inside = event if kernel is None and event.tag.name == "TorchOp" and _is_kernel(event.name) else kernel
            yield from _allocations(event.children, inside)


def _is_kernel(name: str) -> bool:
    """Whether torch has a kernel for this operator: what it calls is then no operator of the program's."""
    if not name.startswith("aten::") or not torch._C._dispatch_has_kernel(name):
        return False
    return not torch._C._dispatch_has_kernel_for_dispatch_key(name, "CompositeImplicitAutograd")


def _account(events: list[tuple[int, int, int, Any]], workspaces: set[int]) -> Allocator:
    open_by_address: dict[int, int] = {}
    own: dict[int, int] = {}  # by the place of its allocation, the place of its release
    for place, (_, address, size, kernel) in enumerate(events):
        if size > 0:
            open_by_address[address] = place
        elif (born := open_by_address.pop(address, None)) is not None:
            made_in = events[born][3]
            is_workspace = made_in is not None and "mkldnn_rnn" in made_in.name and events[born][2] in workspaces
            if made_in is not None and (made_in is kernel or is_workspace):
                own[born] = place
    ends = set(own.values())
    held = peak = at = without = peak_without = 0
    for place, (_, _, size, _) in enumerate(events):
        held += size
        if held > peak:
            peak, at = held, place
        without += 0 if place in own or place in ends else size
        peak_without = max(peak_without, without)
    kernels = Counter[str]()
    for born, died in own.items():
        if born <= at < died:
            kernels[events[born][3].name] += events[born][2]
    return Allocator(peak=peak, without_kernels=peak_without, kernels=tuple(name for name, _ in kernels.most_common()))


def predicted(program: Program) -> MemoryPrediction:
    """The prediction."""
    model = program.model()
    options: dict[str, Any] = {"accumulate": program.accumulate, "autocast": program.autocast}
    return predict_memory(model, program.batch(program.size), program.optimizer(model), **options)


def by_bisection(prediction: MemoryPrediction, available: int) -> int:
    """The largest batch, by running every size that bisection tries."""
    low, high = 1, 2
    while prediction.at(batch=high).peak_bytes <= available:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if prediction.at(batch=middle).peak_bytes <= available else (low, middle)
    return low


def tracked(program: Program) -> int:
    """The peak that torch's MemTracker finds on fake tensors."""
    from torch.distributed._tools.mem_tracker import MemTracker

    with FakeTensorMode(allow_non_fake_inputs=True), redirect_stdout(io.StringIO()):
        model = program.model()
        batch, optimizer = program.batch(program.size), program.optimizer(model)
        tracker: Any = MemTracker()
        tracker.track_external(model, optimizer, *batch)
        with tracker:
            for _ in range(2):
                for _ in range(program.accumulate):
                    with nullcontext() if program.autocast is None else torch.autocast("cpu", program.autocast):
                        loss = model(*batch)
                    loss.backward()
                    del loss
                    tracker.reset_mod_stats()  # it refuses a second call of a module otherwise
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
    return max(int(sizes["Total"]) for sizes in tracker.get_tracker_snapshot("peak").values())


def estimated(program: Program) -> int | None:
    """What gpu-estimator says; None: it does not know such programs."""
    model, first = program.model(), program.batch(program.size)[0]
    parameters, optimizer = list(model.parameters()), type(program.optimizer(model)).__name__
    is_known = optimizer in ("AdamW", "SGD") and all(one.requires_grad for one in parameters)
    if not is_known or first.ndim == 4:
        return None
    result = (
        import_module("gpu_estimator")
        .GPUEstimator()
        .estimate(
            sum(one.numel() for one in parameters),
            batch_size=program.size,
            sequence_length=1 if first.is_floating_point() and first.ndim == 2 else first.shape[1],
            precision="bf16" if parameters[0].dtype is torch.bfloat16 else "fp32",
            optimizer=optimizer.lower(),
            gradient_checkpointing="checkpointed" in program.name,
        )
    )
    parts = (getattr(result, f"{name}_memory_gb") for name in ("model", "optimizer", "gradient", "activation"))
    return int(sum(parts) * 2**30)


def row_of(program: Program) -> Row:
    """The program's row; all that it needs in one process, but for MemTracker, which may crash."""
    torch.manual_seed(0)
    found = predicted(program)
    available = 3 * found.peak_bytes
    largest = found.largest_batch(available), by_bisection(found, available)
    allocator = answer_of(lambda: measured(program), timeout_sec=TIMEOUT_SEC)
    if not isinstance(allocator.value, Allocator):
        raise RuntimeError(f"{program.name}: {allocator.words} {allocator.traceback}")
    tracker = answer_of(lambda: tracked(program), timeout_sec=TIMEOUT_SEC).value
    return Row(
        name=program.name,
        predicted=found.peak_bytes,
        allocator=allocator.value,
        tracker=tracker,
        estimate=estimated(program),
        largest=largest,
    )


def _differs(found: int | None, truth: int, otherwise: str = "") -> str:
    if found is None:
        return otherwise
    return "exact" if found == truth else f"{100 * (found / truth - 1):+.3f}%"


def page_lines(rows: list[Row]) -> list[str]:
    """The table, and what it amounts to."""
    cells = [
        [
            row.name,
            f"{row.predicted:,}",
            f"{row.allocator.peak:,}",
            _differs(row.predicted, row.allocator.peak),
            _differs(row.predicted, row.allocator.without_kernels),
            ", ".join(name.removeprefix("aten::") for name in row.allocator.kernels[:2]),
            f"{row.largest[0]:,}" + ("" if row.largest[0] == row.largest[1] else f" ({row.largest[1]:,})"),
            _differs(row.tracker, row.allocator.peak, "raises"),
            _differs(row.estimate, row.allocator.peak, "n/a"),
        ]
        for row in rows
    ]
    head = ["program", ">predicted, B", ">allocator, B", ">difference", ">without kernels' own", "kernels"]

    def within(limit: float, pairs: Iterable[tuple[int, int]]) -> int:
        return sum(abs(found / truth - 1) <= limit for found, truth in pairs)

    whole = [(row.predicted, row.allocator.peak) for row in rows]
    own = [(row.predicted, row.allocator.without_kernels) for row in rows]
    trackers = [(row.tracker, row.allocator.peak) for row in rows if row.tracker is not None]
    estimates = [(row.estimate, row.allocator.peak) for row in rows if row.estimate is not None]
    return [
        *table([*head, ">largest batch", ">MemTracker", ">gpu-estimator"], cells),
        f"""
Of {len(rows)} programs, the prediction is within 0.5% of the allocator's peak on {within(CLOSE, whole)}, and on
{within(CLOSE, own)} without what is a kernel's own; within 5% on {within(NEAR, whole)} and {within(NEAR, own)}. The
largest batch is that of bisection on {sum(row.largest[0] == row.largest[1] for row in rows)}. MemTracker is within
0.5% on {within(CLOSE, trackers)}, within 5% on {within(NEAR, trackers)}, and raises on {len(rows) - len(trackers)}.
gpu-estimator is within 5% on {within(NEAR, estimates)} of {len(estimates)}.
""",
    ]


def main() -> None:
    """Measures, writes the report."""
    options = start(__file__, __doc__, RESULTS / "memory.md", only="")
    code = code_in_words()
    rows = []
    for program in programs():
        if options.only in program.name:
            rows.append(row_of(program))
            logger.info("%s", rows[-1])
    lines = page_lines(rows)
    if options.only:
        logger.info("%s", "\n".join(lines))
    else:
        write_page(options.output, [*described(__doc__, "torch", "transformers", "gpu-estimator", code=code), *lines])


if __name__ == "__main__":
    main()
