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
from importlib import import_module
from typing import Any

import torch
from torch import nn

from lightning_flops.records import PhaseFlops
from tests.corpus.case import (
    Example,
    Network,
    forward_in_inference_mode,
    forward_without_grad,
    tensors_in,
)

MULTIPLY_ADD = 2
"""FLOPs of one multiply-add."""

TWO_BACKWARDS = 3
"""A step by the rule of thumb: the forward, and a backward of twice the forward."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CountingTool:
    """A tool, and how it is asked."""

    name: str
    package: str
    """What to install; its version is printed with the results."""
    module: str
    """What to import, once for all networks."""
    forward: Callable[[Example], int]
    """FLOPs of one call of the model."""
    how: str
    """The call, in words for the report."""
    step: Callable[[Example], int] | None = None
    """FLOPs of the whole step; None for a tool that reports a forward alone."""
    step_how: str = ""
    step_from_forward: bool = False
    """The step is derived from one forward by a rule, so it is asked only where the step is one forward."""


def grad_mode(example: Example) -> AbstractContextManager[Any]:
    """The grad mode in which the network's step calls the model."""
    if example.step is forward_without_grad:
        return torch.no_grad()
    if example.step is forward_in_inference_mode:
        return torch.inference_mode()
    return nullcontext()


def forward_calls(network: Network) -> int:
    """How often the network's step calls the model with the example's inputs.

    A truth for "one forward" exists only where this is 1: a step that accumulates gradients, or calls the model through
    a functional transform, has no such call.
    """
    example = network.example()
    calls = 0
    original = Example.forward

    def counted(self: Example) -> Any:
        nonlocal calls
        calls += 1
        return original(self)

    Example.forward = counted  # type: ignore[method-assign]
    try:
        example.run()
    finally:
        Example.forward = original  # type: ignore[method-assign]
        example.teardown()
    return calls


def ours_forward(example: Example) -> int:
    """This project, around one call of the model."""
    from lightning_flops.pytorch import count_flops

    with count_flops(example.model) as counts, grad_mode(example):
        example.forward()
    return counts.forward


def ours_step(example: Example) -> int:
    """This project, around the whole step: all four buckets."""
    from lightning_flops.pytorch import count_flops

    with count_flops(example.model) as counts:
        example.run()
    return counts.forward + counts.backward + counts.recompute + counts.optimizer


def our_wrong_figures(network: Network) -> int:
    """How many figures of the network this project gets wrong: buckets, what masked attention skips, modules."""
    from lightning_flops.pytorch import count_flops

    example = network.example()
    expected = network.expected
    try:
        with count_flops(example.model) as counts:
            example.run()
    finally:
        example.teardown()
    by_module = counts.by_module()
    pairs: list[tuple[object, object]] = [
        (counts.forward, expected.forward),
        (counts.backward, expected.backward),
        (counts.recompute, expected.recompute),
        (counts.optimizer, expected.optimizer),
        (counts.skipped, expected.skipped),
        *((by_module.get(name, PhaseFlops()), flops) for name, flops in expected.by_module.items()),
    ]
    return sum(counted != truth for counted, truth in pairs)


def torch_forward(example: Example) -> int:
    """Torch's own counter, around one call of the model."""
    counter = import_module("torch.utils.flop_counter").FlopCounterMode(display=False)
    with counter, grad_mode(example):
        example.forward()
    return int(counter.get_total_flops())


def torch_step(example: Example) -> int:
    """Torch's own counter, around the whole step."""
    counter = import_module("torch.utils.flop_counter").FlopCounterMode(display=False)
    with counter:
        example.run()
    return int(counter.get_total_flops())


def deepspeed_forward(example: Example) -> int:
    """DeepSpeed's profiler as its training loop uses it."""
    profiler = import_module("deepspeed.profiling.flops_profiler").FlopsProfiler(example.model)
    profiler.start_profile()
    with grad_mode(example):
        example.forward()
    macs = profiler.get_total_macs()
    profiler.end_profile()
    return integer(MULTIPLY_ADD * macs)


def deepspeed_step(example: Example) -> int:
    """DeepSpeed's printed rule: backward is twice the forward."""
    return TWO_BACKWARDS * deepspeed_forward(example)


