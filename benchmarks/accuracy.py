"""The corpus through this project and its peers: how far each tool's count is from the count by hand.

``make bench-accuracy`` installs the peers beside this project and runs this; ``python -m benchmarks.accuracy`` runs it
where they are installed. It writes ``benchmarks/results/accuracy.md``. ``--networks lstm`` takes only the networks with
that word in their names, ``--tools`` only some tools; then give an ``--output`` too.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

from lightning_flops import __version__

from . import accuracy_table as table
from .accuracy_worker import CORPUS, GRADIENT_INSIDE_THE_FORWARD, TIMEOUT_SEC
from .counting_tools import TOOLS, CountingTool
from .isolation import Outcome
from .machine import ROOT, code_in_words, machine_in_words, one_thread_environment, versions

logger = logging.getLogger("benchmarks.accuracy")

RESULT = Path(__file__).resolve().parent / "results" / "accuracy.md"


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures, writes the report, and returns 0."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.accuracy", description=__doc__)
    parser.add_argument("--networks", default="", metavar="WORD")
    parser.add_argument("--tools", nargs="*", metavar="TOOL", help=", ".join(tool.name for tool in TOOLS))
    parser.add_argument("--output", type=Path, default=RESULT)
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(message)s")

    code = code_in_words()
    tools = [tool for tool in TOOLS if options.tools is None or tool.name in options.tools]
    rows, our_wrong = measure(tools, word=options.networks)
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(report(rows, tools, our_wrong, code=code))
    logger.info("wrote %s", options.output)
    return 0


def measure(tools: Sequence[CountingTool], *, word: str) -> tuple[list[table.NetworkRow], dict[str, Outcome]]:
    """Every network's row, and by network how many figures this project gets wrong."""
    started = time.monotonic()
    rows: list[table.NetworkRow] = []
    our_wrong: dict[str, Outcome] = {}
    for fact in asked(CORPUS, word=word):
        our_wrong[f"{fact['family']}.{fact['name']}"] = Outcome(**fact.pop("our_wrong_figures"))
        rows.append(table.NetworkRow(**fact))
    logger.info("%d networks, %.0f s", len(rows), time.monotonic() - started)
    for tool in tools:
        answers: Mapping[str, Mapping[str, Mapping[str, Any]]] = asked(tool.name, word=word)
        rows = [with_answers(row, tool, answers[f"{row.family}.{row.name}"]) for row in rows]
        logger.info("%s, %.0f s", tool.name, time.monotonic() - started)
    return rows, our_wrong


def with_answers(
    row: table.NetworkRow, tool: CountingTool, answer: Mapping[str, Mapping[str, Any]]
) -> table.NetworkRow:
    """The row with one tool's outcomes, each where the network has a truth for it."""
    forward, step = dict(row.forward), dict(row.step)
    if row.forward_truth is not None:
        forward[tool.name] = Outcome(**answer["forward"])
    if "step" in answer and row.has_backward and (row.forward_truth is not None or not tool.step_from_forward):
        step[tool.name] = Outcome(**answer["step"])
    return replace(row, forward=forward, step=step)


def asked(tool: str, *, word: str) -> Any:
    """What the worker for *tool* wrote: a process for each tool, so that no tool sees another's patches of torch."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "answers.json"
        subprocess.run(
            [
                *(sys.executable, "-m", "benchmarks.accuracy_worker"),
                *("--tool", tool, "--networks", word, "--output", str(output)),
            ],
            cwd=ROOT,
            env={**os.environ, **one_thread_environment()},
            check=True,
        )
        return json.loads(output.read_text())


def report(
    rows: Sequence[table.NetworkRow],
    tools: Sequence[CountingTool],
    our_wrong: Mapping[str, Outcome],
    *,
    code: str,
) -> str:
    """The whole report as markdown."""
    names = [tool.name for tool in tools]
    step_tools = [tool for tool in tools if tool.step is not None]
    step_names = [tool.name for tool in step_tools]
    forward_rows = [row for row in rows if row.forward_truth is not None]
    step_rows = [row for row in rows if row.has_backward]
    packages = list(dict.fromkeys(["torch", "transformers", *(tool.package for tool in tools)]))
    installed = {**versions(packages), "lightning-flops": __version__}
    all_right = sum(outcome.flops == 0 for outcome in our_wrong.values())
    without_forward = len(rows) - len(forward_rows)
    lines = [
        "# Counts against counts by hand",
        "",
        f"{len(rows)} networks of `tests/corpus`, each with its FLOPs worked out by hand from its layer sizes: a "
        "multiply-add is two, and products, convolutions, recurrent layers and attention (over the full score matrix) "
        "count. Each cell is what a tool reported ÷ that truth. `1` is equality of integers; nothing is rounded to it.",
        "",
        "The networks are small, so that their counts can be checked by hand. What a tool adds by its own convention "
        "(biases, norms, activations) therefore weighs more here than in a large network: "
        "too high is often a convention, too low is work that was not seen.",
        "",
        f"{date.today().isoformat()}, {code}. {machine_in_words()}; every tool on one thread. "
        "Again: `make bench-accuracy`.",
        "",
        ", ".join(f"{package} {version}" for package, version in installed.items()) + ".",
        "",
        "## One forward",
        "",
        f"{len(forward_rows)} networks. The other {without_forward} have no such truth: their step is not one call of "
        "the model (functional transforms, accumulation), or the model takes a gradient in its own forward "
        f"({', '.join(sorted(GRADIENT_INSIDE_THE_FORWARD))}).",
        "",
        *table.summary_table(
            [
                table.summarize(name, [(row.forward.get(name), row.forward_truth) for row in forward_rows])
                for name in names
            ]
        ),
        "",
        "## The whole step: forward, backward, recomputation, optimizer",
        "",
        f"{len(step_rows)} networks whose step does more than a forward, for the tools that say something about it. "
        "DeepSpeed and calflops derive the backward from the forward, so they are asked only where the step has one.",
        "",
        *table.summary_table(
            [table.summarize(name, [(row.step.get(name), row.step_truth) for row in step_rows]) for name in step_names]
        ),
        "",
    ]
    if "lightning_flops" in names:
        lines += [
            "lightning_flops bucket by bucket (forward, backward, recompute, optimizer, skipped by causal attention) "
            f"and module by module: every figure exact on {all_right} of {len(our_wrong)} networks.",
            "",
            *(
                f"- {name}: {outcome.kind}, {outcome.flops} figures differ {outcome.message}".rstrip()
                for name, outcome in our_wrong.items()
                if outcome.flops != 0
            ),
            "",
        ]
    lines += [
        "## How each tool was asked",
        "",
        "On the network's own inputs, in its own mode and grad mode, unless the tool changes them. Inputs that a tool "
        "does not take as they are (keywords, arguments that are no tensors) pass through a module that hands them on. "
        f"Each answer came from a process of its own, ended after {TIMEOUT_SEC:g} s.",
        "",
        "| tool | one forward | the whole step |",
        "|---|---|---|",
        *(f"| {tool.name} | {tool.how} | {tool.step_how or '–'} |" for tool in tools),
        "",
        "## One forward, network by network",
        "",
        *table.ratio_table(forward_rows, names, step=False),
        "",
        "## The whole step, network by network",
        "",
        *table.ratio_table(step_rows, step_names, step=True),
        "",
        "## What was said instead of a count of one forward",
        "",
        *table.failures_table(forward_rows, names),
        "",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    raise SystemExit(main())
