"""What torch's global module hooks leave alone while they are up."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import nn

from lightning_flops.measure.module_hooks import hear_modules
from lightning_flops.signals import Undo


def test_torch_says_nothing_of_our_hooks_and_all_of_other_hooks() -> None:
    filters = list(warnings.filters)

    def nothing(*_: Any) -> None:
        pass

    def said() -> list[str]:
        torch._dynamo.reset()
        with warnings.catch_warnings(record=True) as shown:
            torch.compile(nn.Linear(2, 2), backend="eager")(torch.ones(1, 2))
        return [str(one.message) for one in shown if "global hooks" in str(one.message)]

    with warnings.catch_warnings():
        warnings.simplefilter("default")
        with Undo() as undo:
            hear_modules(undo, nothing, nothing, failed=nothing)
            assert said() == []
        handle = nn.modules.module.register_module_forward_hook(nothing)
        try:
            assert said() != []
        finally:
            handle.remove()
    assert list(warnings.filters) == filters
