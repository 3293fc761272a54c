"""Onto an engine and off it again; what is refused; where reports go."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lightning_flops.report.headline import figures
from lightning_flops.schema.profile import Profile
from tests.deepspeed.engines_truth import BACKWARD, FORWARD
from tests.deepspeed.launching import launch, profile_in
from tests.forks import REPOSITORY, TORCH, run_fork
from tests.ranks import DEEPSPEED, DEEPSPEED_ON_CPU, run_ranks


def returned_by(scenario: str) -> Any:
    return launch("scenarios_one_rank", ranks=1).only(scenario)


@pytest.mark.parametrize("form", ["dict", "path", "arguments"])
def test_the_block_is_found_in_every_form_of_a_config(form: str) -> None:
    returned = returned_by(f"given_as_{form}")
    profile = profile_in(returned)
    assert (profile.counted_steps, profile.flops.forward, profile.flops.backward) == ((2,), FORWARD, BACKWARD)
    assert not returned["builtin"] and not returned["breakdown"]
    assert returned["left"] == []


@pytest.mark.parametrize("block", ["absent", "disabled", "unsaid"])
def test_an_engine_without_an_enabled_block_is_left_alone(block: str) -> None:
    returned = returned_by(f"left_alone_{block}")
    assert returned["same"] and returned["left"] == []
    assert "_Holder" not in returned["kinds"]
    # Off is what somebody wrote; without a word the block may have been forgotten, or its name misspelt.
    said = 'this engine is not profiled: its config has no "flops_profiler" block that is enabled'
    assert returned["logged"] == ([] if block == "disabled" else [said])


def test_uninstall_gives_back_what_install_replaced() -> None:
    returned = returned_by("installed_and_uninstalled")
    assert returned["replaced"] and returned["restored"]
    assert profile_in(returned).flops.forward == FORWARD  # an engine that was made before is profiled on
    assert returned["later"] == []


def test_attach_refuses_what_it_cannot_profile() -> None:
    messages = returned_by("wrong_engines")["messages"]
    assert messages["no engine"] == (
        "LightningFlopsError: attach needs what deepspeed.initialize returns first, got Linear"
    )
    assert "attach needs what deepspeed.initialize returns first" in messages["no module"]
    assert messages["no file"] == (
        "ConfigError: cannot read the DeepSpeed config no/such/ds_config.json: No such file or directory"
    )
    assert "flops_profiler.train_batch_size is not a setting" in messages["no setting"]
    assert "flops_profiler.profile_step must be an integer >= 0" in messages["no rule"]


def test_attaching_twice_is_one_profiler_and_other_settings_are_refused() -> None:
    returned = returned_by("wrong_engines")
    assert returned["same"] and returned["another"] and returned["first"]
    assert "profiled already with other settings" in returned["messages"]["another"]
    assert profile_in(returned).counted_steps == (1,)


def test_attach_without_any_block_takes_the_defaults() -> None:
    returned = returned_by("attached_by_defaults")
    assert returned["defaults"] and returned["left"] == []


def test_after_detaching_an_engine_can_be_attached_to_anew() -> None:
    returned = returned_by("attached_by_defaults")
    assert returned["new"] and returned["tapped"]


def test_attach_switches_the_builtin_profiler_off() -> None:
    returned = returned_by("attached_to_the_builtin")
    assert returned["printed"] == ["Flops Profiler"]
    assert returned["enabled"]  # again, now that ours is detached
    assert profile_in(returned).flops.forward == FORWARD


@pytest.mark.parametrize("how", ["detach", "destroy"])
def test_a_step_that_was_never_reached_is_said_once(how: str) -> None:
    returned = returned_by(f"never_reached_{how}")
    assert returned["logged"] == ["nothing was profiled: profile_step is 100, and this run ended after 3 step(s)"]
    assert returned["left"] == []


def test_an_engine_destroyed_in_its_window_reports_what_there_is() -> None:
    returned = returned_by("ended_early")
    profile = profile_in(returned)
    assert (profile.counted_steps, profile.timed_steps) == ((2,), (5,))
    assert "Training ended before the window closed." in profile.notes
    assert "Profile Summary at step 2:" in returned["printed"] and "came out at step 6." in returned["printed"]
    assert returned["left"] == []


def test_a_program_that_ends_in_a_window_reports_what_there_is(tmp_path: Path) -> None:
    (printed,) = run_ranks(
        ["-W", "ignore", "-m", "tests.deepspeed.ends_in_its_window"],
        ranks=1,
        folder=tmp_path,
        timeout_sec=100,
        environment=DEEPSPEED_ON_CPU,
        imports=DEEPSPEED,
    )
    assert printed.count("Profile Summary at step 2:") == 1 and "2 of 20 steps, 5-6" in printed
    assert printed.count("nothing was profiled: profile_step is 100, and this run ended after 3 step(s)") == 1
    # In the folder of ours, since no monitor is on; of the engine that profiled nothing there is no file.
    files = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*.json"))
    assert files == ["lightning_flops/profile.json"]
    profile = Profile.from_json((tmp_path / files[0]).read_text(encoding="utf-8"))
    words = figures(profile)
    assert printed.count(f"FLOPs of step 2: {words}. Page: lightning_flops/profile.html\n") == 1
    assert (profile.counted_steps, profile.timed_steps, profile.flops.forward) == ((2,), (5, 6), FORWARD)


def test_an_engine_that_is_let_go_is_gone() -> None:
    returned = returned_by("forgotten")
    if returned["plain alive"]:
        pytest.skip("this DeepSpeed keeps engines itself")
    assert not returned["alive"]
    assert returned["logged"] == ["nothing was profiled: profile_step is 5, and this run ended after 3 step(s)"]


def test_a_run_can_have_several_windows() -> None:
    returned = returned_by("several_windows")
    assert returned["counted"] == [[0], [7]]
    assert returned["flops"] == [2 * FORWARD, 2 * FORWARD]
    assert returned["throughput"] and returned["left"] == []


def test_without_deepspeed_the_import_says_what_to_install() -> None:
    program = "import sys; sys.modules['deepspeed'] = None; import lightning_flops.deepspeed"
    ended = run_fork(["-c", program], imports=TORCH, folder=REPOSITORY)
    assert "ImportError: lightning_flops.deepspeed needs DeepSpeed: install lightning-flops[deepspeed]" in ended.stderr


class TestMonitors:
    """Two micro-steps of two samples: ``global_samples`` grows by 4 a step. The window closes with step 6."""

    @property
    def at(self) -> int:
        """The samples at which the report came out, a step or more after the window."""
        ((at, _),) = returned_by("monitors")["scalars"]["flops_profiler/fwd_flops"]
        assert at in range(7 * 4, 16 * 4 + 1, 4)
        return int(at)

    def test_tensorboard_gets_scalars_and_text_at_global_samples(self) -> None:
        returned = returned_by("monitors")
        scalars = returned["scalars"]
        assert scalars["flops_profiler/fwd_flops"] == [[self.at, 2 * FORWARD]]
        assert scalars["flops_profiler/bwd_flops"] == [[self.at, 2 * BACKWARD]]
        assert [step for step, _ in scalars["flops_profiler/samples_per_sec"]] == [self.at]
        assert "Train/Samples/lr" in scalars
        ((step, text),) = returned["texts"]["flops_profiler/profile/text_summary"]
        assert step == self.at and "came out at step 7." in text

    def test_readings_come_every_steps_per_print_steps(self) -> None:
        steps = [step for step, _ in returned_by("monitors")["scalars"]["flops_monitor/samples_per_sec"]]
        assert steps == [4 * 4, 8 * 4, 12 * 4, 16 * 4]

    def test_csv_has_a_table_for_each_scalar_and_the_text(self) -> None:
        tables = returned_by("monitors")["csv"]
        assert tables["flops_profiler_fwd_flops"] == [["step", "fwd_flops"], [str(self.at), str(float(2 * FORWARD))]]

    def test_wandb_gets_both_and_its_steps_never_go_back(self) -> None:
        calls = returned_by("monitors")["wandb"]
        steps = [step for _, step in calls]
        assert steps == sorted(steps)
        ours = {tag: (value, step) for data, step in calls for tag, value in data.items() if "flops_profiler" in tag}
        assert ours["flops_profiler/fwd_flops"] == (
            2 * FORWARD,
            self.at,
        )
        text, step = ours["flops_profiler/profile"]
        assert step == self.at and "came out at step 7." in text

    def test_output_file_has_the_report_in_place_of_the_console(self) -> None:
        returned = returned_by("monitors")
        assert "came out at step 7." in returned["output_file"]
        assert not returned["printed"]

    def test_the_profile_lies_beside_the_logs(self) -> None:
        assert "tensorboard/lightning_flops/profile.json" in returned_by("monitors")["files"]

    def test_a_folder_of_ours_serves_where_no_monitor_is_on(self) -> None:
        returned = returned_by("tensorboard_of_ours")
        assert [flops for _, flops in returned["flops"]] == [FORWARD]
        assert "flops_profiler/profile/text_summary" in returned["texts"]
        assert returned["files"] == ["profile.json"]

    def test_a_monitor_that_fails_costs_one_warning(self) -> None:
        returned = returned_by("failing_monitor")
        assert returned["printed"]
        assert sum("csvMonitor did not take the FLOPs report" in line for line in returned["logged"]) == 1


def test_one_report_is_printed_whatever_the_accumulation() -> None:
    returned = returned_by("printed_report")
    printed = returned["printed"]
    assert printed.count("Profile Summary at step") == 1
    assert "Profile Summary at step 2:" in printed and "came out at step 7. Counted: step 2." in printed
    assert returned["global_steps"] == 8
    assert f"{'micro-steps of a global step:':<70}  4\n" in printed


def test_module_depth_holds_for_the_whole_report() -> None:
    printed = returned_by("printed_report")["printed"]
    assert "depth 0" in printed and "depth 1" not in printed
    assert "(first)" not in printed


def test_a_batch_unlike_the_configs_is_counted_as_it_is() -> None:
    returned = returned_by("batch_size_unlike_the_config")
    profile = profile_in(returned)
    assert (profile.samples, profile.context.micro_batch_size) == (2, 2)


def test_a_run_in_which_all_is_well_logs_no_warning() -> None:
    returned = returned_by("silent_below_warning")
    assert returned["logged"] == []
    assert profile_in(returned).timing is not None


def test_pickles_and_copies_have_nothing_of_ours() -> None:
    returned = returned_by("copied")
    assert (returned["ours"], returned["adapted"], returned["left"]) == (False, False, [])
    profile = profile_in(returned)
    assert (profile.flops.forward, profile.flops.backward) == (FORWARD, BACKWARD)
