"""Twenty architectures of the zoo, counted as ``make bench-zoo`` counts hundreds."""

from __future__ import annotations

import warnings

import pytest

from benchmarks.zoo import results_of
from benchmarks.zoo_table import WAYS, Result, Row

TWENTY = {
    "bert": 5, "bloom": 4, "clip": 5, "convnext": 3, "deberta-v2": 4, "detr": 3, "fnet": 4, "funnel": 3, "gpt2": 5,
    "llama": 5, "mamba": 4, "mixtral": 5, "qwen3_next": 5, "resnet": 3, "segformer": 5, "swin": 5, "t5": 5, "vit": 5,
    "wav2vec2": 5, "whisper": 5,
}  # fmt: skip
"""By architecture, in how many ways it can be counted: not each has sdpa or checkpointing."""
IN_SHORT = ("gpt2", "resnet", "t5", "vit")
"""A decoder, a network of convolutions, a pair of encoder and decoder, and an encoder; the others are ``slow``."""


@pytest.mark.parametrize(
    "architecture", [pytest.param(one, marks=() if one in IN_SHORT else pytest.mark.slow) for one in sorted(TWENTY)]
)
def test_an_architecture_costs_what_its_python_calls_say(architecture: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the library's own, of which each architecture has others
        found = row(*results_of("transformers", architecture))
    verdicts = {way: found.verdict_of(way) for way in WAYS}
    allowed = ("explained", "not run") if architecture == "fnet" else ("not run",)
    assert {way: said for way, said in verdicts.items() if said[0] != "exact" and said[0] not in allowed} == {}
    ran = [way for way, (verdict, _) in verdicts.items() if verdict != "not run"]
    assert len(ran) == TWENTY[architecture], verdicts
    counted = {one.way: one.counted or (0, 0, 0) for one in found.results}
    assert min(counted["eager"][:2]) > 0
    if "checkpointing" in ran:
        assert counted["checkpointing"][:2] == counted["eager"][:2] and counted["checkpointing"][2] > 0


def row(*results: Result) -> Row:
    return Row(library="transformers", architecture="net", results=results)


def test_figures_that_agree_are_exact_and_others_wrong_by_name() -> None:
    one = row(
        Result(way="eager", counted=(1, 2, 0), expected=(1, 2, 0)),
        Result(way="autocast", counted=(1000, 5, 0), expected=(1000, 4, 3)),
    )
    assert one.verdict_of("eager") == ("exact", "")
    assert one.verdict_of("autocast") == ("wrong", "backward 5, expected 4; recompute 0, expected 3")
    assert one.verdict == "wrong"
