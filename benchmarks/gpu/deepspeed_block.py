"""Part 8: the "flops_profiler" block of a DeepSpeed config, on a GPT: what it prints is kept as a page."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from typing import Any

import torch

from ..page import write_page
from .checks import Check, Here, Row, at_least, exactly, not_here, reported
from .nets import FIRST_STEP, SETTLES, batches_of, gpt_on, next_token_loss, size_for

PAGE = "gpu_deepspeed_block.txt"
_NO_DEEPSPEED = "DeepSpeed is not installed"


def _block(here: Here) -> Iterator[Row]:
    """An engine with the block alone, as a user has it."""
    if importlib.util.find_spec("deepspeed") is None:
        yield not_here("DeepSpeed's block", _NO_DEEPSPEED)
        return
    import deepspeed

    from lightning_flops.deepspeed import end_all, install

    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost"}.items():
        os.environ.setdefault(name, value)
    os.environ.setdefault("MASTER_PORT", "29517")
    install()
    size, steps, output = size_for(here), here.pick(20, 2), here.folder / "deepspeed_block.txt"
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": size.batch,
        "bf16": {"enabled": True},
        "flops_profiler": {
            "enabled": True, "profile_step": FIRST_STEP, "timing_steps": steps, "output_file": str(output)
        },
    }  # fmt: skip
    torch.manual_seed(0)
    model = gpt_on(here, size)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=here.on_gpu)  # DeepSpeed's own needs a compiler
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    for tokens in batches_of(size, here, FIRST_STEP + 1 + SETTLES + steps + 12):
        engine.backward(next_token_loss(engine(tokens), tokens))
        engine.step()
    here.settle()
    end_all()
    text = output.read_text(encoding="utf-8")
    if here.output is not None:
        write_page(here.output / PAGE, text.splitlines())
    yield at_least("DeepSpeed's block on a GPT: lines that it prints", len(text.splitlines()), 40)
    for wanted in ("params per GPU", "fwd flops per GPU", "fwd latency", "FLOPS per GPU"):
        yield exactly(f"DeepSpeed's block on a GPT: it has {wanted!r}", wanted in text, True)
    for line in text.splitlines():
        if line.startswith(("params per GPU", "fwd latency", "bwd latency", "step latency", "MFU")):
            yield reported(f"DeepSpeed's block: {line.partition(':')[0]}", line.partition(":")[2].strip())


CHECKS = (Check("DeepSpeed's block", _block, "its engine is made for a GPU"),)
