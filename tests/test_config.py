"""Every setting has its rule, and a mistake is named before training begins."""

from __future__ import annotations

import functools
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from omegaconf import OmegaConf

from lightning_flops import ConfigError, ProfilerConfig
from lightning_flops.config import TraceSchedule, config_from


def refusal(**settings: Any) -> str:
    """The message with which *settings* are refused."""
    with pytest.raises(ConfigError) as caught:
        ProfilerConfig(**settings)
    return str(caught.value)


_NO_STEPS = [-1, True, 1.0, "2", None, [], [1, -1], [1, 2.0], {1}, "12", {1: 2}, range(0), range(10**9), range(10**30)]
_NO_PEAK = [0, -1.0, math.inf, math.nan, True, "1e12", 10**400]


@pytest.mark.parametrize(
    ("name", "right", "wrong"),
    [
        ("enabled", [True, False], ["yes", 1, 0, None]),
        ("profile_step", [0, 1, 10**9], _NO_STEPS),
        ("every", [None, 1], [0, -1, True, 1.0, "2"]),
        ("timer_only", [True], [1, None, "yes"]),
        ("trace_schedule", [], [{"active": 0}, {"repeat": 0}, {"wait": -1}, {"warm": 1}, {"wait": 1.0}, 3, [1, 1]]),
        ("module_depth", [-1, 0, 7], [-2, False, 0.5]),
        ("top_modules", [1, 50], [0, -1, True, 1.0, "1"]),
        ("detailed", [True], ["true", 1, None]),
        (
            "output_file",
            [None, "report.txt", "s3://bucket/report.txt"],
            ["", "  ", 3, False, b"report.txt", ["report.txt"]],
        ),
        ("recompute_fwd_factor", [0, 0.0, 1, 0.5], [-0.1, math.nan, math.inf, "1", True, None]),
        ("timing_steps", [1, 500], [0, 20.0, True]),
        ("ranks_timeout_sec", [0, 0.25, 600], [-0.5, math.nan, math.inf, "30", True, None]),
        ("all_ranks", [True], [1, "true", None]),
        ("html", [True, False], [1, "yes", None]),
        ("monitor", [False], [1, None]),
        ("batch_size", [None, 1, len], [0, -1, True, 8.0, "8"]),
        ("tokens_per_sample", [None, 1, len], [0, True, 1.5]),
        ("causal_attention", ["full", "half"], ["quarter", None, True, ["full"]]),
        ("peak_flops_per_sec", [None, 1, 312e12, {"bfloat16": 989e12, "float32": 67e12}], _NO_PEAK),
        ("peak_flops_per_sec", [], [{}, {"bfloat": 1e12}, {"bfloat16": 0}, {"bfloat16": "fast"}, {3: 1e12}]),
        ("memory_bytes_per_sec", [None, 1, 3.35e12], [*_NO_PEAK, {"float32": 1e12}]),
        ("advice_thresholds", [], [{"data_wait": "0.1"}, {"unknown": 1}, {"data_wait": -1}, 0.1, {1: 1}]),
        ("tensorboard_dir", [None, "logs"], ["", " ", 3]),
        (
            "tag_prefix",
            ["flops_profiler", "run 1/flops", "a.b-c"],
            ["", "/", "a/", "/a", "a//b", "a/../b", ".", "..", " a", "a ", "a:b", "a\n", None],
        ),
    ],
)
def test_a_value_is_kept_or_refused_by_its_rule(name: str, right: list[Any], wrong: list[Any]) -> None:
    for value in right:
        assert getattr(ProfilerConfig(**{name: value}), name) == value
    for value in wrong:
        message = refusal(**{name: value})
        assert message.startswith(f"flops_profiler.{name} must be ")
        assert message.endswith(f", got {value!r}")


def test_a_timer_needs_the_monitor() -> None:
    said = "flops_profiler.monitor must be true where timer_only is, got False"
    assert refusal(timer_only=True, monitor=False) == said


