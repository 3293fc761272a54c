"""Causes of slow steps that people write into loops, modules, callbacks and datasets, each with its remedy.

Each stands in a function whose name the advice must have: judged are the rule, the line or module, and the size.
"""

from __future__ import annotations

import copy
import gc
import os
import tempfile
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from .advice_frameworks import Hook, Lightning, Transformers
from .advice_parts import CLOCK, Planted, Program, Samples, loaded, perceptron

# ---- around the model


def norms_of_gradients(model: nn.Module) -> None:
    """What people log in every step."""
    for parameter in model.parameters():
        value = parameter if parameter.grad is None else parameter.grad
        for _ in range(8):
            float(value.norm())
            torch.histc(value, 64).tolist()


_AVERAGES: dict[str, Tensor] = {}


def average_by_state_dict(model: nn.Module) -> None:
    """An average of the weights, one tensor after the other."""
    for name in model.state_dict():
        value = model.state_dict()[name]
        _AVERAGES[name] = _AVERAGES.get(name, value) * 0.999 + value * 0.001


def save_each_step(model: nn.Module) -> None:
    """A checkpoint in every step."""
    with tempfile.TemporaryFile() as file:
        for _ in range(8):
            torch.save(model.state_dict(), file)


def sync_log(model: nn.Module) -> None:
    """A log that waits for the disk."""
    with tempfile.NamedTemporaryFile() as file:
        for number in range(40):
            file.write(b"%d\n" % number)
            file.flush()
            os.fsync(file.fileno())


def collect_garbage(model: nn.Module) -> None:
    """What a forum advised against running out of memory."""
    gc.collect()


def wait_for_lock(model: nn.Module) -> None:
    """A file that another process writes is polled for."""
    time.sleep(0.01)


def write_numbers(model: nn.Module) -> None:
    """Weights as text, number by number."""
    ",".join(f"{value:.3f}" for value in next(model.parameters()).flatten()[:20_000].tolist())


def log_weights(module: Any) -> None:
    """Twelve norms, each by ``self.log``."""
    for name, parameter in module.named_parameters():
        module.log(f"norms/{name}", parameter.detach().norm())


def copy_batch(batch: Tensor) -> Tensor:
    """A defensive copy of the batch and all that came with it."""
    return copy.deepcopy((batch, [{"id": number, "tags": list(range(20))} for number in range(200)]))[0]


def augment_in_loop(batch: Tensor) -> Tensor:
    """Random changes of each sample, in the loop."""
    return torch.stack([torch.roll(row.flip(0), number % 5) * 1.01 for number, row in enumerate(batch)])


@CLOCK.around
def hits_by_sample(output: Tensor) -> int:
    """A count, by a loop over the samples."""
    hits = 0
    for _ in range(8):
        for row in output:
            hits += int(row.argmax().item() == 0)
    return hits


def loss_by_sample(model: nn.Module, batch: Tensor) -> Tensor:
    """A metric beside the loss."""
    output = model(batch)
    hits_by_sample(output)
    return output.square().mean()  # type: ignore[no-any-return]


def metric_forward(model: nn.Module, batch: Tensor) -> Tensor:
    """Forwards for two metrics."""
    loss = model(batch).square().mean()
    model(batch).argmax(-1)
    model(batch).argmin(-1)
    return loss  # type: ignore[no-any-return]


def metric_without_gradients(model: nn.Module, batch: Tensor) -> Tensor:
    """Forwards without gradients for two metrics."""
    loss = model(batch).square().mean()
    with torch.no_grad():
        model(batch).argmax(-1)
        model(batch).argmin(-1)
    return loss  # type: ignore[no-any-return]


def one_by_one(model: nn.Module, batch: Tensor) -> Tensor:
    """The model called for each sample."""
    return torch.stack([model(row) for row in batch]).square().mean()


def around(cause: Callable[..., Any], place: str, *, rule: str = "line", where: str = "") -> Planted:
    """A program with *cause* at this *place* of its loop."""

    def make(workers: int | None) -> Program:
        program = Program(perceptron(layers=6, width=128), loaded(64, 128), 64)
        watched = cause if place == "loss" else CLOCK.around(cause)
        changes: dict[str, Any] = {place: watched if workers is None else None}
        return program._replace(**changes)

    return Planted(make, rule, where or cause.__name__)


# ---- in modules


class TimeSteps(nn.Module):
    """A layer that is called for each step of a sequence."""

    def __init__(self, slow: bool) -> None:
        """Both compute the same."""
        super().__init__()
        self.proj, self.head, self.slow = nn.Linear(64, 256), nn.Linear(256, 10), slow

    def forward(self, rows: Tensor) -> Tensor:
        """A sequence's mean."""
        if self.slow:
            hidden = torch.stack([self.proj(rows[:, at]) for at in range(rows.shape[1])], 1)
        else:
            hidden = self.proj(rows)
        return self.head(hidden.relu().mean(1))  # type: ignore[no-any-return]


class Doubles(nn.Module):
    """A layer whose weights somebody has made in float64."""

    def __init__(self, slow: bool) -> None:
        """The wide layer, or none."""
        super().__init__()
        self.first, self.wide = nn.Linear(256, 1024), nn.Linear(1024, 1024)
        if slow:
            self.wide.double()

    def forward(self, rows: Tensor) -> Tensor:
        """In float32 again at its end."""
        return self.wide(self.first(rows).to(self.wide.weight.dtype)).float()  # type: ignore[no-any-return]


