"""Whatever befalls a rank, or how it was launched: training does not notice, nobody hangs, and rank 0 reports.

Losses, weights, random state and collectives of a fit are compared with those of the same fit without the profiler.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from lightning_flops.schema.profile import Profile
from tests.lightning.nets import batch_flops
from tests.ranks import LIGHTNING, REPOSITORY, run_ranks
from tests.ranks.launching import launch, profile_in
from tests.ranks.scenarios_faults import BATCHES, SCENARIOS

pytestmark = pytest.mark.timeout(290)

on_two = functools.partial(launch, "scenarios_faults", ranks=2)

BESIDE_PLAIN = ("silent", "skips_steps", "ends_before_its_window", "ends_in_its_window", "ends_first_on_rank_0")
"""Scenarios that train otherwise than the plain one, and once without the profiler themselves."""

COMPARED = ("losses", "weights", "random", "footprint", "collectives")


def absences(profile: Profile) -> dict[int, str]:
    """Why which rank is not in the report."""
    assert profile.ranks is not None
    assert profile.ranks.world_size == 2
    assert profile.ranks.answered + len(profile.ranks.absences) == 2
    return {absence.rank: absence.reason for absence in profile.ranks.absences}


def warnings(returned: dict[str, Any]) -> list[str]:
    return [line for line in returned["logged"] if not line.startswith("INFO ")]


@pytest.mark.parametrize("scenario", [name for name in SCENARIOS if name not in ("plain", *BESIDE_PLAIN)])
def test_training_is_bit_for_bit_what_it_is_without_the_profiler_and_nothing_is_left(scenario: str) -> None:
    for plain, profiled in zip(on_two()("plain"), on_two()(scenario), strict=True):
        assert len(plain["losses"]) == BATCHES
        for name in COMPARED:
            assert profiled[name] == plain[name], name


@pytest.mark.parametrize("scenario", BESIDE_PLAIN)
def test_ranks_that_skip_updates_or_run_out_of_batches_train_as_they_do_without_the_profiler(scenario: str) -> None:
    for returned in on_two()(scenario):
        for name in COMPARED:
            assert returned[name] == returned["plain"][name], name


@pytest.mark.parametrize("scenario", [name for name in SCENARIOS if name != "plain"])
def test_the_store_the_group_and_the_threads_are_as_before(scenario: str) -> None:
    for returned in on_two()(scenario):
        assert returned["ours"] == []
        assert returned["threads"] == []
        assert returned["sum"] == 1 + 2  # an all-reduce afterwards


def test_no_collective_is_ours_and_the_count_would_show_one() -> None:
    for plain, healthy in zip(on_two()("plain"), on_two()("healthy"), strict=True):
        # For each batch a gradient's all-reduce, and what Lightning asks for.
        assert plain["collectives"] == healthy["collectives"] >= BATCHES


def test_every_rank_is_in_the_report_of_rank_0_and_the_others_have_their_own_profile() -> None:
    first, second = on_two()("healthy")
    profile, own = profile_in(first), profile_in(second)
    assert absences(profile) == {}
    assert profile.ranks is not None and profile.ranks.flops.forward == 2 * batch_flops().forward
    assert (own.context.rank, own.ranks) == (1, None)
    assert own.flops.forward == batch_flops().forward
    assert warnings(first) == warnings(second) == []


def test_rank_0_speaks_and_the_others_are_silent() -> None:
    first, second = on_two()("healthy")
    assert first["logged"] != []
    assert second["logged"] == []


def test_windows_close_together_have_a_report_each() -> None:
    for returned in on_two()("every"):
        assert returned["profiles"] == 2
    assert absences(profile_in(on_two()("every")[0])) == {}


@pytest.mark.parametrize(
    ("scenario", "reason"),
    [
        ("profiler_fails", "its profiler failed: RuntimeError: broken on purpose"),
        ("fails_at_start", "its profiler failed: RuntimeError: broken on purpose"),
        ("cannot_pack", "its measurements could not be packed: ValueError: broken on purpose"),
        ("damaged", "what it sent cannot be read: it is no record of a rank"),
        ("silent", "no answer within 0.05 s"),
        ("ends_before_its_window", "its run ended after 1 step(s), before its window closed"),
    ],
)
def test_a_rank_without_a_record_is_named_with_the_reason_long_before_training_ends(scenario: str, reason: str) -> None:
    first, second = on_two()(scenario)
    profile = profile_in(first)
    assert absences(profile) == {1: reason}
    assert profile.report_step < BATCHES
    assert warnings(first) == [f"WARNING the report of step 1 is of 1 of 2 ranks; rank 1: {reason}"]
    failure = reason.partition("its profiler failed: ")[2]
    own = f"WARNING the FLOPs profiler failed and has taken itself out; training goes on: {failure}"
    assert warnings(second) == ([own] if failure else [])


def test_a_rank_that_was_told_of_another_step_is_named_with_it_when_its_training_ends() -> None:
    first, second = on_two()("other_settings")
    assert absences(profile_in(first)) == {1: "it last profiled step 3"}
    assert profile_in(first).ranks.waited_sec < 30.0  # type: ignore[union-attr]
    assert profile_in(second).profile_step == 3


def test_where_rank_0_never_reached_its_window_it_says_so_and_the_others_have_their_own_profile() -> None:
    first, second = on_two()("ends_first_on_rank_0")
    assert first["profile"] is None
    assert warnings(first) == ["WARNING nothing was profiled: profile_step is 1, and this fit ended after 1 step(s)"]
    assert profile_in(second).flops.forward == batch_flops().forward


@pytest.mark.parametrize("scenario", ["skips_steps", "ends_in_its_window"])
def test_a_rank_that_lags_or_ends_early_is_in_with_what_it_has(scenario: str) -> None:
    assert absences(profile_in(on_two()(scenario)[0])) == {}


def test_what_cannot_be_put_together_leaves_the_report_of_rank_0() -> None:
    first, _ = on_two()("cannot_merge")
    profile = profile_in(first)
    note = "What the ranks sent could not be put together: ValueError: broken on purpose."
    assert profile.ranks is None
    assert note in profile.notes
    assert warnings(first) == [f"WARNING {note}"]


def test_without_a_store_every_rank_is_on_its_own_and_says_so() -> None:
    for rank, returned in enumerate(on_two()("no_store")):
        profile = profile_in(returned)
        assert profile.ranks is None
        (note,) = [note for note in profile.notes if "exchange" in note]
        assert note.startswith(f"This report is of rank {rank} alone: the ranks could not exchange anything: torch ")
        assert warnings(returned) == ([f"WARNING {note}"] if rank == 0 else [])


def test_rank_0_alone_leaves_files() -> None:
    for returned in on_two()("rank_0_alone_writes"):
        *files, trace = returned["files"]
        names = ("profile.html", "profile.json", "profile.txt", "throughput.json")
        assert files == [f"logs0/lightning_flops_logs/{name}" for name in names]
        assert trace.startswith("traces/rank0_step")


def test_all_ranks_leave_files_in_one_folder_if_they_are_asked_to() -> None:
    for returned in on_two()("all_ranks"):
        *files, trace_0, trace_1 = returned["files"]
        assert trace_0.startswith("traces/rank0_step") and trace_1.startswith("traces/rank1_step")
        assert files == [
            "flops.rank1.txt",
            "flops.txt",
            "logs0/lightning_flops_logs/profile.html",
            "logs0/lightning_flops_logs/profile.json",
            "logs0/lightning_flops_logs/profile.rank1.json",
            "logs0/lightning_flops_logs/throughput.json",
            "logs0/lightning_flops_logs/throughput.rank1.json",
        ]


@pytest.mark.parametrize(
    ("how", "rank", "ranks", "reason"),
    [
        ("kill", 1, 2, "no answer within "),
        ("kill", 1, 3, "no answer within "),
        # What it had until then it could still send.
        ("raise", 1, 3, None),
    ],
)
def test_the_others_end_in_time_with_the_report_of_what_is_left(
    how: str, rank: int, ranks: int, reason: str | None, tmp_path: Path
) -> None:
    run_ranks(
        ["-W", "ignore", "-m", "tests.ranks.die_me", how, str(rank), str(tmp_path)],
        ranks=ranks,
        folder=tmp_path,
        timeout_sec=150.0,
        environment={"CUDA_VISIBLE_DEVICES": ""},
        imports=LIGHTNING,
        ends_with={rank: -9} if how == "kill" else {},
        # A survivor that waits for another survivor learns of the death when that one ends, and rank 0's store with it.
        store_of_its_own=True,
    )
    left = {path.name: json.loads(path.read_text()) for path in tmp_path.glob("rank*.json")}
    assert len(left) == (ranks - 1 if how == "kill" else ranks)
    assert all(one["seconds"] < 30.0 for one in left.values())
    assert {one["store"] for one in left.values()} == {"still there"}
    assert all(one["raised"] == "RuntimeError" for name, one in left.items() if name != f"rank{rank}.json")
    if how == "raise":
        assert left[f"rank{rank}.json"]["raised"] == "OwnError"
    profile = profile_in(left["rank0.json"])
    assert profile.ranks is not None
    missing = {absence.rank: absence.reason for absence in profile.ranks.absences}
    assert profile.flops_total.forward == batch_flops().forward
    if reason is None:
        assert missing == {}
        assert profile.ranks.answered == ranks
    else:
        # Of two survivors, rank 2 may wait for rank 0 in a collective until that has ended: then its answer is late.
        late = {other for other in missing if other != rank}
        assert rank in missing and late <= ({2} if ranks == 3 else set())
        assert all(why.startswith(reason) for why in missing.values())
        assert profile.ranks.answered == ranks - len(missing)


@pytest.mark.slow
def test_the_others_end_in_time_when_the_rank_that_reports_and_keeps_the_store_dies(tmp_path: Path) -> None:
    run_ranks(
        ["-W", "ignore", "-m", "tests.ranks.die_me", "kill", "0", str(tmp_path)],
        ranks=2,
        folder=tmp_path,
        timeout_sec=150.0,
        environment={"CUDA_VISIBLE_DEVICES": ""},
        imports=LIGHTNING,
        ends_with={0: -9},
    )
    (left,) = (json.loads(path.read_text()) for path in tmp_path.glob("rank*.json"))
    assert left["raised"] == "RuntimeError"
    assert left["seconds"] < 30.0


@pytest.mark.parametrize("launcher", [pytest.param("torchrun", marks=pytest.mark.slow), "slurm"])
def test_the_ranks_of_a_launcher_find_each_other(launcher: str, tmp_path: Path) -> None:
    program = ["-m", "tests.ranks.launch_me", str(tmp_path)]
    if launcher == "slurm":
        run_ranks([*program, "slurm"], ranks=2, folder=tmp_path, timeout_sec=150.0, imports=LIGHTNING)
    else:
        done = subprocess.run(
            [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", *program],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
            capture_output=True,
            text=True,
            timeout=150.0,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
    (path,) = tmp_path.rglob("profile*.json")
    assert absences(Profile.from_json(path.read_text())) == {}
