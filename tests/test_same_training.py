"""A profiled run is the run without us to the last bit, whatever fails on our side, and nothing of ours is left."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.same_training import KINDS, SEAMED
from tests.seams import WORDS, broken_at, seams

SETTINGS: dict[str, Any] = {"profile_step": 1, "timing_steps": 2}

pytestmark = pytest.mark.usefixtures("prompt_reports")


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], dict[str, Any]]:
    """The run of a kind without the profiler, made once."""

    @functools.cache
    def made(kind: str) -> dict[str, Any]:
        outcome = KINDS[kind].outcome(tmp_path_factory.mktemp("plain"), None)
        assert outcome.pop("profiles") == [] and outcome["left on torch"] == []
        return outcome

    return made


@pytest.mark.parametrize("kind", KINDS)
def test_results_and_random_numbers_are_the_same_bits_and_nothing_is_left(
    kind: str, plain: Callable[[str], dict[str, Any]], tmp_path: Path
) -> None:
    expected = plain(kind)
    outcome = KINDS[kind].outcome(tmp_path, SETTINGS)
    (profile,) = outcome.pop("profiles")
    assert outcome == expected
    assert (profile is None) == (", 1 batches" in kind)
    assert kind not in SEAMED or profile.traced is not None


@pytest.mark.parametrize(
    ("kind", "seam"), [(kind, seam) for kind, (_, adapters) in SEAMED.items() for seam in seams(*adapters)]
)
def test_a_failure_of_ours_is_one_warning_and_the_run_goes_on_untouched(
    kind: str, seam: str, plain: Callable[[str], dict[str, Any]], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    expected = plain(kind)
    with broken_at(seam, *SEAMED[kind].adapters, after=kind == "lightning by hand") as broken:
        outcome = SEAMED[kind].outcome(tmp_path, {**SETTINGS, "trace": kind not in ("loop", "transformers")})
    del outcome["profiles"]
    assert outcome == expected
    warned = [one.getMessage() for one in caplog.records if one.levelno >= logging.WARNING]
    assert sum(WORDS in words for words in warned) == int(broken.called), warned
