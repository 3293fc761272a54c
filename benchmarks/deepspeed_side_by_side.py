"""Runs each program of ``deepspeed_rows`` with DeepSpeed's own profiler and with this one, and writes what both print.

``python -m benchmarks.deepspeed_side_by_side`` replaces the marked part of ``docs/deepspeed.md``. What stands there in
grey boxes is what the two commands printed, less the lines that a row is not about; a box says where it leaves any out.
The FLOPs that this project reports are compared with those worked out by hand here, and a difference stops the script.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.machine import code_in_words, machine_in_words, versions

REPOSITORY = Path(__file__).parent.parent
PAGE = REPOSITORY / "docs" / "deepspeed.md"
BEGIN = "<!-- From here on, benchmarks/deepspeed_side_by_side.py writes. -->"
LEFT_OUT = "[...]"

LAYER = 2 * 8 * 256 * 256
"""FLOPs of the forward of a linear layer from 256 to 256 features, on a batch of 8."""

SUMMARY = (r"^Profile Summary", r"^The report came out", r"^fwd flops per GPU:")


@dataclass(frozen=True, kw_only=True)
class Row:
    """One way in which DeepSpeed's own profiler fails, and the program that shows it."""

    name: str
    """Of the program."""
    title: str
    flops_by_hand: int | None
    """Forward FLOPs of the counted step on rank 0; None if the program never finishes one."""
    by_hand: str
    """How they are worked out, and what else is to be seen."""
    keep: tuple[str, ...]
    """Patterns of the lines that the row is about, in both outputs."""
    block: str | None = None
    """Pattern of a line from which everything is kept, up to a closing parenthesis alone on its line."""
    ranks: int = 1


