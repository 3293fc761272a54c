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

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_flops.pytorch import count_flops
from tests.corpus import Example
from tests.corpus.case import Parts, tensors_in

from .machine import RESULTS, code_in_words
from .page import described, table, write_page
from .ratios import Target, difference, median_with_interval, ratio
from .runner import in_rounds, start

logger = logging.getLogger("benchmarks.counting")

Watch = Callable[[nn.Module], AbstractContextManager[Any]]

BERT_TARGET = Target(limit=1.03, unit="× plain")
TINY_TARGET = Target(limit=2.20, unit="× no-op mode")


# ---- who watches


class _NoOpMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A dispatch mode that only counts operators: the floor for everything that sees them from Python."""

    calls = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += 1
        return func(*args, **(kwargs or {}))


@contextmanager
def _deepspeed_profiler(model: nn.Module) -> Iterator[Any]:
    """DeepSpeed's, started and ended as its engine does."""
    profiler = import_module("deepspeed.profiling.flops_profiler").FlopsProfiler(model)
    profiler.start_profile()
    try:
        yield profiler
    finally:
        profiler.end_profile()


PLAIN, NO_OP, OURS = "plain", "no-op dispatch mode", "lightning_flops"
WATCHERS: Mapping[str, Watch] = {
    PLAIN: lambda model: nullcontext(),
    NO_OP: lambda model: _NoOpMode(),  # type: ignore[no-untyped-call]
    OURS: count_flops,  # bytes and attribution included: it has no cheaper mode
    "FlopCounterMode": lambda model: import_module("torch.utils.flop_counter").FlopCounterMode(display=False),
    "DeepSpeed's profiler": _deepspeed_profiler,
}


# ---- what is measured


def _step(example: Example) -> None:
    """One forward, and one backward of the sum of its first output."""
    next(tensors_in(example.forward())).sum().backward()  # type: ignore[no-untyped-call]


def _bert_mini() -> Example:
    """4 layers of 256, 8 samples of 128 tokens."""
    transformers = import_module("transformers")
    torch.manual_seed(0)
    sizes = {"num_hidden_layers": 4, "hidden_size": 256, "num_attention_heads": 4, "intermediate_size": 1024}
    config = transformers.BertConfig(**sizes)
    model: nn.Module = transformers.BertModel(config).train()
    return Example(model, torch.randint(0, config.vocab_size, (8, 128)), step=_step)


def _tiny_block(width: int) -> nn.Module:
    """Linear and tanh on a handful of numbers, with a residual connection."""
    parts = {"linear": nn.Linear(width, width), "activation": nn.Tanh()}
    return Parts(lambda block, x: x + block.activation(block.linear(x)), **parts)


def _tiny_operators() -> Example:
    """Blocks of three modules on 4 × 8 numbers, as many as make about a thousand operators, forward and backward."""
    torch.manual_seed(0)
    blocks, width = 55, 8
    model = nn.Sequential(*(_tiny_block(width) for _ in range(blocks)))
    return Example(model, torch.randn(4, width), step=_step)


class StepSeconds(NamedTuple):
    """CPU seconds of one watched step."""

    inside: float  # The step alone, being watched
    whole: float  # The step, and taking up and ending the watch


Rounds = Mapping[str, Sequence[StepSeconds]]  # By watcher, one measurement of each round, in the order of the rounds


def watched_step(example: Example, watch: Watch) -> StepSeconds:
    """One step under one watcher; gradients are dropped outside the measured time."""
    clock = time.process_time
    context = watch(example.model)
    begin = clock()
    with context:
        enter = clock()
        example.run()
        leave = clock()
    end = clock()
    example.model.zero_grad(set_to_none=True)
    return StepSeconds(inside=leave - enter, whole=end - begin)


def _operators_of(example: Example) -> int:
    with _NoOpMode() as mode:  # type: ignore[no-untyped-call]
        example.run()
    example.model.zero_grad(set_to_none=True)
    return int(mode.calls)


# ---- the report


def step_table(rounds: Rounds, *, target: Target, target_base: str) -> list[str]:
    """Each watcher's step over the plain one and over the no-op mode, and this project's target."""
    columns = ["watcher", ">CPU ms of a step", ">÷ plain", ">÷ no-op mode", ">with its start and end ÷ plain", "target"]
    inside = {name: [sample.inside for sample in samples] for name, samples in rounds.items()}
    whole = {name: [sample.whole for sample in samples] for name, samples in rounds.items()}
    rows = []
    for name in rounds:
        milliseconds = median_with_interval([1e3 * seconds for seconds in inside[name]])
        over_plain, over_floor, ends = (
            ratio(ones[name], others[base]).text(3) if name != base else "1"
            for ones, others, base in ((inside, inside, PLAIN), (inside, inside, NO_OP), (whole, whole, PLAIN))
        )
        verdict = target.verdict(ratio(inside[name], inside[target_base])) if name == OURS else None
        rows.append([name, milliseconds.text(2), over_plain, over_floor if name != PLAIN else None, ends, verdict])
    return table(columns, rows)


def main() -> None:
    """Measures, writes the report."""
    options = start(__file__, __doc__, RESULTS / "counting.md", bert_rounds=31, tiny_rounds=201)
    code = code_in_words()
    tiny, bert = _tiny_operators(), _bert_mini()
    tiny_count, bert_count = _operators_of(tiny), _operators_of(bert)
    gc.collect()
    gc.freeze()  # what the models and libraries keep is not looked through again by every collection
    steps = [
        in_rounds({name: partial(watched_step, example, watch) for name, watch in WATCHERS.items()}, rounds)
        for example, rounds in ((bert, options.bert_rounds), (tiny, options.tiny_rounds))
    ]
    logger.info("steps measured")
    micros = {name: [1e6 * one.inside / tiny_count for one in taken] for name, taken in steps[1].items()}
    added = [f"{name} {difference(micros[name], micros[PLAIN]).text(1)}" for name in WATCHERS if name != PLAIN]
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


if __name__ == "__main__":
    main()
