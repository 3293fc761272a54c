"""``lightning-flops memory FILE.py:FUNCTION``: what a training step holds at its peak, and the batch that fits."""

from __future__ import annotations

import argparse
import re

from lightning_flops.commands.common import command, example, option, print_report
from lightning_flops.errors import LightningFlopsError

# Memory of devices that have one size, as their vendors write it.
_GIGABYTES = {
    **{"T4": 16, "L4": 24, "L40": 48, "L40S": 48, "A10": 24, "A10G": 24, "A30": 24, "A40": 48, "RTX A6000": 48},
    **{"RTX 3090": 24, "RTX 4090": 24, "RTX 5090": 32, "H100": 80, "H200": 141, "MI250X": 128, "MI300X": 192},
}


def _available(options: argparse.Namespace) -> float | None:
    """Bytes that may be held; None: no limit was given."""
    name = options.device
    if options.bytes is not None or name in (None, "cpu"):
        return options.bytes  # type: ignore[no-any-return]
    if size := re.search(r"(\d+) ?GB\b", name, re.IGNORECASE):
        return int(size[1]) * 1e9
    for known, gigabytes in _GIGABYTES.items():
        if re.fullmatch(rf"(NVIDIA |GEFORCE |AMD INSTINCT )*{known}", name, re.IGNORECASE):
            return gigabytes * 1e9
    raise LightningFlopsError(
        f"--device {name} has no one size of memory here: add it (A100-80GB), or use --bytes; known: "
        f"{', '.join(_GIGABYTES)}"
    )


@command(
    option("example", metavar="FILE.py:FUNCTION", help="returns a model and a batch, and an optimizer if there is one"),
    option("--device", metavar="NAME", help="a device whose memory it must fit: H100, A100-80GB; cpu for a run on one"),
    option("--bytes", type=float, metavar="N", help="what may be held: 80e9"),
    option("--batch", type=int, metavar="N", help="size of the batch; by default that of the example"),
    option("--largest", action="store_true", help="find the largest batch that fits"),
    option("--json", action="store_true", help="print JSON"),
)
def memory(options: argparse.Namespace) -> None:
    """Say what a model's training step holds at its peak, which modules keep it, and the largest batch that fits.

    Two eager steps run on fake tensors: no memory is taken. They are those of a GPU, but for --device cpu.

    Example:
      lightning-flops memory my_models.py:gpt2 --device H100 --largest
    """
    from lightning_flops.pytorch import predict_memory

    available = _available(options)
    if options.largest and available is None:
        raise LightningFlopsError("--largest needs --bytes, or a --device whose memory is known, as H100")
    found = predict_memory(*example(options.example, most=3), device="cpu" if options.device == "cpu" else "cuda")
    if options.batch is not None:
        found = found.at(batch=options.batch)
    print_report(found.report(available_bytes=available, largest=options.largest, checkpoints=True), options)