def fvcore_forward(example: Example) -> int:
    """The analysis of a traced graph; it counts a multiply-add as one."""
    model, inputs = positional(example)
    analysis = import_module("fvcore.nn").FlopCountAnalysis(model, inputs)
    analysis.unsupported_ops_warnings(False).uncalled_modules_warnings(False).tracer_warnings("none")
    with grad_mode(example):
        return integer(MULTIPLY_ADD * analysis.total())


def thop_forward(example: Example) -> int:
    """The profile of the modules that it knows."""
    model, inputs = positional(example)
    macs, _ = import_module("thop").profile(model, inputs=inputs, verbose=False)
    return integer(MULTIPLY_ADD * macs)


def ptflops_forward(example: Example, *, backend: str) -> int:
    """One of its two backends; inputs go in by keyword, as its documentation asks for several inputs."""
    model, keywords = by_keyword(example)
    printed = io.StringIO()
    with redirect_stdout(printed), grad_mode(example):
        macs, _ = import_module("ptflops").get_model_complexity_info(
            model,
            (1,),
            input_constructor=lambda _: keywords,
            as_strings=False,
            print_per_layer_stat=False,
            backend=backend,
        )
    if macs is None:
        # It catches what was raised, prints its class and message on a line, and returns nothing.
        said = [line for line in printed.getvalue().splitlines() if line.startswith("<class")]
        raise RuntimeError(" ".join(said[:1]) or "returned None")
    return integer(MULTIPLY_ADD * macs)


def ptflops_aten_forward(example: Example) -> int:
    """The backend it recommends for transformers."""
    return ptflops_forward(example, backend="aten")


def ptflops_pytorch_forward(example: Example) -> int:
    """The backend it recommends for convolutional networks."""
    return ptflops_forward(example, backend="pytorch")


def calflops_macs(example: Example, *, with_backward: bool) -> int:
    """Calflops's MACs, its rule for the backward included if asked."""
    model, tensors = tensors_alone(example)
    with grad_mode(example):
        _, macs, _ = import_module("calflops").calculate_flops(
            model,
            args=list(example.args),
            kwargs=dict(tensors),
            include_backPropagation=with_backward,
            print_results=False,
            output_as_string=False,
        )
    return integer(MULTIPLY_ADD * macs)


def calflops_forward(example: Example) -> int:
    """Calflops on the forward."""
    return calflops_macs(example, with_backward=False)


def calflops_step(example: Example) -> int:
    """Calflops with its option for the backward, which is the forward times two."""
    return calflops_macs(example, with_backward=True)


def torchinfo_forward(example: Example) -> int:
    """The summary; its mult-adds are those of parameters."""
    fixed = {name: value for name, value in example.kwargs.items() if not isinstance(value, torch.Tensor)}
    tensors = {name: value for name, value in example.kwargs.items() if isinstance(value, torch.Tensor)}
    inputs: Any = list(example.args) if example.args or not tensors else tensors
    if example.args:
        fixed |= tensors
    with grad_mode(example):
        summary = import_module("torchinfo").summary(
            example.model,
            input_data=inputs,
            mode="train" if example.model.training else "eval",
            verbose=0,
            **fixed,
        )
    return integer(MULTIPLY_ADD * summary.total_mult_adds)


def integer(reported: float) -> int:
    """A tool's float as the integer it stands for; a fraction of a FLOP is an error of the tool and is rounded."""
    return round(reported)


class PassedOn(nn.Module):
    """Calls a module with inputs that arrive in another form."""

    def __init__(self, module: nn.Module, call: Callable[..., Any]) -> None:
        """*call* gets the module first, then what this module is called with."""
        super().__init__()
        self.module = module
        self.call = call
        # Wrapped in eval mode, a tool must not take the whole for a model in training.
        self.training = module.training

    def forward(self, *inputs: Any, **keywords: Any) -> Any:
        """What the call returns."""
        return self.call(self.module, *inputs, **keywords)


