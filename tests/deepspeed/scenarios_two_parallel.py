"""Two ranks."""

from tests.deepspeed.scenarios_parallel import TWO as SCENARIOS

__all__ = ["SCENARIOS"]
