"""Hundreds of architectures, each counted beside an oracle of its Python calls: forward, backward and recompute.

``make bench-zoo`` installs transformers and timm beside this project and runs this. Every architecture is a tiny model
of random weights, in training without dropout, on a batch of two; nothing is downloaded. Each is counted five ways:
with eager attention, with torch's fused attention (sdpa), with activation checkpointing, under autocast (bfloat16), and
by ``count_offline``, which computes on shapes and must say what the eager count says. The first four are held to
``zoo_oracle.CallOracle``, which shares no mechanism and no formula with the counter: it sees the Python calls
(``torch.matmul``, ``F.linear``, …) instead of the operators, and works out from their shapes what they, their gradients
and their repetition cost.

It writes ``benchmarks/results/zoo.md``. ``--only llama`` takes the architectures whose name that regular expression
finds, ``--seconds 30`` gives each architecture less time; then the table is printed, unless there is an ``--output``.
"""

from __future__ import annotations

import gc
import logging
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from lightning_flops.analysis.counts import FlopCounts
from lightning_flops.pytorch import count_flops, count_offline
from tests.corpus.case import tensors_in

from . import zoo_timm, zoo_transformers
from .machine import RESULTS, code_in_words, usable_cores
from .page import write_page
from .runner import run_apart, start
from .zoo_oracle import CallOracle
from .zoo_table import WAYS, Result, Row, report

logger = logging.getLogger("benchmarks.zoo")

LIBRARIES: Mapping[str, Any] = {"transformers": zoo_transformers, "timm": zoo_timm}


def results_of(library: str, architecture: str) -> Iterator[Result]:
    """Each way of counting *architecture*, in this process; the first is what the others need."""
    source, made = LIBRARIES[library], list[Any]()

    def eager() -> Result:
        made.extend(source.build(architecture, attention="eager"))
        return _held(*made)

    ways: dict[str, Callable[[], Result]] = {
        "eager": eager,
        "autocast": lambda: _held(*made, way="autocast"),
        "offline": lambda: _offline(made[0], made[1], found["eager"]),
        "checkpointing": lambda: _checkpointed(source, *made),
        "sdpa": lambda: _held(*source.build(architecture, attention="sdpa"), way="sdpa"),
    }
    found: dict[str, Result] = {}
    for way, run in ways.items():
        try:
            found[way] = run()
        except Exception as error:
            found[way] = Result(way=way, not_run=f"{type(error).__name__}: {' '.join(str(error).split())}"[:300])
        yield found[way]
        if found["eager"].not_run:
            return


def _step(model: nn.Module, batch: Mapping[str, Any], *, autocast: bool, oracle: CallOracle | None = None) -> None:
    """A forward, and the backward of all that it returns."""
    torch.manual_seed(2)
    model.zero_grad()
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        output = model(**batch)
    roots = [tensor for tensor in tensors_in(output) if tensor.requires_grad]
    with oracle.in_backward() if oracle else nullcontext():
        torch.autograd.backward(roots, [torch.ones_like(root) for root in roots])


def _held(
    model: nn.Module, batch: Mapping[str, Any], *, way: str = "eager", oracle: CallOracle | None = None
) -> Result:
    """The step twice: once the oracle looks, once the counter."""
    autocast = way == "autocast"
    oracle = oracle or CallOracle()
    with oracle:
        _step(model, batch, autocast=autocast, oracle=oracle)
    with count_flops(model) as counts:
        _step(model, batch, autocast=autocast)
    expected = oracle.expected
    tensors = {name: value for name, value in batch.items() if isinstance(value, torch.Tensor)}
    return Result(
        way=way,
        **_figures(counts),
        expected=(expected.forward, expected.backward, expected.recompute),
        batch=", ".join(f"{name} {list(value.shape)}" for name, value in tensors.items()),
    )


def _figures(counts: FlopCounts) -> dict[str, Any]:
    names = sorted(name for name, operator in counts.uncounted.items() if operator.may_have_flops)
    operators = counts.by_operator().items()
    return {
        "counted": (counts.forward, counts.backward, counts.recompute),
        "by_operator": {name: (flops.forward, flops.backward, flops.recompute) for name, flops in operators},
        "said_at_least": tuple(names or ["no operator by name"]) if counts.is_lower_bound else (),
    }


def _checkpointed(source: Any, model: nn.Module, batch: Mapping[str, Any]) -> Result:
    oracle = CallOracle()

    def not_reentrant(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return checkpoint(function, *args, **{"use_reentrant": False, **kwargs})

    with source.checkpointing(model, oracle.checkpointing(not_reentrant)):
        return _held(model, batch, way="checkpointing", oracle=oracle)


def _offline(model: nn.Module, batch: Mapping[str, Any], eager: Result) -> Result:
    torch.manual_seed(2)
    return Result(way="offline", **_figures(count_offline(model, dict(batch))), expected=eager.counted)


def row_of(library: str, architecture: str, *, seconds: float) -> Row:
    """What a process of its own counted, so that a crash or an endless loop is one architecture's."""
    results: list[Result] = []

    def count(send: Callable[[Any], None]) -> None:
        for result in results_of(library, architecture):
            send(result)

    answer = run_apart(count, timeout_sec=seconds, receive=results.append)
    if answer.kind != "answered":
        why = f"longer than {seconds:g} s" if answer.kind == "timed out" else f"{answer.kind}: {answer.words}"
        done = {result.way for result in results}
        results += [Result(way=way, not_run=why) for way in WAYS if way not in done]
    row = Row(library=library, architecture=architecture, results=tuple(results))
    logger.info("%s", row.in_words())
    return row


def main() -> int:
    """Counts, writes the table, and returns 1 if a count is wrong."""
    options = start(__file__, __doc__, None, only="", seconds=120.0, jobs=usable_cores())
    code, began = code_in_words(), time.monotonic()
    asked = [
        (library, architecture)
        for library, source in LIBRARIES.items()
        for architecture in source.architectures()
        if re.search(options.only, architecture)
    ]
    # Once here, so that the processes need not import it each.
    for _ in results_of("transformers", "bert"):
        pass
    gc.freeze()  # so that a process's collections do not copy what it shares with this one
    with ThreadPoolExecutor(options.jobs) as pool:
        rows = list(pool.map(lambda names: row_of(*names, seconds=options.seconds), asked))
    logger.info("%.0f s", time.monotonic() - began)
    page = report(rows, about=__doc__, code=code, only=options.only)
    output = options.output or (None if options.only else RESULTS / "zoo.md")
    if output is None:
        print("\n".join(page))
    else:
        write_page(output, page)
    return int(any(row.verdict == "wrong" for row in rows))


if __name__ == "__main__":
    sys.exit(main())
