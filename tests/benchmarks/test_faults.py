"""The campaigns see the faults that are planted for them, and none where there is none."""

from __future__ import annotations

import logging
import random
import resource
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook

from benchmarks import fault_inputs, fault_lines
from benchmarks.fault_lines import Lines
from benchmarks.faults import Fault, Tally, render
from benchmarks.runner import Answer, answer_of
from lightning_flops.config import ProfilerConfig
from lightning_flops.errors import ConfigError
from lightning_flops.run import run
from lightning_flops.run.run import safe
from lightning_flops.units import percent

# ---- an exception at a line of ours, and boundaries that take it well or badly


class Half(float):
    """Stands for an object with hooks; what it is called with is a function of ours."""

    run = None


def training(failed: Callable[[nn.Module], object]) -> Callable[[bool], nn.Module]:
    """Training with one hook of ours; *failed* is what the boundary does with an exception."""

    def train(profiled: bool) -> nn.Module:
        model = nn.Linear(1, 1)
        nn.init.ones_(model.weight)
        nn.init.ones_(model.bias)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(run, "failed", lambda run, error: failed(model))
            if profiled:
                safe(percent)(Half(0.5))
        return model

    return train


def disturbs(model: nn.Module) -> None:
    with torch.no_grad():
        next(model.parameters()).add_(1)


def raises(model: nn.Module) -> None:
    raise RuntimeError


def speaks(model: nn.Module) -> None:
    for _ in range(2):
        logging.getLogger("lightning_flops").warning("again")


@pytest.mark.parametrize(
    ("failed", "kinds"),
    [
        (lambda model: None, []),
        (lambda model: register_module_forward_hook(lambda *args: None), ["something stayed behind"]),
        (raises, ["it was raised into the training"]),
        (disturbs, ["the training differs"]),
        (speaks, ["more than one warning"]),
        (lambda model: time.sleep(60), ["the training hung or died"]),
    ],
)
def test_a_planted_fault_is_seen_and_no_other(
    failed: Callable[[nn.Module], object], kinds: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = Lines("planted", training(failed))
    assert lines.lines > 0
    monkeypatch.setattr(fault_lines, "_TRIAL_SEC", 5.0)
    assert [fault.kind for fault in lines.trial(random.Random(1))] == kinds


def test_a_line_outside_of_hooks_is_not_drawn() -> None:
    def train(profiled: bool) -> nn.Module:
        percent(0.5)
        return nn.Linear(1, 1)

    assert Lines("planted", train).lines == 0


# ---- hostile input


@pytest.mark.parametrize(
    ("text", "unsafe"),
    [
        ("Linear\n  weights: 3\n", ""),
        ("größer × 2", ""),
        ("a\x1b[2J", "control characters shown as they are: U+001B"),
        ("\u202egnp.exe", "control characters shown as they are: U+202E"),
        ("total\n  FORGED: 1 TFLOPS\n", "a name forges a line"),
        ("name\\nFORGED: 1 TFLOPS\n", ""),
    ],
)
def test_what_a_terminal_obeys_is_seen(text: str, unsafe: str) -> None:
    assert fault_inputs.unsafe_in(text) == unsafe


@pytest.mark.parametrize(
    ("raised", "kinds"),
    [
        (None, []),
        (ConfigError("flops_profiler.trace must be true or false, got 3"), []),
        (
            ConfigError("no"),
            ["the message names nothing that was given", "the message does not say rule and value"],
        ),
        (
            # Ours escape what they quote, so that one who does not is somebody else's.
            type("ConfigError", (ConfigError,), {"__str__": lambda self: "flops_profiler.\x07 is not a setting"})(),
            ["the message shows control characters of the value"],
        ),
        (TypeError("trace"), ["another error than ConfigError"]),
    ],
)
def test_settings_are_taken_or_refused_in_the_right_words(raised: Exception | None, kinds: list[str]) -> None:
    def take() -> Any:
        if raised is not None:
            raised.__traceback__ = None
            raise raised
        return ProfilerConfig()

    found = fault_inputs._judge_settings("way", take, ["trace"])
    assert [fault.kind for fault in found] == kinds


GOOD = {"code": 2, "shown": "", "said": "lightning-flops: a.json: no trace\n", "grown": 10}


@pytest.mark.parametrize(
    ("more", "kinds"),
    [
        ({}, []),
        ({"said": "lightning-flops: no trace\n"}, ["the error does not name the file"]),
        ({"said": "a.json\nTraceback\n"}, ["a traceback", "the error is more than one line"]),
        ({"grown": 101}, ["more memory than the bound"]),
        ({"code": 7}, ["an exit code that stands for nothing"]),
        ({"code": 0, "shown": "\x9b31m"}, ["on the terminal: control characters shown as they are"]),
    ],
)
def test_a_command_ends_well_or_its_fault_is_named(more: dict[str, Any], kinds: list[str]) -> None:
    answer = Answer(value={**GOOD, **more})
    found = fault_inputs._judge_command(answer, name="a.json", bound=100, is_json=False)
    assert [kind for kind, _ in found] == kinds


def test_memory_of_a_process_of_its_own_is_seen() -> None:
    def greedy() -> Any:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        held = b"x" * (300 << 20)
        grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) << 10
        return {"raised": "", "words": str(len(held)), "grown": grown}

    answer = answer_of(greedy, timeout_sec=60.0)
    (fault,) = fault_inputs._judge_reading(answer, "", bound=200 << 20, errors=(ValueError,))
    assert fault.kind == "more memory than the bound"


@pytest.mark.parametrize("trial", [fault_inputs.try_settings, fault_inputs.try_record, fault_inputs.try_profile])
def test_a_trial_can_be_tried_again(trial: Callable[..., list[Fault]]) -> None:
    both = [trial(random.Random("1/6")) for _ in range(2)]
    assert both[0] == both[1]


# ---- figures


def test_the_page_has_a_row_for_each_campaign_and_one_for_each_kind_and_place_of_a_fault() -> None:
    numbers = iter(range(4))

    def trial(draw: random.Random) -> list[Fault]:
        return [Fault("left", "a.py: f", "a|b\n")] if next(numbers) % 2 else []

    tally = Tally(campaign="planted", promise="nothing", seed=5)
    tally.run(trial, iter(range(4)))
    page = render([tally])
    assert "| planted | nothing | 4 | 2 |" in page
    assert "| left | a.py: f | 2 | `planted --seed 5 --only 1` | a\\|b\\n |" in page
