"""Every block of code in the README and docs/ is run, read as the command that it is, or known as its output."""

from __future__ import annotations

import argparse
import importlib.metadata
import re
import shlex
from pathlib import Path

import pytest

import lightning_flops
from lightning_flops import cli, entry_points
from tests.forks import run_fork
from tests.golden_files import FOLDER as GOLDEN
from tests.page.samples import many_ranks
from tests.pages import (
    LEFT_OUT,
    PAGES,
    README,
    REPOSITORY,
    Block,
    blocks,
    on_page,
    programs_with_output,
    run_program,
    shown,
    without_times,
)
from tests.report import compared, jobs, windows

# ---- Python

JOB = """
from pathlib import Path
from lightning_flops import Profile
profile = Profile.from_json(Path("job.json").read_text())
"""
ENGINE = """
import os, torch
from pathlib import Path
os.environ["LOCAL_RANK"] = "0"  # as a launcher sets it
store = f"file://{Path('store').resolve()}"
torch.distributed.init_process_group("gloo", init_method=store, rank=0, world_size=1)
from tests.deepspeed.engines import engine_of
engine = engine_of({"train_micro_batch_size_per_gpu": 4})
"""
OPERATORS = """
torch.library.define("mylib::pair_product", "(Tensor a, Tensor b) -> Tensor")
torch.library.define("mylib::rms_norm", "(Tensor a) -> Tensor")
"""
IMAGES = """
from torch import nn
model = nn.Sequential(nn.Conv2d(3, 4, 32, stride=32), nn.Flatten(), nn.Linear(4 * 7 * 7, 2))
"""
BETWEEN = {
    ("counting.md", "register_flop_formula"): OPERATORS,
    ("counting.md", "FlopsProfiler, get_model_profile"): IMAGES,
    ("distributed.md", "profile.ranks"): JOB,
    ("deepspeed.md", "deepspeed.attach"): ENGINE,
}
"""What the first program of a page with these words takes for granted, where that is not the page's first block."""

TUTORIAL = REPOSITORY / "docs" / "tutorial.md"

ENDS = "===== the end of a program ====="


def files_for_programs(folder: Path) -> None:
    """What the pages' programs read: profiles of two runs, that of a job, a DeepSpeed config."""
    for name, profile in (("before", compared.wider()), ("after", compared.slow_module())):
        (folder / name).mkdir()
        (folder / name / "profile.json").write_text(profile.to_json())
    (folder / "profile.json").write_text(windows.build_profile(windows.mlp_window(), config=jobs.CONFIG).to_json())
    (folder / "job.json").write_text(many_ranks().to_json())
    (folder / "ds_config.json").write_text('{"flops_profiler": {"enabled": true}}')


def program_of(page: Path) -> str:
    """All programs of *page* as one, in their order, since one goes on where the one before ended."""
    parts, unused = list[str](), {words: text for (name, words), text in BETWEEN.items() if name == page.name}
    first = blocks(page)[0]
    for block in blocks(page, "python"):
        needed = [words for words in unused if words in block.text]
        assert not needed or str(block) != str(first), "a page's first block runs as it is copied"
        parts += [unused.pop(words) for words in needed]
        parts.append(f"# {block}\n{block.text}\nprint({ENDS!r}, flush=True)\n")
    return "\n".join(parts)


@pytest.mark.parametrize(
    "page",
    [
        # An engine waits for operators of DeepSpeed's to be compiled.
        pytest.param(page, id=page.name, marks=[pytest.mark.slow] if page.name == "deepspeed.md" else [])
        for page in PAGES
        if page not in (README, TUTORIAL) and blocks(page, "python")
    ],
)
def test_the_programs_of_a_page_run_and_print_what_it_shows(page: Path, tmp_path: Path) -> None:
    files_for_programs(tmp_path)
    parts = run_program(program_of(page), tmp_path).split(ENDS)
    printed = dict(zip(map(str, blocks(page, "python")), parts, strict=False))
    for program, output in list(programs_with_output(page)):
        now = shown(printed[str(program)], output.text)
        assert without_times(on_page(output, now)) == without_times(now), str(output)


