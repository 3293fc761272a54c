"""One adapter for each tool that counts FLOPs: the call that its own documentation shows, on a network of the corpus.

Every adapter hands the tool the network's own inputs, in the network's own mode and under the grad mode that its step
uses. What counts multiply-adds is multiplied by two. Where a tool takes positional inputs alone, tensors only, or
keywords only, the network is wrapped in a module that passes them on. Adapters import their tool when they are called.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext, redirect_stdout
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import nn

from lightning_flops.pytorch import count_flops
from tests.corpus.case import Example, forward_in_inference_mode, forward_without_grad, tensors_in

Count = Callable[[Example], int]


@dataclass(frozen=True, slots=True)
class CountingTool:
    """A tool, and how it is asked."""

    name: str
    module: str  # What to import, once for all networks
    forward: Count  # FLOPs of one call of the model
    how: str  # The call, in words for the report
    step: Count | None = None  # FLOPs of the whole step; None for a tool that reports a forward alone
    step_how: str = "–"
    #: The step is derived from one forward by a rule, so it is asked only where the step is one forward.
    step_from_forward: bool = False

    @property
    def package(self) -> str:
        """What to install; its version is printed with the results."""
        return self.module.partition(".")[0]


def _grad_mode(example: Example) -> AbstractContextManager[Any]:
    """The grad mode in which the network's step calls the model."""
    if example.step is forward_without_grad:
        return torch.no_grad()
    return torch.inference_mode() if example.step is forward_in_inference_mode else nullcontext()


# ---- this project and torch's counter


def _asked(example: Example, counter: Any, *, whole_step: bool) -> Any:
    """*counter*, after it has watched one call of the model, or the whole step."""
    with counter as counts, nullcontext() if whole_step else _grad_mode(example):
        example.run() if whole_step else example.forward()
    return counts


def _ours(example: Example, *, whole_step: bool) -> int:
    counts = _asked(example, count_flops(example.model), whole_step=whole_step)
    return int(counts.total.total if whole_step else counts.forward)


def _torch_counter(example: Example, *, whole_step: bool) -> int:
    counter = import_module("torch.utils.flop_counter").FlopCounterMode(display=False)
    return int(_asked(example, counter, whole_step=whole_step).get_total_flops())


# ---- the peers: each returns multiply-adds


def _deepspeed(example: Example) -> float:
    profiler = import_module("deepspeed.profiling.flops_profiler").FlopsProfiler(example.model)
    profiler.start_profile()
    example.forward()
    macs: float = profiler.get_total_macs()
    profiler.end_profile()
    return macs


def _fvcore(example: Example) -> float:
    analysis = import_module("fvcore.nn").FlopCountAnalysis(*_positional(example))
    analysis.unsupported_ops_warnings(False).uncalled_modules_warnings(False).tracer_warnings("none")
    return float(analysis.total())


def _thop(example: Example) -> float:
    model, inputs = _positional(example)
    return float(import_module("thop").profile(model, inputs=inputs, verbose=False)[0])


def _ptflops(example: Example, *, backend: str) -> float:
    """One of its two backends; inputs go in by keyword, as its documentation asks for several inputs."""
    model, keywords = _by_keyword(example)
    settings: dict[str, Any] = {"as_strings": False, "print_per_layer_stat": False, "backend": backend}
    printed, count = io.StringIO(), import_module("ptflops").get_model_complexity_info
    with redirect_stdout(printed):
        macs, _ = count(model, (1,), input_constructor=lambda _: keywords, **settings)
    if macs is None:
        # It catches what was raised, prints its class and message on a line, and returns nothing.
        said = [line for line in printed.getvalue().splitlines() if line.startswith("<class")]
        raise RuntimeError(" ".join(said[:1]) or "returned None")
    return float(macs)


def _calflops(example: Example, *, with_backward: bool = False) -> float:
    model, tensors = _tensors_alone(example)
    settings: dict[str, Any] = {"print_results": False, "output_as_string": False}
    inputs: dict[str, Any] = {"args": list(example.args), "kwargs": dict(tensors)}
    count = import_module("calflops").calculate_flops
    return float(count(model, **inputs, include_backPropagation=with_backward, **settings)[1])


def _torchinfo(example: Example) -> float:
    fixed, tensors = _apart(example)
    inputs: Any = list(example.args) if example.args or not tensors else tensors
    if example.args:
        fixed |= tensors
    mode = "train" if example.model.training else "eval"
    summary = import_module("torchinfo").summary(example.model, input_data=inputs, mode=mode, verbose=0, **fixed)
    return float(summary.total_mult_adds)


def _flops(macs_of: Callable[[Example], float], times: int = 1) -> Count:
    """FLOPs of one forward by a tool that counts multiply-adds; a fraction of one is the tool's error, and rounded."""

    def count(example: Example) -> int:
        with _grad_mode(example):
            return times * round(2 * macs_of(example))

    return count


