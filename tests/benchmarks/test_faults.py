"""The campaigns see the faults that are planted for them, and none where there is none."""

from __future__ import annotations

import contextlib
import random
import resource
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch.nn.modules.module import register_module_forward_hook

from benchmarks import fault_inputs, fault_lines
from benchmarks.fault_campaign import Answer, Fault, Tally, answer_of, run_campaign
from benchmarks.fault_lines import Lines, Site, Tripwire, page_with
from benchmarks.faults import render
from lightning_flops.config import ProfilerConfig
from lightning_flops.errors import ConfigError
from lightning_flops.units import percent

# ---- a failure at a line of ours, and trainings that take it well or badly


def careful(weights: list[str]) -> None:
    try:
        percent(0.5)
    except Exception:
        return


def leaky(weights: list[str]) -> None:
    try:
        percent(0.5)
    except Exception:
        register_module_forward_hook(lambda *args: None)


def swallowing(weights: list[str]) -> None:
    try:
        percent(0.5)
    except BaseException:
        return


def unguarded(weights: list[str]) -> None:
    percent(0.5)


def disturbing(weights: list[str]) -> None:
    try:
        percent(0.5)
    except Exception:
        weights.append("another")


def hanging(weights: list[str]) -> None:
    try:
        percent(0.5)
    except Exception:
        time.sleep(60)


