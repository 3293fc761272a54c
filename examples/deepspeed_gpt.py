"""Train a small GPT on bytes of English with DeepSpeed; nothing in this program knows of the profiler.

The text is Python's own language reference, half a megabyte that ships with every Python (``help("topics")`` shows
it). The profiler is switched on by the ``"flops_profiler"`` block of ``ds_config.json`` and by how it is started::

    lightning-flops run examples/deepspeed_gpt.py                      # one process
    torchrun --nproc-per-node 2 -m lightning_flops run examples/deepspeed_gpt.py --zero 3
    deepspeed --module lightning_flops run examples/deepspeed_gpt.py   # GPUs
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import os
import sys
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import deepspeed
import torch
from torch import Tensor, nn

CONTEXT = 128
BYTES = 256


class Block(nn.Module):
    """Attention to what came before, then a feed-forward network."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.feed_forward = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        """``(samples, tokens, width)`` to the same."""
        samples, tokens, width = x.shape
        projected: Tensor = self.qkv(self.attention_norm(x))
        q, k, v = projected.view(samples, tokens, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(samples, tokens, width))
        result: Tensor = x + self.feed_forward(x)
        return result


class Gpt(nn.Module):
    """Predicts each byte of a text from those before it."""

    def __init__(self, width: int = 128, layers: int = 4, heads: int = 4) -> None:
        super().__init__()
        self.bytes = nn.Embedding(BYTES, width)
        self.positions = nn.Embedding(CONTEXT, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, BYTES, bias=False)

    def forward(self, text: Tensor) -> Tensor:
        """Mean cross entropy, in nats a byte, of *text* ``(samples, CONTEXT + 1)``."""
        seen, next_bytes = text[:, :-1], text[:, 1:]
        x = self.bytes(seen) + self.positions.weight[: seen.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return nn.functional.cross_entropy(logits.flatten(0, 1), next_bytes.flatten())


def language_reference() -> Tensor:
    """The text, as a vector of bytes."""
    text = "\n".join(topics[name] for name in sorted(topics))
    return torch.tensor(list(text.encode()), dtype=torch.long)


def excerpts(text: Tensor, starts: Tensor) -> Tensor:
    """``(samples, CONTEXT + 1)`` bytes of *text*, from each of *starts* on."""
    return text[starts[:, None] + torch.arange(CONTEXT + 1)]


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line's settings."""
    parser = argparse.ArgumentParser(description="Train a small GPT on bytes of English with DeepSpeed.")
    parser.add_argument("--zero", type=int, choices=(0, 1, 2, 3), help="ZeRO stage in place of the config's")
    parser.add_argument("--steps", type=int, default=60, help="optimizer steps")
    parser.add_argument("--ds-config", type=Path, default=Path(__file__).with_name("ds_config.json"))
    parser.add_argument("--local_rank", type=int, default=0, help="DeepSpeed's launcher passes it")
    return parser.parse_args(arguments)


def read_config(options: argparse.Namespace) -> dict[str, Any]:
    """DeepSpeed's config, with the stage that the command line asks for."""
    config: dict[str, Any] = json.loads(options.ds_config.read_text())
    if options.zero is not None:
        config["zero_optimization"] = {**config.get("zero_optimization", {}), "stage": options.zero}
    return config


def join_the_others() -> None:
    """Join the other processes of this job; without a launcher, be the only one."""
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29555"}
    if "RANK" not in os.environ:
        os.environ.update(alone)
    if deepspeed.get_accelerator().device_name() == "cpu":
        # gloo sums up gradients as well, and this operator takes a minute to compile.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        torch.set_num_threads(1)
    deepspeed.init_distributed(verbose=False)


def _tensorboard() -> str:
    """The command that is installed beside this Python, as short as it can be typed from here."""
    command = Path(sys.executable).with_name("tensorboard")
    return os.path.relpath(command) if command.exists() else "tensorboard"


def main(arguments: list[str] | None = None) -> None:
    """Train, and print how well the text is predicted."""
    options = parse_arguments(arguments)
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    join_the_others()
    torch.manual_seed(0)
    model = Gpt()
    config = read_config(options)
    engine, _, _, _ = deepspeed.initialize(
        model=model, optimizer=torch.optim.AdamW(model.parameters(), lr=2e-3), config=config
    )

    text = language_reference()
    training, held_out = text[: -len(text) // 10], text[-len(text) // 10 :]
    checked = excerpts(held_out, torch.arange(0, len(held_out) - CONTEXT, len(held_out) // 64)[:32]).to(engine.device)
    drawn = torch.Generator().manual_seed(engine.global_rank)  # other excerpts on every rank
    samples, batches = engine.train_micro_batch_size_per_gpu(), engine.gradient_accumulation_steps()

    for step in range(options.steps + 1):
        if step % 20 == 0 or step == options.steps:
            engine.eval()
            with torch.no_grad():
                bits = engine(checked).item() / math.log(2)
            engine.train()
            if engine.global_rank == 0:
                print(f"step {step:4d}: {bits:.3f} bits a byte of the held-out text", flush=True)
        if step == options.steps:
            break
        for _ in range(batches):
            starts = torch.randint(len(training) - CONTEXT, (samples,), generator=drawn)
            loss = engine(excerpts(training, starts).to(engine.device))
            engine.backward(loss)
            engine.step()
    board = config.get("tensorboard", {})
    if engine.global_rank == 0 and board.get("enabled") and board.get("output_path"):
        print(f"Logs are in {Path(board['output_path'], board.get('job_name', ''))}")
        print(f"See them in TensorBoard: {_tensorboard()} --logdir {board['output_path']}", flush=True)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
