"""The README: its program runs and prints what the README says, and its figures are those of the pages it names."""

from __future__ import annotations

import platform
import re

import pytest

from lightning_flops.report import scalars
from tests.pages import PAGES, README, REPOSITORY, on_page, programs_with_output, run_program

PARTS_OF_A_STEP = {"data wait", "transfer", "forward", "backward", "optimizer", "other"}


@pytest.fixture(scope="module")
def printed(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The first lines that the README's program prints of its report."""
    ((program, _),) = programs_with_output(README)
    printed = run_program(program.text, tmp_path_factory.mktemp("readme"))
    return printed[printed.index("BoringModel on ") :].split("\n\n")[0] + "\n"


def of_any_machine(answer: str) -> tuple[list[str], list[float], set[str]]:
    """What is the same everywhere; the shares of the parts of the step, and their names."""
    lines = answer.replace(platform.machine(), "x86_64").replace("\n  ", " ").splitlines()  # as if nothing were wrapped
    parts = re.compile(r"(?: *[a-z ]+ [\d.]+%(?: █+)?)+")  # a small part, alone on its line, has no block
    bar = " ".join(line for line in lines if parts.fullmatch(line))
    shares = re.findall(r"([a-z ]*[a-z]) ([\d.]+)%", bar)
    exact = [line for line in lines if line.startswith("BoringModel on ") or "FLOPs a step" in line]
    (step,) = (line for line in lines if line.startswith("A typical step: "))
    step = step.removesuffix(" A step this short may read 0.1 ms too long.")  # as it is on most machines
    of_step = re.sub(r"~ (us|ms|s);", "~ s;", re.sub(r"[\d,.]*\d", "~", step))
    return [*exact, of_step], [float(share) for _, share in shares], {name.strip() for name, _ in shares}


def test_the_program_prints_what_the_readme_shows(printed: str) -> None:
    ((_, output),) = programs_with_output(README)
    exact, shares, names = of_any_machine(on_page(output, printed))
    now, shares_now, names_now = of_any_machine(printed)
    assert exact == now
    for of_the_parts, named in ((shares, names), (shares_now, names_now)):
        assert sum(of_the_parts) == pytest.approx(100, abs=0.31)  # six shares, each rounded to a tenth
        assert named <= PARTS_OF_A_STEP and len(named) >= 4


def test_the_shown_counts_are_those_of_the_programs_layers(printed: str) -> None:
    first, second = 2 * 32 * 32 * 4096, 2 * 32 * 4096 * 2
    # The batch needs no gradient, so the first layer's backward is its weight's alone.
    forward, backward = first + second, first + 2 * second
    params = 32 * 4096 + 4096 + 4096 * 2 + 2
    millions = [f"{flops / 1e6:.3g}" for flops in (forward + backward, forward, backward)]
    assert "{} MFLOPs a step: forward {} M, backward {} M. {:,} parameters.".format(*millions, params) in printed


def test_the_readme_is_short_and_so_is_its_program() -> None:
    ((program, _),) = programs_with_output(README)
    assert len([line for line in program.text.splitlines() if line]) <= 10
    assert len(README.read_text().splitlines()) <= 130


RESULTS = (
    ("zoo.md", r"([\d,]+) counts of (\d+) architectures of transformers and timm", r"^(\d+) architectures ran"),
    ("zoo.md", r"([\d,]+) are exact to the last FLOP, (\d+) differ", r"\*\*([\d,]+) exact, (\d+) explained, 0 wrong"),
    ("accuracy.md", r"exact on all (\d+), the", r"^\| lightning_flops \| (\d+) of \1 \|"),
    ("accuracy.md", r"seven peers is exact on (\d+)", r"^\| FlopCounterMode \| (\d+) of"),
    ("zoo.md", r"(\d+) more architectures did not run", r"(\d+) more did not, and say why"),
    ("lightning_suite.md", r"([\d,]+) pass with it; ", r"^\| Ended alike \(([\d,]+) passed"),
    ("lightning_suite.md", r"pass with it; (\d+) compare", r"^\| By construction \| (\d+) \|"),
    ("lightning_suite_rest.md", r"lightning_suite_rest.md\) (\d+) and", r"^\| Ended alike \(.*?([\d,]+) passed"),
    ("deepspeed_suite.md", r"deepspeed_suite.md\) (\d+) pass", r"^\| Ended alike \(.*?([\d,]+) passed"),
    ("loops.md", r"agree with it in (\d+) \(\[loops", r"^\*\*(\d+) of \d+ loops are right"),
    ("advice.md", r"In \d+ of (\d+) programs with one", r"^- quiet: .* what was planted in 100.0% of (\d+) runs"),
)


@pytest.mark.parametrize(("page", "said", "measured"), RESULTS)
def test_a_figure_of_trust_is_that_of_its_page(page: str, said: str, measured: str) -> None:
    words = " ".join(README.read_text().replace("\n- ", "\n").split())
    result = (REPOSITORY / "benchmarks" / "results" / page).read_text()
    ours, theirs = re.search(said, words), re.search(measured, result, re.MULTILINE)
    assert ours is not None and theirs is not None
    assert set(theirs.groups()) <= set(ours.groups())


@pytest.mark.parametrize("page", ["lightning_suite.md", "lightning_suite_rest.md", "deepspeed_suite.md"])
def test_no_test_of_a_framework_showed_a_fault(page: str) -> None:
    assert "\n| Faults | 0 |\n" in (REPOSITORY / "benchmarks" / "results" / page).read_text()


def test_the_failures_it_speaks_of_are_those_of_the_campaigns() -> None:
    result = (REPOSITORY / "benchmarks" / "results" / "faults.md").read_text()
    campaigns = re.findall(r"^\| \S+ \| (\w+) \| ([\d,]+) \| (\d+) \|$", result, re.MULTILINE)
    of_ours = [(int(tried), int(faults)) for raised, tried, faults in campaigns if raised == "RuntimeError"]
    signals = [(int(tried), int(faults)) for raised, tried, faults in campaigns if raised != "RuntimeError"]
    (tried, noticed), (interrupts, faulty) = (map(sum, zip(*rows, strict=True)) for rows in (of_ours, signals))
    words = " ".join(README.read_text().split())
    assert f"Of {tried} exceptions raised at random lines inside the profiler's hooks {noticed} were noticed" in words
    kept = f"{interrupts - faulty} came out and left nothing behind; after {faulty} the campaign could not"
    assert f"Of {interrupts} interrupts there, by Ctrl-C or a signal handler, {kept}" in words


def test_every_tag_that_is_named_is_written_and_every_written_tag_is_named() -> None:
    page = (REPOSITORY / "docs" / "reading.md").read_text()
    table = page.split("## What is measured")[1].split("## ")[0]
    named = {tag for row in table.splitlines() for tag in re.findall(r"`([a-z_]+)`", row.rpartition(" | ")[2])}
    assert named == set(scalars.PATHS)


def test_the_readme_names_every_page_of_its_table() -> None:
    pages = {page.stem for page in PAGES if page != README} - {"install", "architecture", "profile", "api", "reading"}
    assert {page for page in pages if f"(docs/{page}.md)" not in README.read_text()} == set()
