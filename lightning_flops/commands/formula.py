"""``lightning-flops formula FILE.py:FUNCTION``: the FLOPs of a model as a function of its batch's sizes."""

from __future__ import annotations

import argparse

from lightning_flops.commands.common import by_name, command, example, option, print_report
from lightning_flops.errors import LightningFlopsError
from lightning_flops.units import shown


def _varying(text: str) -> tuple[str | int, dict[int, str] | list[int]]:
    """A tensor, and its axes with or without names: ``input_ids=0,1``, ``0=0:batch,2:length``."""
    tensor, _, axes = text.partition("=")
    found = [part.partition(":") for part in axes.split(",")]
    try:
        named = {int(axis): name for axis, _, name in found if name}
        return int(tensor) if tensor.isdecimal() else tensor, named or [int(axis) for axis, _, _ in found]
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a tensor, = and axes, got {shown(text)}") from None


@command(
    option("example", metavar="FILE.py:FUNCTION", help="returns a model and a batch"),
    option(
        "--vary",
        type=_varying,
        action="append",
        required=True,
        metavar="TENSOR=AXIS,...",
        help="axes of a tensor of the batch that vary, by its name or position; AXIS:NAME names one",
    ),
    option(
        "--at",
        type=by_name(int, "batch=8,sequence=512"),
        action="append",
        default=[],
        metavar="NAME=SIZE,...",
        help="sizes to print FLOPs of",
    ),
    option("--causal-attention", choices=("full", "half"), default="full", help="of the score matrix (default: full)"),
    option("--json", action="store_true", help="print JSON"),
)
def formula(options: argparse.Namespace) -> None:
    """Say what a model's FLOPs are as a function of its batch's sizes.

    They are those of a forward and a backward, exact, and counted on fake tensors.

    Example:
      lightning-flops formula my_models.py:bert --vary input_ids=0,1 --at batch=8,sequence=4096
    """
    from lightning_flops.pytorch import flops_formula

    model, batch = example(options.example)
    found = flops_formula(model, batch, vary=dict(options.vary), causal_attention=options.causal_attention)
    for sizes in options.at:
        try:
            found(**sizes)
        except TypeError as error:
            raise LightningFlopsError(f"--at: {error}") from error
    print_report(found, options)
