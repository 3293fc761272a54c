"""One part of the models that are counted by hand."""

from __future__ import annotations

from tests.deepspeed.scenarios_models import of_part

SCENARIOS = of_part(0)
