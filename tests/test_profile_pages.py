"""docs/profile.md and docs/profile.schema.json: what the dataclasses say, and what every file of numbers keeps to."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from docs import write_profile_pages
from lightning_flops.analysis.throughput import build_throughput
from lightning_flops.config import ProfilerConfig
from lightning_flops.records import BatchTotals, Extremes
from lightning_flops.schema.profile import Profile
from tests.report import windows
from tests.report.windows import build_profile

GOLDEN = Path(__file__).parent / "golden"
SCHEMA = json.loads(write_profile_pages.SCHEMA.read_text(encoding="utf-8"))

MLP = json.loads((GOLDEN / "json" / "mlp.json").read_text(encoding="utf-8"))


def validate(data: Any, record: str) -> None:
    """Hold *data* to one of the three records."""
    jsonschema.Draft202012Validator({**SCHEMA, "oneOf": [{"$ref": f"#/$defs/{record}"}]}).validate(data)


def test_both_pages_are_what_the_dataclasses_say() -> None:
    assert json.dumps(SCHEMA) == json.dumps(write_profile_pages.json_schema()), "make docs-profile writes it anew"
    page = write_profile_pages.PAGE.read_text(encoding="utf-8")
    assert page == write_profile_pages.page(), "make docs-profile writes it anew"


def test_every_field_says_what_it_means() -> None:
    silent = [
        f"{record.__name__}.{field}"
        for record in write_profile_pages.all_records()
        for field, meaning in write_profile_pages.field_meanings(record).items()
        if not meaning
    ]
    assert silent == []


def test_the_schema_is_json_schema() -> None:
    jsonschema.Draft202012Validator.check_schema(SCHEMA)


def test_every_golden_file_of_numbers_keeps_to_it() -> None:
    kinds = {"json": "Profile", "trace": "TracesReport"}
    paths = [path for path in sorted(GOLDEN.rglob("*.json")) if path.parent.name in kinds]
    assert len(paths) >= 2
    for path in paths:
        validate(json.loads(path.read_text(encoding="utf-8")), kinds[path.parent.name])


@pytest.mark.parametrize("name", ["transformer", "untimed", "lower_bound", "parallel", "stage", "variable", "unknown"])
def test_every_kind_of_profile_keeps_to_it(name: str) -> None:
    profile = build_profile(getattr(windows, f"{name}_window")(), config=ProfilerConfig())
    validate(json.loads(profile.to_json()), "Profile")


def test_throughput_keeps_to_it() -> None:
    seconds = Extremes(number=2, total=3.0, least=1.0, greatest=2.0)
    totals = BatchTotals(batches=2, seconds=seconds, reader_sec=None, samples=None, samples_per_sec=None)
    summary = build_throughput(totals, dp_size=1)
    assert summary is not None
    validate(json.loads(summary.to_json()), "ThroughputSummary")


def test_a_profile_is_told_from_what_is_none() -> None:
    jsonschema.Draft202012Validator(SCHEMA).validate(MLP)
    validate(MLP, "Profile")
    for broken in (
        {name: value for name, value in MLP.items() if name != "flops"},
        {**MLP, "more": 1},
        {**MLP, "flops": {**MLP["flops"], "forward": "1"}},
        {**MLP, "context": {name: value for name, value in MLP["context"].items() if name != "rank"}},
        {**MLP, "schema_version": 1},
    ):
        with pytest.raises(jsonschema.ValidationError):
            validate(broken, "Profile")


def test_summary_is_the_headline_by_name() -> None:
    profile = Profile.from_json(json.dumps(MLP))
    assert profile.timing is not None
    summary = profile.summary()
    # What the file says under its own names.
    assert summary == {
        "global_step_sec": MLP["timing"]["global_step_sec"],
        "samples_per_sec": MLP["rates"]["samples_per_sec"],
        "tokens_per_sec": MLP["rates"]["tokens_per_sec"],
        "mfu": MLP["rates"]["mfu"],
        "hfu": MLP["rates"]["hfu"],
        "data_wait_ratio": MLP["rates"]["data_wait_ratio"],
        "forward_flops": MLP["flops"]["forward"],
        "backward_flops": MLP["flops"]["backward"],
        "hardware_flops": MLP["flops"]["hardware"],
        "params": MLP["params"],
        "advice": {one["rule"]: one["stake"] for one in MLP["advice"]},
    }
    assert summary["mfu"] is not None
    json.dumps(summary)


def test_summary_of_a_run_that_was_not_timed_has_no_rates() -> None:
    profile = build_profile(windows.untimed_window(), config=ProfilerConfig())
    assert profile.summary() == {
        **dict.fromkeys(("global_step_sec", "samples_per_sec", "tokens_per_sec", "mfu", "hfu", "data_wait_ratio")),
        "forward_flops": profile.flops.forward,
        "backward_flops": profile.flops.backward,
        "hardware_flops": profile.flops.hardware,
        "params": profile.params,
        "advice": {one.rule: one.stake for one in profile.advice},
    }
    renamed = replace(profile, params=7)
    assert renamed.summary()["params"] == 7
