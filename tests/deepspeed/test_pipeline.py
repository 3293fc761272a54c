"""Pipelines of stages: each stage's profile is exact and true of the stage, and the stages add up to the model."""

from __future__ import annotations

from typing import Any

import pytest

from lightning_flops.report.text import render_text
from lightning_flops.schema.profile import Profile
from lightning_flops.schema.throughput import Spread, ThroughputSummary
from tests.deepspeed.launching import INSTALLED, launch, profile_in

pytestmark = pytest.mark.skipif(not INSTALLED, reason="needs deepspeed")

# As scenarios_pipeline says it, which imports DeepSpeed: three micro-steps of four samples.
ROWS, IN, HIDDEN, OUT = 3 * 4, 8, 16, 4
FIRST, SECOND, THIRD, FOURTH = (2 * ROWS * size for size in (IN * HIDDEN, HIDDEN**2, HIDDEN**2, HIDDEN * OUT))


def on_two(scenario: str) -> list[dict[str, Any]]:
    return launch("scenarios_two_parallel", ranks=2)(scenario)


def on_four(scenario: str) -> list[dict[str, Any]]:
    return launch("scenarios_four_parallel", ranks=4)(scenario)


def flops(profile: Profile) -> tuple[int, int, int, int]:
    one = profile.flops
    return one.forward, one.backward, one.recompute, one.optimizer


def test_each_stage_counts_its_own_layers_of_all_micro_batches_and_no_evaluation() -> None:
    first, second = (profile_in(returned) for returned in on_two("attached"))
    # The data needs no gradient; the second stage sends its input's gradient back.
    assert flops(first) == (FIRST + SECOND, FIRST + 2 * SECOND, 0, 0)
    assert flops(second) == (THIRD + FOURTH, 2 * (THIRD + FOURTH), 0, 0)
    forwards = {module.name: module.total.forward for module in second.modules if module.total.forward}
    assert forwards == {"": THIRD + FOURTH, "2": THIRD, "3": FOURTH}
    assert not first.uncounted and not second.uncounted
    assert first.outside.total == second.outside.total == 0
    # Steps with an evaluation behind them are like those without.
    assert (first.timed_steps, second.timed_steps) == ((4, 5, 6), (4, 5, 6))


@pytest.mark.parametrize(("launched", "stages"), [(on_two, 2), (on_four, 4)])
def test_stages_add_up_to_what_the_model_costs_without_stages(launched: Any, stages: int) -> None:
    profiles = [profile_in(returned) for returned in launched("attached" if stages == 2 else "four_stages")]
    assert sum(profile.flops.forward for profile in profiles) == FIRST + SECOND + THIRD + FOURTH
    assert sum(profile.flops.backward for profile in profiles) == FIRST + 2 * (SECOND + THIRD + FOURTH)
    params = IN * HIDDEN + HIDDEN + 2 * (HIDDEN * HIDDEN + HIDDEN) + HIDDEN * OUT + OUT
    assert sum(profile.params or 0 for profile in profiles) == params
    assert [profile.context.pp_rank for profile in profiles] == list(range(stages))


def test_a_stage_in_the_middle_knows_its_samples_though_it_sees_no_batch() -> None:
    for profile in (profile_in(returned) for returned in on_four("four_stages")):
        context = profile.context
        assert (context.pp_size, context.dp_size, context.tp_size, context.world_size) == (4, 1, 1, 4)
        assert (profile.micro_steps, profile.samples, profile.tokens) == (3, ROWS, 7 * ROWS)
        assert (context.micro_batch_size, context.accumulate) == (4, 3)
        assert profile.timed_steps == (4, 5, 6)


def test_every_part_of_a_step_has_its_time_and_the_exchange_with_the_other_stage_is_the_bubble() -> None:
    for stage, returned in enumerate(on_two("timed")):
        timing = profile_in(returned).timing
        assert timing is not None
        # Three micro-batches, each loaded in 4 s, sent once in 0.25 s and received once in 0.5 s; 1 s for the loss.
        parts = {part.name: (min(part.steps_sec), part.mean_sec, max(part.steps_sec)) for part in timing.parts}
        seconds = {
            "data wait": 3 * 4.0,
            "transfer": 0.0,
            "forward": 3 * 1.0,
            "backward": 3 * 2.0,
            "bubble": 3 * (0.25 + 0.5) + 1.0,
            "optimizer": 8.0,
            "other": 0.125,
        }
        assert parts == {name: (value,) * 3 for name, value in seconds.items()}
        assert timing.seconds_of("bubble") == seconds["bubble"]
        assert timing.global_step_sec == sum(seconds.values())
        assert timing.reader_sec == 12.0
        # An evaluation loads and computes as much, and sends or receives one way, after each of the three steps.
        assert timing.excluded_sec == {"validation": 3 * 3 * (4.0 + 1.0 + (0.5 if stage else 0.25))}


def test_a_step_is_all_that_train_batch_does() -> None:
    for returned in on_two("timed"):
        profile = profile_in(returned)
        assert (profile.counted_steps, profile.timed_steps) == ((1,), (4, 5, 6))
        assert (profile.micro_steps, profile.samples) == (3, ROWS)
        assert profile.rates.samples_per_sec == ROWS / (12.0 + 3.0 + 6.0 + 3.25 + 8.0 + 0.125)


def test_throughput_of_a_whole_run_takes_a_train_batch_for_a_batch() -> None:
    for returned in on_two("timed"):
        summary = ThroughputSummary.from_json(returned["throughput"])
        step_sec = 12.0 + 3.0 + 6.0 + 3.25 + 8.0 + 0.125
        assert summary.batches in range(1, 9)  # neither the counted one nor those beside the analysis
        assert summary.batch_cost_sec.minimum == step_sec  # in the first step stages tell each other their shapes, too
        assert summary.reader_cost_sec == Spread(average=12.0, maximum=12.0, minimum=12.0)
        assert summary.ips is not None and summary.ips.maximum == ROWS / step_sec


