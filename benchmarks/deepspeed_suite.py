"""Runs DeepSpeed's own tests without and with this project, and says where they end otherwise.

``python -m benchmarks.deepspeed_suite FOLDER`` takes a folder that holds deepspeedai/DeepSpeed at the tag of the
installed version: DeepSpeed's tests are no part of this project. They run three times, in a copy: as they are; after
``lightning_flops.deepspeed.install()`` with an enabled block in every config that has none, so that every engine is
profiled; and those of the profiler with ``lightning_flops.FlopsProfiler`` in the place of DeepSpeed's. Exits with 1
where a test ends otherwise and ``DIFFERENCES`` does not say why, where no engine was profiled, or where nothing ran.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

from benchmarks.machine import ROOT, code_in_words, machine_in_words, one_thread_environment, versions

RESULTS = ROOT / "benchmarks" / "results" / "deepspeed_suite.md"
PLUGIN = ROOT / "benchmarks" / "suite_plugin"
EXTENSIONS = ROOT / ".cache" / "deepspeed_suite"
"""Where DeepSpeed's compiled operators are kept from one run to the next; nobody else's lock is in the way."""

PROFILER = ("unit/profiling",)
RUNTIME = (
    "unit/runtime/test_ds_config_dict.py",
    "unit/runtime/test_ds_config_model.py",
    "unit/runtime/test_ds_initialize.py",
    "unit/runtime/test_multi_output_model.py",
    "unit/runtime/test_no_sync_ctxt.py",
    "unit/runtime/test_data.py",
    "unit/runtime/test_runtime_utils.py",
    "unit/runtime/test_autocast.py",
    "unit/runtime/half_precision/test_dynamic_loss_scale.py",
    "unit/runtime/pipe",
    "unit/runtime/sparse_tensor",
    "unit/runtime/rollout",
    "unit/runtime/zero/test_ignore_unused_parameters.py",
    "unit/runtime/zero/test_unwrap_model.py",
    "unit/runtime/zero/test_zero_allreduce_fetch_params.py",
    "unit/runtime/zero/test_zero_config.py",
    "unit/runtime/zero/test_zero_context.py",
    "unit/runtime/zero/test_zero_context_ancestry.py",
    "unit/runtime/zero/test_zero_context_return.py",
    "unit/runtime/zero/test_zero_dynamic_class.py",
    "unit/runtime/zero/test_zero_hook_attribute_delegation.py",
    "unit/runtime/zero/test_zero_late_module_attach.py",
    "unit/runtime/zero/test_zero_leaf_module.py",
    "unit/runtime/zero/test_zero_nesting_init.py",
)
LEFT_OUT = {
    "half_precision/onebit, test_mup_optimizers.py, test_engine_eigenvalue.py, test_pld.py": (
        "need a package, or a part of DeepSpeed, that is not there"
    ),
    "activation_checkpointing, comm, half_precision/test_fp8.py, zero/test_zeropp.py": (
        "are skipped on a CPU, nearly all of them"
    ),
    "half_precision/test_fp16.py, zenflow, zero with NVMe or offload++": (
        "train by parts of DeepSpeed that are compiled for many minutes first"
    ),
    "test_lr_schedulers.py, test_multiple_models.py, zero/test_zero_tensor_fragment.py, zero/test_zero_tiled.py": (
        "450 variants of what the chosen files train already"
    ),
    "all others": "for time",
}
DIFFERENCES = {
    "unit/profiling/flops_profiler/test_flops_profiler.py::TestFlopsProfiler::test": (
        "asks the engine for its flops_profiler: DeepSpeed's own has stood down, and is not made"
    ),
}
"""Tests that end otherwise with ``install()`` by construction, and why."""

MODES = {
    "without": (*PROFILER, *RUNTIME),
    "with": (*PROFILER, *RUNTIME),
    "replaced": PROFILER,
}


@dataclass
class Run:
    """How the tests of one mode ended."""

    outcomes: dict[str, str] = field(default_factory=dict)
    words: dict[str, str] = field(default_factory=dict)
    seconds: Counter[str] = field(default_factory=Counter)
    """By file."""
    chosen: set[str] = field(default_factory=set)
    engines: int = 0
    """Profiled, on every rank."""
    counting: int = 0
    """How often a counter of theirs was switched on, some of them several times in a step."""
    windows: int = 0
    """How many of them trained until the window closed."""

    @classmethod
    def read(cls, path: Path) -> Run:
        """From the lines that the plugin wrote."""
        run = cls()
        for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
            facts = json.loads(line)
            run.chosen |= {facts[key] for key in ("chosen", "test") if key in facts}
            run.engines += "engine" in facts
            run.counting += "counting" in facts
            run.windows += "window" in facts
            if "test" in facts:
                name = facts["test"]
                run.seconds[name.partition("::")[0]] += facts["seconds"]
                if run.outcomes.get(name) != "failed":  # a test whose end fails has failed, though it passed before
                    run.outcomes[name], run.words[name] = facts["outcome"], facts["words"]
        return run


def run_tests(tests: Path, mode: str, *, folder: Path, only: Sequence[str], timeout_sec: float) -> Run:
    """Run the tests of *mode* in a copy of DeepSpeed's folder of tests."""
    copy = folder / mode
    shutil.copytree(tests, copy, symlinks=True, dirs_exist_ok=True)
    record = folder / f"{mode}.jsonl"
    chosen = [
        name
        for name in only or MODES[mode]
        if (copy / name.partition("::")[0]).exists() and (mode != "replaced" or name.startswith(PROFILER))
    ]
    if not chosen:
        return Run.read(record)
    environment = {
        **os.environ,
        **one_thread_environment(),
        "LOCAL_SIZE": "2",  # as many devices as a CPU has for DeepSpeed; tests of four are skipped
        "DS_UNITTEST_TIMEOUT": "300",
        "TORCH_EXTENSIONS_DIR": str(EXTENSIONS),
        "PYTHONPATH": os.pathsep.join([str(PLUGIN), str(ROOT)]),
        "DEEPSPEED_SUITE_MODE": mode,
        "DEEPSPEED_SUITE_RECORD": str(record),
    }
    command = [sys.executable, "-m", "pytest", "-q", "-p", "deepspeed_suite_plugin", "-p", "no:randomly"]
    command += ["-p", "no:cacheprovider", "-m", "not nightly", "--continue-on-collection-errors", *chosen]
    with (folder / f"{mode}.log").open("w") as log:
        pytest = subprocess.Popen(
            command, cwd=copy, env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            pytest.wait(timeout_sec)
        except subprocess.TimeoutExpired:
            sys.stderr.write(f"the tests {mode} this project were ended after {timeout_sec:.0f} s\n")
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pytest.pid, signal.SIGKILL)  # and those that a test left behind
        pytest.wait()
    return Run.read(record)


