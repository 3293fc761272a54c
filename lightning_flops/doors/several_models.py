"""Several modules that one loop trains side by side, as one model: a generator and a discriminator, for example."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping

from torch import nn

from lightning_flops.instrument.module_scope import unwrapped


class SeveralModels(nn.Module):
    """Holds modules that a loop calls one by one; nobody calls this one.

    It is in evaluation mode if one of them is: loops put a generator into that mode to look at its samples.

    Args:
        models: by the names that reports have for them.
    """

    def __init__(self, models: Mapping[str, nn.Module]) -> None:
        super().__init__()
        for name, model in models.items():
            self.add_module(name, model)

    @property
    def training(self) -> bool:
        """The mode of those inside."""
        return all(model.training for model in self.children())

    @training.setter
    def training(self, mode: bool) -> None:
        """Nothing: they have modes of their own."""


def called_in(model: nn.Module) -> tuple[nn.Module, ...]:
    """What a loop that trains *model* calls."""
    return tuple(model.children()) if isinstance(model, SeveralModels) else (model,)


def names_of(model: nn.Module) -> list[str]:
    """The names that reports have for what a loop calls that trains *model*."""
    if isinstance(model, SeveralModels):
        return [name for name, _ in model.named_children()]
    return [type(unwrapped(model)).__name__]


class ModelWhileItLives:
    """What a loop calls, which does not live longer because of this."""

    def __init__(self, model: nn.Module) -> None:
        self._names = [name for name, _ in model.named_children()] if isinstance(model, SeveralModels) else None
        self._models = [weakref.ref(one) for one in called_in(model)]

    def __call__(self) -> nn.Module | None:
        """The model, or the models as one again; None if one of them is gone."""
        models = [one for reference in self._models if (one := reference()) is not None]
        if len(models) < len(self._models):
            return None
        return models[0] if self._names is None else SeveralModels(dict(zip(self._names, models, strict=True)))


def root_of(model: nn.Module) -> nn.Module:
    """*model*, or the models in it, without their wrappers."""
    if not isinstance(model, SeveralModels):
        return unwrapped(model)
    return SeveralModels({name: unwrapped(one) for name, one in model.named_children()})


def together(models: Iterable[nn.Module]) -> nn.Module:
    """*models* as one, by the names of their classes; the model itself if there is one alone."""
    several = list(models)
    if len(several) == 1:
        return several[0]
    named: dict[str, nn.Module] = {}
    for model in several:
        name = kind = type(unwrapped(model)).__name__
        number = 1
        while name in named:
            number += 1
            name = f"{kind}_{number}"
        named[name] = model
    return SeveralModels(named)
