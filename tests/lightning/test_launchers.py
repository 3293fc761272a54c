"""Two ranks on gloo, by every launcher: each rank's own counts, files from rank 0 only, no rank hangs."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lightning_flops import Profile
from lightning_flops.adapters.lightning import run_context
from tests.forks import REPOSITORY, run_fork
from tests.lightning.nets import BACKWARD, BATCH, FORWARD
from tests.ranks import LIGHTNING


@pytest.mark.timeout(240)
@pytest.mark.parametrize(("root", "strategy"), [("lightning.pytorch", "ddp"), ("pytorch_lightning", "ddp_fork")])
def test_two_ranks_train_and_rank_zero_reports(root: str, strategy: str, tmp_path: Path, temporary: Path) -> None:
    done = run_fork(
        ["-m", "tests.lightning.launch_me", root, strategy, str(tmp_path)],
        folder=REPOSITORY,
        imports=LIGHTNING,
        timeout_sec=200.0,
        environment={"CUDA_VISIBLE_DEVICES": "", "TMPDIR": str(temporary)},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "the FLOPs profiler failed" not in done.stderr, done.stderr
    written = sorted(path.name for path in tmp_path.rglob("profile*"))
    assert written == ["profile.html", "profile.json", "profile.txt"]
    (path,) = tmp_path.rglob("profile.json")
    profile = Profile.from_json(path.read_text())
    assert (profile.context.world_size, profile.context.dp_size, profile.context.rank) == (2, 2, 0)
    assert path.with_name("throughput.json").exists()
    assert (profile.flops.forward, profile.flops.backward) == (FORWARD, BACKWARD)
    assert profile.context.strategy
    assert profile.ranks is not None and (profile.ranks.world_size, profile.ranks.answered) == (2, 2)
    timing = profile.timing
    assert timing is not None and timing.timed_steps == 2
    assert (timing.data_wait_sec, timing.seconds_of("transfer"), timing.seconds_of("other")) == (BATCH * 0.5, 0.0, 0.0)
    assert (timing.forward_sec, timing.backward_sec, timing.optimizer_sec) == (2.0, 4.0, 8.0)


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_the_process_that_waits_for_those_it_spawned_has_rank_zeros_profile(tmp_path: Path, temporary: Path) -> None:
    done = run_fork(
        ["-W", "ignore", "-m", "tests.lightning.spawn_me", str(tmp_path)],
        folder=REPOSITORY,
        imports=LIGHTNING,
        timeout_sec=200.0,
        environment={"CUDA_VISIBLE_DEVICES": "", "TMPDIR": str(temporary)},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = tmp_path.rglob("profile.json")
    profile = Profile.load(path)
    assert profile.ranks is not None and profile.ranks.answered == 2
    assert profile.timing is not None
    assert done.stdout.splitlines()[-1] == f"before None, after [{profile.timing.global_step_sec}]"


# ---- how the ranks share the work, as the names of a device mesh's dimensions say


@pytest.mark.parametrize(
    ("mesh", "expected"),
    [
        ({"data_parallel": 4, "tensor_parallel": 2}, {"dp": 4, "tp": 2}),
        ({"pp": 2, "dp_replicate": 2, "dp_shard": 3, "cp": 2, "tp": 2}, {"dp": 6, "tp": 2, "pp": 2, "cp": 2}),
        ({"data_parallel": 2, "ulysses": 4}, {"dp": 2, "sp": 4}),
        # Ranks with different experts see different data.
        ({"dp_shard": 3, "ep": 4, "tp": 2}, {"dp": 12, "tp": 2, "ep": 4}),
        ({"data_parallel": 2, "expert_parallel": 2}, {"dp": 4, "ep": 2}),
    ],
)
def test_sizes_go_by_the_names_of_the_meshs_dimensions(mesh: dict[str, int], expected: dict[str, int]) -> None:
    shape = SimpleNamespace(mesh_dim_names=tuple(mesh), shape=tuple(mesh.values()))
    strategy = SimpleNamespace(root_device=torch.device("cpu"), device_mesh=shape)
    ranks = {"global_rank": 0, "world_size": math.prod(mesh.values())}
    trainer: Any = SimpleNamespace(strategy=strategy, precision="32-true", accumulate_grad_batches=1, **ranks)
    found = run_context(trainer)
    sizes = {name: getattr(found, f"{name}_size") for name in ("dp", "tp", "pp", "cp", "sp", "ep")}
    assert {name: size for name, size in sizes.items() if size != 1} == expected
