"""What counting costs: a watched step over the same step unwatched, in one process, on one thread, in CPU time.

``make bench-counting`` installs the peers and runs this; ``python -m benchmarks.counting_speed`` runs it where they are
installed. Every round runs every watcher once, in a new random order, after one round that is not measured. It writes
``benchmarks/results/counting.md``.
"""

from __future__ import annotations

import argparse
import gc
import logging
import os
import random
import time
import tracemalloc
import warnings
from collections.abc import Mapping, Sequence
from datetime import date
from pathlib import Path

import torch
from torch import nn
from torch.nn.modules import module as module_hooks
from torch.optim import optimizer as optimizer_hooks

from . import counting_table as table
from .counting_table import Footprint, StepSeconds
from .machine import code_in_words, machine_in_words, restart_in_one_thread_environment, versions
from .workloads import (
    NO_OP,
    OURS,
    PLAIN,
    WATCHERS,
    Watch,
    Workload,
    bert_mini,
    operators_of,
    ten_thousand_modules,
    tiny_operators,
)

logger = logging.getLogger("benchmarks.counting_speed")

RESULT = Path(__file__).resolve().parent / "results" / "counting.md"
MODULE = "benchmarks.counting_speed"


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures, writes the report, and returns 0."""
    parser = argparse.ArgumentParser(prog=f"python -m {MODULE}", description=__doc__)
    parser.add_argument("--bert-rounds", type=int, default=31)
    parser.add_argument("--tiny-rounds", type=int, default=201)
    parser.add_argument("--module-rounds", type=int, default=31)
    parser.add_argument("--watchers", nargs="*", help=f"besides {PLAIN}, {NO_OP}, {OURS}: " + ", ".join(WATCHERS))
    parser.add_argument("--output", type=Path, default=RESULT)
    options = parser.parse_args(arguments)
    restart_in_one_thread_environment(MODULE)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    warnings.simplefilter("ignore")
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    torch.set_num_threads(1)

    chosen = {PLAIN, NO_OP, OURS, *(WATCHERS if options.watchers is None else options.watchers)}
    watchers = {name: watch for name, watch in WATCHERS.items() if name in chosen}
    code, load_before = code_in_words(), os.getloadavg()[0]
    tiny, bert = tiny_operators(), bert_mini()
    operators = {"tiny": operators_of(tiny), "bert": operators_of(bert)}
    bert_rounds = step_rounds(bert, watchers, rounds=options.bert_rounds)
    logger.info("BERT-mini measured")
    tiny_rounds = step_rounds(tiny, watchers, rounds=options.tiny_rounds)
    logger.info("tiny operators measured")
    large = ten_thousand_modules()
    seconds = enter_and_leave_seconds(large, watchers, rounds=options.module_rounds)
    footprints = {name: footprint(large, watch) for name, watch in watchers.items()}
    logger.info("ten thousand modules measured")
    load = max(load_before, os.getloadavg()[0])
    modules = sum(1 for _ in tiny.model.modules())
    lines = report(bert_rounds, tiny_rounds, seconds, footprints, operators, modules=modules, code=code, load=load)
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text("\n".join(lines))
    logger.info("wrote %s", options.output)
    return 0


def step_rounds(workload: Workload, watchers: Mapping[str, Watch], *, rounds: int) -> dict[str, list[StepSeconds]]:
    """One measurement of every watcher in each of *rounds* rounds, each round in an order of its own."""
    samples: dict[str, list[StepSeconds]] = {name: [] for name in watchers}
    for watch in watchers.values():
        watched_step(workload, watch)
    # What the models and libraries keep is not looked through again by every collection.
    gc.collect()
    gc.freeze()
    order = random.Random(0)
    for _ in range(rounds):
        names = list(watchers)
        order.shuffle(names)
        for name in names:
            gc.collect()
            samples[name].append(watched_step(workload, watchers[name]))
    return samples


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
    workload.forget_gradients()
    return StepSeconds(inside=leave - enter, whole=end - begin)


def enter_and_leave_seconds(model: nn.Module, watchers: Mapping[str, Watch], *, rounds: int) -> dict[str, list[float]]:
    """CPU seconds to make a watcher, enter it and leave it, with nothing in between."""
    seconds: dict[str, list[float]] = {name: [] for name in watchers}
    for name, watch in watchers.items():
        enter_and_leave(model, watch)
        logger.debug("%s entered once", name)
    order = random.Random(0)
    for _ in range(rounds):
        names = list(watchers)
        order.shuffle(names)
        for name in names:
            gc.collect()
            begin = time.process_time()
            enter_and_leave(model, watchers[name])
            seconds[name].append(time.process_time() - begin)
    return seconds


def enter_and_leave(model: nn.Module, watch: Watch) -> None:
    """Makes the watcher, enters it, leaves it and drops it."""
    with watch(model):
        pass


def footprint(model: nn.Module, watch: Watch) -> Footprint:
    """Memory a watcher holds, and what it leaves on the model and on torch; its first use is not measured."""
    enter_and_leave(model, watch)
    hooks, attributes = hooks_on(model), attributes_of(model)
    tracemalloc.start()
    try:
        gc.collect()
        before = tracemalloc.get_traced_memory()[0]
        with watch(model):
            gc.collect()
            held = tracemalloc.get_traced_memory()[0] - before
        gc.collect()
        left = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    return Footprint(
        held_bytes=held,
        left_bytes=left,
        left_hooks=hooks_on(model) - hooks,
        left_attributes=attributes_of(model) - attributes,
    )


def hooks_on(model: nn.Module) -> int:
    """Forward and backward hooks on the modules, and torch's global module and optimizer hooks."""
    return sum(
        len(hooks)
        for owner in (module_hooks, optimizer_hooks, *model.modules())
        for name, hooks in vars(owner).items()
        if "hooks" in name and isinstance(hooks, dict)
    )


