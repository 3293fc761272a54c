"""Train a small network on handwritten digits with several processes, and see one report of all of them.

Each process has the whole network and digits of its own (``--strategy ddp``), a shard of the parameters and digits of
its own (``fsdp2``), or rows and columns of the layers and the same digits as the others (``tensor``). Try::

    torchrun --nproc-per-node 2 examples/train_ddp.py
    torchrun --nproc-per-node 2 examples/train_ddp.py --slow-rank 1 --slow-part data
    torchrun --nproc-per-node 2 examples/train_ddp.py --strategy tensor
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import logging
import os
import time
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.data import DataLoader, Dataset

from lightning_flops import FlopsProfilerCallback, render_text

if TYPE_CHECKING:
    import lightning.pytorch as pl
    from lightning.pytorch.strategies import ModelParallelStrategy
else:
    # Either name of Lightning will do.
    pl = importlib.import_module("lightning.pytorch" if importlib.util.find_spec("lightning") else "pytorch_lightning")
    ModelParallelStrategy = importlib.import_module(f"{pl.__name__}.strategies").ModelParallelStrategy

PIXELS, HIDDEN, DIGITS = 64, 256, 10
PAUSE_SEC = 0.02


class Digits(Dataset[tuple[Tensor, Tensor]]):
    """Images as rows of 64 pixels, and what they show; reading a batch takes *pause_sec* more."""

    def __init__(self, pause_sec: float) -> None:
        digits = load_digits()
        self.images = torch.tensor(digits.data, dtype=torch.float32) / 16
        self.labels = torch.tensor(digits.target)
        self.pause_sec = pause_sec

    def __len__(self) -> int:
        return len(self.labels)

    def __getitems__(self, indices: list[int]) -> list[tuple[Tensor, Tensor]]:
        """The rows of one batch."""
        time.sleep(self.pause_sec)
        return [(self.images[index], self.labels[index]) for index in indices]

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        """One row."""
        return self.images[index], self.labels[index]


class Network(nn.Module):
    """Two hidden layers; computing the second takes *pause_sec* more."""

    def __init__(self, pause_sec: float) -> None:
        super().__init__()
        self.first = nn.Linear(PIXELS, HIDDEN)
        self.second = Slow(HIDDEN, PIXELS, pause_sec=pause_sec)
        self.head = nn.Linear(PIXELS, DIGITS)

    def forward(self, images: Tensor) -> Tensor:
        """Logits ``(samples, 10)`` of *images* ``(samples, 64)``."""
        logits: Tensor = self.head(torch.relu(self.second(torch.relu(self.first(images)))))
        return logits


class Slow(nn.Linear):
    """A linear layer that dawdles."""

    def __init__(self, inputs: int, outputs: int, *, pause_sec: float) -> None:
        super().__init__(inputs, outputs)
        self.pause_sec = pause_sec

    def forward(self, inputs: Tensor) -> Tensor:
        """As a linear layer's, later."""
        time.sleep(self.pause_sec)
        return super().forward(inputs)


class Classifier(pl.LightningModule):
    """Trains the network, which ModelParallelStrategy lets its module cut into parts."""

    def __init__(self, network: Network, strategy: str) -> None:
        super().__init__()
        self.network = network
        self.strategy = strategy

    def configure_model(self) -> None:
        """Shard the parameters, or split the first two layers; nothing to do for DDP."""
        mesh = self.device_mesh
        if self.strategy == "ddp" or mesh is None:
            return
        if self.strategy == "tensor":
            plan = {"first": ColwiseParallel(), "second": RowwiseParallel()}
            parallelize_module(self.network, mesh["tensor_parallel"], plan)
        else:
            for layer in (self.network.first, self.network.second):
                fully_shard(layer, mesh=mesh["data_parallel"])
            fully_shard(self.network, mesh=mesh["data_parallel"])

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Cross entropy of one batch."""
        images, labels = batch
        return nn.functional.cross_entropy(self.network(images), labels)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW."""
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def make_trainer(options: argparse.Namespace, processes: int, **more: Any) -> pl.Trainer:
    """A Trainer for the processes that torchrun has started."""
    strategy: Any = "ddp"
    if options.strategy != "ddp":
        split = processes if options.strategy == "tensor" else 1
        strategy = ModelParallelStrategy(data_parallel_size=processes // split, tensor_parallel_size=split)
    return pl.Trainer(
        accelerator="auto" if torch.cuda.device_count() >= processes else "cpu",
        devices=processes,
        strategy=strategy,
        max_steps=options.max_steps,
        max_epochs=-1,
        default_root_dir=options.log_dir,
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        enable_progress_bar=False,
        **more,
    )


def main(arguments: list[str] | None = None) -> None:
    """Train, then let the first process print the report of all."""
    parser = argparse.ArgumentParser(description="Train on handwritten digits with several processes, profiled.")
    parser.add_argument("--strategy", choices=("ddp", "fsdp2", "tensor"), default="ddp")
    parser.add_argument("--max-steps", type=int, default=60)
    parser.add_argument("--batch-size", type=int, default=32, help="images in a process's batch")
    parser.add_argument(
        "--slow-rank", type=int, help=f"the process that takes {PAUSE_SEC * 1000:g} ms longer each batch"
    )
    parser.add_argument("--slow-part", choices=("data", "forward"), default="data", help="what it takes longer for")
    parser.add_argument("--log-dir", type=Path, default=Path("logs"))
    options = parser.parse_args(arguments)

    logging.getLogger("lightning_flops").addHandler(logging.StreamHandler())  # its warnings, and no more
    warnings.filterwarnings("ignore", message=r".*(does not have many workers|LeafSpec).*")
    torch.set_num_threads(1)
    pl.seed_everything(0, verbose=False)
    rank, processes = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    pause_sec = PAUSE_SEC if rank == options.slow_rank else 0.0

    profiler = FlopsProfilerCallback(profile_step=10)
    trainer = make_trainer(options, processes, callbacks=[profiler])
    network = Network(pause_sec if options.slow_part == "forward" else 0.0)
    digits = Digits(pause_sec if options.slow_part == "data" else 0.0)
    trainer.fit(Classifier(network, options.strategy), DataLoader(digits, options.batch_size, shuffle=True))
    if trainer.is_global_zero and profiler.profile is not None:
        print(render_text(profiler.profile, detailed=True))


if __name__ == "__main__":
    main()