@pytest.mark.parametrize(
    ("name", "asked", "nothing"),
    [
        ("trace_dir", "traces", None),
        ("record_shapes", True, False),
        ("profile_memory", True, False),
        ("with_stack", True, False),
        ("trace_schedule", {"repeat": 2}, {"repeat": 1}),
    ],
)
def test_what_is_asked_of_the_trace_needs_one(name: str, asked: Any, nothing: Any) -> None:
    said = refusal(trace=False, **{name: asked})
    assert said == f"flops_profiler.trace must be true where {name} is given, got False"
    assert ProfilerConfig(trace=False, **{name: nothing}).trace is False
    assert ProfilerConfig(**{name: asked}).trace is True


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        (range(1, 50, 10), (1, 11, 21, 31, 41)),
        (np.array([20, 1]), (1, 20)),
        ((20, 1), (1, 20)),
        (OmegaConf.create({"steps": [20, "${first}"], "first": 1}).steps, (1, 20)),
        (np.int64(3), 3),
    ],
    ids=["range", "array", "tuple", "ListConfig", "numpy's integer"],
)
def test_steps_may_come_in_any_sequence(given: Any, kept: Any) -> None:
    assert ProfilerConfig(profile_step=given).profile_step == kept
    assert config_from({"profile_step": given}, owner="profile").profile_step == kept
    steps = kept if isinstance(kept, tuple) else (kept,)
    assert {type(step) for step in steps} == {int}  # which JSON can hold


@pytest.mark.parametrize("wrong", [np.array(3), np.array([1.0, 2.0]), np.array([[1, 2]]), OmegaConf.create({"1": 2})])
def test_what_is_no_sequence_of_integers_is_refused(wrong: Any) -> None:
    assert refusal(profile_step=wrong).startswith("flops_profiler.profile_step must be an integer >= 0, or a list of")


class Mounted:
    """A path of a library that has a class of its own for it."""

    def __fspath__(self) -> str:
        return "mounted/place"


@pytest.mark.parametrize("name", ["output_file", "trace_dir", "tensorboard_dir"])
def test_a_path_may_be_any_object_that_stands_for_one(name: str) -> None:
    paths: list[tuple[Any, str]] = [(Path("a") / "b", str(Path("a", "b"))), (Mounted(), "mounted/place")]
    for path, kept in paths:
        config = ProfilerConfig(**{name: path})
        assert getattr(config, name) == kept and type(getattr(config, name)) is str


def test_hydras_mappings_are_mappings() -> None:
    node = OmegaConf.create({"peak_flops_per_sec": {"bf16": 312e12}, "trace_schedule": {"active": 3}, "every": 5})
    config = ProfilerConfig.from_block({"enabled": True, **node})
    assert config.peak_flops_per_sec == {"bfloat16": 312e12}
    assert (config.trace_schedule, config.every) == (TraceSchedule(active=3), 5)
    assert ProfilerConfig.from_deepspeed_config(OmegaConf.create({"flops_profiler": node})).every == 5


def test_steps_of_a_list_are_put_in_order_each_once() -> None:
    config = ProfilerConfig.from_block({"enabled": True, "profile_step": [50, 1, np.int64(9), 50]})
    assert config.profile_step == (1, 9, 50)
    assert [type(step) for step in config.profile_step] == [int, int, int]


def test_a_trace_schedule_may_be_a_mapping_that_names_what_differs() -> None:
    config = ProfilerConfig.from_block({"enabled": True, "trace_schedule": {"wait": 2, "active": 3}})
    assert config.trace_schedule == TraceSchedule(wait=2, warmup=1, active=3, repeat=1)
    assert ProfilerConfig(trace_schedule=None) == ProfilerConfig()