def attributes_of(model: nn.Module) -> int:
    """How many entries the modules' dictionaries have, all together."""
    return sum(len(vars(module)) for module in model.modules())


def report(
    bert_rounds: table.Rounds,
    tiny_rounds: table.Rounds,
    seconds: Mapping[str, Sequence[float]],
    footprints: Mapping[str, Footprint],
    operators: Mapping[str, int],
    *,
    modules: int,
    code: str,
    load: float,
) -> list[str]:
    """The whole report as lines of markdown."""
    added = [
        f"{name} {table.added_per_operator(tiny_rounds, name, plain=PLAIN, operators=operators['tiny']).text(1)}"
        for name in tiny_rounds
        if name != PLAIN
    ]
    packages = ("torch", "transformers", "deepspeed")
    return [
        "# What counting costs",
        "",
        "A watched step over the same step unwatched: forward and backward, in one process, on one thread, in CPU "
        "time. Every round runs every watcher once in a new random order, after one unmeasured round. A ratio is the "
        "median of the rounds' ratios, with a 95% bootstrap interval. lightning_flops counts FLOPs and bytes and "
        "attributes both to modules, phases and operators.",
        "",
        f"{date.today().isoformat()}, {code}. {machine_in_words()}; up to {load:.1f} processes were running or "
        "waiting on it. Again: `make bench-counting`.",
        "",
        ", ".join(f"{package} {version}" for package, version in versions(packages).items()) + ".",
        "",
        "## BERT-mini: 4 layers, hidden size 256, 8 samples of 128 tokens",
        "",
        f"{operators['bert']} operators a step, {len(bert_rounds[PLAIN])} rounds.",
        "",
        *table.step_table(
            bert_rounds, plain=PLAIN, floor=NO_OP, ours=OURS, target=table.BERT_TARGET, target_base=PLAIN
        ),
        "",
        "## A thousand tiny operators",
        "",
        f"{operators['tiny']} operators a step on tensors of 32 numbers, in {modules} modules, "
        f"{len(tiny_rounds[PLAIN])} rounds.",
        "",
        *table.step_table(
            tiny_rounds, plain=PLAIN, floor=NO_OP, ours=OURS, target=table.TINY_TARGET, target_base=NO_OP
        ),
        "",
        "Added to each operator, CPU µs: " + "; ".join(added) + ".",
        "",
        "## Entering and leaving a model of 10,000 modules",
        "",
        f"{len(seconds[PLAIN])} rounds; memory as Python's tracemalloc sees it, in a run of its own.",
        "",
        *table.modules_table(seconds, footprints, ours=OURS),
        "",
    ]


if __name__ == "__main__":
    raise SystemExit(main())