def different(plain: Run, other: Run) -> list[str]:
    """Tests that both ran and that ended otherwise."""
    return [name for name, outcome in other.outcomes.items() if plain.outcomes.get(name, outcome) != outcome]


def report(runs: Mapping[str, Run], *, source: str) -> tuple[str, bool]:
    """The result as text, and whether all is as it has to be."""
    plain, profiled, replaced = runs["without"], runs["with"], runs["replaced"]
    unlike = different(plain, profiled)
    unexplained = [name for name in unlike if name not in DIFFERENCES] + different(plain, replaced)
    chosen = plain.chosen | profiled.chosen
    not_run = [name for name in chosen if not (name in plain.outcomes and name in profiled.outcomes)]
    lines = [
        "# DeepSpeed's own tests, without and with this project",
        "",
        "Written by `make test-deepspeed-suite DEEPSPEED_SOURCE=folder`, which runs it again.",
        "",
        f"Tests of DeepSpeed {source}: its profiler's, and those of its runtime that run on a CPU. With: after "
        "`lightning_flops.deepspeed.install()`, every config with an enabled block "
        '(`"profile_step": 0, "timing_steps": 1`), so that every engine is profiled. Replaced: '
        "`lightning_flops.FlopsProfiler` and `get_model_profile` in the place of DeepSpeed's.",
        "",
        "| | tests | passed | skipped | failed | engines profiled | counters switched on | windows closed |",
        "|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for mode, run in runs.items():
        ended = Counter(run.outcomes.values())
        cells: list[object] = [len(run.outcomes), ended["passed"], ended["skipped"], ended["failed"]]
        cells += [run.engines, run.counting, run.windows] if mode == "with" else ["", "", ""]
        lines.append(f"| {mode} | {' | '.join(map(str, cells))} |")
    lines += ["", f"{len(unlike)} end otherwise with this project:", ""]
    lines += [
        f"- `{name}`: {plain.outcomes[name]}, with: {profiled.outcomes[name]}. "
        + (DIFFERENCES.get(name) or f"NOT EXPLAINED: {profiled.words[name]}")
        for name in unlike
    ]
    lines += [f"- replaced, `{name}`: NOT EXPLAINED: {replaced.words[name]}" for name in different(plain, replaced)]
    if not_run:
        lines += [
            "",
            f"Of {len(chosen)} chosen tests {len(not_run)} were not reached in both runs, and are not compared.",
        ]
    lines += [
        "",
        "| file | tests | passed | skipped | failed | seconds without | with |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for file in dict.fromkeys(name.partition("::")[0] for name in plain.outcomes):
        ended = Counter(outcome for name, outcome in plain.outcomes.items() if name.partition("::")[0] == file)
        cells = [ended.total(), ended["passed"], ended["skipped"], ended["failed"]]
        seconds = [f"{run.seconds[file]:.0f}" for run in (plain, profiled)]
        lines.append(f"| {file.removeprefix('unit/')} | {' | '.join([*map(str, cells), *seconds])} |")
    lines += ["", "Left out of `unit/runtime`:", ""]
    lines += [f"- {what}: {why}." for what, why in LEFT_OUT.items()]
    found = versions(["torch", "deepspeed"])
    words = ", ".join(f"{name} {version}" for name, version in found.items())
    lines += ["", f"*{code_in_words()}. {machine_in_words()}. {words}.*", ""]
    fine = not unexplained and bool(plain.outcomes) and profiled.counting > 0 and not not_run
    return "\n".join(lines), fine


def source_of(folder: Path) -> tuple[Path, str]:
    """DeepSpeed's tests in *folder*, and their version; ends the program where there are none."""
    installed = metadata.version("deepspeed")
    tests = folder / "tests"
    if not (tests / "unit" / "profiling").is_dir():
        sys.exit(
            f"{folder} holds no DeepSpeed: give a folder with the repository deepspeedai/DeepSpeed at tag "
            f"v{installed}, such as of\n  git clone --depth 1 --branch v{installed} "
            "https://github.com/deepspeedai/DeepSpeed\n  make test-deepspeed-suite DEEPSPEED_SOURCE=DeepSpeed"
        )
    file = folder / "version.txt"
    version = file.read_text().strip() if file.exists() else "of unknown version"
    if version != installed:
        sys.stderr.write(f"warning: the tests are those of DeepSpeed {version}, and {installed} is installed\n")
    return tests, version


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the tests, print the result, and write it down where all chosen tests ran."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="deepspeedai/DeepSpeed at the tag of the installed version")
    parser.add_argument("--only", nargs="+", default=[], metavar="TEST", help="these alone; nothing is written down")
    parser.add_argument(
        "--keep",
        type=Path,
        metavar="FOLDER",
        help="keep pytest's output and the records there; tests that are recorded there already are not run again",
    )
    parser.add_argument(
        "--timeout", type=float, default=1500.0, metavar="SECONDS", help="of the runs, which go side by side"
    )
    options: Any = parser.parse_args(arguments)
    tests, version = source_of(options.folder)
    EXTENSIONS.mkdir(exist_ok=True, parents=True)
    for lock in EXTENSIONS.glob("*/lock"):  # of a run that was ended while it compiled: the next would wait for ever
        lock.unlink()
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.keep or Path(temporary)
        folder.mkdir(exist_ok=True, parents=True)

        def run(mode: str) -> Run:
            return run_tests(tests, mode, folder=folder, only=options.only, timeout_sec=options.timeout)

        with ThreadPoolExecutor() as side_by_side:
            runs = dict(zip(MODES, side_by_side.map(run, MODES), strict=True))
    text, fine = report(runs, source=version)
    sys.stdout.write(text)
    if not options.only:
        RESULTS.write_text(text, encoding="utf-8")
    return 0 if fine else 1


if __name__ == "__main__":
    sys.exit(main())
