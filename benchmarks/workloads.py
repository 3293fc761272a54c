"""What the cost of counting is measured on, and who is watching."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from tests.corpus.case import tensors_in

Watch = Callable[[nn.Module], AbstractContextManager[Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """A model and its inputs."""

    model: nn.Module
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)

    def step(self) -> None:
        """One forward and one backward."""
        first = next(tensors_in(self.model(*self.args, **self.kwargs)))
        first.sum().backward()  # type: ignore[no-untyped-call]

    def forget_gradients(self) -> None:
        """Undoes what a step leaves behind."""
        self.model.zero_grad(set_to_none=True)


class NoOpMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A dispatch mode that does nothing: the floor for everything that sees operators from Python."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Runs the operator."""
        return func(*args, **(kwargs or {}))


class OperatorCount(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the operators that a step runs."""

    def __init__(self) -> None:
        """Starts at zero."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: int = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Runs the operator and counts it."""
        self.calls += 1
        return func(*args, **(kwargs or {}))


def operators_of(workload: Workload) -> int:
    """How many operators one step of *workload* runs."""
    counter = OperatorCount()
    with counter:
        workload.step()
    workload.forget_gradients()
    return counter.calls


@contextmanager
def deepspeed_profiler(model: nn.Module) -> Iterator[Any]:
    """DeepSpeed's profiler, started and ended as its engine does."""
    profiler = import_module("deepspeed.profiling.flops_profiler").FlopsProfiler(model)
    profiler.start_profile()
    try:
        yield profiler
    finally:
        profiler.end_profile()


def lightning_flops_counter(model: nn.Module) -> AbstractContextManager[Any]:
    """This project, bytes and attribution included: it has no cheaper mode."""
    from lightning_flops.pytorch import count_flops

    return count_flops(model)


def torch_counter(model: nn.Module) -> AbstractContextManager[Any]:
    """Torch's own counter."""
    counter: AbstractContextManager[Any] = import_module("torch.utils.flop_counter").FlopCounterMode(display=False)
    return counter


PLAIN = "plain"
NO_OP = "no-op dispatch mode"
OURS = "lightning_flops"

WATCHERS: Mapping[str, Watch] = {
    PLAIN: lambda model: nullcontext(),
    NO_OP: lambda model: NoOpMode(),  # type: ignore[no-untyped-call]
    OURS: lightning_flops_counter,
    "FlopCounterMode": torch_counter,
    "DeepSpeed's profiler": deepspeed_profiler,
}


def bert_mini() -> Workload:
    """4 layers of 256, 8 samples of 128 tokens; loss: the sum of the last hidden state."""
    transformers = import_module("transformers")
    torch.manual_seed(0)
    config = transformers.BertConfig(
        num_hidden_layers=4, hidden_size=256, num_attention_heads=4, intermediate_size=1024
    )
    model: nn.Module = transformers.BertModel(config).train()
    return Workload(model=model, kwargs={"input_ids": torch.randint(0, config.vocab_size, (8, 128))})


class TinyBlock(nn.Module):
    """Linear and tanh on a handful of numbers, with a residual connection."""

    def __init__(self, width: int) -> None:
        """Keeps *width*."""
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.activation = nn.Tanh()

    def forward(self, x: Tensor) -> Tensor:
        """The input and what was made of it."""
        return x + self.activation(self.linear(x))  # type: ignore[no-any-return]


def tiny_operators() -> Workload:
    """Blocks of three modules on 4 × 8 numbers, as many as make about a thousand operators, forward and backward."""
    torch.manual_seed(0)
    blocks, width = 55, 8
    model = nn.Sequential(*(TinyBlock(width) for _ in range(blocks)))
    return Workload(model=model, args=(torch.randn(4, width),))


def ten_thousand_modules() -> nn.Module:
    """99 sequences of 100 small linear layers: with the root, 10,000 modules."""
    return nn.Sequential(*(nn.Sequential(*(nn.Linear(2, 2) for _ in range(100))) for _ in range(99)))
