"""Hundreds of architectures, each counted beside an oracle of its Python calls: forward, backward and recompute.

``make bench-zoo`` installs transformers and timm beside this project and runs this. Every architecture is a tiny model of
random weights, nothing is downloaded. Each is counted five ways: with eager attention, with torch's fused attention
(sdpa), with activation checkpointing, under autocast, and by ``count_offline``, which must say what the eager count says.
The first four are held to ``zoo_oracle.CallOracle``, which shares no mechanism and no formula with the counter.

It writes ``benchmarks/results/zoo.md``. ``--only llama`` takes the architectures whose name that regular expression
finds, ``--shard 2/4`` the second of four parts, ``--seconds 30`` gives each architecture less time; then the table is
printed, unless there is an ``--output``.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import re
import resource
import select
import signal
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from lightning_flops.pytorch import FlopCounts, count_flops, count_offline

from . import zoo_timm, zoo_transformers
from .zoo_oracle import CallOracle

logger = logging.getLogger("benchmarks.zoo")

RESULT = Path(__file__).resolve().parent / "results" / "zoo.md"
WAYS = ("eager", "sdpa", "checkpointing", "autocast", "offline")
"""How an architecture is counted; the first is there whenever the architecture runs at all."""

LIBRARIES: Mapping[str, Any] = {"transformers": zoo_transformers, "timm": zoo_timm}


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """One way of counting one architecture: three figures each from the counter and the oracle, or why there are none.

    The figures are forward, backward and recompute FLOPs.
    """

    way: str
    counted: tuple[int, int, int] | None = None
    expected: tuple[int, int, int] | None = None
    not_run: str = ""
    batch: str = ""
    """What the model was called with."""
    by_operator: dict[str, tuple[int, int, int]] = field(default_factory=dict)
    by_call: dict[str, int] = field(default_factory=dict)
    uncounted: tuple[str, ...] = ()
    printed: str = ""
    """What torch wrote to stderr during the offline count."""


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
    )


def _figures(counts: FlopCounts) -> tuple[int, int, int]:
    return counts.forward, counts.backward, counts.recompute


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
    )


def in_a_child(library: str, architecture: str, *, seconds: float) -> list[Result]:
    """The same in a forked process, so that a crash or an endless loop is one architecture's."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(read)
        _work(library, architecture, write)
    os.close(write)
    results, ended = _read(read, seconds)
    if not ended:
        os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    os.close(read)
    if not ended or status:
        why = f"longer than {seconds:g} s" if not ended else f"the process ended with status {status}"
        done = {result.way for result in results}
        results += [Result(way=way, not_run=why) for way in WAYS if way not in done]
    return results


def _work(library: str, architecture: str, write: int) -> None:
    """The child's whole life."""
    code = 1
    try:
        silent = os.open(os.devnull, os.O_WRONLY)
        os.dup2(silent, 1)
        os.dup2(silent, 2)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        warnings.simplefilter("ignore")
        for result in results_of(library, architecture):
            os.write(write, (json.dumps(asdict(result)) + "\n").encode())
        code = 0
    finally:
        os._exit(code)


def _read(pipe: int, seconds: float) -> tuple[list[Result], bool]:
    """What came through the pipe, and whether it was closed in time."""
    data, until = b"", time.monotonic() + seconds
    while (left := until - time.monotonic()) > 0:
        if not select.select([pipe], [], [], left)[0]:
            break
        chunk = os.read(pipe, 1 << 16)
        if not chunk:
            return _results(data), True
        data += chunk
    return _results(data), False


def _results(data: bytes) -> list[Result]:
    return [Result(**json.loads(line)) for line in data.decode().splitlines() if line.endswith("}")]


def main(arguments: Sequence[str] | None = None) -> int:
    """Counts, writes the table, and returns how many ways of counting are wrong (at most 1)."""
    from .zoo_table import Row, report

    parser = argparse.ArgumentParser(prog="python -m benchmarks.zoo", description=__doc__)
    parser.add_argument("--only", default="", metavar="REGEX")
    parser.add_argument("--library", choices=sorted(LIBRARIES))
    parser.add_argument("--shard", default="1/1", metavar="N/M")
    parser.add_argument("--seconds", type=float, default=120, help="for one architecture")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--records", type=Path, help="all figures, one architecture a line")
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    torch.set_num_threads(1)
    part, parts = (int(number) for number in options.shard.split("/"))
    asked = [
        (library, architecture)
        for library in LIBRARIES
        if options.library in (None, library)
        for architecture in LIBRARIES[library].architectures()
        if re.search(options.only, architecture)
    ][part - 1 :: parts]
    whole = not options.only and not options.library and parts == 1
    output = options.output or (RESULT if whole else None)
    # Once here, so that the children need not import it each.
    for _ in results_of("transformers", "bert"):
        pass
    started = time.monotonic()
    rows: list[Row] = []
    with options.records.open("w") if options.records else nullcontext() as records:
        for library, architecture in asked:
            results = in_a_child(library, architecture, seconds=options.seconds)
            row = Row(library=library, architecture=architecture, results=tuple(results))
            rows.append(row)
            logger.info("%4.0f s  %s", time.monotonic() - started, row.in_words())
            if records is not None:
                records.write(json.dumps(asdict(row)) + "\n")
                records.flush()
    text = report(rows)
    if output is None:
        print(text)
    else:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(text)
        logger.info("wrote %s", output)
    return int(any(row.verdict == "wrong" for row in rows))


if __name__ == "__main__":
    sys.exit(main())
