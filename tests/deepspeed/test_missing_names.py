"""A DeepSpeed that has lost one of the private names that an engine's door uses."""

from __future__ import annotations

import pytest

from lightning_flops.doors.deepspeed_context import LOST
from tests.deepspeed.launching import launch

OF_ENGINES = ("_config", "_is_gradient_accumulation_boundary")
"""Those that an engine without stages is asked for, and whose loss a report tells."""


@pytest.mark.parametrize("name", LOST)
def test_a_private_name_that_is_missing_costs_what_the_report_says(name: str) -> None:
    returned = launch("scenarios_one_rank", ranks=1).only("missing_names")
    plain, without = returned["None"], returned[name]
    assert len(plain["losses"]) == 10
    assert (without["losses"], without["left"]) == (plain["losses"], [])
    notes = [note for note in without["notes"] if note.startswith("This DeepSpeed (")]
    if name not in OF_ENGINES:
        assert notes == []  # a pipeline's, or one that some versions have not
        return
    (note,) = notes
    assert note.endswith(f" keeps no {name}: {LOST[name]}.")
