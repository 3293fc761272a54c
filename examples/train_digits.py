"""Train a small network on handwritten digits, and see in TensorBoard what a step of it costs.

The images are scikit-learn's: 1797 of 8 x 8 pixels, real handwriting, shipped with the package. Try::

    python examples/train_digits.py
    python examples/train_digits.py --model conv --augment
    python examples/train_digits.py --model conv --augment --workers 1
    python examples/train_digits.py --model conv --accumulate 4 --precision bf16-mixed
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import logging
import math
import os
import sys
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from scipy.ndimage import rotate
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from lightning_flops import FlopsProfilerCallback, render_text

if TYPE_CHECKING:
    import lightning.pytorch as pl
    from lightning.pytorch.loggers import TensorBoardLogger
else:
    # Either name of Lightning will do.
    pl = importlib.import_module("lightning.pytorch" if importlib.util.find_spec("lightning") else "pytorch_lightning")
    TensorBoardLogger = importlib.import_module(f"{pl.__name__}.loggers").TensorBoardLogger

DIGITS = 10
PIXELS = 8
EPOCHS = 8


class VisionTransformer(nn.Module):
    """Reads an image as 16 patches of 2 x 2 pixels."""

    def __init__(self, width: int = 64, layers: int = 2, heads: int = 4) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, width, kernel_size=2, stride=2)
        self.positions = nn.Parameter(torch.randn(1, (PIXELS // 2) ** 2, width) * 0.02)
        layer = nn.TransformerEncoderLayer(
            width, heads, 4 * width, dropout=0.1, activation="gelu", batch_first=True, norm_first=True
        )
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, DIGITS)

    def forward(self, images: Tensor) -> Tensor:
        """Logits ``(samples, 10)`` of *images* ``(samples, 1, 8, 8)``."""
        tokens: Tensor = self.patches(images).flatten(2).transpose(1, 2) + self.positions
        logits: Tensor = self.head(self.encoder(tokens).mean(1))
        return logits


class ConvNet(nn.Sequential):
    """Three convolutions and a linear layer."""

    def __init__(self, width: int = 32) -> None:
        super().__init__(
            nn.Conv2d(1, width, 3, padding=1),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, 2 * width, 3, stride=2, padding=1),
            nn.BatchNorm2d(2 * width),
            nn.ReLU(),
            nn.Conv2d(2 * width, 2 * width, 3, padding=1),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Dropout(0.1),
            nn.Linear(2 * width, DIGITS),
        )


class DigitClassifier(pl.LightningModule):
    """Trains a network to name the digit in an image."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Cross entropy of one batch."""
        images, labels = batch
        loss = nn.functional.cross_entropy(self.network(images), labels)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """Share of the held-out images that are named correctly."""
        images, labels = batch
        hits = (self.network(images).argmax(1) == labels).float()
        self.log("val_accuracy", hits.mean(), prog_bar=True, batch_size=len(labels))

    def configure_optimizers(self) -> Any:
        """AdamW, with a learning rate that rises and then falls."""
        optimizer = torch.optim.AdamW(self.parameters())
        steps = int(self.trainer.estimated_stepping_batches)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=4e-3, total_steps=steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class PrintAccuracy(pl.Callback):
    """Prints a line after each validation, and keeps the figures."""

    def __init__(self) -> None:
        self.accuracies: list[float] = []

    def on_validation_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Runs also before training, so the first figure is that of a network that knows nothing."""
        self.accuracies.append(trainer.callback_metrics["val_accuracy"].item())
        trainer.print(f"step {trainer.global_step:4d}: {self.accuracies[-1]:6.1%} of the held-out digits are right")


class Rotated(Dataset[tuple[Tensor, Tensor]]):
    """The images, each turned by a few degrees whenever it is read."""

    def __init__(self, images: Tensor, labels: Tensor) -> None:
        self.images, self.labels = images, labels

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, place: int) -> tuple[Tensor, Tensor]:
        degrees = float(torch.empty(()).uniform_(-15, 15))
        turned = rotate(self.images[place], degrees, axes=(1, 2), reshape=False)
        return torch.from_numpy(turned), self.labels[place]


def loaders(batch_size: int, *, augment: bool, workers: int) -> tuple[DataLoader[Any], DataLoader[Any]]:
    """Batches of ``(images, labels)`` to train on, turned a little if asked, and a fifth of all to validate on."""
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(digits.target)
    train, held_out = train_test_split(range(len(labels)), test_size=0.2, random_state=0, stratify=labels)
    trained_on = Rotated if augment else TensorDataset
    return (
        DataLoader(
            trained_on(images[train], labels[train]),
            batch_size,
            shuffle=True,
            drop_last=True,
            num_workers=workers,
            persistent_workers=workers > 0,
        ),
        DataLoader(TensorDataset(images[held_out], labels[held_out]), 360),
    )


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line's settings."""
    parser = argparse.ArgumentParser(description="Train on handwritten digits with the FLOPs profiler.")
    parser.add_argument("--model", choices=("vit", "conv"), default="vit")
    parser.add_argument("--profile-step", type=int, default=10, help="optimizer steps before the profiled one")
    parser.add_argument("--max-steps", type=int, default=-1, help=f"optimizer steps; default {EPOCHS} epochs")
    parser.add_argument("--precision", default="32-true", help="as the Trainer takes it, such as bf16-mixed")
    parser.add_argument("--accumulate", type=int, default=1, help="batches in an optimizer step")
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--augment", action="store_true", help="turn each image a little when it is read")
    parser.add_argument("--workers", type=int, default=0, help="processes that read images to train on")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--log-dir", type=Path, default=Path("logs"))
    return parser.parse_args(arguments)