class Attention(nn.Module):
    """Attention, written out or not."""

    def __init__(self, slow: bool) -> None:
        """Four heads."""
        super().__init__()
        self.qkv, self.out, self.slow = nn.Linear(64, 192), nn.Linear(64, 64), slow

    def forward(self, rows: Tensor) -> Tensor:
        """Causal."""
        batch, length, width = rows.shape
        query, key, value = self.qkv(rows).view(batch, length, 3, 4, width // 4).permute(2, 0, 3, 1, 4)
        if self.slow:
            scores = query @ key.transpose(-1, -2) / (width // 4) ** 0.5
            scores = scores.masked_fill(torch.ones(length, length).triu(1).bool(), float("-inf"))
            found = scores.softmax(-1) @ value
        else:
            found = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.out(found.transpose(1, 2).reshape(batch, length, width))  # type: ignore[no-any-return]


@CLOCK.around
def scaled_by_row(hidden: Tensor) -> Tensor:
    """One row after the other."""
    return torch.stack([row / (row.abs().amax() + 1.0) for row in hidden])


class RowByRow(nn.Module):
    """Rows that are scaled one after the other."""

    def __init__(self, slow: bool) -> None:
        """Both compute the same."""
        super().__init__()
        self.layer, self.slow = nn.Linear(64, 64), slow

    def forward(self, rows: Tensor) -> Tensor:
        """Each row divided by its largest element."""
        hidden = self.layer(rows)
        if self.slow:
            return scaled_by_row(hidden)  # type: ignore[no-any-return]
        return hidden / (hidden.abs().amax(-1, keepdim=True) + 1.0)  # type: ignore[no-any-return]


class Checkpointed(nn.Module):
    """Layers under activation checkpointing."""

    def __init__(self, slow: bool) -> None:
        """Four layers."""
        super().__init__()
        self.layers, self.slow = perceptron(nn.ReLU, width=512, layers=4), slow

    def forward(self, rows: Tensor) -> Tensor:
        """All of them at once."""
        rows = rows.requires_grad_()
        return checkpoint(self.layers, rows, use_reentrant=False) if self.slow else self.layers(rows)  # type: ignore[no-any-return]


def inside(module: Callable[[bool], nn.Module], rule: str, where: str, *shape: int) -> Planted:
    """A program whose *module* has the cause."""
    return Planted(lambda workers: Program(module(workers is None), loaded(*shape), shape[0]), rule, where)


# ---- loading


def decode_slowly() -> None:
    """A sample is decoded by Python."""
    sum(number * number for number in range(10_000))


@CLOCK.around
def collate_by_hand(rows: list[Tensor]) -> Tensor:
    """A batch put together number by number."""
    return torch.tensor([[float(value) for value in row] for row in rows])


def collated(workers: int | None) -> Program:
    """A loader without workers whose collate_fn is the cause."""
    loader = DataLoader(
        Samples(bool, 256), batch_size=32, collate_fn=collate_by_hand, num_workers=workers or 0,
        persistent_workers=bool(workers),
    )  # fmt: skip
    return Program(perceptron(width=256), loader, 32)


def hooked(
    framework: Callable[..., Any], hook: str, cause: Callable[..., object], *, rule: str = "line", where: str = ""
) -> Planted:
    """A training of the *framework* with the *cause* in this hook."""
    watched = cause if hook == "load" else CLOCK.around(cause)  # the samples have a clock of their own
    return Planted(partial(framework, Hook(hook, watched)), rule, where or f"{hook} {cause.__name__}")


CAUSES: dict[str, Planted] = {
    **{
        cause.__name__: around(cause, "after")
        for cause in (
            norms_of_gradients, average_by_state_dict, save_each_step, sync_log, collect_garbage, wait_for_lock,
            write_numbers,
        )
    },
    **{cause.__name__: around(cause, "before") for cause in (copy_batch, augment_in_loop)},
    "loss_by_sample": around(loss_by_sample, "loss", where="hits_by_sample"),
    "metric_forward": around(metric_forward, "loss", rule="unused_forward", where="the root"),
    "metric_without_gradients": around(
        metric_without_gradients, "loss", rule="metric_forward", where="called without gradients"
    ),
    "one_by_one": around(one_by_one, "loss", rule="calls", where="64 times"),
    "time_steps": inside(TimeSteps, "calls", "proj", 16, 200, 64),
    "float64_layer": inside(Doubles, "float64", "wide", 64, 256),
    "attention": inside(Attention, "attention", "the root", 4, 256, 64),
    "row_by_row": inside(RowByRow, "line_in_module", "scaled_by_row", 128, 64),
    "checkpointed": inside(Checkpointed, "recompute", "checkpointing", 256, 512),
    "collate_by_hand": Planted(collated, "data_wait", "collate_by_hand"),
    "lightning_callback_sleeps": hooked(Lightning, "on_train_batch_end", wait_for_lock),
    "lightning_callback_saves": hooked(Lightning, "on_train_batch_end", save_each_step),
    "lightning_callback_norms": hooked(Lightning, "on_before_optimizer_step", norms_of_gradients),
    "lightning_module_average": hooked(Lightning, "on_train_batch_start", average_by_state_dict),
    "lightning_logs": hooked(Lightning, "training_step", log_weights, where="log_weights"),
    "lightning_dataset": hooked(Lightning, "load", decode_slowly, rule="data_wait", where="decode_slowly"),
    "transformers_callback_norms": hooked(Transformers, "on_step_end", norms_of_gradients),
    "transformers_callback_sleeps": hooked(Transformers, "on_step_end", wait_for_lock),
    "transformers_dataset": hooked(Transformers, "load", decode_slowly, rule="data_wait", where="decode_slowly"),
}  # fmt: skip
"""Programs by name, with the rule that knows the cause, and what its fact must name."""