ROWS = (
    Row(
        name="root_module",
        title="The root module",
        flops_by_hand=2 * LAYER,
        by_hand=(
            "Two products of 2 × 8 × 256 × 256 = 1,048,576 FLOPs, one in the root's own forward. DeepSpeed loses "
            "that one, and its root's latency is the time since 1970."
        ),
        keep=(*SUMMARY, r"^fwd MACs per GPU"),
        block=r"^Net\($",
    ),
    Row(
        name="accumulation",
        title="Gradient accumulation",
        flops_by_hand=4 * 2 * LAYER,
        by_hand=(
            "Four micro-steps of two layers: 8 × 1,048,576 FLOPs and 4 × 8 samples a step. DeepSpeed prints one "
            "report a micro-step, each with the FLOPs and samples of that micro-step; the last divides them by "
            "the time of the step."
        ),
        keep=(*SUMMARY, r"^batch size per GPU", r"^iter latency", r"^samples/second:"),
    ),
    Row(
        name="samples_per_second",
        title="samples/second",
        ranks=2,
        flops_by_hand=2 * 2 * LAYER,
        by_hand=(
            "Both ranks see the same 8 samples in each of the two micro-steps of a step: 16 samples a step, "
            "whatever the number of ranks. DeepSpeed multiplies by the world size and leaves the accumulation "
            "out."
        ),
        keep=(
            *SUMMARY,
            r"^world size",
            r"^data parallel size:",
            r"^model parallel size",
            r"^batch size",
            r"^iter latency",
            r"^samples/second:",
        ),
    ),
    Row(
        name="step_number",
        title="The step's number",
        flops_by_hand=2 * LAYER,
        by_hand=(
            "`profile_step` is 2: the step that begins after two steps. DeepSpeed's report calls it 3. Ours names"
            " the counted step, the timed ones, and the step at which the report came out."
        ),
        keep=SUMMARY,
    ),
    Row(
        name="zero_3",
        title="ZeRO-3",
        ranks=2,
        flops_by_hand=2 * 4 * LAYER,
        by_hand=(
            "Two layers from 512 to 512 features: 2 × 2 × 8 × 512 × 512 = 8,388,608 FLOPs and 2 × (512 × 512 + "
            "512) = 525,312 parameters. DeepSpeed counts each product twice and takes a rank's part for the "
            "model."
        ),
        keep=(*SUMMARY, r"^params ", r"^trainable params"),
    ),
    Row(
        name="two_forwards",
        title="Two forwards and one backward",
        flops_by_hand=4 * LAYER,
        by_hand="Two forwards of two layers: 4 × 1,048,576 FLOPs. DeepSpeed's own timers end the training.",
        keep=(*SUMMARY, r"Error", r"^trained"),
    ),
    Row(
        name="lightnings_self",
        title="`self(x)` in Lightning's training_step",
        flops_by_hand=2 * LAYER,
        by_hand=(
            "Two layers. Lightning runs `training_step` inside the engine's forward, so `self(x)` is a forward "
            "inside a forward. (Lightning's own messages are in the boxes, too; the report is in `profile.txt`.)"
        ),
        keep=(*SUMMARY, r"Error", r"^trained"),
    ),
    Row(
        name="pipeline",
        title="PipelineEngine",
        ranks=2,
        flops_by_hand=4 * 2 * LAYER,
        by_hand=(
            "Stage 0 has two of the four layers, and a step four micro-batches: 8 × 1,048,576 FLOPs, as has "
            "stage 1. Rank 0 reports on both. The bubble is the time in which a stage waits for the other."
        ),
        keep=(*SUMMARY, r"Error", r"^params (per|of)", r"^bubble +\d", r"^(stage|[01]) +(ranks|\d) ", r"^trained"),
    ),
    Row(
        name="compiled",
        title="torch.compile",
        flops_by_hand=2 * LAYER,
        by_hand=(
            "Two layers. Step 0 compiles in both. DeepSpeed's hooks make step 4, the profiled one, compile "
            "everything anew, and its latency is the compiler's."
        ),
        keep=(*SUMMARY, r"^fwd latency:", r"^steps of more", r"^  step \d"),
    ),
    Row(
        name="evaluation",
        title="Evaluation between steps",
        flops_by_hand=2 * LAYER,
        by_hand=(
            "Two layers on a batch of 8. The forward on 1,600 samples under `no_grad` and `eval()` is none of the "
            "step's: DeepSpeed adds its time to the step's forward; ours lists it as left out."
        ),
        keep=(*SUMMARY, r"^fwd latency:", r"Other time during profiling", r"user's own clock"),
    ),
    Row(
        name="attention_by_keywords",
        title="Attention called by keywords",
        flops_by_hand=LAYER + 2 * (2 * 8 * 4 * 16 * 16 * 4),
        by_hand="One layer, and two products of 2 × 8 × 4 × 16 × 16 × 4 FLOPs.",
        keep=(*SUMMARY, r"Error", r"^trained"),
    ),
    Row(
        name="einsum_of_a_list",
        title="einsum of a list",
        flops_by_hand=LAYER + 2 * 8 * 8 * 256,
        by_hand="One layer, and a product of 2 × 8 × 8 × 256 FLOPs.",
        keep=(*SUMMARY, r"Error", r"^trained"),
    ),
    Row(
        name="convolution_of_one_image",
        title="A convolution without a batch dimension",
        flops_by_hand=LAYER + 2 * (3 * 6 * 254) * 9,
        by_hand="One layer, and a 3 × 3 convolution to 3 × 6 × 254 values: 2 × 9 FLOPs each.",
        keep=(*SUMMARY, r"Error", r"^trained"),
    ),
    Row(
        name="packed_sequence",
        title="PackedSequence",
        flops_by_hand=7 * 2 * (256 + 256) * 4 * 256,
        by_hand="Seven time steps, each 2 × (256 + 256) × 4 × 256 FLOPs.",
        keep=(*SUMMARY, r"Error", r"^trained"),
    ),
    Row(
        name="scripted_child",
        title="A child made by torch.jit.script",
        flops_by_hand=2 * LAYER,
        by_hand="Two layers.",
        keep=(*SUMMARY, r"Error", r"^trained"),
    ),
    Row(
        name="exception_in_the_step",
        title="An exception in the profiled step",
        flops_by_hand=None,
        by_hand=(
            "Each step from the profiled one on raises in the user's forward. DeepSpeed's timer then hides the "
            "user's error behind its own, and functions stay patched and modules hooked. Nothing of ours stays; "
            "there is no whole step to report."
        ),
        keep=(r"^raised", r"^torch\.nn\.functional", r"^hooks", r"^attributes", r"profiled"),
    ),
    Row(
        name="the_block_itself",
        title="What the block switches on besides",
        flops_by_hand=2 * LAYER,
        by_hand=(
            "Twelve steps, of which one is profiled. DeepSpeed's block forces `wall_clock_breakdown` for the "
            "whole run: two lines of log a step, and on a GPU a synchronization for each timer."
        ),
        keep=(*SUMMARY, r"wall_clock", r"time \(ms\)"),
    ),
    Row(
        name="tensorboard",
        title="TensorBoard",
        flops_by_hand=2 * LAYER,
        by_hand="Two layers. The same config, with DeepSpeed's TensorBoard monitor on.",
        keep=(*SUMMARY, r"^tags", r"^  [A-Za-z_]+/"),
    ),
    Row(
        name="module_depth",
        title="module_depth",
        flops_by_hand=4 * LAYER,
        by_hand=(
            "`module_depth` is 1: the root and its two children. DeepSpeed's aggregated profile stops at the "
            "root, and its detailed one shows every module."
        ),
        keep=(*SUMMARY, r"^depth", r"^    (params|MACs|fwd latency) "),
        block=r"^Sequential\($",
    ),
    Row(
        name="latency",
        title="Latencies",
        flops_by_hand=60 * 2 * 8 * 64 * 64,
        by_hand=(
            "Sixty small layers: 60 × 2 × 8 × 64 × 64 FLOPs. DeepSpeed times the step it counts, with a hook, a "
            "synchronization and a clock around every module and a Python function around every operator. Ours "
            "times other steps, in which nothing of that is there."
        ),
        keep=(*SUMMARY, r"^fwd latency:", r"user's own clock"),
    ),
)