def test_an_unknown_key_is_named_with_the_nearest_known_one() -> None:
    with pytest.raises(ConfigError, match=r"^flops_profiler.profile_stepp is .* setting, did you mean profile_step\?$"):
        ProfilerConfig.from_block({"enabled": True, "profile_stepp": 2})
    assert config_from({"every": 5, "trace": None}, owner="profile") == ProfilerConfig(every=5)
    with pytest.raises(ConfigError, match=r"timing_step is not a setting of profile, did you mean timing_steps\?"):
        config_from({"timing_step": 5}, owner="profile")


def test_the_block_of_a_config_is_read_and_is_off_unless_it_says_enabled(tmp_path: Path) -> None:
    path = tmp_path / "ds [1].json"
    block = {"enabled": True, "profile_step": 7, "recompute_fwd_factor": 1}
    document = {"train_batch_size": 8, "flops_profiler": block}
    path.write_text(json.dumps(document))
    for form in (document, path, str(path)):
        found = ProfilerConfig.from_deepspeed_config(form)
        assert found == ProfilerConfig(profile_step=7, recompute_fwd_factor=1.0, detailed=True)
    assert ProfilerConfig.from_block({"profile_step": 5}).enabled is False


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "cannot read the DeepSpeed config {}: No such file or directory"),
        ("[1]", "a DeepSpeed config must be a JSON object or the path of one, got [1]"),
        (
            '{\n  "train_batch_size": 8,\n  "flops_profiler": {"enabled" true}\n}',
            "cannot read the DeepSpeed config {}: Expecting ':' delimiter: line 3 column 32 (char 58)",
        ),
    ],
)
def test_a_file_that_is_no_config_is_named_with_the_reason(content: str | None, words: str, tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ConfigError) as caught:
        ProfilerConfig.from_deepspeed_config(path)
    assert str(caught.value) == words.format(path)


def test_a_block_taken_over_passes_over_what_it_does_not_know() -> None:
    settings, unknown, wrong = ProfilerConfig.taken_over(
        {"enabled": True, "detailed": False, "output_file": "", "step": 1}
    )
    assert settings == ProfilerConfig(detailed=False)
    assert unknown == ["flops_profiler.step is not a setting, did you mean profile_step?"]
    assert wrong is None


def test_a_wrong_value_of_a_block_taken_over_switches_off_unless_it_is_overruled() -> None:
    block = {"enabled": True, "top_modules": "3"}
    settings, _, wrong = ProfilerConfig.taken_over(block)
    assert not settings.enabled
    assert wrong == "flops_profiler.top_modules must be an integer >= 1, got '3'"
    overruled, _, wrong = ProfilerConfig.taken_over(block, given={"top_modules": 2})
    assert overruled == ProfilerConfig(top_modules=2, detailed=True) and wrong is None


NESTED = functools.reduce(lambda inner, _: [inner], range(100_000), list[Any]())


@pytest.mark.parametrize(
    ("block", "words"),
    [
        ({"profile_step": NESTED}, "flops_profiler.profile_step must be an integer >= 0, or a list of such"),
        ({"ranks_timeout_sec": 10**5_000}, "flops_profiler.ranks_timeout_sec must be a number >= 0"),
        ({"output_file": 10**5_000}, "flops_profiler.output_file must be a path or URL, or None"),
        ({"top_modules": "9" * 10**6}, "flops_profiler.top_modules must be an integer >= 1"),
        (NESTED, "flops_profiler must be an object, got a value of type list"),
        ({"x" * 10**6: 1}, "flops_profiler.'xxx"),
        ({"profile_step\x1b[2J": 1}, "flops_profiler.'profile_step\\x1b[2J' is not a setting"),
    ],
    ids=["nested", "large", "no path", "long", "no object", "long name", "name"],
)
def test_a_block_beyond_any_real_one_is_one_short_error(block: Any, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        ProfilerConfig.from_block(block)
    assert str(caught.value).startswith(words)
    assert len(str(caught.value)) < 800
