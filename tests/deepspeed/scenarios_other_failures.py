"""The profiler fails where it is made to fail in ``make test-all`` alone."""

from __future__ import annotations

from functools import partial

from tests.deepspeed.places_of_failure import OTHER_PLACES
from tests.deepspeed.scenarios_failures import failures

SCENARIOS = {"failures": partial(failures, OTHER_PLACES)}
