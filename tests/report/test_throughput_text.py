from __future__ import annotations

from dataclasses import replace

import pytest

from lightning_flops.report.counts_text import estimate_text
from lightning_flops.report.text import render_text
from lightning_flops.schema.throughput import Spread, ThroughputSummary
from tests.golden_files import golden

OF_TEN_STEPS = ThroughputSummary(
    schema_version=3,
    batches=9,
    reader_ratio=None,
    reader_cost_sec=None,
    batch_cost_sec=Spread(average=0.1, maximum=0.4, minimum=0.05),
    ips=None,
    ips_unit="batches/s",
    model_flops=1_000,
    hardware_flops=1_000,
    steps_counted=10,
    flops_error=0.0,
    checks=3,
)


CASES = {
    "throughput": ThroughputSummary(
        schema_version=3,
        batches=1200,
        reader_ratio=0.53514,
        reader_cost_sec=Spread(average=0.01367, maximum=0.01407, minimum=0.0131),
        batch_cost_sec=Spread(average=0.02555, maximum=0.02781, minimum=0.0222),
        ips=Spread(average=39.13907, maximum=45.03588, minimum=35.9583),
        ips_unit="samples/s",
    ),
    "throughput_unknown": replace(OF_TEN_STEPS, batches=1, model_flops=None, hardware_flops=None),
    # Of 1,000 steps 20 are estimated; tokens are those of all of them.
    "throughput_lengths": replace(
        OF_TEN_STEPS,
        mfu=0.342,
        flops_error=0.01,
        steps_counted=30,
        steps_by_formula=950,
        steps_estimated=20,
        checks=12,
        tokens=2_000_000,
        real_tokens=1_300_000,
        padding_ratio=0.35,
        tokens_per_sec=12_345.0,
        useful_mfu=0.2,
    ),
    "throughput_known": replace(
        OF_TEN_STEPS,
        batches=99,
        model_flops=123_456_789_000,
        hardware_flops=150_000_000_000,
        mfu=0.4125,
        lower_bound=True,
        steps_counted=100,
        checks=12,
        notes=("Step 5 needed more.", "Nothing else is known."),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_the_summary_of_a_run_is_the_file_people_read(name: str) -> None:
    golden(f"text/{name}.txt", render_text(CASES[name]))


def test_shares_carry_their_error() -> None:
    assert estimate_text(0.342, 0.0) == "34.20%"
    assert estimate_text(0.342, 0.01) == "≈ 34.20% ± 0.34%"
    assert estimate_text(0.342, None) == "≈ 34.20% (unchecked)"
    assert estimate_text(None, None) == "n/a"


def test_a_run_whose_peak_is_not_known_says_that_its_mfu_is_not() -> None:
    why = "no dense peak is known for the device; run lightning-flops peak, or set peak_flops_per_sec"
    lines = render_text(replace(OF_TEN_STEPS, unavailable={"mfu": why})).splitlines()
    assert f"{'MFU:':<70}  n/a ({why})" in lines
