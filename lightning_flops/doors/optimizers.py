"""The optimizers of a loop that the user wrote, as they were before accelerate or Fabric wrapped them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from torch.optim import Optimizer

from lightning_flops.errors import ConfigError
from lightning_flops.text.json_text import shown


def optimizers_in(given: Any) -> tuple[Any, ...]:
    """The optimizers that a user gave, without the wrappers that accelerate and Fabric put around them.

    Raises:
        ConfigError: it is neither an optimizer nor several.
    """
    if given is None:
        return ()
    several = given if isinstance(given, Iterable) else (given,)
    found = tuple(map(_unwrapped, several))
    for one in found:
        if not callable(getattr(one, "step", None)):
            raise ConfigError(f"optimizer must be an optimizer or several, with a method step, got {shown(one)}")
    return found


def _unwrapped(optimizer: Any) -> Any:
    while is_wrapper(optimizer):
        inner = getattr(optimizer, "optimizer", None)
        if inner is None:
            break
        optimizer = inner
    return optimizer


def stand_ins(optimizer: Any) -> list[Any]:
    """The optimizers that *optimizer* holds and that update the same parameters, as SAM's base optimizer does.

    A loop may call their step in place of its own.
    """
    if not isinstance(optimizer, Optimizer):
        return []
    held = (one for one in vars(optimizer).values() if isinstance(one, Optimizer) and one is not optimizer)
    return [one for one in held if set(updated_by(one)) == set(updated_by(optimizer))]


def without_inner(optimizers: tuple[Any, ...]) -> tuple[Any, ...]:
    """Those of *optimizers* that none of the others is put around: they make its updates, or it makes theirs."""
    inner = {id(held) for one in optimizers for held in stand_ins(one)}
    return tuple(one for one in optimizers if id(one) not in inner) or optimizers


def updated_by(optimizer: Any) -> Iterator[int]:
    """The ids of the parameters that *optimizer* updates."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.requires_grad:
                yield id(parameter)


def is_wrapper(optimizer: Any) -> bool:
    """Whether accelerate or Fabric has put *optimizer* around another one."""
    return any(kind.__module__.startswith(_WRAPPERS) for kind in type(optimizer).__mro__)


_WRAPPERS = ("accelerate.", "lightning.fabric.", "lightning_fabric.")
"""Where the optimizer wrappers come from that may call what they wrap, or not."""
