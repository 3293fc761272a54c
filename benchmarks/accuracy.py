"""Counts against counts by hand: the corpus through this project and its peers.

``make bench-accuracy`` installs the peers beside this project and writes this. ``python -m benchmarks.accuracy`` runs
where they are: ``--networks lstm`` takes only the networks with that word in their names; then give an ``--output``
too. A process for each tool, so that no tool sees another's patches of torch, and in it one for each network.

The FLOPs of each network of ``tests/corpus`` were worked out by hand from its layer sizes: a multiply-add is two, and
products, convolutions, recurrent layers and attention (over the full score matrix) count. Each cell is what a tool
reported ÷ that truth. ``1`` is equality of integers; nothing is rounded to it. The networks are small, so that their
counts can be checked by hand. What a tool adds by its own convention (biases, norms, activations) therefore weighs more
here than in a large network: too high is often a convention, too low is work that was not seen.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib import import_module

from tests.corpus import Network, all_networks

from .counting_tools import TOOLS, Count, CountingTool
from .machine import RESULTS, code_in_words
from .page import described, table, write_page
from .runner import Answer, answer_of, run_apart, start

logger = logging.getLogger("benchmarks.accuracy")

TIMEOUT_SEC = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One network: its truths and what every tool made of it."""

    name: str
    forward_truth: int | None  # FLOPs of one call of the model; None where the step is not one call of the model
    #: FLOPs of the whole step: forward, backward, recomputation and optimizer; None where that is the forward alone.
    step_truth: int | None
    forward: dict[str, Answer] = field(default_factory=dict)  # By tool
    step: dict[str, Answer | None] = field(default_factory=dict)


def main() -> None:
    """Measures, writes the report."""
    options = start(__file__, __doc__, RESULTS / "accuracy.md", networks="")
    code, began = code_in_words(), time.monotonic()
    networks = [network for network in all_networks() if options.networks in network.key]
    import_module("torch._dynamo")  # which torch imports when the first dispatch mode is entered
    for network in networks:
        if network.family.startswith("transformers"):
            network.example().teardown()  # imports what the forked processes need, once
    rows = [_row_of(network) for network in networks]
    logger.info("%d networks, %.0f s", len(rows), time.monotonic() - began)
    for tool in TOOLS:
        answer = run_apart(lambda send, tool=tool: _ask_all(tool, networks), timeout_sec=3600)  # type: ignore[misc]
        if answer.kind != "answered":
            raise RuntimeError(f"{tool.name}: {answer.words}\n{answer.traceback}")
        for row, (forward, step) in zip(rows, answer.value, strict=True):
            row.forward[tool.name] = forward
            if row.forward_truth is not None or not tool.step_from_forward:
                row.step[tool.name] = step
        logger.info("%s, %.0f s", tool.name, time.monotonic() - began)
    write_page(options.output, report(rows, code=code))


def _row_of(network: Network) -> Row:
    expected = answer_of(lambda: network.expected, timeout_sec=TIMEOUT_SEC).value  # it is made to be asked
    forward, total = expected.forward, expected.phases.total
    return Row(
        name=network.key,
        forward_truth=forward if network.one_call else None,
        step_truth=total if total != forward else None,
    )


def _ask_all(tool: CountingTool, networks: Sequence[Network]) -> list[tuple[Answer, Answer | None]]:
    """The tool's answers on each network: on one forward and, where it says something of it, on the step."""

    def ask(count: Count, network: Network) -> Answer:
        return answer_of(lambda: count(network.example()), timeout_sec=TIMEOUT_SEC)

    import_module(tool.module)
    return [(ask(tool.forward, one), None if tool.step is None else ask(tool.step, one)) for one in networks]


# ---- the report


def ratio_text(answer: Answer | None, truth: int | None) -> str:
    """A cell: ``1`` is exact and nothing else is; three digits otherwise, or how the tool failed."""
    if answer is None or truth is None:
        return "–"
    if answer.kind != "answered":
        return answer.kind
    if answer.value == truth:
        return "1"
    return "∞" if truth == 0 else _inexact_text(answer.value / truth)


