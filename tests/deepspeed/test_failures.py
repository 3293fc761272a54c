"""The profiler itself fails under DeepSpeed: one warning, nothing left behind, and the training it would have been."""

from __future__ import annotations

import pytest

from tests.deepspeed.launching import launch
from tests.deepspeed.places_of_failure import OTHER_PLACES, PLACES


@pytest.mark.parametrize(
    ("place", "scenarios"),
    [
        *((place, "scenarios_one_rank") for place in PLACES),
        *(pytest.param(place, "scenarios_other_failures", marks=pytest.mark.slow) for place in OTHER_PLACES),
    ],
)
def test_a_failure_of_ours_is_one_warning_and_the_training_goes_on_untouched(place: str, scenarios: str) -> None:
    returned = launch(scenarios, ranks=1).only("failures")
    plain, failed = returned["None"], returned[place]
    assert len(plain["losses"]) == 10
    assert failed["losses"] == plain["losses"]
    warnings = [line for line in failed["logged"] if "broken on purpose" in line]
    assert len(warnings) == int(failed["called"]), failed["logged"]
    assert failed["left_at_the_end"] == []
    out = any("taken itself out" in words or "is not profiled" in words for words in failed["logged_in_training"])
    assert not out or failed["left"] == []
