"""What counting offline needs: fake tensors, which have shapes and no values, and torch's walk through containers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

from lightning_flops.errors import LightningFlopsError
from lightning_flops.instrument.torch_private.names import TABLE, take

LOGGER = "torch._subclasses.fake_tensor"
"""Where torch writes the trace of what it could not run on fake tensors, before it raises it."""

_FAKES = "torch._subclasses.fake_tensor"
_TREES = "torch.utils._pytree"
_LOSS = (
    "has no fake tensors that this package knows: count_offline cannot count, and what compiled backwards repeat of "
    "their forwards counts as backward"
)


def _refuse(*args: Any, **kwargs: Any) -> NoReturn:
    """Stands for what is missing.

    Raises:
        LightningFlopsError: always; says what is missing.
    """
    missing = [path for path, name in TABLE.items() if name.missing and path.startswith((_FAKES, _TREES))]
    raise LightningFlopsError(f"{TABLE[missing[0]].sentence} What is missing is {', '.join(missing)}.")


class _NoFake:
    """Stands for a class of fake tensors in a torch that has none."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        _refuse()


if TYPE_CHECKING:
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.utils._pytree import tree_map_only
else:
    FakeTensorMode = take(f"{_FAKES}:FakeTensorMode", _NoFake, _LOSS, reported=False)
    tree_map_only = take(f"{_TREES}:tree_map_only", _refuse, _LOSS, reported=False)

__all__ = [
    "LOGGER",
    "FakeTensorMode",
    "tree_map_only",
]