@pytest.mark.parametrize(
    ("name", "which", "golden"),
    [
        ("traces", slice(0, None), "trace/resnet50"),
        ("compare", slice(1, -1), "trace/compare_slow_kernel"),
        ("compare", slice(-1, None), "text/compare_throughput"),
    ],
)
def test_what_a_page_shows_of_traces_and_throughput_is_in_the_golden_file(name: str, which: slice, golden: str) -> None:
    printed = (GOLDEN / f"{golden}.txt").read_text(encoding="utf-8")
    found = blocks(REPOSITORY / "docs" / f"{name}.md", "text")[which]
    assert found and [str(block) for block in found if block.text.strip() not in printed] == []


# ---- the tutorial: its program runs, and its commands say what the page says of them, as many lines as it has


def printed(command: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """What a command of the page prints, which must end well."""
    program, *arguments = shlex.split(command)
    if program == "python":
        run = run_fork(["-W", "ignore", *arguments], folder=folder, imports=("torch", "numpy"), environment={})
        assert run.returncode == 0, run.stderr
        return "".join(line for line in run.stderr.splitlines(True) if line.startswith("lightning-flops: "))
    assert cli.main(arguments) == 0
    return "".join(capsys.readouterr())


def test_the_tutorial_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    (program,) = blocks(TUTORIAL, "python")
    (tmp_path / "train.py").write_text(program.text)
    said = []
    for command, output in zip(blocks(TUTORIAL, "bash"), blocks(TUTORIAL, "text"), strict=True):
        said.append(printed(command.text, tmp_path, capsys))
        cut = output.text.rstrip().endswith(LEFT_OUT)
        lines = said[-1].splitlines()[: len(output.text.splitlines()) - cut]
        on_page(output, "\n".join([*lines, *([LEFT_OUT] * cut), ""]))
    slow, report, fixed, difference, verdicts = said
    busy = "(, starved of processors)?"  # where other programs run beside
    for line, folder in ((slow, "slow"), (fixed, "fixed")):
        # Forward 2 x 32 x 1024 x (64 + 8), backward 2 x 32 x 1024 x (64 + 2 x 8).
        figures = r"lightning-flops: FLOPs of step 5: 9\.96 MFLOPs and .* a step, .* samples/s \(wall clock\)" + busy
        figures += r"\."
        assert re.fullmatch(rf"{figures} Page: {folder}/lightning_flops/profile\.html\n", line)
    assert re.search(r"^data wait [5-9]\d\.\d% █", report, re.MULTILINE)
    told = re.search(r"more than noise explains \(", " ".join(difference.split()))
    if told is not None:  # where other programs left both runs their processors
        assert re.search(r"^By cause: .*less waiting -", difference, re.MULTILINE)
        assert "Most of it: data wait -" in difference
    assert [re.sub(r" B/A is .*", "", line) for line in verdicts.splitlines()] == [
        "lightning-flops compare: --fail-if 'hardware_flops > 1' does not hold: hardware_flops",
        "lightning-flops compare: --fail-if 'cpu_time_sec > 1.5' does not hold: cpu_time_sec",
    ]


def commands() -> list[tuple[Block, str]]:
    """The lines of bash, and in a console those that were typed."""
    return [
        (block, line.removeprefix("$ "))
        for page in PAGES
        for block in blocks(page)
        for line in block.text.splitlines()
        if (block.language == "bash" and line.strip()) or (block.language == "console" and line.startswith("$ "))
    ]


@pytest.mark.parametrize(("block", "command"), [pytest.param(*one, id=f"{one[0]}-{one[1][:50]}") for one in commands()])
def test_a_command_is_one_that_would_run(block: Block, command: str) -> None:
    assert problem_of(command) is None


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page)], ids=lambda page: page.name)
def test_the_first_command_of_a_page_runs_on_files_of_the_clone(page: Path) -> None:
    first = blocks(page)[0]
    words = shlex.split(first.text.splitlines()[0]) if first.language == "bash" else []
    assert [word for word in words if Path(word).suffix and not (REPOSITORY / word).is_file()] == []


