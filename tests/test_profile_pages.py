"""Pages that are made of the package's tables and dataclasses, and the schema that every file of numbers keeps to."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import griffe
import jsonschema
import pytest
from mkdocs.config import load_config

from docs import write_advice, write_profile_pages, write_settings_tables
from lightning_flops import compare_profiles, render_text
from lightning_flops.analysis.rates import build_throughput
from lightning_flops.errors import ComparisonError
from lightning_flops.records import BatchTotals, Extremes
from lightning_flops.schema.profile import Profile, ThroughputSummary
from tests.analysis.in_memory import known
from tests.analysis.test_compare import assert_adds_up
from tests.golden_files import golden
from tests.pages import REPOSITORY
from tests.report.test_ranks_text import CASES as JOBS
from tests.report.test_text import CASES, profile_of

GOLDEN = Path(__file__).parent / "golden"
SCHEMA = json.loads(write_profile_pages.SCHEMA.read_text(encoding="utf-8"))

KINDS = {"json/mlp.json": "Profile", "json/throughput.json": "ThroughputSummary", "trace/cpu.json": "TracesReport"} | {
    "json/comparison.json": "Comparison"
}
"""What each golden file of numbers is; a new one has its line here."""

MLP = json.loads((GOLDEN / "json" / "mlp.json").read_text(encoding="utf-8"))


def validate(data: Any, record: str) -> None:
    """Hold *data* to one of these records."""
    jsonschema.Draft202012Validator({**SCHEMA, "oneOf": [{"$ref": f"#/$defs/{record}"}]}).validate(data)


@pytest.mark.parametrize(
    ("path", "written"),
    [
        (write_profile_pages.PAGE, lambda text: write_profile_pages.page()),
        (write_advice.PAGE, lambda text: write_advice.page()),
        (write_settings_tables.PAGE, write_settings_tables.page),
    ],
)
def test_a_page_is_what_the_package_says(path: Path, written: Callable[[str], str]) -> None:
    text = path.read_text(encoding="utf-8")
    assert text == written(text), "make docs-profile writes it anew"


def test_the_schema_is_what_the_dataclasses_say() -> None:
    assert json.dumps(SCHEMA) == json.dumps(write_profile_pages.json_schema()), "make docs-profile writes it anew"


def test_every_field_says_what_it_means() -> None:
    silent = [
        f"{record.__name__}.{field}"
        for record in write_profile_pages.all_records()
        for field, meaning in write_profile_pages.field_meanings(record).items()
        if not meaning
    ]
    assert silent == []


COMMENTED = '''
class Step:
    own: dict[str, int] = {}  #: Its ``a: b``.
    #: Above,
    #: in two lines.
    above: tuple[
        int, ...
    ] = ()
    reason: int = 1  # a reason is no meaning
    below: int = 2
    """As a string."""
'''


def test_the_site_reads_the_comments_at_fields_as_these_pages_do() -> None:
    config = load_config(str(REPOSITORY / "mkdocs.yml"))
    (path,) = config.plugins["mkdocstrings"].config["handlers"]["python"]["options"]["extensions"]
    extensions = griffe.load_extensions(REPOSITORY / path)
    with griffe.temporary_visited_package("steps", {"__init__.py": COMMENTED}, extensions=extensions) as module:
        texts = {name: field.docstring and field.docstring.value for name, field in module["Step"].members.items()}
    assert texts == {
        "own": "Its ``a: b``.", "above": "Above,\nin two lines.", "reason": None, "below": "As a string.",
    }  # fmt: skip


def test_every_golden_file_of_numbers_keeps_to_it() -> None:
    paths = {str(path.relative_to(GOLDEN)): path for path in GOLDEN.rglob("*.json")}
    assert paths.keys() == KINDS.keys()
    for name, path in paths.items():
        data = json.loads(path.read_text(encoding="utf-8"))
        validate(data, KINDS[name])
        jsonschema.Draft202012Validator(SCHEMA).validate(data)  # which knows by itself what a file is


PROFILES = {
    **{name: profile_of(name) for name in CASES},
    **{f"ranks_{name}": profile for name, profile in JOBS.items() if name != "thousands"},
}


@pytest.mark.parametrize("name", PROFILES)
def test_every_kind_of_profile_keeps_to_it(name: str) -> None:
    validate(json.loads(PROFILES[name].to_json()), "Profile")


@pytest.mark.parametrize("name", PROFILES)
def test_comparisons_of_every_kind_of_profile_keep_to_it_and_add_up(name: str) -> None:
    a, names = PROFILES[name], list(PROFILES)
    for step in (0, 1, 5):  # with itself and two others
        b = PROFILES[names[(names.index(name) + step) % len(names)]]
        if a.timing is None or b.timing is None or a.context.loop != b.context.loop:
            with pytest.raises(ComparisonError):
                compare_profiles(a, b)
            continue
        comparison = compare_profiles(a, b)
        assert_adds_up(comparison)
        assert all(line.isprintable() for line in render_text(comparison).splitlines())
        validate(json.loads(comparison.to_json()), "Comparison")


def test_throughput_keeps_to_it() -> None:
    seconds = Extremes(number=2, total=3.0, least=1.0, greatest=2.0)
    totals = BatchTotals(batches=2, seconds=seconds, reader_sec=None, samples=None, samples_per_sec=None)
    summary = known(build_throughput(totals, dp_size=1))
    validate(json.loads(summary.to_json()), "ThroughputSummary")
    waits = Extremes(number=2, total=1.0, least=0.25, greatest=0.75)
    rates = Extremes(number=2, total=9.0, least=3.0, greatest=6.0)  # six samples in each
    whole = known(build_throughput(replace(totals, reader_sec=waits, samples=12, samples_per_sec=rates), dp_size=1))
    # 1 s of 3 in the loader; 12 samples in 3 s.
    assert whole.reader_ratio == 1 / 3 and whole.ips is not None and whole.ips.average == 4.0
    golden("json/throughput.json", whole.to_json())
    assert ThroughputSummary.from_json(whole.to_json()) == whole


def test_summary_is_the_headline_by_name() -> None:
    profile = Profile.from_json(json.dumps(MLP))
    # What the file says under its own names, in this order.
    expected = {
        "global_step_sec": MLP["timing"]["global_step"]["mean_sec"],
        "samples_per_sec": MLP["rates"]["samples_per_sec"],
        "tokens_per_sec": MLP["rates"]["tokens_per_sec"],
        "mfu": MLP["rates"]["mfu"],
        "hfu": MLP["rates"]["hfu"],
        "forward_flops": MLP["flops"]["forward"],
        "backward_flops": MLP["flops"]["backward"],
        "hardware_flops": sum(MLP["flops"][name] for name in ("forward", "backward", "recompute", "optimizer")),
        "data_wait_ratio": MLP["rates"]["data_wait_ratio"],
        "cpu_time_sec": None,
        "params": MLP["params"],
        "advice": {one["rule"]: one["saves"] for one in MLP["advice"]},
    }
    assert json.dumps(profile.summary()) == json.dumps(expected) and expected["mfu"] is not None
