"""DeepSpeed's own tests with every engine profiled: what is run, and what is set up in every process of theirs.

With the profiler means after ``lightning_flops.deepspeed.install()`` with an enabled block in every config that has
none. The piece ``replaced`` runs the tests of DeepSpeed's profiler with ``lightning_flops.FlopsProfiler`` in its place.
DeepSpeed's distributed tests run in processes that a server forks. The server loads this module first, so that what is
set up here is in every one of them.
"""

from __future__ import annotations

import multiprocessing
import os
from pathlib import Path
from typing import Any

from .machine import ONE_THREAD, ROOT
from .suite import Piece, Project

MODE = "DEEPSPEED_SUITE_MODE"
"""``plain``; ``profiled``: ``install()``, and a block in every config; ``replaced``: our standalone profiler."""

BLOCK = {"enabled": True, "profile_step": 0, "timing_steps": 1}
"""From the first step on, and soon done: most of these tests train for a few steps."""

_PLAIN, _PROFILED, _REPLACED = ({MODE: mode} for mode in ("plain", "profiled", "replaced"))
_RUNTIME = """ds_config_dict ds_config_model ds_initialize multi_output_model no_sync_ctxt data runtime_utils
    autocast"""
_ZERO = """ignore_unused_parameters unwrap_model zero_allreduce_fetch_params zero_config zero_context
    zero_context_ancestry zero_context_return zero_dynamic_class zero_hook_attribute_delegation zero_late_module_attach
    zero_leaf_module zero_nesting_init"""
_ABOUT = """Written by `make test-deepspeed-suite DEEPSPEED_SOURCE=folder`. With the profiler: after
`lightning_flops.deepspeed.install()`, every config with an enabled block, so that every engine is profiled.
`[replaced]`: with `FlopsProfiler` and `get_model_profile` of this project in the place of DeepSpeed's.

Left out of `unit/runtime` are tests that need a package, or a part of DeepSpeed, that is not there
(half_precision/onebit, test_mup_optimizers.py, test_engine_eigenvalue.py, test_pld.py), that are skipped on a CPU
(activation_checkpointing, comm, half_precision/test_fp8.py, zero/test_zeropp.py), that train by parts which take many
minutes to compile (half_precision/test_fp16.py, zenflow, zero with NVMe or offload++), 450 variants of what the chosen
files train already (test_lr_schedulers.py, test_multiple_models.py, zero/test_zero_tensor_fragment.py,
zero/test_zero_tiled.py), and, for time, all others.

"""


def _drop_locks(work: Path) -> None:
    """Remove the locks of a run that was ended while it compiled: the next would wait for ever."""
    for lock in work.glob("extensions/*/lock"):
        lock.unlink()


def _in(folder: str, names: str) -> tuple[str, ...]:
    return tuple(f"unit/runtime/{folder}test_{name}.py" for name in names.split())


PROJECT = Project(
    package="deepspeed",
    repository="deepspeedai/DeepSpeed",
    holds="tests/unit/profiling",
    version_files=("version.txt",),
    title="DeepSpeed's own tests, without and with this project",
    about=_ABOUT,
    pieces={
        "profiling": Piece(targets=("unit/profiling",), environment=_PLAIN, profiled=_PROFILED),
        "runtime": Piece(
            targets=(
                *_in("", _RUNTIME),
                "unit/runtime/half_precision/test_dynamic_loss_scale.py",
                *(f"unit/runtime/{folder}" for folder in ("pipe", "sparse_tensor", "rollout")),
                *_in("zero/", _ZERO),
            ),
            environment=_PLAIN,
            profiled=_PROFILED,
        ),
        "replaced": Piece(targets=("unit/profiling",), environment=_PLAIN, profiled=_REPLACED, mark="[replaced] "),
    },
    known=ROOT / "benchmarks" / "deepspeed_suite_known.txt",
    settings="pytest.ini",
    environment={
        **ONE_THREAD,
        "LOCAL_SIZE": "2",  # as many devices as a CPU has for DeepSpeed; tests of four are skipped
        "DS_UNITTEST_TIMEOUT": "280",
        "TORCH_EXTENSIONS_DIR": str(ROOT / ".cache" / "deepspeed_suite" / "extensions"),
    },
    options=("-p", "benchmarks.suite_deepspeed", "-m", "not nightly"),
    prepare=_drop_locks,
)


# ---- in every process of the tests


def _set_up(mode: str) -> None:
    import deepspeed
    from deepspeed.accelerator import get_accelerator

    multiprocessing.set_forkserver_preload([__name__])
    # Operators for shared memory would be compiled first; gloo does without.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    # torch computes in half precision on every CPU; DeepSpeed asks for instructions that make it fast.
    type(get_accelerator()).is_fp16_supported = lambda self: True
    if mode == "profiled":
        _profile_every_engine()
    elif mode == "replaced":
        _replace_the_standalone_profiler()


def _profile_every_engine() -> None:
    import lightning_flops.deepspeed
    from lightning_flops.config import ProfilerConfig

    from .suite_plugin import record_the_profiler

    ours: Any = lightning_flops.deepspeed
    ours.install()
    record_the_profiler()
    block_of = ours._block_of

    def block_of_any(engine: Any, **given: Any) -> Any:
        has_one = "flops_profiler" in engine._config._param_dict
        return block_of(engine, **given) if has_one else ProfilerConfig.from_block(BLOCK)

    ours._block_of = block_of_any


def _replace_the_standalone_profiler() -> None:
    from deepspeed.profiling import flops_profiler
    from deepspeed.profiling.flops_profiler import profiler
    from deepspeed.runtime import engine

    import lightning_flops

    for owner in (flops_profiler, profiler, engine):
        for name in ("FlopsProfiler", "get_model_profile"):
            if hasattr(owner, name):
                setattr(owner, name, getattr(lightning_flops, name))


if MODE in os.environ:
    _set_up(os.environ[MODE])