def excerpt(text: str, patterns: Iterable[str], *, block: str | None = None) -> str:
    """The lines of *text* that match one of *patterns*, and ``[...]`` where others are left out.

    From a line that matches *block* to the next that is only a closing parenthesis, every line is kept.
    """
    kept: list[str] = []
    inside = False
    for line in (line.rstrip() for line in text.splitlines()):
        inside = inside or (block is not None and re.search(block, line) is not None)
        if inside or any(re.search(pattern, line) for pattern in patterns):
            kept.append(line)
            inside = inside and line != ")"
        elif not kept or kept[-1] != LEFT_OUT:
            kept.append(LEFT_OUT)
    return "\n".join(kept)


def command_of(row: Row, *, ours: bool) -> list[str]:
    """What runs *row* in Python, with DeepSpeed's own profiler or with ours."""
    return [*(["-m", "lightning_flops", "run"] if ours else []), "-m", "benchmarks.deepspeed_rows", row.name]


def run_row(row: Row, *, ours: bool, folder: Path) -> tuple[int, str]:
    """Exit status and output of rank 0, which writes its files to *folder*."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    processes = []
    for rank in range(row.ranks):
        environment = {
            "PYTHONPATH": str(REPOSITORY),
            "PYTHONWARNINGS": "ignore",
            "OMP_NUM_THREADS": "1",
            "DS_ACCELERATOR": "cpu",
            "CUDA_VISIBLE_DEVICES": "",
            "TORCH_EXTENSIONS_DIR": str(REPOSITORY / ".cache" / "torch_extensions"),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "WORLD_SIZE": str(row.ranks),
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
        }
        with (folder / f"output{rank}.txt").open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, *command_of(row, ours=ours)],
                cwd=folder,
                env={**os.environ, **environment},
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        processes.append(process)
    for process in processes:
        try:
            process.wait(timeout=240)
        except subprocess.TimeoutExpired:
            process.kill()  # which its exit status tells
            process.wait()
    return processes[0].returncode, (folder / "output0.txt").read_text(errors="replace")


def forward_flops(folder: Path) -> int | None:
    """What our profile below *folder* says of the counted step; None if there is no profile."""
    paths = list(folder.rglob("profile.json"))
    return int(json.loads(paths[0].read_text())["flops"]["forward"]) if paths else None


class WrongCountError(Exception):
    """This project's count is not the one worked out by hand, or its run failed."""


def section(row: Row) -> str:
    """The page's section on *row*, after both runs."""
    lines = [f"### {row.title}", "", row.by_hand, ""]
    for ours in (False, True):
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            status, output = run_row(row, ours=ours, folder=folder)
            if ours:
                found = forward_flops(folder)
                if status != 0 or found != row.flops_by_hand:
                    raise SystemExit(
                        f"{row.name}: {found} FLOPs, by hand {row.flops_by_hand}; status {status}\n{output}"
                    )
                if row.name == "lightnings_self":
                    (text,) = folder.rglob("profile.txt")
                    output = text.read_text() + output
            else:
                output = "\n".join(line for line in output.splitlines() if "frame.py" not in line)
        who = "with this profiler" if ours else "with DeepSpeed's own"
        command = " ".join(["python", *command_of(row, ours=ours)])
        lines += [
            f"`{command}`, {who}, exit status {status}:",
            "",
            "```text",
            excerpt(output, row.keep, block=row.block),
            "```",
            "",
        ]
    if row.flops_by_hand is not None:
        lines += [f"`profile.json` has {row.flops_by_hand:,} forward FLOPs in the step, as by hand.", ""]
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run every row, or the named ones, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("rows", nargs="*", help="print these rows' sections in place of writing the page")
    chosen = parser.parse_args(arguments).rows
    if chosen:
        for row in ROWS:
            if row.name in chosen:
                print(section(row))
        return
    sections = []
    failed = False
    for row in ROWS:
        print(row.name, flush=True)
        try:
            sections.append(section(row))
        except WrongCountError as error:
            print(error, file=sys.stderr, flush=True)
            failed = True
    if failed:
        raise SystemExit("the page was not written")
    written = PAGE.read_text().partition(BEGIN)[0]
    installed = ", ".join(
        f"{name} {version}" for name, version in versions(("torch", "deepspeed", "lightning")).items()
    )
    PAGE.write_text(
        "\n".join([written + BEGIN, "", f"{machine_in_words()}; {installed}; {code_in_words()}.", "", *sections])
    )


if __name__ == "__main__":
    main()
