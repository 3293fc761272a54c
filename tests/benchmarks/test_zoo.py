"""Twenty architectures of the zoo, counted as ``make bench-zoo`` counts hundreds."""

from __future__ import annotations

import warnings

import pytest

from benchmarks.zoo import results_of
from benchmarks.zoo_table import WAYS, Result, Row

WAYS_OF = {
    3: "convnext detr funnel resnet",
    4: "bloom deberta-v2 fnet mamba",
    5: "bert clip gpt2 llama mixtral qwen3_next segformer swin t5 vit wav2vec2 whisper",
}
"""In how many ways each can be counted: not each has sdpa or checkpointing."""
TWENTY = {name: number for number, names in WAYS_OF.items() for name in names.split()}
IN_SHORT = ("gpt2", "resnet", "t5", "vit")
"""A decoder, a network of convolutions, a pair of encoder and decoder, and an encoder; the others are ``slow``."""


@pytest.mark.parametrize(
    "architecture", [pytest.param(one, marks=() if one in IN_SHORT else pytest.mark.slow) for one in sorted(TWENTY)]
)
def test_an_architecture_costs_what_its_python_calls_say(architecture: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the library's own, of which each architecture has others
        results = tuple(results_of("transformers", architecture))
    row = Row(library="transformers", architecture=architecture, results=results)
    verdicts = {way: row.verdict_of(way) for way in WAYS}
    allowed = ("explained", "not run") if architecture == "fnet" else ("not run",)
    assert {way: said for way, said in verdicts.items() if said[0] != "exact" and said[0] not in allowed} == {}
    ran = [way for way, (verdict, _) in verdicts.items() if verdict != "not run"]
    assert len(ran) == TWENTY[architecture], verdicts
    counted = {result.way: result.counted for result in results if result.counted is not None}
    forward, backward, _ = counted["eager"]
    assert min(forward, backward) > 0
    if "checkpointing" in ran:
        assert counted["checkpointing"][:2] == (forward, backward)
        assert counted["checkpointing"][2] > 0


def test_figures_that_agree_are_exact_and_others_wrong_by_name() -> None:
    right = Result(way="eager", counted=(1, 2, 0), expected=(1, 2, 0))
    wrong = Result(way="autocast", counted=(1000, 5, 0), expected=(1000, 4, 3))
    one = Row(library="transformers", architecture="net", results=(right, wrong))
    assert one.verdict_of("eager") == ("exact", "")
    assert one.verdict_of("autocast") == ("wrong", "backward 5, expected 4; recompute 0, expected 3")
    assert one.verdict == "wrong"
