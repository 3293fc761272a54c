"""A profile as JSON: what is written, what is read again, and what a file that cannot be read is told."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from lightning_flops.config import ProfilerConfig
from lightning_flops.errors import LightningFlopsError, ProfileFormatError
from lightning_flops.records import ModuleRecord
from lightning_flops.report.text import render_text
from lightning_flops.schema.profile import Profile
from tests.golden_files import golden
from tests.report import windows
from tests.report.windows import build_profile

MLP = windows.mlp_window()
CONFIG = ProfilerConfig()


@pytest.mark.parametrize("name", windows.WINDOWS)
def test_json_reads_back_to_an_equal_profile(name: str) -> None:
    profile = build_profile(windows.WINDOWS[name](), config=CONFIG)
    assert Profile.from_json(profile.to_json()) == profile


def test_json_is_the_file_people_read() -> None:
    golden(
        "json/mlp.json", build_profile(windows.mlp_window(), config=ProfilerConfig(peak_flops_per_sec=700e9)).to_json()
    )


def _changed(**changes: object) -> str:
    data = json.loads(build_profile(MLP, config=CONFIG).to_json())
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
        ("", "the profile is not valid JSON: line 1 column 1: Expecting value"),
        ('{"schema_version": 1,', "the profile is not valid JSON: line 1 column 22"),
        ("[1, 2]", r"the profile must be a JSON object, got \[1, 2\]"),
        ("{}", "schema_version must be 3 to 5, the versions this package reads, got None"),
        (_changed(schema_version=2), "schema_version must be 3 to 5, the versions this package reads, got 2"),
        (_changed(schema_version=True), "schema_version must be 3 to 5, the versions this package reads, got True"),
        (_changed(flops__forward=...), "flops.forward is missing"),
        (_changed(rates__mfu=...), "rates.mfu is missing"),
        (_changed(flops__forwards=3), "flops.forwards is not a field of StepFlops"),
        (_changed(surprise=3), "surprise is not a field of Profile"),
        (_changed(flops__forward=3.0), "flops.forward must be an integer, got 3.0"),
        (_changed(flops__forward=True), "flops.forward must be an integer, got True"),
        (_changed(flops__forward=None), "flops.forward must be an integer, got None"),
        (_changed(rates__mfu="high"), "rates.mfu must be a number, got 'high'"),
        (_changed(rates__mfu=False), "rates.mfu must be a number, got False"),
        (_changed(lower_bound=0), "lower_bound must be true or false, got 0"),
        (_changed(context__framework=1), "context.framework must be a text, got 1"),
        (_changed(settings__causal_attention="some"), "settings.causal_attention must be 'full' or 'half', got 'some'"),
        (_changed(modules={}), "modules must be a list, got {}"),
        (_changed(modules=[4]), r"modules\[0\] must be an object, got 4"),
        (_changed(uncounted=[]), r"uncounted must be an object, got \[\]"),
        (_changed(unavailable__mfu=1), "unavailable.mfu must be a text, got 1"),
        (_changed(micro_steps=1).replace('"micro_steps": 1', '"micro_steps": NaN'), "it holds NaN"),
        (_changed(micro_steps=1).replace('"micro_steps": 1', '"micro_steps": 1e999'), "micro_steps must be a finite"),
        (_changed(notes=[]).replace('"notes": []', '"notes": [], "notes": []'), "the profile gives 'notes' twice"),
        ("[" * 100_000, "the profile is nested deeper than 100 levels"),
        (_changed(notes=[[[[[0]]]]]).replace("0", "[" * 96 + "]" * 96), "the profile is nested deeper than 100 levels"),
        ('{"schema_version": ' + "9" * 5000 + "}", "the profile holds a whole number of 5,000 digits"),
        (_changed(**{"\x1b[2J" * 50: 3}), r"^'(\\x1b\[2J)+\\x… is not a field of Profile$"),
        ("{" + ",".join(f'"{i}":0' for i in range(200_000)) + ',"7":0}', "the profile gives '7' twice"),
    ],
)
def test_profile_that_cannot_be_read_says_what_is_wrong(text: str, message: str) -> None:
    with pytest.raises(ProfileFormatError, match=message) as caught:
        Profile.from_json(text)
    assert isinstance(caught.value, LightningFlopsError)


def _of_version_3() -> str:
    """The profile of MLP as version 3 wrote it: no loop in its context, no seconds of single steps."""
    data = json.loads(build_profile(MLP, config=CONFIG).to_json())
    data["schema_version"] = 3
    del data["context"]["loop"]
    for part in (*data["timing"]["parts"], data["timing"]["global_step"]):
        del part["steps_sec"]
    return json.dumps(data)


def test_a_profile_of_version_3_reads_on() -> None:
    today = build_profile(MLP, config=CONFIG)
    read = Profile.from_json(_of_version_3())
    assert today.timing is not None and read.timing is not None
    assert read.context.loop == "training" and read.timing.global_step.steps_sec == ()
    parts = tuple(replace(one, steps_sec=()) for one in today.timing.parts)
    timing = replace(today.timing, parts=parts, global_step=replace(today.timing.global_step, steps_sec=()))
    assert read == replace(today, timing=timing)
    assert Profile.from_json(read.to_json()) == read


def test_a_file_that_version_3_wrote_reads_on() -> None:
    text = (Path(__file__).parent.parent / "data" / "profiles" / "version_3.json").read_text(encoding="utf-8")
    written = json.loads(text)
    read = Profile.from_json(text)
    assert written["schema_version"] == 3 and read.schema_version == 5
    assert (read.context.loop, read.budget, read.memory_bytes_per_sec, read.parameter_bytes) == (
        "training",
        None,
        None,
        {},
    )
    assert read.timing is not None and read.timing.global_step_sec == written["timing"]["global_step_sec"]
    assert Profile.from_json(read.to_json()) == read
    assert str(render_text(read)) and repr(read)


def test_of_a_profile_of_version_3_only_what_came_later_may_be_missing() -> None:
    data = json.loads(_of_version_3())
    del data["flops"]["forward"]
    with pytest.raises(ProfileFormatError, match=r"flops\.forward is missing"):
        Profile.from_json(json.dumps(data))
    data = json.loads(_of_version_3())
    data["context"]["loops"] = "training"
    with pytest.raises(ProfileFormatError, match=r"context\.loops is not a field of RunContext"):
        Profile.from_json(json.dumps(data))


def test_number_that_json_cannot_hold_is_named_and_not_written() -> None:
    profile = build_profile(MLP, config=CONFIG)
    with pytest.raises(ProfileFormatError, match=r"rates\.mfu is nan, which JSON cannot hold"):
        replace(profile, rates=replace(profile.rates, mfu=math.nan)).to_json()


def test_text_that_no_file_can_hold_is_escaped_in_json() -> None:
    modules = (ModuleRecord(name="", type_name="Net", extra_repr="\ud800 é"),)
    profile = build_profile(replace(MLP, modules=modules), config=CONFIG)
    text = profile.to_json()
    assert "é" in text
    assert text.encode("utf-8")
    assert Profile.from_json(text) == profile
