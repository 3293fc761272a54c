"""Names, answers and printed layout beside DeepSpeed's own, on the same model, where DeepSpeed is installed."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path
from typing import Any

import pytest

import lightning_flops
from lightning_flops import FlopsProfiler, get_model_profile
from tests.ranks import DEEPSPEED, DEEPSPEED_ON_CPU, run_ranks
from tests.standalone.questions import METHODS, aggregated, parameters_of, report, strings

TITLE = re.compile(r"^-+ [\w ]+ -+$")
LABEL = re.compile(r"^([a-zA-Z][^:{]*):  +(\S.*)$")
TIMES = re.compile(r"[\d.e+-]+ [mu]?s = [\d.e+-]+% latency, [\d.e+-]+ [TGMKmu]?FLOPS")
"""What a clock says of a module: no two runs agree on it."""


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What DeepSpeed's profiler prints and answers."""
    if importlib.util.find_spec("deepspeed") is None:
        pytest.skip("DeepSpeed is not installed")
    (printed,) = run_ranks(
        [str(Path(__file__).parent / "deepspeed_reports.py")],
        ranks=1,
        folder=tmp_path_factory.mktemp("deepspeed"),
        timeout_sec=240,
        environment=DEEPSPEED_ON_CPU,
        imports=DEEPSPEED,
    )
    return json.loads(next(line for line in reversed(printed.splitlines()) if line.startswith("{")))


def titles(text: str) -> list[tuple[str, int]]:
    """Each ruled title and its width; the product's own name left out."""
    return [(line.strip("- ").replace("DeepSpeed ", ""), len(line)) for line in text.splitlines() if TITLE.match(line)]


def labels(text: str) -> list[tuple[str, int]]:
    """Each label of the summary and the column of its value."""
    return [(match[1], match.start(2)) for match in map(LABEL.match, text.splitlines()) if match]


def values(text: str) -> dict[str, str]:
    return {match[1]: match[2].rstrip() for match in map(LABEL.match, text.splitlines()) if match}


def tree(text: str) -> list[str]:
    """The lines of the detailed tree, times left out."""
    lines = text.splitlines()
    start, end = lines.index("Net("), lines.index(")") + 1
    return [TIMES.sub("TIMES", line) for line in lines[start:end]]


def depths(text: str) -> list[str]:
    """The lines of the aggregated profile, times left out."""
    lines = text.splitlines()
    start = next(number for number, line in enumerate(lines) if line.startswith("Top "))
    return [
        line.split("{")[0] if "latency -" in line else line
        for line in lines[start:]
        if line.startswith(("Top ", "depth ", "    params ", "    MACs ", "    fwd latency "))
    ]


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


def test_titles_labels_and_columns_are_deepspeeds(theirs: Any) -> None:
    ours = report(lightning_flops, top_modules=2)
    assert len(titles(ours)) == 3
    assert titles(ours) == titles(theirs["report"])
    assert len(labels(ours)) == 7
    assert labels(ours) == labels(theirs["report"])
    assert ours.splitlines()[-1] == theirs["report"].splitlines()[-1]
    assert ours.splitlines()[:1] == theirs["report"].splitlines()[:1]
    assert ours.splitlines()[2:4] == theirs["report"].splitlines()[2:4]  # the step, and what stands for what


def test_the_tree_is_deepspeeds_to_the_last_character_but_for_the_times(theirs: Any) -> None:
    ours = tree(report(lightning_flops, top_modules=2))
    assert ours == tree(theirs["report"])
    assert sum("TIMES" in line for line in ours) == 8
    # 8 samples through 30 × 50 weights, of 30 × 50 + 50 × 70 + 2 × 70 × 70.
    assert "    (0): Linear(1.55 K = 10.34% Params, 12 KMACs = 10.14% MACs, TIMES, in_features=30" in "\n".join(ours)


def test_the_aggregated_profile_is_deepspeeds_and_has_the_deepest_level_too(theirs: Any) -> None:
    ours = depths(report(lightning_flops, top_modules=2))
    assert ours[: len(depths(theirs["report"]))] == depths(theirs["report"])
    assert [line for line in ours if line.startswith("depth")] == ["depth 0:", "depth 1:", "depth 2:"]
    assert [line for line in depths(theirs["report"]) if line.startswith("depth")] == ["depth 0:", "depth 1:"]


def test_a_depth_asked_for_is_shown(theirs: Any) -> None:
    ours = depths(aggregated(lightning_flops))
    assert ours[: len(depths(theirs["aggregated"]))] == depths(theirs["aggregated"])
    assert ours[-4] == "depth 2:"
    assert depths(theirs["aggregated"])[-4] == "depth 1:"


def found_first(text: str, words: str) -> str | None:
    """The label of the line in which a search for *words*, a colon and a value ends; None if it finds nothing."""
    match = re.search(rf"{re.escape(words)}:\s+\S+", text)
    if match is None:
        return None
    start = text.rfind("\n", 0, match.start()) + 1
    line = text[start:].partition("\n")[0]
    return label[1] if (label := LABEL.match(line)) else f"no label: {line}"


def test_a_search_for_the_end_of_any_label_finds_the_line_that_it_finds_in_deepspeeds_report(theirs: Any) -> None:
    words = [label.split(" ") for label, _ in labels(theirs["in_engine"])]
    searches = {" ".join(parts[start:]) for parts in words for start in range(len(parts))}
    assert "data parallel size" in searches and len(searches) > 20
    for search in searches:
        assert found_first(theirs["ours_in_engine"], search) == found_first(theirs["in_engine"], search), search


def test_in_an_engine_the_lines_are_deepspeeds_in_its_order(theirs: Any) -> None:
    assert labels(theirs["ours_in_engine"]) == labels(theirs["in_engine"])
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
