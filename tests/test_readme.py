"""The README's program runs, prints what the README says, and its words name things that exist.

``REWRITE_GOLDEN_FILES=1`` writes the output into the README anew; read what changed before you commit it.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from tests.forks import run_fork
from tests.golden_files import REWRITE_VARIABLE

REPOSITORY = Path(__file__).parent.parent
README = REPOSITORY / "README.md"
LEFT_OUT = "[...]"

SHOWN = (
    ("Classifier on", "One step:"),
    ("Profile Summary", "The report came out"),
    ("fwd MACs per GPU", "samples/second"),
    ("mean, ", "global step"),
    ("Classifier(", ")"),
)
TREE = "Classifier("
"""First and last line of each part of the output that the README shows, by how they begin."""

PARTS_OF_A_STEP = "data wait|transfer|forward|backward|optimizer|other|global step"
SPEAKS_OF_TIME = re.compile(
    rf"^One step: |latency:|FLOPS per GPU|samples/second|^ +mean, |^({PARTS_OF_A_STEP}) +[\d.]+ +[\d.]+%"
)
FIGURE = re.compile(r"\d[\d.,]*(?: ?[numkKMGT]?(?:s\b|FLOPS\b|FLOP/s)|%| [KM](?= |$))?")


OF_A_MODULE = re.compile(r",?\s*<fwd latency[^>]*>")


def block(language: str) -> str:
    """The README's first fenced block in *language*."""
    return README.read_text().split(f"```{language}\n", 1)[1].split("```", 1)[0]


def without_times(text: str) -> str:
    """*text* with every figure masked on the lines that speak of time, and the spaces that align them.

    What the tree says of a module's time, in angle brackets, is taken out: figures decide where its lines break.
    """
    lines = []
    for line in OF_A_MODULE.sub("", text).splitlines():
        if SPEAKS_OF_TIME.search(line):
            line = re.sub(r"mean, m?s", "mean, ~", line)
            line = re.sub(r"(over the wall clock\.).*", r"\1", line)  # what follows breaks where figures let it
            line = re.sub(r" +", " ", FIGURE.sub("~", line))
        lines.append(line)
    return "\n".join(lines)


def shown(output: str) -> str:
    """The parts of *output* that the README shows, with a line between them for what is left out."""
    lines = output.splitlines()
    parts = []
    for first, last in SHOWN:
        begin = next(place for place, line in enumerate(lines) if line.strip().startswith(first))
        end = next(place for place in range(begin, len(lines)) if lines[place].startswith(last))
        parts.append("\n".join(lines[begin : end + 1]))
    return f"\n{LEFT_OUT}\n".join(parts) + "\n"


@pytest.fixture(scope="module")
def output(tmp_path_factory: pytest.TempPathFactory) -> str:
    """What the README's program prints."""
    folder = tmp_path_factory.mktemp("readme")
    (folder / "program.py").write_text(block("python"))
    run = run_fork(["program.py"], folder=folder, environment={"COLUMNS": "120"})
    assert run.returncode == 0, run.stderr
    return run.stdout


def test_the_program_prints_what_the_readme_shows(output: str) -> None:
    if os.environ.get(REWRITE_VARIABLE) == "1":
        README.write_text(README.read_text().replace(f"```text\n{block('text')}```", f"```text\n{shown(output)}```", 1))
    assert without_times(block("text")) == without_times(shown(output))


def test_the_shown_counts_are_those_of_the_programs_layers(output: str) -> None:
    convolution = 2 * 32 * 8 * 8 * 32 * 3 * 3
    linear = 2 * 32 * (32 * 8 * 8) * 10
    assert re.search(rf"^fwd .* {convolution + linear:,} ", output, re.MULTILINE)
    # The images need no gradient, so the convolution's backward is its weight's alone.
    assert re.search(rf"^bwd \(measured\) .* {convolution + 2 * linear:,} ", output, re.MULTILINE)


def test_figures_of_time_and_nothing_else_are_masked() -> None:
    assert without_times("fwd latency:      33.8 ms") == "fwd latency: ~"
    assert (
        without_times("bwd FLOPS per GPU = 2 * fwd:  (measured) 1.2 GFLOPS")
        == "bwd FLOPS per GPU = ~ * fwd: (measured) ~"
    )
    assert (
        without_times("One step: 6.35 ms, 5,042.1 samples/s over the wall clock. MFU n/a: no")
        == "One step: ~, ~ samples/s over the wall clock."
    )
    assert without_times("optimizer    0.8    1.29%   0.5") == "optimizer ~ ~ ~"
    assert without_times("optimizer       0      0    249.74 KB") == "optimizer       0      0    249.74 KB"
    assert without_times("fwd flops per GPU:      2.49 M") == "fwd flops per GPU:      2.49 M"


def test_the_program_is_short() -> None:
    assert len(block("python").splitlines()) <= 25


def test_every_tag_the_readme_names_is_written_and_every_written_tag_is_named() -> None:
    from lightning_flops.report import scalars

    source = Path(scalars.__file__).read_text().split("def profile_scalars")[1].split("def monitor_scalars")[0]
    written = set(re.findall(r'^ {12}"(\w+)":', source, re.MULTILINE)) - {"heavy_operators_uncounted"}
    table = README.read_text().split("## What is measured")[1].split("## ")[0]
    named = {tag for row in table.splitlines() for tag in re.findall(r"`([a-z_]+)`", row.rpartition(" | ")[2])}
    assert named == written


@pytest.mark.parametrize("page", [README, *sorted((REPOSITORY / "docs").glob("*.md"))], ids=lambda page: page.name)
def test_links_and_pictures_of_a_page_exist(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
        assert (page.parent / target).is_file(), target
