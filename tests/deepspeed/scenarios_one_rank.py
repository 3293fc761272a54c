"""Everything that one rank alone can show, in one launch."""

from __future__ import annotations

from tests.deepspeed import scenarios_doors, scenarios_steps, scenarios_zero

SCENARIOS = {**scenarios_zero.SCENARIOS, **scenarios_steps.SCENARIOS, **scenarios_doors.SCENARIOS}
