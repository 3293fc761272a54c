"""What torch's global module hooks leave alone while they are up."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn

from lightning_flops.measure.module_hooks import put_up_hooks


def _nothing(*_: Any) -> None:
    pass


def test_torch_says_nothing_of_our_hooks_and_all_of_other_hooks() -> None:
    shown: list[str] = []
    filters = list(warnings.filters)

    def call(compiled: Callable[..., Any]) -> None:
        shown.clear()
        torch._dynamo.reset()
        compiled(torch.ones(1, 2))

    with warnings.catch_warnings():
        warnings.simplefilter("default")
        warnings.showwarning = lambda message, *_: shown.append(str(message))
        with ExitStack() as undo:
            put_up_hooks(undo, _nothing, _nothing, failed=_nothing)
            call(torch.compile(nn.Linear(2, 2), backend="eager"))
            assert not [one for one in shown if "global hooks" in one]
        handle = nn.modules.module.register_module_forward_hook(_nothing)
        try:
            call(torch.compile(nn.Linear(2, 2), backend="eager"))
        finally:
            handle.remove()
        assert [one for one in shown if "global hooks" in one]
    assert list(warnings.filters) == filters
