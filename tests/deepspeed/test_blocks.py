"""Every config that DeepSpeed takes, trains: what is wrong in a block that was taken over is said, not raised."""

from __future__ import annotations

from typing import Any

from tests.deepspeed.launching import launch

STEPS = 4


def returned_by(scenario: str) -> Any:
    return launch("scenarios_blocks", ranks=1).only(scenario)


def test_deepspeed_alone_says_which_blocks_are_refused_and_in_its_own_words() -> None:
    refused = 0
    for name, alone, hooked in returned_by("read_alike"):
        if alone.startswith("read"):
            assert hooked in (alone, "read, off"), name  # its own profiler stands down
        else:
            assert hooked == alone, name
            refused += 1
    assert refused > 3


def test_every_block_that_deepspeed_takes_trains_as_without_any() -> None:
    returned = returned_by("trained")
    plain, made = returned["plain"], 0
    assert plain["raised"] is None and len(plain["losses"]) == STEPS
    for name, one in returned["blocks"].items():
        if not one["alone"]["made"]:
            assert one["ours"]["raised"] and "ConfigError" not in one["ours"]["raised"], name
            continue
        assert one["ours"]["raised"] is None, name
        assert one["ours"]["losses"] == plain["losses"], name
        assert one["ours"]["left"] == [] and not one["ours"]["builtin"], name
        made += 1
    assert made > 50


def test_there_is_a_profile_or_a_word_of_why_not() -> None:
    for name, one in returned_by("trained")["blocks"].items():
        if one["ours"]["made"] and name.partition("=")[0] != "enabled":
            assert one["ours"]["profiled"] or one["ours"]["logged"], name


def test_a_wrong_value_is_named_with_its_rule_and_an_unknown_key_with_the_nearest() -> None:
    blocks = returned_by("trained")["blocks"]
    not_profiled = "this engine is not profiled: flops_profiler."
    assert blocks["profile_step='1'"]["ours"]["logged"] == [
        f"{not_profiled}profile_step must be an integer >= 0, or a list of such, got '1'"
    ]
    assert blocks["timing_steps=0"]["ours"]["logged"] == [f"{not_profiled}timing_steps must be an integer >= 1, got 0"]
    assert blocks["trace_dir without trace"]["ours"]["logged"] == [
        f"{not_profiled}trace must be true where trace_dir is given, got False"
    ]
    unknown = blocks["step=1"]["ours"]
    assert unknown["profiled"] == [1]
    assert unknown["logged"] == [
        "in the DeepSpeed config, flops_profiler.step is not a setting, did you mean profile_step?"
    ]
    off = blocks["off, enable=0"]["ours"]
    assert off["logged"][0] == (
        "in the DeepSpeed config, flops_profiler.enable is not a setting, did you mean enabled?"
    )
    assert max(len(line) for one in blocks.values() for line in one["ours"]["logged"]) < 400


def test_deepspeeds_own_test_config_is_profiled_in_every_form() -> None:
    for form, found in returned_by("in_every_form").items():
        assert (found["counted"], found["top_modules"]) == ([1], 3), form
        assert found["logged"] == [
            "in the DeepSpeed config, flops_profiler.step is not a setting, did you mean profile_step?"
        ], form


def test_an_engines_own_block_is_warned_of_and_one_handed_to_us_is_an_error() -> None:
    returned = returned_by("attached_to_a_wrong_block")
    assert returned["enabled"] is False
    assert returned["logged"] == [
        "in the DeepSpeed config, flops_profiler.step is not a setting, did you mean profile_step?",
        "this engine is not profiled: flops_profiler.top_modules must be an integer >= 1, got 0",
    ]
    assert returned["raised"].startswith("ConfigError: flops_profiler.step is not a setting")