def _fastest(run: Callable[[], object], *, times: int = 10, seconds: float = 0.5) -> float:
    """Seconds of the fastest of so many calls of *run*, or of more: other work makes some slower, none faster."""
    spent: list[float] = []
    while len(spent) < times or sum(spent) < seconds:
        begin = time.perf_counter()
        run()
        spent.append(time.perf_counter() - begin)
    return min(spent)


def measured_peak(precision: str, *, size: int = 1024) -> dict[str, float]:
    """FLOP/s of this CPU in the dtype of *precision*, by the name of that dtype: the fastest of some matrix products.

    No vendor publishes this figure for the threads that a process has, and MFU needs one. It is no upper limit of the
    chip, only what torch's own product reaches here.
    """
    name = next(
        (name for prefix, name in (("bf16", "bfloat16"), ("16", "float16")) if precision.startswith(prefix)), ""
    )
    found = {}
    for dtype in dict.fromkeys(("float32", name or "float32")):
        factors = [torch.randn(size, size).to(getattr(torch, dtype)) for _ in range(2)]
        found[dtype] = 2 * size**3 / _fastest(partial(torch.mm, *factors))
    return found


def measured_bandwidth(*, size: int = 1 << 26) -> float:
    """Bytes/s between this CPU and its memory, read and written together: the fastest of some copies of *size* bytes.

    They are more than the cache of a core holds. As with the peak, this is what torch's own copy reaches here.
    """
    source = torch.zeros(size, dtype=torch.uint8)
    target = torch.empty_like(source)
    return 2 * size / _fastest(lambda: target.copy_(source))


def _tensorboard() -> str:
    """The command that is installed beside this Python, as short as it can be typed from here."""
    command = Path(sys.executable).with_name("tensorboard")
    return os.path.relpath(command) if command.exists() else "tensorboard"


def main(arguments: list[str] | None = None) -> None:
    """Train, then print where the logs are and the report."""
    options = parse_arguments(arguments)
    logging.getLogger("lightning_flops").addHandler(logging.StreamHandler())  # its warnings, and no more
    warnings.filterwarnings("ignore", message=r".*(does not have many workers|LeafSpec).*")
    torch.set_num_threads(1)  # networks as small as these only wait for a second core
    pl.seed_everything(options.seed)

    peak = bandwidth = None
    if not torch.accelerator.is_available():  # an accelerator's peak is its vendor's
        peak, bandwidth = measured_peak(options.precision), measured_bandwidth()
        rates = ", ".join(f"{rate / 1e9:.0f} GFLOP/s in {dtype}" for dtype, rate in peak.items())
        print(f"Peak of this CPU with one thread, measured once with a matrix product: {rates}")
        print(f"Bandwidth of its memory, measured once with a copy: {bandwidth / 1e9:.1f} GB/s")
    profiler = FlopsProfilerCallback(
        profile_step=options.profile_step, peak_flops_per_sec=peak, memory_bytes_per_sec=bandwidth
    )
    accuracy = PrintAccuracy()
    logger = TensorBoardLogger(options.log_dir, name=f"digits-{options.model}")
    train_loader, validation_loader = loaders(options.batch_size, augment=options.augment, workers=options.workers)
    steps_per_epoch = math.ceil(len(train_loader) / options.accumulate)
    trainer = pl.Trainer(
        max_steps=options.max_steps,
        max_epochs=EPOCHS if options.max_steps < 0 else math.ceil(options.max_steps / steps_per_epoch),
        precision=options.precision,
        accumulate_grad_batches=options.accumulate,
        num_sanity_val_steps=-1,
        log_every_n_steps=10,
        enable_checkpointing=False,
        enable_model_summary=False,  # its column of FLOPs is 0 without an example_input_array
        logger=logger,
        callbacks=[profiler, accuracy],
    )
    network = VisionTransformer() if options.model == "vit" else ConvNet()
    trainer.fit(DigitClassifier(network), train_loader, validation_loader)

    rising = " -> ".join(f"{value:.1%}" for value in accuracy.accuracies)
    print(f"Accuracy on the held-out digits: {rising}")
    print(f"Logs are in {logger.log_dir}")
    print(f"See them in TensorBoard: {_tensorboard()} --logdir {options.log_dir}")
    print("then open the address that it prints, and there the pages Time Series and Text\n")
    if profiler.profile is not None:  # last, so that a terminal ends with it
        print(render_text(profiler.profile))


if __name__ == "__main__":
    main()
