"""Hundreds of architectures, each counted beside an oracle of its Python calls: forward, backward and recompute.

``make bench-zoo`` installs transformers and timm beside this project and runs this. Every architecture is a tiny model
of random weights, nothing is downloaded. Each is counted five ways: with eager attention, with torch's fused attention
(sdpa), with activation checkpointing, under autocast, and by ``count_offline``, which must say what the eager count
says. The first four are held to ``zoo_oracle.CallOracle``, which shares no mechanism and no formula with the counter.

It writes ``benchmarks/results/zoo.md``. ``--only llama`` takes the architectures whose name that regular expression
finds, ``--shard 2/4`` the second of four parts, ``--seconds 30`` gives each architecture less time; then the table is
printed, unless there is an ``--output``.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import os
import re
import resource
import select
import shlex
import signal
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from lightning_flops.pytorch import FlopCounts, count_flops, count_offline

from . import zoo_timm, zoo_transformers
from .machine import code_in_words, usable_cores
from .zoo_oracle import CallOracle
from .zoo_table import WAYS, Result, Row, report

logger = logging.getLogger("benchmarks.zoo")

RESULT = Path(__file__).resolve().parent / "results" / "zoo.md"
LIBRARIES: Mapping[str, Any] = {"transformers": zoo_transformers, "timm": zoo_timm}


def results_of(library: str, architecture: str, ways: Sequence[str] = WAYS) -> Iterator[Result]:
    """Each way of counting *architecture*, in this process."""
    source = LIBRARIES[library]
    try:
        model, batch = source.build(architecture, attention="eager")
        first = _held(model, batch)
    except Exception as error:
        yield Result(way="eager", not_run=in_one_line(error))
        return
    if "eager" in ways:
        yield first
    if "autocast" in ways:
        yield _tried("autocast", lambda: _held(model, batch, way="autocast"))
    if "offline" in ways:
        yield _tried("offline", lambda: _offline(model, batch, first))
    if "checkpointing" in ways:
        yield _tried("checkpointing", lambda: _checkpointed(source, model, batch))
    if "sdpa" in ways:
        yield _tried("sdpa", lambda: _held(*source.build(architecture, attention="sdpa"), way="sdpa"))


def _tried(way: str, run: Callable[[], Result]) -> Result:
    try:
        return run()
    except Exception as error:
        return Result(way=way, not_run=in_one_line(error))


def in_one_line(error: Exception) -> str:
    """The error's kind and the beginning of its words."""
    words = " ".join(str(error).split())
    return f"{type(error).__name__}: {words}"[:300]


def step(model: nn.Module, batch: Mapping[str, Any], *, autocast: bool, oracle: CallOracle | None = None) -> None:
    """A forward, and the backward of all that it returns."""
    torch.manual_seed(2)
    model.zero_grad()
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        output = model(**batch)
    roots = [tensor for tensor in zoo_transformers.outputs(output) if tensor.requires_grad]
    with oracle.in_backward() if oracle else nullcontext():
        torch.autograd.backward(roots, [torch.ones_like(root) for root in roots])


def _held(
    model: nn.Module, batch: Mapping[str, Any], *, way: str = "eager", oracle: CallOracle | None = None
) -> Result:
    """The step twice: once the oracle looks, once the counter."""
    autocast = way == "autocast"
    oracle = oracle or CallOracle()
    with oracle:
        step(model, batch, autocast=autocast, oracle=oracle)
    with count_flops(model) as counts:
        step(model, batch, autocast=autocast)
    expected = oracle.expected
    return Result(
        way=way,
        counted=_figures(counts),
        expected=(expected.forward, expected.backward, expected.recompute),
        batch=", ".join(
            f"{name} {list(value.shape)}" for name, value in batch.items() if isinstance(value, torch.Tensor)
        ),
        by_operator={
            name: (flops.forward, flops.backward, flops.recompute) for name, flops in counts.by_operator().items()
        },
        by_call={f"{name} {part}": flops for (name, part), flops in oracle.by_call.items() if flops},
        uncounted=tuple(sorted(counts.uncounted)),
        said_at_least=_said_at_least(counts),
    )


def _figures(counts: FlopCounts) -> tuple[int, int, int]:
    return counts.forward, counts.backward, counts.recompute


def _said_at_least(counts: FlopCounts) -> tuple[str, ...]:
    """The operators because of which the counter calls its figures lower bounds; none if it does not."""
    heavy = sorted(name for name, operator in counts.uncounted.items() if operator.heavy)
    return tuple(heavy or ["no operator by name"]) if counts.is_lower_bound else ()


