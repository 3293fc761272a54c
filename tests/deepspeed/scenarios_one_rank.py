"""Everything that one rank alone can show, in one launch."""

from __future__ import annotations

from tests.deepspeed.scenarios_doors import SCENARIOS as DOORS
from tests.deepspeed.scenarios_failures import SCENARIOS as FAILURES
from tests.deepspeed.scenarios_steps import SCENARIOS as STEPS
from tests.deepspeed.scenarios_zero import SCENARIOS as ZERO

SCENARIOS = {**ZERO, **STEPS, **DOORS, **FAILURES}
