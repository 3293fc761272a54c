"""Names, answers and printed layout beside DeepSpeed's own, on the same model, where DeepSpeed is installed."""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Iterable, Sequence
from typing import Any

import pytest

import lightning_flops
from lightning_flops import FlopsProfiler, get_model_profile
from tests.ranks import DEEPSPEED, DEEPSPEED_ON_CPU, run_ranks
from tests.standalone.questions import METHODS, aggregated, parameters_of, report, strings

LABEL = re.compile(r"^([a-zA-Z][^:{]*):  +(\S.*)$")


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What DeepSpeed's profiler prints and answers."""
    if importlib.util.find_spec("deepspeed") is None:
        pytest.skip("DeepSpeed is not installed")
    (printed,) = run_ranks(
        ["-m", "tests.standalone.questions"],
        ranks=1,
        folder=tmp_path_factory.mktemp("deepspeed"),
        timeout_sec=240,
        environment=DEEPSPEED_ON_CPU,
        imports=DEEPSPEED,
    )
    return json.loads(next(line for line in reversed(printed.splitlines()) if line.startswith("{")))


def labels(text: str) -> list[tuple[str, int]]:
    """Each label of the summary and the column of its value."""
    return [(match[1], match.start(2)) for match in map(LABEL.match, text.splitlines()) if match]


def values(text: str) -> dict[str, str]:
    return {match[1]: match[2].rstrip() for match in map(LABEL.match, text.splitlines()) if match}


def are_among(theirs: Sequence[object], ours: Iterable[object]) -> bool:
    """Whether *ours* has all of *theirs* in their order, and perhaps others between them."""
    left = iter(ours)
    return all(one in left for one in theirs)


def test_the_arguments_and_their_defaults_are_deepspeeds(theirs: Any) -> None:
    # Empty tuples and None stand for the mutable defaults [] and {}.
    same = {"[]": "()", "{}": "None"}

    def translated(parameters: list[list[str]]) -> list[list[str]]:
        return [[name, same.get(default, default)] for name, default in parameters]

    *same_as_theirs, added = parameters_of(get_model_profile)
    assert same_as_theirs == translated(theirs["get_model_profile"])
    assert added == ["timed_runs", "1"]
    for name in METHODS:
        assert parameters_of(getattr(FlopsProfiler, name)) == translated(theirs["methods"][name]), name


def test_the_helpers_write_every_number_as_deepspeeds_do(theirs: Any) -> None:
    assert strings(lightning_flops) == theirs["strings"]


def test_labels_and_their_columns_are_deepspeeds(theirs: Any) -> None:
    ours = report(lightning_flops, top_modules=2)
    assert len(labels(theirs["report"])) == 7
    assert are_among(labels(theirs["report"]), labels(ours))
    assert ours.splitlines()[0] == theirs["report"].splitlines()[0]
    assert ours.splitlines()[2] == theirs["report"].splitlines()[2] == "Profile Summary at step 1:"
    tree, same = (re.findall(r"^ *(.*\()$", text, re.MULTILINE) for text in (ours, theirs["report"]))
    assert same == tree


def test_the_classes_of_modules_that_weigh_most_at_each_depth_are_deepspeeds(theirs: Any) -> None:
    def heaviest(text: str) -> list[str]:
        kept = ("depth ", "    params ", "    MACs ")
        return [line.partition(" and ")[0] for line in text.splitlines() if line.startswith(kept)]

    for printed, same in (
        (report(lightning_flops, top_modules=2), theirs["report"]),
        (aggregated(lightning_flops), theirs["aggregated"]),
    ):
        assert heaviest(printed)[: len(heaviest(same))] == heaviest(same)  # ours have the deepest level, too
        assert [line for line in heaviest(printed) if "depth" in line] == ["depth 0:", "depth 1:", "depth 2:"]


def test_in_an_engine_the_lines_are_deepspeeds_in_its_order(theirs: Any) -> None:
    assert are_among(labels(theirs["in_engine"]), labels(theirs["ours_in_engine"]))
    ours, deepspeeds = values(theirs["ours_in_engine"]), values(theirs["in_engine"])
    for label in (
        "world size",
        "data parallel size",
        "model parallel size",
        "batch size per GPU",
        "params per GPU",
        "params of model = params per GPU * mp_size",
        "fwd MACs per GPU",
    ):
        assert ours[label] == deepspeeds[label]
    assert "bwd FLOPS per GPU = 3 * fwd flops per GPU / bwd latency" in ours