def faults_of(use: Callable[[list[str]], None], error: str, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The kinds of fault that are found where *use* calls a function of ours within a training, and that fails."""

    def train(profiled: bool, wire: Tripwire, seen: dict[str, Any]) -> None:
        seen["weights"] = ["0x1p0"]
        with wire:
            if profiled:
                use(seen["weights"])

    monkeypatch.setitem(fault_lines.RUNS, "planted", train)
    monkeypatch.setattr(fault_lines, "TRIAL_SEC", 20.0)
    lines = Lines("planted")
    monkeypatch.setattr(fault_lines, "TRIAL_SEC", 2.0)
    file, _, line = next(iter(lines.sites)).rpartition(":")
    assert file == "units.py"
    site = Site(file=file, line=int(line), hit=1)
    (in_a_fork,) = lines.try_all([(site, error)])
    alone = lines.faults_at(site, error)
    assert not in_a_fork.alone and in_a_fork.faults == alone
    return [fault.kind for fault in alone]


@pytest.mark.parametrize(
    ("use", "error", "kinds"),
    [
        (careful, "RuntimeError", []),
        (careful, "KeyboardInterrupt", []),
        (leaky, "RuntimeError", ["something stayed behind"]),
        (swallowing, "RuntimeError", []),
        (swallowing, "KeyboardInterrupt", ["the user's interrupt was lost"]),
        (unguarded, "RuntimeError", ["it was raised into the training"]),
        (unguarded, "KeyboardInterrupt", []),
        (disturbing, "RuntimeError", ["the training differs"]),
        (hanging, "RuntimeError", ["the training hung or died"]),
    ],
)
def test_a_planted_fault_is_seen_and_no_other(
    use: Callable[[list[str]], None], error: str, kinds: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert faults_of(use, error, monkeypatch) == [f"{error}: {kind}" for kind in kinds]


def test_a_tripwire_raises_at_its_line_the_time_it_was_told_and_once() -> None:
    with Tripwire() as counted:
        for _ in range(3):
            percent(0.5)
    (file, line), hits = next(iter(counted.hits.items()))
    assert hits == 3
    site = Site(file=file.rpartition("lightning_flops/")[2], line=line, hit=2)
    assert Site.parse(str(site)) == site
    assert site.function == "units.py: percent"
    done = 0
    with Tripwire(site) as wire:
        for _ in range(3):
            try:
                percent(0.5)
                done += 1
            except RuntimeError:
                assert done == 1
    assert wire.fired
    assert done == 2


def _numbers_in_files(weights: list[str]) -> None:
    """Training whose every step reads and writes a file: a fork writes to the same one."""
    with open("steps.txt", "w+") as file:
        for step in range(3):
            with contextlib.suppress(RuntimeError):
                percent(0.5)
            file.write(f"{step}")
            file.flush()
            Path(f"step{step}").mkdir()
        file.seek(0)
        weights.append(file.read())


def test_trials_in_one_training_know_nothing_of_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    def train(profiled: bool, wire: Tripwire, seen: dict[str, Any]) -> None:
        seen["weights"] = []
        with wire:
            _numbers_in_files(seen["weights"]) if profiled else seen["weights"].append("012")

    monkeypatch.setitem(fault_lines.RUNS, "planted", train)
    lines = Lines("planted")
    file, _, line = next(iter(lines.sites)).rpartition(":")
    sites = [
        (Site(file=file, line=int(line), hit=hit), error)
        for hit in (1, 3, 4)
        for error in ("RuntimeError", "KeyboardInterrupt")
    ]
    trials = list(lines.try_all(sites))
    # The fourth time does not come: those are tried alone, and do not come there either.
    assert [(str(trial.site).rpartition(":")[2], trial.alone) for trial in trials] == [
        ("1", False), ("1", False), ("3", False), ("3", False), ("4", True), ("4", True),
    ]  # fmt: skip
    assert not any(trial.faults for trial in trials)


def test_a_site_where_there_is_another_thread_is_tried_in_a_training_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def train(profiled: bool, wire: Tripwire, seen: dict[str, Any]) -> None:
        seen["weights"], over = [], threading.Event()
        other = threading.Thread(target=over.wait)
        with wire:
            other.start()
            unguarded([]) if profiled else None
            over.set()
            other.join()

    monkeypatch.setitem(fault_lines.RUNS, "planted", train)
    monkeypatch.setattr(fault_lines, "TRIAL_SEC", 20.0)
    lines = Lines("planted")
    trials = list(lines.sweep(random.Random(1), None))
    assert all(trial.alone for trial in trials)
    assert [fault.kind for trial in trials for fault in trial.faults] == [
        "RuntimeError: it was raised into the training" for _ in lines.sites
    ]


def test_a_page_of_sweeps_keeps_the_rows_of_other_trainings() -> None:
    page = page_with(
        "| a | everything | 3 |", page_with("| b | everything | 2 |", page_with("| a | everything | 1 |", ""))
    )
    assert page.endswith("|\n| a | everything | 3 |\n| b | everything | 2 |\n")


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

    found = fault_inputs._judge_settings("door", take, ["trace"], "")
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
    (fault,) = fault_inputs._judge_reading(answer, "", "", bound=200 << 20, error=ValueError)
    assert fault.kind == "more memory than the bound"


@pytest.mark.parametrize("trial", [fault_inputs.try_settings, fault_inputs.try_record, fault_inputs.try_profile])
def test_a_trial_can_be_tried_again(trial: Callable[..., list[Fault]]) -> None:
    both = [trial(random.Random("1/6"), "again") for _ in range(2)]
    assert both[0] == both[1]


# ---- figures


def test_a_process_that_dies_or_hangs_has_an_answer() -> None:
    assert answer_of(lambda: [1, "a"], timeout_sec=20.0).value == [1, "a"]
    assert answer_of(lambda: time.sleep(60), timeout_sec=0.5).failed == "no answer in 0.5 s"
    assert answer_of(lambda: 1 / 0, timeout_sec=20.0).failed == "ZeroDivisionError: division by zero"


def test_the_page_has_a_row_for_each_campaign_and_one_for_each_kind_and_place_of_a_fault() -> None:
    def trial(draw: random.Random, again: str) -> list[Fault]:
        number = int(again.rpartition(" ")[2])
        return [Fault(kind="left", where="a.py: f", again=again, words="a|b\n")] if number % 2 else []

    tally = Tally(campaign="planted", promise="nothing", seed=5)
    for number in range(4):
        run_campaign(tally, trial, seconds=0.0, again="planted --seed {seed} --only {number}", only=number)
    page = render([tally], ran="today")
    assert "| planted | nothing | 4 | 2 |\n" in page
    assert "| left | a.py: f | 2 | `planted --seed 5 --only 1` | a\\|b\\n |\n" in page