def positional(example: Example) -> tuple[nn.Module, tuple[Any, ...]]:
    """The model and its inputs without keywords.

    Where there were keywords the wrapper returns the output's tensors as a tuple: tracing takes no output classes.
    """
    if not example.kwargs:
        return example.model, tuple(example.args)
    names = [name for name, value in example.kwargs.items() if isinstance(value, torch.Tensor)]
    fixed = {name: value for name, value in example.kwargs.items() if name not in names}
    count = len(example.args)

    def call(module: nn.Module, *inputs: Any) -> Any:
        keywords = dict(zip(names, inputs[count:], strict=True))
        return tuple(tensors_in(module(*inputs[:count], **keywords, **fixed)))

    return PassedOn(example.model, call), (*example.args, *(example.kwargs[name] for name in names))


def by_keyword(example: Example) -> tuple[nn.Module, dict[str, Any]]:
    """The model and its inputs by keyword alone.

    The model itself is called as it always is: hooks on a layer that is the whole model look at its positional inputs.
    """
    inputs = {f"input_{index}": value for index, value in enumerate(example.args)}

    def call(module: nn.Module, **given: Any) -> Any:
        ordered = [given.pop(name) for name in inputs]
        return module(*ordered, **given)

    return PassedOn(example.model, call), {**inputs, **example.kwargs}


def tensors_alone(example: Example) -> tuple[nn.Module, Mapping[str, Any]]:
    """The model with every keyword that is no tensor filled in, and the other keywords."""
    fixed = {name: value for name, value in example.kwargs.items() if not isinstance(value, torch.Tensor)}
    if not fixed:
        return example.model, example.kwargs

    def call(module: nn.Module, *inputs: Any, **keywords: Any) -> Any:
        return module(*inputs, **keywords, **fixed)

    tensors = {name: value for name, value in example.kwargs.items() if name not in fixed}
    return PassedOn(example.model, call), tensors


TOOLS: tuple[CountingTool, ...] = (
    CountingTool(
        name="lightning_flops",
        package="lightning-flops",
        module="lightning_flops.pytorch",
        forward=ours_forward,
        how="`with count_flops(model) as counts:` around the model's call; `counts.forward`",
        step=ours_step,
        step_how="`count_flops` around the step; the four buckets added up",
    ),
    CountingTool(
        name="FlopCounterMode",
        package="torch",
        module="torch.utils.flop_counter",
        forward=torch_forward,
        how="`with FlopCounterMode(display=False)` around the model's call; FLOPs as reported",
        step=torch_step,
        step_how="`FlopCounterMode` around the step",
    ),
    CountingTool(
        name="DeepSpeed",
        package="deepspeed",
        module="deepspeed.profiling.flops_profiler",
        forward=deepspeed_forward,
        how="`FlopsProfiler(model)`: `start_profile()`, the model's call, `get_total_macs()` × 2 (its FLOPs also count "
        "elementwise work, its MACs do not); the network's own mode, where `get_model_profile` would switch to eval",
        step=deepspeed_step,
        step_how="forward × 3: the backward it prints is twice the forward",
        step_from_forward=True,
    ),
    CountingTool(
        name="fvcore",
        package="fvcore",
        module="fvcore.nn",
        forward=fvcore_forward,
        how="`FlopCountAnalysis(model, inputs).total()` × 2: it counts a multiply-add as one",
    ),
    CountingTool(
        name="thop",
        package="thop",
        module="thop",
        forward=thop_forward,
        how="`profile(model, inputs=inputs)`, MACs × 2",
    ),
    CountingTool(
        name="ptflops (aten)",
        package="ptflops",
        module="ptflops",
        forward=ptflops_aten_forward,
        how='`get_model_complexity_info(..., backend="aten")`, MACs × 2',
    ),
    CountingTool(
        name="ptflops (pytorch)",
        package="ptflops",
        module="ptflops",
        forward=ptflops_pytorch_forward,
        how='`get_model_complexity_info(..., backend="pytorch")`, MACs × 2; inputs by keyword, so that the whole batch '
        "is one sample to it",
    ),
    CountingTool(
        name="calflops",
        package="calflops",
        module="calflops",
        forward=calflops_forward,
        how="`calculate_flops(model, args=..., kwargs=...)`, MACs × 2",
        step=calflops_step,
        step_how="`include_backPropagation=True`: forward × 3",
        step_from_forward=True,
    ),
    CountingTool(
        name="torchinfo",
        package="torchinfo",
        module="torchinfo",
        forward=torchinfo_forward,
        how="`summary(model, input_data=..., mode=...).total_mult_adds` × 2, in the network's own mode",
    ),
)
