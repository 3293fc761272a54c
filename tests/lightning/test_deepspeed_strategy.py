"""Lightning's DeepSpeedStrategy on two ranks, gloo, real engines: its config's block, its steps, its parameters."""

from __future__ import annotations

import importlib.util
import json
from typing import Any

import pytest

from lightning_flops import Profile
from tests.lightning.nets import BATCH, HIDDEN, IN, OUT, batch_flops
from tests.ranks import DEEPSPEED_ON_CPU, EVERYTHING, run_ranks

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="needs deepspeed"),
    pytest.mark.timeout(280),
]

RANKS = 2
PAIRS = ("lightning.pytorch 2", "pytorch_lightning 3")
FULL = PAIRS[0]
each_pair = pytest.mark.parametrize("pair", PAIRS)
PARAMS = (IN * HIDDEN + HIDDEN) + (HIDDEN * OUT + OUT)
STEP = batch_flops(times=4)
"""Four batches accumulate."""
MICRO_BATCHES = 3 * 18

Seen = dict[str, dict[str, dict[str, Any]]]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[Seen]:
    """What each rank saw, by root and stage and by scenario; one start of two ranks runs them all."""
    folder = tmp_path_factory.mktemp("ranks")
    run_ranks(
        ["-m", "tests.lightning.deepspeed_me", str(folder), *PAIRS],
        ranks=RANKS,
        folder=folder,
        timeout_sec=240,
        environment=DEEPSPEED_ON_CPU,
        imports=EVERYTHING,
    )
    return [json.loads((folder / f"seen{rank}.json").read_text()) for rank in range(RANKS)]


def profile_of(fit: dict[str, Any], index: int = 0) -> Profile:
    return Profile.from_json(fit["profiles"][index])


def log_of(fit: dict[str, Any], words: str) -> list[str]:
    return [message for message in fit["messages"] if words in message]


