"""What counting costs: a watched step over the same step unwatched, in one process, on one thread, in CPU time.

``make bench-counting`` installs the peers and writes this; ``python -m benchmarks.counting`` runs where they are. A
step is forward and backward. Every round runs every watcher once in a new random order, after one unmeasured round. A
ratio is the median of the rounds' ratios, with a 95% bootstrap interval. lightning_flops counts FLOPs and bytes and
attributes both to modules, phases and operators.
"""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from importlib import import_module
from typing import Any, NamedTuple

from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from .machine import RESULTS, code_in_words
from .page import described, table, write_page
from .ratios import Estimate, Target, difference, median_with_interval, ratio
from .runner import in_rounds, start
from .workloads import Workload, bert_mini, tiny_operators

logger = logging.getLogger("benchmarks.counting")

Watch = Callable[[nn.Module], AbstractContextManager[Any]]

BERT_TARGET = Target(limit=1.03, unit="× plain")
TINY_TARGET = Target(limit=1.20, unit="× no-op mode")


# ---- who watches


class _NoOpMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A dispatch mode that does nothing: the floor for everything that sees operators from Python."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class _OperatorCount(_NoOpMode):  # type: ignore[no-untyped-call]
    calls = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += 1
        return func(*args, **(kwargs or {}))


@contextmanager
def _deepspeed_profiler(model: nn.Module) -> Iterator[Any]:
    """DeepSpeed's profiler, started and ended as its engine does."""
    profiler = import_module("deepspeed.profiling.flops_profiler").FlopsProfiler(model)
    profiler.start_profile()
    try:
        yield profiler
    finally:
        profiler.end_profile()


def _ours(model: nn.Module) -> AbstractContextManager[Any]:
    """This project, bytes and attribution included: it has no cheaper mode."""
    from lightning_flops.pytorch import count_flops

    return count_flops(model)


PLAIN, NO_OP, OURS = "plain", "no-op dispatch mode", "lightning_flops"
WATCHERS: Mapping[str, Watch] = {
    PLAIN: lambda model: nullcontext(),
    NO_OP: lambda model: _NoOpMode(),  # type: ignore[no-untyped-call]
    OURS: _ours,
    "FlopCounterMode": lambda model: import_module("torch.utils.flop_counter").FlopCounterMode(display=False),
    "DeepSpeed's profiler": _deepspeed_profiler,
}


# ---- what is measured


class StepSeconds(NamedTuple):
    """CPU seconds of one watched step."""

    inside: float  # The step alone, being watched
    whole: float  # The step, and taking up and ending the watch


Rounds = Mapping[str, Sequence[StepSeconds]]  # By watcher, one measurement of each round, in the order of the rounds


def watched_step(workload: Workload, watch: Watch) -> StepSeconds:
    """One step under one watcher; gradients are dropped outside the measured time."""
    clock = time.process_time
    context = watch(workload.model)
    begin = clock()
    with context:
        enter = clock()
        workload.step()
        leave = clock()
    end = clock()
    workload.model.zero_grad(set_to_none=True)
    return StepSeconds(inside=leave - enter, whole=end - begin)


def _operators_of(workload: Workload) -> int:
    with _OperatorCount() as mode:  # type: ignore[no-untyped-call]
        workload.step()
    workload.model.zero_grad(set_to_none=True)
    return int(mode.calls)


# ---- the report


def step_table(rounds: Rounds, *, target: Target, target_base: str) -> list[str]:
    """Each watcher's step over the plain one and over the no-op mode, and this project's target."""
    columns = ["watcher", ">CPU ms of a step", ">÷ plain", ">÷ no-op mode", ">with its start and end ÷ plain", "target"]
    inside = {name: [sample.inside for sample in samples] for name, samples in rounds.items()}
    whole = {name: [sample.whole for sample in samples] for name, samples in rounds.items()}
    rows = []
    for name in rounds:
        over_plain, over_floor = ratio(inside[name], inside[PLAIN]), ratio(inside[name], inside[NO_OP])
        rows.append(
            [
                name,
                median_with_interval([1e3 * seconds for seconds in inside[name]]).text(2),
                "1" if name == PLAIN else over_plain.text(3),
                None if name == PLAIN else "1" if name == NO_OP else over_floor.text(3),
                "1" if name == PLAIN else ratio(whole[name], whole[PLAIN]).text(3),
                target.verdict(ratio(inside[name], inside[target_base])) if name == OURS else None,
            ]
        )
    return table(columns, rows)


def added_per_operator(rounds: Rounds, name: str, *, operators: int) -> Estimate:
    """CPU microseconds that *name* adds to each operator of a step."""
    ours, plain = ([1e6 * one.inside / operators for one in rounds[arm]] for arm in (name, PLAIN))
    return difference(ours, plain)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures, writes the report, and returns 0."""
    options = start(
        __file__, __doc__, RESULTS / "counting.md", arguments, bert_rounds=31, tiny_rounds=201,
        watchers=list(WATCHERS),
    )  # fmt: skip
    watchers = {name: watch for name, watch in WATCHERS.items() if name in {PLAIN, NO_OP, OURS, *options.watchers}}
    code = code_in_words()
    tiny, bert = tiny_operators(), bert_mini()
    tiny_count, bert_count = _operators_of(tiny), _operators_of(bert)
    gc.collect()
    gc.freeze()  # what the models and libraries keep is not looked through again by every collection
    steps = [
        in_rounds({name: partial(watched_step, workload, watch) for name, watch in watchers.items()}, rounds)
        for workload, rounds in ((bert, options.bert_rounds), (tiny, options.tiny_rounds))
    ]
    logger.info("steps measured")
    added = [
        f"{name} {added_per_operator(steps[1], name, operators=tiny_count).text(1)}"
        for name in watchers
        if name != PLAIN
    ]
    modules = len(list(tiny.model.modules()))
    page = [
        *described(__doc__, "torch", "transformers", "deepspeed", code=code),
        "## BERT-mini: 4 layers, hidden size 256, 8 samples of 128 tokens\n",
        f"{bert_count} operators a step, {options.bert_rounds} rounds.\n",
        *step_table(steps[0], target=BERT_TARGET, target_base=PLAIN),
        "\n## A thousand tiny operators\n",
        f"{tiny_count} operators a step on 32 numbers, in {modules} modules, {options.tiny_rounds} rounds.\n",
        *step_table(steps[1], target=TINY_TARGET, target_base=NO_OP),
        f"\nAdded to each operator, CPU µs: {'; '.join(added)}.\n",
    ]
    write_page(options.output, page)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
