"""What the cost of counting and tracing is measured on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tests.corpus.case import tensors_in


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """A model and its inputs."""

    model: nn.Module
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)

    def loss(self) -> Tensor:
        """One forward."""
        return next(tensors_in(self.model(*self.args, **self.kwargs))).sum()

    def step(self) -> None:
        """One forward and one backward."""
        self.loss().backward()  # type: ignore[no-untyped-call]


def bert_mini() -> Workload:
    """4 layers of 256, 8 samples of 128 tokens; loss: the sum of the last hidden state."""
    transformers = import_module("transformers")
    torch.manual_seed(0)
    config = transformers.BertConfig(
        num_hidden_layers=4, hidden_size=256, num_attention_heads=4, intermediate_size=1024
    )
    model: nn.Module = transformers.BertModel(config).train()
    return Workload(model=model, kwargs={"input_ids": torch.randint(0, config.vocab_size, (8, 128))})


class _TinyBlock(nn.Module):
    """Linear and tanh on a handful of numbers, with a residual connection."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.activation = nn.Tanh()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.activation(self.linear(x))  # type: ignore[no-any-return]


def tiny_operators() -> Workload:
    """Blocks of three modules on 4 × 8 numbers, as many as make about a thousand operators, forward and backward."""
    torch.manual_seed(0)
    blocks, width = 55, 8
    model = nn.Sequential(*(_TinyBlock(width) for _ in range(blocks)))
    return Workload(model=model, args=(torch.randn(4, width),))


def quiet_trainer(folder: str | Path, *callbacks: Any, **settings: Any) -> Any:
    """A Trainer of Lightning's for one epoch on one device, that shows and saves nothing."""
    quiet = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    here = {"accelerator": "cpu", "devices": 1, "max_epochs": 1, "default_root_dir": str(folder)}
    return import_module("lightning.pytorch").Trainer(**{**quiet, **here, "callbacks": list(callbacks), **settings})


def sized(*sizes: int) -> nn.Sequential:
    """Linear layers between *sizes*, with tanh behind each."""
    return nn.Sequential(*(part for pair in pairwise(sizes) for part in (nn.Linear(*pair), nn.Tanh())))


def encoder(width: int, number: int) -> nn.Module:
    """Layers of a transformer's encoder."""
    layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, number, enable_nested_tensor=False)
