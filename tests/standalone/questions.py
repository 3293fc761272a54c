"""What is asked of a standalone profiler, DeepSpeed's or ours: names, answers and everything that it prints.

``python -m tests.standalone.questions`` prints DeepSpeed's answers as JSON on its last line.
"""

from __future__ import annotations

import contextlib
import inspect
import io
import json
import sys
from typing import Any

import torch
from torch import nn

NUMBERS = sorted(
    {0, 0.5, 3.14159, 999.994, 999.995, 12345678, 3139.93e9, 1e15, 1.5e18, 2e-7}
    | {mantissa * 10.0**exponent for exponent in range(-7, 16) for mantissa in (1, 1.005, 9.999, 9.99999)}
)
PREFIXES = (None, "T", "G", "M", "K", "m", "u", "", "B", "x")
HELPERS = [f"{kind}_to_string" for kind in ("macs", "number", "flops", "bytes", "params", "duration")]
METHODS = (
    "__init__ start_profile stop_profile reset_profile end_profile get_total_flops get_total_macs get_total_duration "
    "get_total_params print_model_profile print_model_aggregated_profile"
).split()


def model() -> nn.Module:
    """Linear layers alone, on which both profilers count the same multiply-adds."""
    body = nn.Sequential(nn.Linear(30, 50), nn.ReLU(), nn.Linear(50, 70, bias=False))
    deeper = nn.ModuleDict({"one": nn.Linear(70, 70), "other": nn.Linear(70, 70)})

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = body
            self.deeper = deeper

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.body(x)
            for layer in self.deeper.values():
                x = layer(x)
            return x

    return Net()


def parameters_of(function: Any) -> list[list[str]]:
    """Names and defaults of *function*'s positional arguments."""
    return [
        [name, repr(parameter.default)]
        for name, parameter in inspect.signature(function).parameters.items()
        if parameter.kind is parameter.POSITIONAL_OR_KEYWORD
    ]


def strings(module: Any) -> dict[str, list[str]]:
    """What every helper of *module* makes of every number, prefix and some precisions."""
    return {
        name: [
            getattr(module, name)(number, units=prefix, precision=precision)
            for number in NUMBERS
            for prefix in PREFIXES
            for precision in (0, 2, 4)
        ]
        for name in HELPERS
    }


def report(module: Any, **settings: Any) -> str:
    """What *module*'s ``get_model_profile`` prints."""
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        module.get_model_profile(model(), (8, 30), **settings)
    return printed.getvalue()


def aggregated(module: Any) -> str:
    """What *module*'s profiler prints of the classes of modules."""
    net = model()
    profiler = module.FlopsProfiler(net)
    profiler.start_profile()
    net(torch.ones(8, 30))
    profiler.stop_profile()
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        profiler.print_model_aggregated_profile(module_depth=2, top_modules=3)
    profiler.end_profile()
    return printed.getvalue()


def report_in_an_engine(profiler_class: Any) -> str:
    """What *profiler_class* prints in a step of a real engine that times its steps."""
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    net = model()
    engine, *_ = deepspeed.initialize(
        model=net,
        optimizer=torch.optim.SGD(net.parameters(), lr=0.1),
        config={"train_micro_batch_size_per_gpu": 8, "wall_clock_breakdown": True},
    )
    profiler = profiler_class(net, engine, 1.0)
    profiler.start_profile()
    loss = engine(torch.ones(8, 30)).sum()
    profiler.stop_profile()
    engine.backward(loss)
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        engine.timers("step").start()
        engine.timers("step").stop()
        profiler.print_model_profile()
    profiler.end_profile()
    return printed.getvalue()


def main() -> None:
    from deepspeed.profiling import flops_profiler

    import lightning_flops

    answers = {
        "strings": strings(flops_profiler),
        "methods": {name: parameters_of(getattr(flops_profiler.FlopsProfiler, name)) for name in METHODS},
        "get_model_profile": parameters_of(flops_profiler.get_model_profile),
        "report": report(flops_profiler, top_modules=2),
        "aggregated": aggregated(flops_profiler),
        "in_engine": report_in_an_engine(flops_profiler.FlopsProfiler),
        "ours_in_engine": report_in_an_engine(lightning_flops.FlopsProfiler),
    }
    sys.stdout.write(f"\n{json.dumps(answers)}\n")


if __name__ == "__main__":
    main()
