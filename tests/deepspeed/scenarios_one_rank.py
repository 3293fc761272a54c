"""Everything that one rank alone can show, in one launch."""

from __future__ import annotations

from tests.deepspeed import scenarios_attach, scenarios_failures, scenarios_steps, scenarios_zero
from tests.deepspeed.scenario import SCENARIOS

__all__ = ["SCENARIOS", "scenarios_attach", "scenarios_failures", "scenarios_steps", "scenarios_zero"]
