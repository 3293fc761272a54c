from __future__ import annotations

from dataclasses import replace

from lightning_flops.report.law_text import step_law_lines
from lightning_flops.report.throughput_text import render_throughput
from lightning_flops.schema.law import LawSum, LawTerm, LawVariable, LengthRow, StepLaw
from lightning_flops.schema.throughput import Spread, ThroughputSummary
from tests.golden_files import golden

OF_TEN_STEPS = ThroughputSummary(
    schema_version=2,
    batches=9,
    reader_ratio=None,
    reader_cost_sec=None,
    batch_cost_sec=Spread(average=0.1, maximum=0.4, minimum=0.05),
    ips=None,
    ips_unit="batches/s",
    model_flops=1_000,
    hardware_flops=1_000,
    steps_counted=1,
    steps_predicted=9,
)


def test_the_summary_is_a_table_of_costs_and_rates() -> None:
    summary = ThroughputSummary(
        schema_version=1,
        batches=1200,
        reader_ratio=0.53514,
        reader_cost_sec=Spread(average=0.01367, maximum=0.01407, minimum=0.0131),
        batch_cost_sec=Spread(average=0.02555, maximum=0.02781, minimum=0.0222),
        ips=Spread(average=39.13907, maximum=45.03588, minimum=35.9583),
        ips_unit="samples/s",
    )
    golden("text/throughput.txt", render_throughput(summary))


def test_what_was_not_seen_is_not_available() -> None:
    summary = ThroughputSummary(
        schema_version=1,
        batches=1,
        reader_ratio=None,
        reader_cost_sec=None,
        batch_cost_sec=Spread(average=0.0, maximum=0.0, minimum=0.0),
        ips=None,
        ips_unit="batches/s",
    )
    golden("text/throughput_unknown.txt", render_throughput(summary))


def test_a_run_of_many_lengths_shows_its_law_its_lengths_and_its_padding() -> None:
    """Of 1,000 steps 30 were counted, and 20 are not known; tokens are those of all of them."""
    length = LawVariable(name="S", least=16, greatest=480, apart=1, between=True)
    samples = LawVariable(name="B", least=5, greatest=8, apart=3, between=False)

    def rows(each: int, pairs: int) -> tuple[LawTerm, ...]:
        return (
            LawTerm(numerator=each, denominator=1, powers={"B": 1, "S": 1}),
            LawTerm(numerator=pairs, denominator=1, powers={"B": 1, "S": 2}),
        )

    summary = ThroughputSummary(
        schema_version=2,
        batches=970,
        reader_ratio=0.1,
        reader_cost_sec=Spread(average=0.01, maximum=0.02, minimum=0.005),
        batch_cost_sec=Spread(average=0.1, maximum=0.4, minimum=0.05),
        ips=Spread(average=80.0, maximum=160.0, minimum=20.0),
        ips_unit="samples/s",
        steps_counted=30,
        steps_predicted=950,
        steps_checked=12,
        steps_unknown=20,
        tokens=2_000_000,
        real_tokens=1_300_000,
        trained_tokens=900_000,
        padding_ratio=0.35,
        tokens_per_sec=12_345.0,
        useful_mfu=0.2,
        law=StepLaw(
            variables=(samples, length),
            sums=(
                LawSum(bucket="forward", dtype="bfloat16", terms=rows(170_000_000, 36_864)),
                LawSum(bucket="backward", dtype="bfloat16", terms=rows(340_000_000, 73_728)),
            ),
            counted=28,
            checks=24,
            lengths=(
                LengthRow(shortest=16, longest=127, steps=600, model_flops=2.5e11, step_sec=0.05, mfu=0.25),
                LengthRow(shortest=128, longest=480, steps=350, model_flops=1.25e12, step_sec=0.2, mfu=None),
            ),
        ),
    )
    golden("text/throughput_lengths.txt", render_throughput(summary))


def test_a_run_whose_steps_are_all_known_says_what_they_spent() -> None:
    summary = ThroughputSummary(
        schema_version=2,
        batches=99,
        reader_ratio=None,
        reader_cost_sec=None,
        batch_cost_sec=Spread(average=0.1, maximum=0.4, minimum=0.05),
        ips=None,
        ips_unit="batches/s",
        model_flops=123_456_789_000,
        hardware_flops=150_000_000_000,
        mfu=0.4125,
        lower_bound=True,
        steps_counted=1,
        steps_predicted=99,
    )
    golden("text/throughput_known.txt", render_throughput(summary))


def test_a_run_whose_peak_is_not_known_says_that_its_mfu_is_not() -> None:
    why = "no dense peak is known for the device; set peak_flops_per_sec"
    lines = render_throughput(replace(OF_TEN_STEPS, model_flops_per_sec=1_000.0, unavailable={"mfu": why})).splitlines()
    place = lines.index("Model FLOPs: 1,000, hardware FLOPs: 1,000, MFU: n/a")
    assert lines[place + 1] == f"MFU is n/a: {why}."


def test_what_makes_flops_lower_bounds_stands_below_them() -> None:
    notes = ("Step 5 spent more.", "Nothing else is known.")
    lines = render_throughput(replace(OF_TEN_STEPS, mfu=0.5, lower_bound=True, notes=notes)).splitlines()
    place = lines.index(
        "Model FLOPs: 1,000 (lower bound), hardware FLOPs: 1,000 (lower bound), MFU: 50.00% (lower bound)"
    )
    assert lines[place + 1 : place + 3] == list(notes)


def test_what_depends_on_padding_has_a_letter_of_its_own() -> None:
    """Without padding 120·S² - 120·S are skipped of each sample's scores."""
    terms = [
        LawTerm(numerator=sign * 120, denominator=1, powers={"B": 1, "S": power, "F": 1})
        for sign, power in ((-1, 1), (1, 2))
    ]
    law = StepLaw(
        variables=(
            LawVariable(name="B", least=1, greatest=4, apart=1, between=True),
            LawVariable(name="S", least=5, greatest=40, apart=1, between=True),
            LawVariable(name="F", least=0, greatest=1, apart=1, between=False),
        ),
        sums=(LawSum(bucket="causal_skipped", dtype="float32", terms=tuple(terms)),),
        counted=20,
        checks=14,
        lengths=(),
    )
    first, second, *rest = step_law_lines(law, why_none="")
    assert (first, second) == ("FLOPs of a batch by its sizes:", "  causal skipped = B·(-120·S·F + 120·S²·F)")
    assert " ".join(rest) == (
        "F is 1 for a batch without padding, and 0 for one with padding. Used for B from 1 to 4 and S from 5 to 40. It "
        "rests on 20 counted steps, 14 of which the others foretold to the last FLOP."
    )