@each_pair
def test_a_step_is_the_engines_and_its_flops_are_exact_and_the_training_is_the_same_bits(
    ranks: list[Seen], pair: str
) -> None:
    for rank, seen in enumerate(ranks):
        plain, fit = seen[pair]["plain"], seen[pair]["profiled"]
        # The engine accumulates across epochs of 18 batches; Lightning's own count starts anew in each.
        assert (fit["global_steps"], fit["lightnings_steps"]) == (MICRO_BATCHES // 4, 3 * (18 // 4))
        profile = profile_of(fit)
        assert profile.context.rank == rank
        assert (profile.flops.forward, profile.flops.backward) == (STEP.forward, STEP.backward)
        assert (profile.flops.recompute, profile.flops.optimizer) == (0, 0)
        assert (profile.micro_steps, profile.samples) == (4, 4 * BATCH)
        by_name = {module.name: module for module in profile.modules}
        assert by_name["net.0.linear"].total.forward == 4 * 2 * BATCH * IN * HIDDEN
        assert by_name["net.1"].total.backward == 4 * 2 * (2 * BATCH * HIDDEN * OUT)
        # Parameters are the model's, also where each rank holds a part.
        assert (profile.params, profile.trainable_params) == (PARAMS, PARAMS)
        assert by_name["net.1"].params == HIDDEN * OUT + OUT
        assert profile.local_params is not None
        assert profile.local_params < PARAMS if pair.endswith("3") else profile.local_params == PARAMS
        # The block is taken over, and given back.
        assert (profile.profile_step, len(profile.timed_steps), profile.settings.module_depth) == (2, 2, 1)
        assert len(profile.timed_steps) == 2 and fit["builtin_was_on"] is False
        assert plain["profiles"] == [] and len(fit["profiles"]) == 1
        assert len(plain["losses"]) == MICRO_BATCHES
        for what in ("losses", "weights", "random_state", "config", "global_steps"):
            assert fit[what] == plain[what], what


def test_in_every_scenario_the_users_config_comes_back_and_nothing_of_ours_stays(ranks: list[Seen]) -> None:
    for seen in ranks:
        for fits in seen.values():
            for name, fit in fits.items():
                assert fit["block_is_the_users"] and fit["block_is_as_written"], name
                assert fit["left_behind"] == [], name


def test_the_phases_of_a_step_are_timed_and_add_up(ranks: list[Seen]) -> None:
    timing = profile_of(ranks[0][FULL]["profiled"]).timing
    assert timing is not None
    parts = {name: timing.seconds_of(name) for name in ("transfer", "other")}
    parts |= {name: getattr(timing, f"{name}_sec") for name in ("data_wait", "forward", "backward", "optimizer")}
    seconds = {name: value for name, value in parts.items() if value is not None}
    assert seconds.keys() == parts.keys() and min(seconds.values()) >= 0 and seconds["forward"] > 0
    assert sum(seconds.values()) == pytest.approx(timing.global_step_sec, rel=1e-9)


def test_arguments_win_over_the_block_and_the_traced_step_has_times_of_modules(ranks: list[Seen]) -> None:
    for seen in ranks:
        fit = seen[FULL]["arguments"]
        profile = profile_of(fit)
        assert (profile.profile_step, len(profile.timed_steps), profile.settings.module_depth) == (1, 3, 1)
        assert profile.traced is not None
        times = {module.name: module.times for module in profile.modules}
        for name in ("", "net.0.linear", "net.1"):
            one = times[name]
            assert one is not None and one.forward_sec > 0 and one.backward_sec is not None, name
        for what in ("losses", "weights", "random_state"):
            assert fit[what] == seen[FULL]["plain"][what], what


def test_an_exception_in_the_users_step_leaves_as_it_came_and_the_report_says_so(ranks: list[Seen]) -> None:
    for seen in ranks:
        fit = seen[FULL]["fails"]
        assert fit["raised"] == "RuntimeError: the user's own"
        profile = profile_of(fit)
        assert (profile.flops.forward, profile.timing) == (STEP.forward, None)
        assert any("interrupted by RuntimeError" in note for note in profile.notes)


def test_manual_optimization_has_its_steps_counted(ranks: list[Seen]) -> None:
    for seen in ranks:
        profile = profile_of(seen[FULL]["manual"])
        assert (seen[FULL]["manual"]["global_steps"], profile.micro_steps) == (18, 1)
        assert (profile.flops.forward, profile.flops.backward) == (batch_flops().forward, batch_flops().backward)


def test_a_wrong_value_in_the_block_is_a_warning_and_no_profile_and_training_is_as_without_us(
    ranks: list[Seen],
) -> None:
    for rank, seen in enumerate(ranks):
        wrong = seen[FULL]["wrong"]
        assert "raised" not in wrong and wrong["losses"] == seen[FULL]["plain"]["losses"][: len(wrong["losses"])] != []
        assert wrong["profiles"] == [] and wrong["builtin_was_on"] is False
        assert log_of(wrong, "not profiled") == [
            "WARNING: this fit is not profiled: flops_profiler.profile_step must be an integer >= 0, or a list of "
            "such, got '2'"
        ] * (rank == 0)


def test_an_unknown_key_in_the_block_is_a_warning_that_names_the_nearest(ranks: list[Seen]) -> None:
    unknown = ranks[0][FULL]["unknown"]
    profile = profile_of(unknown)
    assert (profile.profile_step, profile.settings.detailed) == (1, True)
    assert log_of(unknown, "not a setting") == [
        "WARNING: in the DeepSpeed config, flops_profiler.step is not a setting, did you mean profile_step?"
    ]


def test_a_block_that_deepspeed_refuses_ends_in_deepspeeds_own_error(ranks: list[Seen]) -> None:
    for seen in ranks:
        fit = seen[FULL]["no object"]
        assert (fit["raised"], fit["losses"]) == ("AttributeError: 'list' object has no attribute 'get'", [])


def test_a_block_that_says_off_switches_the_callback_off_with_a_warning(ranks: list[Seen]) -> None:
    fit = ranks[0][FULL]["block off"]
    assert fit["profiles"] == []
    assert log_of(fit, "") == ["WARNING: flops_profiler.enabled is not true: this fit is not profiled"]


def test_by_the_environment_the_block_is_served_without_any_code(ranks: list[Seen]) -> None:
    for seen in ranks:
        fit = seen[FULL]["switch"]
        profile = profile_of(fit)
        assert (fit["callbacks"], fit["builtin_was_on"]) == (1, False)
        assert (profile.profile_step, len(profile.timed_steps)) == (2, 2)
        assert (profile.flops.forward, profile.flops.backward) == (STEP.forward, STEP.backward)
        for what in ("losses", "weights"):
            assert fit[what] == seen[FULL]["plain"][what]
    profile = profile_of(ranks[0][FULL]["switch, no block"])
    assert (profile.profile_step, len(profile.timed_steps), profile.flops.forward) == (1, 20, STEP.forward)
    own = ranks[0][FULL]["switch, own callback"]
    assert own["callbacks"] == 2
    assert [profile_of(own, index).profile_step for index in range(len(own["profiles"]))] == [1]
    assert log_of(own, "not profiled") == []