def problem_of(command: str) -> str | None:
    """Why *command* would not run, or None."""
    words = shlex.split(command, comments=True)
    while words and (variable := re.match(r"([A-Z_]+)=", words[0])):
        words = words[1:]
        if variable[1] not in (entry_points.SWITCH, entry_points.SETTINGS, entry_points.LOG_DIR):
            return f"no variable of ours: {variable[1]}"
    match words:
        case ["pip", "install", wanted]:
            extras = re.fullmatch(r"\.\[(\w+(?:,\w+)*)\]", wanted)
            known = importlib.metadata.metadata("lightning-flops").get_all("Provides-Extra", [])
            return None if extras and set(extras[1].split(",")) <= set(known) else f"no such extras: {wanted}"
        case ["make", target]:
            rules = re.findall(r"^([\w.-]+):", (REPOSITORY / "Makefile").read_text(), re.MULTILINE)
            return None if target in rules else f"no target {target}"
        case ["tensorboard", "--logdir", _] | ["python", "train.py", *_]:
            return None
        case ["lightning-flops", *arguments]:
            return refused(arguments)
        case ["python" | "torchrun" | "deepspeed", *launched]:
            return problem_of_launch(launched)
    return "unknown to this test"


def problem_of_launch(words: list[str]) -> str | None:
    """Why what a launcher starts would not run: our command, or an example with flags of its own."""
    for place, word in enumerate(words):
        if word in ("lightning_flops", "lightning-flops"):
            return refused(words[place + 1 :])
        if word.startswith("examples/"):
            source = REPOSITORY / word
            flags = [flag for flag in words[place + 1 :] if flag.startswith("--")]
            if not source.is_file():
                return f"no file {word}"
            return next((f"no flag {flag}" for flag in flags if f'"{flag}"' not in source.read_text()), None)
    return "starts nothing of ours"


def refused(arguments: list[str]) -> str | None:
    """Why our command refuses *arguments*, or None."""
    try:
        cli.parser().parse_args(arguments)
    except (SystemExit, argparse.ArgumentError) as end:
        return f"refused: {end}"
    return None


# ---- links, and the site


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_and_pictures_of_a_page_exist(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
        assert target.startswith("https://") or (page.parent / target).is_file(), target


def test_every_public_name_is_on_the_page_of_functions() -> None:
    page = (REPOSITORY / "docs" / "api.md").read_text()
    listed = re.findall(r"^::: lightning_flops\.(\w+)$", page, re.MULTILINE)
    assert set(listed) == set(lightning_flops.__all__) - {"__version__"}


# ---- docs/architecture.md names what is there

PAGE = (REPOSITORY / "docs" / "architecture.md").read_text(encoding="utf-8")
PACKAGE = REPOSITORY / "lightning_flops"


def test_every_file_and_folder_that_the_page_names_is_there() -> None:
    named = re.findall(r"`([\w./]+(?:\.py|/))`", PAGE)
    assert len(named) > 40
    # A file may be named beside another one of its folder.
    there = {name for name in named if (REPOSITORY / name).exists() or (PACKAGE / name).exists()}
    assert [name for name in named if name not in there and not list(PACKAGE.glob(f"*/{name}"))] == []


def test_every_folder_of_the_package_has_its_place_on_the_page_which_is_short() -> None:
    folders = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    assert {folder for folder in folders if f"`{folder}/`" not in PAGE} == set()
    assert len(PAGE.splitlines()) <= 100


# ---- benchmarks/results: what was measured, and of which code


RESULTS = sorted((REPOSITORY / "benchmarks" / "results").glob("*.md"))


@pytest.mark.parametrize("page", RESULTS, ids=lambda page: page.name)
def test_a_page_of_results_names_its_commit_and_some_page_or_target_leads_to_it(page: Path) -> None:
    assert re.search(r"\bcommit [0-9a-f]{12}\b", page.read_text())
    assert any(f"benchmarks/results/{page.name}" in one.read_text() for one in PAGES)
