"""A profile as JSON: what is written, what is read again, and the message of a file that cannot be read."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from types import MappingProxyType

import numpy as np
import pytest
from torch.torch_version import TorchVersion

from lightning_flops.config import ProfilerConfig
from lightning_flops.errors import LightningFlopsError, ProfileFormatError
from lightning_flops.records import ModuleRecord
from lightning_flops.schema.profile import Profile
from tests.golden_files import golden
from tests.report import windows
from tests.report.windows import build_profile

MLP = windows.mlp_window()
CONFIG = ProfilerConfig()
PROFILE = build_profile(MLP, config=CONFIG)


def test_json_is_the_file_people_read() -> None:
    golden("json/mlp.json", build_profile(MLP, config=ProfilerConfig(peak_flops_per_sec=700e9)).to_json())


def _changed(**changes: object) -> str:
    data = json.loads(PROFILE.to_json())
    for path, value in changes.items():
        *above, last = path.split("__")
        place = data
        for key in above:
            place = place[key]
        if value is ...:
            del place[last]
        else:
            place[last] = value
    return json.dumps(data)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "the profile cannot be read: Input data was truncated"),
        ("{}", "Object missing required field `schema_version`"),
        (_changed(schema_version=18), "has schema version 18, and 17 is read here: it was written by a newer"),
        (_changed(schema_version=2), "has schema version 2, and 17 is read here: it was written by an older"),
        (_changed(flops__skipped=...), r"missing required field `skipped` - at `\$\.flops`"),
        (_changed(flops__forward=3.5), r"Expected `int`, got `float` - at `\$\.flops\.forward`"),
        (_changed(rates__mfu="high"), r"Expected `float \| null`, got `str` - at `\$\.rates\.mfu`"),
        (_changed(settings__causal_attention="some"), r"Invalid enum value 'some' - at `\$\.settings\."),
        (_changed(micro_steps=1).replace('"micro_steps": 1', '"micro_steps": NaN'), r"JSON is malformed: invalid"),
        (_changed(micro_steps=1).replace('"micro_steps": 1', '"micro_steps": 1e999'), r"out of range - at `\$\.micro"),
        ("[" * 100_000, "Expected `object`, got `array`"),
        ('{"schema_version": 17, "notes": ' + "[" * 100_000, "the profile is nested too deep"),
    ],
)
def test_profile_that_cannot_be_read_says_what_is_wrong(text: str, message: str) -> None:
    with pytest.raises(ProfileFormatError, match=message) as caught:
        Profile.from_json(text)
    assert isinstance(caught.value, LightningFlopsError)


def test_a_field_that_is_not_known_is_passed_over() -> None:
    assert Profile.from_json(_changed(surprise=3)) == PROFILE


def test_number_that_json_cannot_hold_is_not_written() -> None:
    with pytest.raises(ProfileFormatError, match="not finite, which JSON cannot hold"):
        replace(PROFILE, rates=replace(PROFILE.rates, mfu=math.nan)).to_json()


def test_values_of_classes_that_are_texts_numbers_or_mappings_are_written() -> None:
    context = replace(PROFILE.context, torch_version=TorchVersion("2.9.0"))
    mapped = replace(PROFILE, context=context, samples=np.float64(100.0), unavailable=MappingProxyType({"mfu": "why"}))
    read = Profile.from_json(mapped.to_json())
    assert (read.context.torch_version, read.samples, read.unavailable) == ("2.9.0", 100.0, {"mfu": "why"})


def test_integers_have_no_limit() -> None:
    large = replace(PROFILE, flops=replace(PROFILE.flops, forward=2**70))
    assert Profile.from_json(large.to_json()) == large


def test_text_that_no_file_can_hold_is_replaced_in_json() -> None:
    modules = (ModuleRecord(name="", type_name="Net", extra_repr="\ud800 é"),)
    text = build_profile(replace(MLP, modules=modules), config=CONFIG).to_json()
    assert Profile.from_json(text).modules[0].extra_repr == "? é"