def test_the_first_stage_reports_on_the_model_and_the_others_on_themselves() -> None:
    for stage, returned in enumerate(on_two("attached")):
        lines = render_text(profile_in(returned), detailed=True).splitlines()
        of_stage = [line for line in lines if " of stage" in line.partition(":")[0] and ": " in line]
        of_model = [line for line in lines if line.startswith(("params of model", "fwd flops of model"))]
        if stage == 0:
            forward = FIRST + SECOND + THIRD + FOURTH
            params = IN * HIDDEN + HIDDEN + 2 * (HIDDEN * HIDDEN + HIDDEN) + HIDDEN * OUT + OUT
            assert [line.partition(": ")[2].split() for line in of_model] == [
                [f"{params}"],
                [f"{round(forward / 1000, 2):g}", "K"],
            ]
            assert of_stage == []
        else:
            labels = ["params of stage", "trainable params of stage", "fwd flops of stage"]
            assert [line.partition(":")[0].partition(" =")[0] for line in of_stage] == labels
            assert all(line.partition(":")[2].strip().startswith("(stage 1 of 2) ") for line in of_stage)
            assert of_model == []
        assert any("(pp 2)" in line for line in lines)
        assert any(line.startswith("bubble ") for line in lines)


def test_a_single_stage_is_the_model_and_waits_for_nobody() -> None:
    for returned in on_two("one_stage"):
        profile = profile_in(returned)
        assert flops(profile) == (FIRST + SECOND + THIRD + FOURTH, FIRST + 2 * (SECOND + THIRD + FOURTH), 0, 0)
        assert (profile.context.dp_size, profile.context.pp_size) == (2, 1)
        assert (profile.counted_steps, profile.timed_steps, profile.notes) == ((1,), (4, 5, 6), ())
        assert profile.timing is not None
        assert "bubble" not in [part.name for part in profile.timing.parts]
        assert "stage" not in render_text(profile, detailed=True)


def test_a_tied_weight_counts_in_the_first_stage_that_has_it() -> None:
    first, second = (profile_in(returned) for returned in on_two("tied"))
    tied, layer = IN * IN, IN * IN + IN
    assert (first.params, first.local_params) == (tied + layer, tied + layer)
    assert (second.params, second.local_params) == (layer, tied + layer)
    assert flops(first) == (2 * 2 * ROWS * IN * IN, 3 * 2 * ROWS * IN * IN, 0, 0)
    assert flops(second) == (2 * 2 * ROWS * IN * IN, 4 * 2 * ROWS * IN * IN, 0, 0)


def test_what_a_stage_computes_again_for_its_backward_is_recompute() -> None:
    first, second = (profile_in(returned) for returned in on_two("checkpointed"))
    # DeepSpeed lets the data need a gradient, or nothing behind a reentrant checkpoint would.
    assert flops(first) == (FIRST + SECOND, 2 * (FIRST + SECOND), FIRST + SECOND, 0)
    assert flops(second) == (THIRD + FOURTH, 2 * (THIRD + FOURTH), THIRD + FOURTH, 0)


def test_losses_and_weights_are_the_same_bits_with_the_hook_and_without() -> None:
    for returned in on_two("same_bits"):
        without, switched_off, profiled = returned["losses"]
        assert without == switched_off == profiled
        assert len(set(without)) == len(without)  # they train
        without, switched_off, profiled = returned["weights"]
        assert without == switched_off == profiled


def test_an_engine_whose_block_is_off_has_nothing_of_ours() -> None:
    for returned in on_two("same_bits"):
        without, switched_off, _ = returned["names"]
        assert without == switched_off


def test_detaching_leaves_the_engine_as_it_was() -> None:
    for returned in (*on_two("attached"), *on_four("four_stages")):
        assert returned["tapped"] and returned["left"]


def test_an_exception_in_a_step_leaves_nothing_behind_and_is_the_users() -> None:
    for returned in on_two("interrupted"):
        assert (returned["raised"], returned["left"]) == ("the user's own", True)
        profile = profile_in(returned)
        assert profile.counted_steps == (1,)
        assert "Training was interrupted by FloatingPointError." in profile.notes


def test_a_step_that_is_never_reached_is_one_warning_of_the_first_rank() -> None:
    first, second = on_two("never_reached")
    assert (first["profile"], second["profile"]) == (None, None)
    (warning,) = first["warnings"]
    assert warning.startswith("nothing was profiled: profile_step is 50")
    assert second["warnings"] == []


def test_ranks_that_see_different_data_are_told_from_stages() -> None:
    for rank, returned in enumerate(on_four("two_pipelines")):
        profile = profile_in(returned)
        context = profile.context
        assert (context.rank, context.pp_rank) == (rank, rank // 2)
        assert (context.dp_size, context.pp_size, context.tp_size) == (2, 2, 1)
        assert profile.timing is not None
        assert profile.rates.samples_per_sec == 2 * ROWS / profile.timing.global_step_sec


def test_every_rank_that_is_asked_to_writes_its_own_report_beside_that_of_rank_0() -> None:
    names = ["", ".rank1", ".rank2", ".rank3"]
    expected = [f"flops{name}.txt" for name in names] + [f"logs/lightning_flops/profile{name}.json" for name in names]
    for returned in on_four("two_pipelines"):
        assert [name for name in returned["files"] if "throughput" not in name] == sorted(expected)
