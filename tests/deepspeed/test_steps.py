"""What belongs to a step under DeepSpeed, and to which part of it."""

from __future__ import annotations

from typing import Any

import pytest

from lightning_flops.schema.profile import Profile
from tests.deepspeed.engines_truth import BACKWARD, FORWARD, FORWARD_BY_MODULE
from tests.deepspeed.launching import launch, profile_in


def returned_by(scenario: str) -> dict[str, Any]:
    returned: dict[str, Any] = launch("scenarios_one_rank", ranks=1).only(scenario)
    return returned


def profile_of(scenario: str) -> Profile:
    returned = returned_by(scenario)
    assert returned["left"] == []
    profile = profile_in(returned)
    assert not profile.uncounted
    return profile


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_backward_called_on_the_loss_is_the_steps(stage: int) -> None:
    if returned_by(f"torch_style_{stage}") is None:
        pytest.skip("this DeepSpeed knows engine.backward alone")
    profile = profile_of(f"torch_style_{stage}")
    assert (profile.flops.forward, profile.flops.backward) == (2 * FORWARD, 2 * BACKWARD)
    assert profile.timing is not None and profile.timing.backward_sec is not None
    assert profile.timing.backward_sec > 0


def test_two_forwards_with_one_backward_are_one_micro_step() -> None:
    profile = profile_of("two_forwards_one_backward")
    assert (profile.flops.forward, profile.flops.backward) == (2 * FORWARD, 2 * BACKWARD)
    assert (profile.micro_steps, profile.samples) == (1, 2)


def test_a_root_that_calls_itself_is_counted_once() -> None:
    profile = profile_of("root_called_inside_itself")
    assert (profile.flops.forward, profile.flops.backward) == (FORWARD, BACKWARD)
    totals = {module.name: module.total.forward for module in profile.modules}
    assert totals == {"": FORWARD, **{f"net{'.' if name else ''}{name}": it for name, it in FORWARD_BY_MODULE.items()}}


@pytest.mark.parametrize(
    ("scenario", "micro_steps"), [("no_sync", 4), ("border_set_by_hand", 3), ("border_left_to_the_loop", 3)]
)
def test_micro_steps_are_told_without_a_call_of_step_for_each(scenario: str, micro_steps: int) -> None:
    if returned_by(scenario) is None:
        pytest.skip("this DeepSpeed has no managed_gradient_accumulation")
    profile = profile_of(scenario)
    assert (profile.micro_steps, profile.samples) == (micro_steps, 2 * micro_steps)
    assert (profile.flops.forward, profile.flops.backward) == (micro_steps * FORWARD, micro_steps * BACKWARD)


@pytest.mark.parametrize("stage", [1, 2])
def test_a_step_whose_update_loss_scaling_skipped_is_a_step(stage: int) -> None:
    returned = returned_by(f"skipped_updates_{stage}")
    assert (returned["steps"], returned["skipped"]) == (8, 8)
    profile = profile_of(f"skipped_updates_{stage}")
    assert (profile.counted_steps, profile.timed_steps) == ((2,), (5, 6))
    assert (profile.flops.forward, profile.flops.backward) == (FORWARD, BACKWARD)
    assert [one.dtype for one in profile.dtypes] == ["float16"]


def test_a_teacher_and_a_forward_without_gradients_belong_to_the_step() -> None:
    teacher = 2 * 2 * 8 * 4
    profile = profile_of("frozen_helpers")
    assert profile.flops.forward == 2 * FORWARD + teacher
    assert profile.flops.without_backward == FORWARD + teacher
    assert profile.flops.backward == BACKWARD
    assert profile.outside.forward == teacher
    # The teacher runs before the engine's forward, where its time is not told from what else the loop does.
    assert profile.timing is not None and profile.timing.forward_sec is None
    assert profile.rates.samples_per_sec is not None


def test_the_loss_between_forward_and_backward_is_forward() -> None:
    product = 2 * 2 * 2 * 4
    profile = profile_of("product_in_the_loss")
    assert profile.flops.forward == FORWARD + product
    assert profile.flops.backward == BACKWARD + 2 * product
    assert profile.timing is not None and profile.timing.forward_sec is not None


@pytest.mark.parametrize("how", ["engine", "module"])
def test_an_evaluation_between_steps_is_in_no_figure(how: str) -> None:
    profile = profile_of(f"evaluation_{how}")
    assert (profile.flops.forward, profile.flops.backward) == (FORWARD, BACKWARD)
    assert profile.samples == 2
    assert profile.timing is not None and profile.timing.excluded_sec["validation"] > 0


def test_a_checkpoint_between_steps_is_in_no_figure() -> None:
    returned = returned_by("checkpoints")
    assert returned["global_steps"] == 8 - 3  # after step 3 it was set back to 1
    profile = profile_of("checkpoints")
    assert (profile.counted_steps, profile.timed_steps) == ((2,), (5, 6))  # steps as they ran
    assert (profile.flops.forward, profile.flops.backward) == (FORWARD, BACKWARD)
    assert profile.timing is not None and profile.timing.excluded_sec["checkpoint"] > 0