def _inexact_text(ratio: float) -> str:
    """A ratio that is not exactly one, with as many digits as it takes to show that."""
    texts = (f"{ratio:.{digits}g}" for digits in range(3, 17))
    return "0" if ratio == 0 else next((text for text in texts if float(text) != 1.0), "≈1")


def summary_row(tool: str, pairs: Sequence[tuple[Answer | None, int | None]]) -> list[object]:
    """How one tool did beside the truths; pairs without an answer or a truth do not count as asked."""
    asked = [(answer, truth) for answer, truth in pairs if answer is not None and truth is not None]
    counted = [(answer.value, truth) for answer, truth in asked if answer.kind == "answered"]
    ratios = [flops / truth for flops, truth in counted if truth > 0]
    bounds = [("1" if one == 1 else _inexact_text(one)) for one in (min(ratios), max(ratios))] if ratios else "––"
    exact, low = (sum(flops == truth for flops, truth in counted), sum(flops < truth for flops, truth in counted))
    high = len(counted) - exact - low
    return [tool, f"{exact} of {len(asked)}", low, high, len(asked) - len(counted), " … ".join(bounds)]


def failures(rows: Sequence[Row], tool: str) -> list[list[object]]:
    """A tool's distinct reasons for not answering, and how many networks had each."""
    # The first words of a message name its kind; the rest often names the one network's tensors.
    answers = [row.forward[tool] for row in rows]
    reasons = Counter(f"{one.kind}: {one.words}"[:110] for one in answers if one.kind != "answered")
    return [[tool, count, reason] for reason, count in reasons.items()]


def report(rows: Sequence[Row], *, code: str) -> list[str]:
    """The lines of the report."""
    names = [tool.name for tool in TOOLS]
    step_names = [tool.name for tool in TOOLS if tool.step is not None]
    forward_rows = [row for row in rows if row.forward_truth is not None]
    step_rows = [row for row in rows if row.step_truth is not None]
    packages = list(dict.fromkeys(["torch", "transformers", *(tool.package for tool in TOOLS)]))
    columns = ["tool", "exact on", "too low on", "too high on", "raised on", "ratios from … to"]
    return [
        *described(__doc__, *packages, code=code),
        f"""## One forward

{len(forward_rows)} of {len(rows)} networks. The others have no such truth: their forward is more than one call of the
model (accumulation, a loss outside of it), or the model takes a gradient in its own forward.
""",
        *table(columns, [summary_row(n, [(r.forward.get(n), r.forward_truth) for r in forward_rows]) for n in names]),
        f"""
## The whole step: forward, backward, recomputation, optimizer

{len(step_rows)} networks whose step does more than a forward, for the tools that say something about it. DeepSpeed and
calflops derive the backward from the forward, so they are asked only where the step has one.
""",
        *table(columns, [summary_row(n, [(r.step.get(n), r.step_truth) for r in step_rows]) for n in step_names]),
        f"""
## How each tool was asked

On the network's own inputs, in its own mode and grad mode, unless the tool changes them. Inputs that a tool does not
take as they are (keywords, arguments that are no tensors) pass through a module that hands them on. Each answer came
from a process of its own, ended after {TIMEOUT_SEC:g} s.
""",
        *table(["tool", "one forward", "the whole step"], [[t.name, t.how, t.step_how] for t in TOOLS]),
        "\n## One forward, network by network\n",
        *ratio_table(forward_rows, names, step=False),
        "\n## The whole step, network by network\n",
        *ratio_table(step_rows, step_names, step=True),
        "\n## What was said instead of a count of one forward\n",
        *table(["tool", ">networks", "said"], [line for name in names for line in failures(forward_rows, name)]),
    ]


def ratio_table(rows: Sequence[Row], tools: Sequence[str], *, step: bool) -> list[str]:
    """One line per network: its truth, and each tool's ratio to it."""
    lines: list[list[object]] = []
    for row in rows:
        truth, answers = (row.step_truth, row.step) if step else (row.forward_truth, row.forward)
        lines.append([row.name, f"{truth:,}", *(ratio_text(answers.get(tool), truth) for tool in tools)])
    return table(["network", ">truth", *(f">{tool}" for tool in tools)], lines)


if __name__ == "__main__":
    main()
