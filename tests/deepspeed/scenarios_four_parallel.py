"""Four ranks."""

from tests.deepspeed.scenarios_parallel import FOUR as SCENARIOS

__all__ = ["SCENARIOS"]
