"""The callback's construction: settings, errors, both import roots, command line."""

from __future__ import annotations

import importlib
import inspect
import json
import types
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Union, get_args, get_origin, get_type_hints

import pytest

from lightning_flops import ConfigError, FlopsProfilerCallback, ProfilerConfig
from lightning_flops.config import OF_DEEPSPEED, SETTINGS, TraceSchedule
from tests.lightning.nets import ROOTS, loader, new_net

MakeTrainer = Callable[..., Any]


@pytest.fixture(params=ROOTS)
def root(request: pytest.FixtureRequest) -> str:
    """Both import roots, one after the other: what is here is asked of both in every run of the tests."""
    return str(request.param)


def test_the_defaults_are_deepspeeds_and_ours() -> None:
    assert FlopsProfilerCallback().config == ProfilerConfig()
    config = FlopsProfilerCallback().config
    assert (config.profile_step, config.module_depth, config.top_modules) == (1, -1, 1)
    assert (config.detailed, config.output_file, config.recompute_fwd_factor) == (False, None, 0.0)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"profile_step": -1}, r"profile_step must be .* >= 0.*, got -1"),
        ({"profile_steps": 1}, "profile_steps is not a setting of FlopsProfilerCallback, did you mean profile_step?"),
        ({"zzz": 1}, "zzz is not a setting of FlopsProfilerCallback; the settings are profile_step, module_depth,"),
    ],
)
def test_a_wrong_argument_is_an_error_at_construction(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=rf"flops_profiler\.{words}"):
        FlopsProfilerCallback(**arguments)


WIDER: Mapping[str, tuple[set[Any], set[Any]]] = {
    # An argument takes every sequence or mapping, a setting is kept in one form; a path may be a Path.
    "profile_step": ({tuple[int, ...]}, {Sequence[int]}),
    "trace_schedule": ({TraceSchedule}, {Mapping[str, int]}),
    "output_file": (set(), {Path}),
    "trace_dir": (set(), {Path}),
}
"""By argument: the types of the setting that it does not name, and those that it takes in their place."""
NO_WIDER: tuple[set[Any], set[Any]] = (set(), set())


def test_the_signature_has_every_setting_under_its_name_and_type() -> None:
    settings, parameters = get_type_hints(ProfilerConfig), inspect.signature(FlopsProfilerCallback).parameters
    arguments = get_type_hints(FlopsProfilerCallback.__init__)
    assert {name for name, setting in SETTINGS.items() if not setting.in_a_block_only} | {"unknown"} == set(parameters)
    # A program that counts on the place of an argument counts on DeepSpeed's own.
    in_place = [name for name, one in parameters.items() if one.kind is one.POSITIONAL_OR_KEYWORD]
    assert in_place == list(OF_DEEPSPEED)[1:] == list(SETTINGS)[1:7]
    for name, parameter in parameters.items():
        if name != "unknown":
            narrower, wider = WIDER.get(name, NO_WIDER)
            assert parameter.default is None
            assert members(arguments[name]) == (members(settings[name]) - narrower) | wider | {type(None)}, name


def members(hint: Any) -> set[Any]:
    """The types that a union is made of."""
    return set(get_args(hint)) if get_origin(hint) in (Union, types.UnionType) else {hint}


def test_every_argument_reaches_the_setting_of_its_name() -> None:
    other_than_default: dict[str, Any] = {
        "profile_step": 2,
        "module_depth": 3,
        "top_modules": 4,
        "detailed": True,
        "output_file": "report.txt",
        "recompute_fwd_factor": 0.5,
        "timing_steps": 5,
        "every": 6,
        "trace_schedule": {"wait": 7},
        "trace_dir": "traces",
        "record_shapes": True,
        "profile_memory": True,
        "with_stack": True,
        "batch_size": 8,
        "tokens_per_sample": 9,
        "causal_attention": "half",
        "peak_flops_per_sec": 10.0,
        "memory_bytes_per_sec": 11.0,
        "advice_thresholds": {"data_wait": 0.2},
        "ranks_timeout_sec": 11.0,
        "all_ranks": True,
        "html": False,
        "tag_prefix": "mine",
    }
    apart: dict[str, Any] = {"timer_only": True, "trace": False, "monitor": False}  # none of them goes with all others
    assert {*other_than_default, *apart} == {*inspect.signature(FlopsProfilerCallback).parameters} - {"unknown"}
    assert FlopsProfilerCallback(**other_than_default).config == ProfilerConfig(**other_than_default)
    for name, value in {**other_than_default, **apart}.items():
        assert FlopsProfilerCallback(**{name: value}).config == ProfilerConfig(**{name: value}) != ProfilerConfig()
    assert FlopsProfilerCallback(2, 3, 4, True, Path("a"), 0.5).config == ProfilerConfig(
        profile_step=2, module_depth=3, top_modules=4, detailed=True, output_file="a", recompute_fwd_factor=0.5
    )
    assert FlopsProfilerCallback(trace_dir=Path("a")).config == ProfilerConfig(trace_dir="a")


BLOCK = {"enabled": True, "profile_step": 3, "module_depth": 2, "top_modules": 4, "detailed": False, "timing_steps": 5}


def test_a_deepspeed_block_is_the_callbacks_settings_and_may_lie_in_a_file(tmp_path: Path) -> None:
    whole = {"train_batch_size": 8, "flops_profiler": BLOCK}
    path = tmp_path / "ds_config.json"
    path.write_text(json.dumps(whole))
    expected = ProfilerConfig(profile_step=3, module_depth=2, top_modules=4, detailed=False, timing_steps=5)
    for form in (whole, path, str(path)):
        assert FlopsProfilerCallback.from_deepspeed_config(form).config == expected


@pytest.mark.parametrize(
    "config", [{}, {"flops_profiler": {"profile_step": 1}}, {"flops_profiler": {"enabled": False}}]
)
def test_a_block_that_is_absent_or_not_enabled_profiles_nothing_and_says_so(
    root: str, trainer: MakeTrainer, config: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    callback = FlopsProfilerCallback.from_deepspeed_config(config)
    trainer(callback).fit(new_net(root), loader(8))
    assert callback.profile is None
    said = [record.getMessage() for record in caplog.records if record.name.startswith("lightning_flops")]
    assert said == ["flops_profiler.enabled is not true: this fit is not profiled"]


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
    assert described == [name for name, setting in SETTINGS.items() if not setting.in_a_block_only]


def test_the_command_line_takes_the_callback_by_its_class_path(
    root: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["train.py"])
    cli = importlib.import_module(f"{root}.cli")

    class Data(importlib.import_module(root).LightningDataModule):  # type: ignore[misc]
        def train_dataloader(self) -> Any:
            return loader(8)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # jsonargparse's, of how Lightning calls it
        built = cli.LightningCLI(
            type(new_net(root)),
            Data,
            args=[
                "fit",
                "--seed_everything=1",
                "--trainer.accelerator=cpu",
                "--trainer.max_epochs=1",
                "--trainer.logger=false",
                "--trainer.enable_checkpointing=false",
                "--trainer.enable_progress_bar=false",
                "--trainer.enable_model_summary=false",
                f"--trainer.default_root_dir={tmp_path}",
                "--trainer.callbacks+=lightning_flops.FlopsProfilerCallback",
                "--trainer.callbacks.profile_step=2",
                "--trainer.callbacks.timing_steps=1",
            ],
            save_config_callback=None,
        )
    (callback,) = [c for c in built.trainer.callbacks if isinstance(c, FlopsProfilerCallback)]
    assert callback.config == ProfilerConfig(profile_step=2, timing_steps=1)
    assert callback.profile is not None
