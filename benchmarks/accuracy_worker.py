"""Asks one tool about every network of the corpus, each in a process of its own, and writes what it said as JSON."""

from __future__ import annotations

import argparse
import json
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from importlib import import_module
from pathlib import Path

import torch

from lightning_flops.records import OUTSIDE
from tests.corpus import Example, Network, all_networks

from .counting_tools import TOOLS, CountingTool, forward_calls, our_wrong_figures
from .isolation import Outcome, isolated

CORPUS = "the corpus itself"
"""What is asked about first: each network's truths."""

TIMEOUT_SEC = 120.0

GRADIENT_INSIDE_THE_FORWARD = frozenset({"forces_from_an_energy"})
"""Networks whose model takes a gradient in its own forward: one call of the model is more than the forward bucket."""


def key_of(network: Network) -> str:
    """The network's name in reports."""
    return f"{network.family}.{network.name}"


def selected(word: str) -> list[Network]:
    """The networks whose name contains *word*."""
    return [network for network in all_networks() if word in key_of(network)]


def facts_about(network: Network, *, timeout_sec: float = TIMEOUT_SEC) -> dict[str, object]:
    """What the network's own truths say, and what of it this project gets wrong."""
    expected = network.expected
    calls = isolated(partial(forward_calls, network), timeout_sec=timeout_sec)
    has_forward_truth = calls.flops == 1 and network.name not in GRADIENT_INSIDE_THE_FORWARD
    outside = expected.by_module.get(OUTSIDE)
    forward_truth = expected.forward - (outside.forward if outside is not None else 0)
    return {
        "name": network.name,
        "family": network.family,
        "forward_truth": forward_truth if has_forward_truth else None,
        "step_truth": expected.phases.total,
        "has_backward": expected.phases.total != expected.forward,
        "our_wrong_figures": asdict(isolated(partial(our_wrong_figures, network), timeout_sec=timeout_sec)),
    }


def ask(count: Callable[[Example], int], network: Network, *, timeout_sec: float = TIMEOUT_SEC) -> Outcome:
    """What one count says about one network."""

    def measure() -> int:
        example = network.example()
        try:
            return count(example)
        finally:
            example.teardown()

    return isolated(measure, timeout_sec=timeout_sec)


def answers(tool: CountingTool, networks: Sequence[Network]) -> dict[str, dict[str, object]]:
    """The tool's outcomes on each network: ``forward`` and, where it has one, ``step``."""
    found: dict[str, dict[str, object]] = {}
    for network in networks:
        found[key_of(network)] = {"forward": asdict(ask(tool.forward, network))}
        if tool.step is not None:
            found[key_of(network)]["step"] = asdict(ask(tool.step, network))
    return found


def import_once(tool: CountingTool | None, networks: Sequence[Network]) -> None:
    """Imports what the forked processes need, so that each does not do it again."""
    # Torch imports its compiler when the first dispatch mode is entered.
    import_module("torch._dynamo")
    if tool is not None:
        import_module(tool.module)
    for network in networks:
        if network.family.startswith("transformers"):
            network.example().teardown()


def main() -> int:
    """Measures and writes; returns 0."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tool", required=True)
    parser.add_argument("--networks", default="")
    parser.add_argument("--output", type=Path, required=True)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    networks = selected(options.networks)
    result: object
    if options.tool == CORPUS:
        import_once(None, networks)
        result = [facts_about(network) for network in networks]
    else:
        (tool,) = (tool for tool in TOOLS if tool.name == options.tool)
        import_once(tool, networks)
        result = answers(tool, networks)
    options.output.write_text(json.dumps(result))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
