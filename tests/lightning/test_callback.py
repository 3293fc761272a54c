"""The callback's construction: settings, errors, both import roots, command line."""

from __future__ import annotations

import importlib
import inspect
import json
import warnings
from pathlib import Path
from typing import Any

import pytest

from lightning_flops import ConfigError, FlopsProfilerCallback, ProfilerConfig
from lightning_flops.config import ARGUMENTS, OF_DEEPSPEED, SETTINGS
from tests.lightning.nets import MakeTrainer, loader, new_net
from tests.listening import warnings_in


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"profile_step": -1}, r"profile_step must be .* >= 0.*, got -1"),
        ({"profile_steps": 1}, "profile_steps is not a setting of FlopsProfilerCallback, did you mean profile_step?"),
        ({"zzz": 1}, "zzz is not a setting of FlopsProfilerCallback, did you mean "),
    ],
)
def test_a_wrong_argument_is_an_error_at_construction(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=rf"flops_profiler\.{words}"):
        FlopsProfilerCallback(**arguments)


def test_every_argument_reaches_the_setting_of_its_name() -> None:
    numbers = "profile_step module_depth top_modules timing_steps every batch_size tokens_per_sample".split()
    other_than_default: dict[str, Any] = {
        **dict.fromkeys(numbers, 2),
        **dict.fromkeys(("peak_flops_per_sec", "memory_bytes_per_sec", "ranks_timeout_sec"), 11.0),
        **dict.fromkeys(("detailed", "record_shapes", "profile_memory", "with_stack", "all_ranks"), True),
        **{"output_file": "report.txt", "trace_dir": "traces", "tag_prefix": "mine", "causal_attention": "half"},
        **{"recompute_fwd_factor": 0.5, "trace_schedule": {"wait": 7}, "html": False, "lines": False},
        "advice_thresholds": {"data_wait": 0.2},
    }
    apart: dict[str, Any] = {"timer_only": True, "trace": False, "monitor": False}  # none of them goes with all others
    parameters = inspect.signature(FlopsProfilerCallback).parameters
    assert {*other_than_default, *apart} == {*parameters} - {"unknown"}
    # A program that counts on the place of an argument counts on DeepSpeed's own.
    in_place = [name for name, one in parameters.items() if one.kind is one.POSITIONAL_OR_KEYWORD]
    assert in_place == list(OF_DEEPSPEED)[1:] == list(SETTINGS)[1:7]
    assert FlopsProfilerCallback().config == ProfilerConfig()
    assert FlopsProfilerCallback(**other_than_default).config == ProfilerConfig(**other_than_default)
    for name, value in {**other_than_default, **apart}.items():
        assert FlopsProfilerCallback(**{name: value}).config == ProfilerConfig(**{name: value}) != ProfilerConfig()
    assert FlopsProfilerCallback(2, 3, 4, True, Path("a"), 0.5).config == ProfilerConfig(
        profile_step=2, module_depth=3, top_modules=4, detailed=True, output_file="a", recompute_fwd_factor=0.5
    )
    assert FlopsProfilerCallback(trace_dir=Path("a")).config == ProfilerConfig(trace_dir="a")


def test_a_deepspeed_block_is_the_callbacks_settings_and_may_lie_in_a_file(tmp_path: Path) -> None:
    given: dict[str, Any] = {"profile_step": 3, "module_depth": 2, "detailed": False, "timing_steps": 5}
    whole = {"train_batch_size": 8, "flops_profiler": {"enabled": True, **given}}
    path = tmp_path / "ds_config.json"
    path.write_text(json.dumps(whole))
    for form in (whole, path, str(path)):
        assert FlopsProfilerCallback.from_deepspeed_config(form).config == ProfilerConfig(**given)


@pytest.mark.parametrize("given", [{}, {"flops_profiler": {"profile_step": 1}}, {"flops_profiler": {"enabled": False}}])
def test_a_block_that_is_absent_or_not_enabled_profiles_nothing_and_says_so(
    root: str, trainer: MakeTrainer, given: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    callback = FlopsProfilerCallback.from_deepspeed_config(given)
    trainer(callback).fit(new_net(root), loader(8))
    assert callback.profile is None
    assert warnings_in(caplog) == ["flops_profiler.enabled is not true: this fit is not profiled"]


def test_the_command_line_says_of_every_argument_what_it_does(
    root: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["train.py"])
    monkeypatch.setenv("COLUMNS", "10000")  # a narrow page breaks words at their hyphens
    cli = importlib.import_module(f"{root}.cli")
    asked = ["--trainer.callbacks.help=lightning_flops.FlopsProfilerCallback"]
    with warnings.catch_warnings(), pytest.raises(SystemExit):
        warnings.simplefilter("ignore")  # jsonargparse's, of how Lightning calls it
        cli.LightningCLI(type(new_net(root)), run=False, args=asked)
    words = " ".join(capsys.readouterr().out.split())
    described = [name for name, setting in SETTINGS.items() if f" {setting.help}" in words]
    assert described == list(ARGUMENTS)
