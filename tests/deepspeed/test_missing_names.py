"""A DeepSpeed that has lost one of the private names that an engine's adapter uses."""

from __future__ import annotations

from pathlib import Path

import pytest

import lightning_flops
from lightning_flops.adapters.deepspeed_context import LOST
from tests.deepspeed.launching import launch
from tests.private_names_in import private_names_in

OF_ENGINES = ("_config",)
"""Those that an engine without stages is asked for, and whose loss a report tells."""


def test_every_private_name_of_deepspeeds_that_the_door_asks_for_is_listed() -> None:
    package = Path(lightning_flops.__file__).parent
    files = (package / "deepspeed.py", *package.glob("adapters/deepspeed_*.py"))
    assert private_names_in(files, own=frozenset({"_profiles"})) - {"_lightning_flops_adapter"} == {*LOST}


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
