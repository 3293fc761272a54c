"""The README and the pages of ``docs/``: their blocks of code, and what stands below a program as its output.

A block of ``text`` that follows a program of ``python`` holds what that program prints, with ``[...]`` for lines that
the page leaves out. Figures of time are another machine's, and are masked; everything else is compared.
``REWRITE_GOLDEN_FILES=1`` writes what is printed into the page anew; read what changed before you commit it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.forks import LIGHTNING, run_fork
from tests.golden_files import REWRITE_VARIABLE
from tests.ranks import DEEPSPEED_ON_CPU

REPOSITORY = Path(__file__).parent.parent
README = REPOSITORY / "README.md"
PAGES = (README, *sorted((REPOSITORY / "docs").glob("*.md")))
LEFT_OUT = "[...]"

_FENCED = re.compile(r"^```(?P<language>\w*)[^\n]*\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL)

_PARTS_OF_A_STEP = (
    "data wait|transfer|forward|backward|optimizer|other|global step|rollout|scoring|training|rewards|rest"
)
_SPEAKS_OF_TIME = re.compile(
    r"^A typical step: |latency:|latency min / |FLOPS per GPU|samples/second|tokens/second|^ +(typical|mean), "
    rf"|^({_PARTS_OF_A_STEP}) +[\d.]+ +[\d.]+%"
)
_FIGURE = re.compile(r"\d[\d.,]*(?: ?[numkKMGT]?(?:s\b|FLOPS\b|FLOP/s)|%| [KM](?= |$))?")
_OF_A_MODULE = re.compile(r",?\s*<fwd latency[^>]*>")


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """A fenced block of a page."""

    page: Path
    line: int  #: Of the page, where its text begins.
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.page.name}:{self.line}"


def blocks(page: Path, language: str | None = None) -> list[Block]:
    """The fenced blocks of *page*, in their order; of one *language*, if one is given."""
    text = page.read_text(encoding="utf-8")
    found = (
        Block(page=page, line=text.count("\n", 0, one.start()) + 2, language=one["language"], text=one["text"])
        for one in _FENCED.finditer(text)
    )
    return [one for one in found if language in (None, one.language)]


def programs_with_output(page: Path) -> Iterator[tuple[Block, Block]]:
    """Each program of *page* that has its output below it, with that output."""
    found = blocks(page)
    for program, output in zip(found, found[1:], strict=False):
        if (program.language, output.language) == ("python", "text"):
            yield program, output


def run_program(text: str, folder: Path) -> str:
    """What a program of a page prints in *folder*."""
    (folder / "program.py").write_text(text)
    environment = {**DEEPSPEED_ON_CPU, "COLUMNS": "120"}
    run = run_fork(["-W", "ignore", "program.py"], folder=folder, imports=LIGHTNING, environment=environment)
    assert run.returncode == 0, run.stdout[-2000:] + run.stderr[-4000:]
    return run.stdout


def on_page(output: Block, now: str) -> str:
    """The text of *output*: what stands on its page, or *now*, if golden files are to be written anew."""
    if os.environ.get(REWRITE_VARIABLE) != "1":
        return output.text
    text = output.page.read_text(encoding="utf-8")
    output.page.write_text(text.replace(f"```text\n{output.text}```", f"```text\n{now}```", 1), encoding="utf-8")
    return now


def without_times(text: str) -> str:
    """*text* with every figure masked on the lines that speak of time, and the spaces that align them.

    What the tree says of a module's time, in angle brackets, is taken out: figures decide where its lines break.
    """
    return "\n".join(_masked(line) for line in _OF_A_MODULE.sub("", text).splitlines())


#: What a report says in addition on a busy machine.
_STARVED = re.compile(r"^STARVED\. For .*?starved\s+run\.(?:\s+Give\s+it\s.*?again\.)?\n", re.MULTILINE | re.DOTALL)


def shown(printed: str, block: str) -> str:
    """Of what was *printed*, the parts that *block* shows: each begins and ends with a line as in the block.

    Raises:
        LookupError: nothing that was printed begins or ends as a part does.
    """
    lines = _STARVED.sub("", printed).splitlines()
    masked = [_masked(line) for line in lines]
    end, parts = 0, []
    for part in block.split(LEFT_OUT):
        if part.strip():
            first, *_, last = [*(asked := part.strip("\n").splitlines()), asked[-1]]
            begin = _place(masked, first, end)
            end = _place(masked, last, begin + (len(asked) > 1)) + 1
            parts.append("\n".join(lines[begin:end]))
    return f"\n{LEFT_OUT}\n".join(parts) + "\n"


def _place(masked: list[str], line: str, after: int) -> int:
    for place in range(after, len(masked)):
        if masked[place] == _masked(line):
            return place
    raise LookupError(f"no line was printed that is, but for times: {line}")


def _masked(line: str) -> str:
    if not _SPEAKS_OF_TIME.search(line):
        return line.rstrip()
    line = re.sub(r"(typical|mean|min|max), [mu]?s", r"\1, ~", line)
    line = re.sub(r"(over the wall clock\.).*", r"\1", line)  # what follows breaks where figures let it
    return re.sub(r" +", " ", _FIGURE.sub("~", line)).rstrip()