def test_a_step_holds_what_another_engine_does_in_it() -> None:
    for returned in returned_by("two_engines").values():
        assert returned["left"] == []
        profile = profile_in(returned)
        assert (profile.flops.forward, profile.flops.backward) == (2 * FORWARD, 2 * BACKWARD)
        assert (profile.modules[0].total.forward, profile.modules[0].total.backward) == (FORWARD, BACKWARD)
        assert (profile.outside.forward, profile.outside.backward) == (FORWARD, BACKWARD)


def test_training_in_evaluation_mode_is_training() -> None:
    profile = profile_of("trained_in_eval_mode")
    assert (profile.flops.forward, profile.flops.backward) == (FORWARD, BACKWARD)
    assert profile.timing is not None and not profile.timing.excluded_sec


def test_step_0_can_be_counted() -> None:
    profile = profile_of("first_step")
    assert profile.counted_steps == (0,)
    assert (profile.flops.forward, profile.flops.backward) == (2 * FORWARD, 2 * BACKWARD)


def test_a_step_that_was_half_over_at_the_start_is_nobodys() -> None:
    profile = profile_of("attached_in_the_middle")
    assert profile.counted_steps == (0,)
    assert (profile.micro_steps, profile.samples) == (2, 4)
    assert (profile.flops.forward, profile.flops.backward) == (2 * FORWARD, 2 * BACKWARD)


def test_a_compiled_engine_counts_the_same_and_is_not_compiled_again() -> None:
    returned = returned_by("compiled")
    assert returned["compiled"]
    assert returned["graphs"] == returned["plain_graphs"] > 0
    profile = profile_of("compiled")
    assert (profile.flops.forward, profile.flops.backward) == (FORWARD, BACKWARD)


def test_what_the_engine_multiplies_for_the_update_is_the_optimizers() -> None:
    if returned_by("muon") is None:
        pytest.skip("this DeepSpeed has no Muon")
    profile = profile_of("muon")
    assert (profile.flops.forward, profile.flops.backward) == (FORWARD, BACKWARD)
    # Muon iterates five times over each matrix of m x n, m <= n: two products of m·m·n and one of m·m·m.
    assert profile.flops.optimizer == sum(5 * (2 * (2 * m * m * n) + 2 * m**3) for m, n in ((8, 8), (8, 16), (4, 16)))
    assert profile.flops.model == FORWARD + BACKWARD


class TestFakeClock:
    """Seconds: a batch 1, forward 2, loss 4, backward 8, optimizer 16, the rest of a micro-step 32; two micro-steps."""

    @pytest.mark.parametrize("loader", ["engine's", "user's", "none"])
    def test_every_second_is_in_its_part(self, loader: str) -> None:
        returned = returned_by(f"clock_{loader}")
        parts = returned["parts"]
        assert parts["forward"] == 2 * (2 + 4)
        assert parts["backward"] == 2 * 8
        assert parts["optimizer"] == 16
        # Every other step there is an evaluation, and 32 s more after it.
        elsewhere = 2 * 32 + 32 / 2
        if loader == "user's":
            assert (parts["data wait"], parts["transfer + other"]) == (2 * 1, elsewhere)
        elif loader == "engine's":  # its workers are processes, whose clocks are theirs
            assert (parts["data wait"], parts["transfer + other"]) == (0, elsewhere)
        else:
            assert parts["data wait + transfer + other"] == elsewhere
        assert len(parts) == (4 if loader == "none" else 5)
        assert returned["excluded"] == {"validation": 64 + 512 + 128}

    def test_a_wait_that_cannot_be_seen_is_not_available(self) -> None:
        profile = profile_of("clock_none")
        assert profile.timing is not None and profile.timing.data_wait_sec is None
        assert (profile.rates.data_wait_ratio, profile.timing.reader_sec) == (None, None)
        assert any("could not be seen" in note for note in profile.notes)

    def test_rates_are_of_a_whole_step(self) -> None:
        profile = profile_of("clock_user's")
        assert profile.timing is not None
        assert profile.timing.iter_sec == 12 + 16 + 16
        assert profile.rates.iter_samples_per_sec == 4 / 44
        assert profile.rates.forward_flops_per_sec == 2 * FORWARD / 12
        assert profile.rates.backward_flops_per_sec == 2 * BACKWARD / 16
        assert profile.rates.samples_per_sec == 4 / (2 + 12 + 16 + 16 + 80)


def test_the_wait_for_a_loader_of_the_users_own_is_monitored_without_any_window() -> None:
    returned = returned_by("monitored_wait")
    assert [reading["flops_monitor/data_wait_ratio"] for reading in returned["readings"]] == [1 / 4, 1 / 4]
    assert (returned["reader_sec"], returned["reader_ratio"]) == (1, 1 / 4)  # of a batch; the end of the data is none
    assert returned["left"] == []


@pytest.mark.parametrize("where", ["forward", "backward", "optimizer"])
def test_after_an_exception_in_the_counted_step_nothing_is_left(where: str) -> None:
    returned = returned_by(f"interrupted_{where}")
    assert returned["raised"] == where
    assert returned["left"] == []
    assert returned["no profile"]
    assert sum("RuntimeError" in line for line in returned["logged"]) == 1


@pytest.mark.parametrize("where", ["forward", "backward", "optimizer"])
def test_after_an_exception_of_the_engine_the_monitor_is_gone_too(where: str) -> None:
    returned = returned_by(f"interrupted_later_{where}")
    assert (returned["raised"], returned["no profile"]) == (where, False)
    assert returned["left"] == []
