"""No private name of torch stands outside of ``measure/torch_private``: read from the source of every other file."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

import lightning_flops

PACKAGE = Path(lightning_flops.__file__).parent

PRIVATE = r"_[^_\W]\w*"
BY_PATH = re.compile(rf"\btorch(?!\.ops\.)(?:\.\w+)*[.:]{PRIVATE}|from torch[\w.]* import [^\n]*\b{PRIVATE}")
"""In code and in texts; names in ``torch.ops`` are the dispatcher's names of operators."""
OF_AN_OBJECT = re.compile(rf"(?<!self)(?<!cls)(?<!super\(\))\.({PRIVATE})")


def torchs() -> set[str]:
    """Private names that common objects of torch have."""
    made: list[Any] = [
        nn.Linear(1, 1),
        torch.zeros(1, requires_grad=True).sin().grad_fn,
        torch.zeros(1),
        torch.optim.SGD([nn.Parameter(torch.zeros(1))]),
        torch.ops.aten.mm.default,
        iter(DataLoader([1])),  # type: ignore[arg-type]
        torch.nn.modules.module,
    ]
    return {name for one in made for name in dir(one) if re.fullmatch(PRIVATE, name)}


def test_no_private_name_of_torch_stands_outside_of_its_room() -> None:
    known, found = torchs(), []
    for path in PACKAGE.rglob("*.py"):
        if "torch_private" not in path.parts:
            source = path.read_text()
            own = {
                name for kinds in re.findall(rf"(?:def|class) ({PRIVATE})|self\.({PRIVATE})", source) for name in kinds
            }
            names = BY_PATH.findall(source) + [one for one in OF_AN_OBJECT.findall(source) if one in known - own]
            found += [f"{path.relative_to(PACKAGE)}: {name}" for name in names]
    assert sorted(found) == []
