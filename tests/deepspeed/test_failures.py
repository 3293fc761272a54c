"""The profiler itself fails under DeepSpeed: one warning, nothing left behind, and the training it would have been."""

from __future__ import annotations

import pytest

from tests.deepspeed.launching import launch
from tests.deepspeed.places_of_failure import PLACES


@pytest.mark.parametrize("place", PLACES)
def test_a_failure_of_ours_is_one_warning_and_the_training_goes_on_untouched(place: str) -> None:
    returned = launch("scenarios_one_rank", ranks=1).only("failures")
    plain, failed = returned["None"], returned[place]
    assert len(plain["losses"]) == 10
    assert failed["losses"] == plain["losses"]
    assert failed["called"]
    assert len([line for line in failed["logged"] if "broken on purpose" in line]) == 1, failed["logged"]
    assert failed["left"] == []
