"""Where the profiler is made to fail, for the tests and for what they launch."""

from __future__ import annotations

from tests.session.seams import seams, shared_out

DOOR = (
    "lightning_flops.adapters.deepspeed_engine",
    "lightning_flops.adapters.deepspeed_steps",
    "lightning_flops.adapters.loader_taps",
)
PLACES, OTHER_PLACES = shared_out(
    "deepspeed",
    (seam for seam in seams(*DOOR) if seam.startswith(("lightning_flops.adapters.", "lightning_flops.session."))),
)
"""The seams of the door and of the session. What is below the session fails in the tests of Lightning's door."""
