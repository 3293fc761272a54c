"""Train a small network on handwritten digits in a loop of torch alone, and see the FLOPs profiler's report.

Try::

    python examples/train_plain.py
    python examples/train_plain.py --epochs 4 --profile-step 50 --log-dir logs/plain
"""

from __future__ import annotations

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_flops import profile_training, render_text


def main() -> None:
    """Trains, and prints the report without the module tree."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--profile-step", type=int, default=10, help="profile the step that begins after this many")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--log-dir", default="logs/plain")
    options = parser.parse_args()

    torch.manual_seed(0)
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    loader = DataLoader(TensorDataset(images, torch.tensor(digits.target)), batch_size=32, shuffle=True, drop_last=True)
    body = nn.Sequential(nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 64, 3, padding=1), nn.ReLU())
    model = nn.Sequential(body, nn.Flatten(), nn.Linear(64 * 8 * 8, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    with profile_training(
        model, optimizer, profile_step=options.profile_step, log_dir=options.log_dir, detailed=False
    ) as profiler:
        for epoch in range(options.epochs):
            for batch, labels in loader:
                loss = nn.functional.cross_entropy(model(batch), labels)
                loss.backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                optimizer.zero_grad()
            print(f"epoch {epoch}: loss {loss.item():.3f}")

    if profiler.profile is not None:
        print(render_text(profiler.profile))
        print(f"Logs are in {options.log_dir}, and with them the report as a page, lightning_flops/profile.html")
        print(f"See the logs with: tensorboard --logdir {options.log_dir}")


if __name__ == "__main__":
    main()