def _checkpointed(source: Any, model: nn.Module, batch: Mapping[str, Any]) -> Result:
    oracle = CallOracle()

    def not_reentrant(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return checkpoint(function, *args, **{"use_reentrant": False, **kwargs})

    with source.checkpointing(model, oracle.checkpointing(not_reentrant)):
        return _held(model, batch, way="checkpointing", oracle=oracle)


def _offline(model: nn.Module, batch: Mapping[str, Any], eager: Result) -> Result:
    torch.manual_seed(2)
    counts = count_offline(model, dict(batch))
    return Result(
        way="offline",
        counted=_figures(counts),
        expected=eager.counted,
        by_operator={
            name: (flops.forward, flops.backward, flops.recompute) for name, flops in counts.by_operator().items()
        },
        uncounted=tuple(sorted(counts.uncounted)),
        said_at_least=_said_at_least(counts),
    )


class Child:
    """A forked process that counts one architecture, so that a crash or an endless loop is one architecture's."""

    def __init__(self, library: str, architecture: str, *, seconds: float, ways: Sequence[str]) -> None:
        self.library, self.architecture = library, architecture
        self._seconds, self._until = seconds, time.monotonic() + seconds
        self._data = b""
        self.pipe, write = os.pipe()
        self._process = os.fork()
        if self._process == 0:
            os.close(self.pipe)
            _work(library, architecture, write, ways)
        os.close(write)

    def row(self, *, readable: bool) -> Row | None:
        """What it counted, once it has ended or its time is over; None before."""
        why = f"longer than {self._seconds:g} s"
        if readable:
            chunk = os.read(self.pipe, 1 << 16)
            self._data += chunk
            if chunk:
                return None
            why = ""
        elif time.monotonic() < self._until:
            return None
        else:
            os.kill(self._process, signal.SIGKILL)
        _, status = os.waitpid(self._process, 0)
        os.close(self.pipe)
        why = why or (f"the process ended with status {status}" if status else "")
        lines = self._data.decode().splitlines(keepends=True)
        results = [Result(**json.loads(line)) for line in lines if line.endswith("\n")]
        if why:
            done = {result.way for result in results}
            results += [Result(way=way, not_run=why) for way in WAYS if way not in done]
        return Row(library=self.library, architecture=self.architecture, results=tuple(results))


def _work(library: str, architecture: str, write: int, ways: Sequence[str]) -> None:
    """The child's whole life."""
    code = 1
    try:
        silent = os.open(os.devnull, os.O_WRONLY)
        os.dup2(silent, 1)
        os.dup2(silent, 2)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        warnings.simplefilter("ignore")
        for result in results_of(library, architecture, ways):
            os.write(write, (json.dumps(asdict(result)) + "\n").encode())
        code = 0
    finally:
        os._exit(code)


def rows_of(
    asked: Sequence[tuple[str, str]], *, seconds: float, jobs: int, ways: Sequence[str] = WAYS
) -> Iterator[Row]:
    """Each architecture's row, in the order in which they end; *jobs* run at once."""
    waiting, running = list(reversed(asked)), dict[int, Child]()
    while waiting or running:
        while waiting and len(running) < jobs:
            child = Child(*waiting.pop(), seconds=seconds, ways=ways)
            running[child.pipe] = child
        readable = select.select(list(running), [], [], 1.0)[0]
        for pipe, child in list(running.items()):
            row = child.row(readable=pipe in readable)
            if row is not None:
                del running[pipe]
                yield row


def main(arguments: Sequence[str] | None = None) -> int:
    """Counts, writes the table, and returns 1 if a count is wrong."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.zoo", description=__doc__)
    parser.add_argument("--only", default="", metavar="REGEX")
    parser.add_argument("--library", choices=sorted(LIBRARIES))
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS, help="fewer of them for a quick look")
    parser.add_argument("--shard", default="1/1", metavar="N/M")
    parser.add_argument("--seconds", type=float, default=120, help="for one architecture")
    parser.add_argument("--jobs", type=int, default=usable_cores())
    parser.add_argument("--output", type=Path)
    parser.add_argument("--records", type=Path, help="all figures, one architecture a line")
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    torch.set_num_threads(1)
    code = code_in_words()
    part, parts = (int(number) for number in options.shard.split("/"))
    asked = [
        (library, architecture)
        for library in LIBRARIES
        if options.library in (None, library)
        for architecture in LIBRARIES[library].architectures()
        if re.search(options.only, architecture)
    ][part - 1 :: parts]
    whole = not options.only and not options.library and parts == 1 and tuple(options.ways) == WAYS
    output = options.output or (RESULT if whole else None)
    # Once here, so that the children need not import it each.
    for _ in results_of("transformers", "bert"):
        pass
    gc.freeze()  # so that a child's collections do not copy what it shares with this process
    started = time.monotonic()
    rows: list[Row] = []
    with options.records.open("w") if options.records else nullcontext() as records:
        for row in rows_of(asked, seconds=options.seconds, jobs=options.jobs, ways=options.ways):
            rows.append(row)
            logger.info("%4.0f s  %s", time.monotonic() - started, row.in_words())
            if records is not None:
                records.write(json.dumps(asdict(row)) + "\n")
                records.flush()
    order = {names: place for place, names in enumerate(asked)}
    rows.sort(key=lambda row: order[row.library, row.architecture])
    words = shlex.join(sys.argv[1:] if arguments is None else arguments)
    text = report(rows, code=code, asked="" if whole else words)
    if output is None:
        print(text)
    else:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(text)
        logger.info("wrote %s", output)
    return int(any(row.verdict == "wrong" for row in rows))


if __name__ == "__main__":
    sys.exit(main())