# ---- inputs in the form that a tool takes


class _PassedOn(nn.Module):
    """Calls a module, the first argument of *call*, with inputs that arrive in another form."""

    def __init__(self, module: nn.Module, call: Callable[..., Any]) -> None:
        super().__init__()
        self.module = module
        self.call = call
        # Wrapped in eval mode, a tool must not take the whole for a model in training.
        self.training = module.training

    def forward(self, *inputs: Any, **keywords: Any) -> Any:
        return self.call(self.module, *inputs, **keywords)


def _apart(example: Example) -> tuple[dict[str, Any], dict[str, Any]]:
    """The keywords that are no tensors, and those that are."""
    tensors = {name: value for name, value in example.kwargs.items() if isinstance(value, torch.Tensor)}
    return {name: value for name, value in example.kwargs.items() if name not in tensors}, tensors


def _positional(example: Example) -> tuple[nn.Module, tuple[Any, ...]]:
    """The model and its inputs without keywords.

    Where there were keywords the wrapper returns the output's tensors as a tuple: tracing takes no output classes.
    """
    if not example.kwargs:
        return example.model, tuple(example.args)
    fixed, tensors = _apart(example)
    count = len(example.args)

    def call(module: nn.Module, *inputs: Any) -> Any:
        keywords = dict(zip(tensors, inputs[count:], strict=True))
        return tuple(tensors_in(module(*inputs[:count], **keywords, **fixed)))

    return _PassedOn(example.model, call), (*example.args, *tensors.values())


def _by_keyword(example: Example) -> tuple[nn.Module, dict[str, Any]]:
    """The model and its inputs by keyword alone.

    The model itself is called as it always is: hooks on a layer that is the whole model look at its positional inputs.
    """
    inputs = {f"input_{index}": value for index, value in enumerate(example.args)}

    def call(module: nn.Module, **given: Any) -> Any:
        ordered = [given.pop(name) for name in inputs]
        return module(*ordered, **given)

    return _PassedOn(example.model, call), {**inputs, **example.kwargs}


def _tensors_alone(example: Example) -> tuple[nn.Module, Mapping[str, Any]]:
    """The model with every keyword that is no tensor filled in, and the other keywords."""
    fixed, tensors = _apart(example)
    return _PassedOn(example.model, partial(nn.Module.__call__, **fixed)) if fixed else example.model, tensors


_PTFLOPS_HOW = '`get_model_complexity_info(..., backend="{}")`, MACs × 2'
_DEEPSPEED_HOW = """`FlopsProfiler(model)`: `start_profile()`, the model's call, `get_total_macs()` × 2 (its FLOPs also
count elementwise work, its MACs do not); the network's own mode, where `get_model_profile` would switch to eval"""

# fmt: off
TOOLS: tuple[CountingTool, ...] = (
    CountingTool("lightning_flops", "lightning_flops.pytorch", partial(_ours, whole_step=False),
                 "`with count_flops(model) as counts:` around the model's call; `counts.forward`",
                 partial(_ours, whole_step=True), "`count_flops` around the step; the four buckets added up"),
    CountingTool("FlopCounterMode", "torch.utils.flop_counter", partial(_torch_counter, whole_step=False),
                 "`with FlopCounterMode(display=False)` around the model's call; FLOPs as reported",
                 partial(_torch_counter, whole_step=True), "`FlopCounterMode` around the step"),
    CountingTool("DeepSpeed", "deepspeed.profiling.flops_profiler", _flops(_deepspeed), _DEEPSPEED_HOW,
                 _flops(_deepspeed, times=3), "forward × 3: the backward it prints is twice the forward", True),
    CountingTool("fvcore", "fvcore.nn", _flops(_fvcore),
                 "`FlopCountAnalysis(model, inputs).total()` × 2: it counts a multiply-add as one"),
    CountingTool("thop", "thop", _flops(_thop), "`profile(model, inputs=inputs)`, MACs × 2"),
    CountingTool("ptflops (aten)", "ptflops", _flops(partial(_ptflops, backend="aten")), _PTFLOPS_HOW.format("aten")),
    CountingTool("ptflops (pytorch)", "ptflops", _flops(partial(_ptflops, backend="pytorch")),
                 f"{_PTFLOPS_HOW.format('pytorch')}; inputs by keyword, so that the whole batch is one sample to it"),
    CountingTool("calflops", "calflops", _flops(_calflops), "`calculate_flops(model, args=..., kwargs=...)`, MACs × 2",
                 _flops(partial(_calflops, with_backward=True)), "`include_backPropagation=True`: forward × 3", True),
    CountingTool("torchinfo", "torchinfo", _flops(_torchinfo),
                 "`summary(model, input_data=..., mode=...).total_mult_adds` × 2, in the network's own mode"),
)
# fmt: on
