"""Which modules a model has: their names without wrappers' prefixes, and what the report says about each."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.jit import ScriptModule
from torch.nn.parameter import is_lazy

from lightning_flops.instrument.parameter_sizes import FlatParameters, parameter_sizes
from lightning_flops.instrument.random_state import random_state_kept
from lightning_flops.instrument.torch_private.modules import (
    TORCHS_WRAPPERS,
    children_of,
    parameters_of,
)
from lightning_flops.records import OUTSIDE, ModuleRecord
from lightning_flops.signals import words_of
from lightning_flops.text.printable import package_logger

logger = package_logger(__name__)


def _wrapper_types() -> dict[str, tuple[tuple[str, str], ...]]:
    """Maps the child name of a wrapped module to the (module, class) of the wrappers that use this name."""
    return {
        **TORCHS_WRAPPERS,
        "module": (
            *TORCHS_WRAPPERS["module"],
            ("deepspeed.runtime.engine", "DeepSpeedEngine"),
            ("lightning.fabric.wrappers", "_FabricModule"),
        ),
        "_forward_module": (
            ("lightning.fabric.wrappers", "_FabricModule"),
            ("lightning_fabric.wrappers", "_FabricModule"),
        ),
        "_original_module": (
            ("lightning.fabric.wrappers", "_FabricModule"),
            ("lightning_fabric.wrappers", "_FabricModule"),
        ),
    }


_WRAPPERS = {
    child: frozenset(f"{module}.{name}" for module, name in classes) for child, classes in _wrapper_types().items()
}


def require_module(model: object) -> None:
    """Check that *model* is a module.

    Raises:
        TypeError: it is not.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")


def wraps(module: nn.Module, child: str) -> bool:
    """Whether *module* is a wrapper, and its child of this name is the module that it wraps.

    The wrapper's class, or one of its base classes, decides, and never the child's name alone. We compare classes by
    name, so that no framework is imported for this.
    """
    wrappers = _WRAPPERS.get(child)
    return wrappers is not None and any(
        f"{cls.__module__}.{cls.__qualname__}" in wrappers for cls in type(module).__mro__
    )


def unwrapped(module: nn.Module) -> nn.Module:
    """The model inside of wrappers such as DistributedDataParallel or what ``torch.compile`` returns."""
    while (inner := next((child for name, child in module.named_children() if wraps(module, name)), None)) is not None:
        module = inner
    return module


def named_modules(root: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Every module of *root* under each of its names, wrappers' prefixes removed, in ``named_modules`` order.

    A wrapper and the module it wraps have the same name; both are yielded, the wrapper first. A shared module is
    yielded under every name, and so are the modules below it. A module that contains itself is yielded once on each
    path.
    """
    # An explicit stack, so that no model is too deep for Python.
    pending: list[tuple[str, nn.Module, frozenset[int]]] = [("", root, frozenset())]
    while pending:
        name, module, above = pending.pop()
        yield name, module
        children = children_of(module)
        if not children:
            continue
        within = above | {id(module)}
        below = [
            (
                name if key in _WRAPPERS and wraps(module, key) else f"{name}.{key}" if name else key,
                child,
                within,
            )
            for key, child in children.items()
            if child is not None and id(child) not in within
        ]
        pending.extend(reversed(below))


class ModuleNames:
    """The names of a model's modules, kept beside the model."""

    def __init__(self, root: nn.Module | None) -> None:
        self._root = root
        self.known: dict[nn.Module, str | tuple[str, ...]] = {}
        """Each module's name; its names if it is shared or TorchScript's. ``refresh`` makes a new dictionary."""
        self._strangers: set[nn.Module] = set()
        self._owners: dict[int, str] | None = None
        self.refresh()

    def refresh(self) -> None:
        """Reads the names again, because modules come and go while a model is set up."""
        names: dict[nn.Module, str | tuple[str, ...]] = {}
        if self._root is not None:
            for name, module in named_modules(self._root):
                known = names.get(module)
                if known is None:
                    names[module] = (name,) if isinstance(module, ScriptModule) else name
                elif isinstance(known, str):
                    if known != name:
                        names[module] = (known, name)
                elif name not in known:
                    names[module] = (*known, name)
        self.known = names
        self._strangers = set()
        self._owners = None

    def name_for(self, module: nn.Module, caller: str) -> str | None:
        """Name of a module that the module named *caller* calls; None if it is not one of the root's.

        For a shared module it is the name nearest to the caller's, or else the first.
        """
        known = self.known.get(module)
        if known is None:
            if module in self._strangers:
                return None
            # Seen for the first time: added since the names were read, or not the root's, such as a loss function.
            self.refresh()
            known = self.known.get(module)
            if known is None:
                self._strangers.add(module)
                return None
        if isinstance(known, str):
            return known
        return max(known, key=lambda name: _shared_depth(name, caller))

    def modules(self) -> Iterable[nn.Module]:
        """The modules that have names, each once."""
        return self.known.keys()

    def owner_of(self, parameter: Any) -> str:
        """Name of the first module that holds *parameter*; ``(outside)`` if none does."""
        owners = self._owners
        if owners is None:
            owners = {}
            for module, known in self.known.items():
                name = known if isinstance(known, str) else known[0]
                for held in parameters_of(module).values():
                    if held is not None:
                        owners.setdefault(id(held), name)
            self._owners = owners
        return owners.get(id(parameter), OUTSIDE)


def _shared_depth(name: str, caller: str) -> int:
    """How many leading parts the two names share."""
    depth = 0
    for mine, theirs in zip(name.split("."), caller.split("."), strict=False):
        if mine != theirs:
            break
        depth += 1
    return depth


def describe_modules(
    root: nn.Module,
    *,
    whole: nn.Module | None = None,
    settings: bool = True,
    note: Callable[[str], object] = logger.warning,
) -> tuple[ModuleRecord, ...]:
    """What each module of *root* is and how many parameters it holds, in ``named_modules`` order.

    A module with several names is listed under each; the later ones are aliases of the first. Parameters are counted
    once in each subtree, however often they are shared in it. A shard counts with its full size.

    Args:
        root: the model.
        whole: *root* with all its wrappers, which may know more about its parameters; None if it has none.
        settings: whether each module is asked for its ``extra_repr``, which may be the user's code.
        note: gets a sentence about anything that cannot be known.
    """
    flat = FlatParameters(root if whole is None else whole, note=note)
    named = list(named_modules(root))
    by_name: dict[str, list[nn.Module]] = {}
    for name, module in named:
        by_name.setdefault(name, []).append(module)
    sizes = _SubtreeSizes(flat)
    first_name: dict[nn.Module, str] = {}
    records = []
    extra_reprs: dict[nn.Module, str] = {}
    if settings:
        with random_state_kept():
            extra_reprs = {module: _extra_repr(module) for _, module in named}
    for name, modules in by_name.items():
        # Describe the wrapped module, which the user wrote, but count the parameters of the wrapper, which holds all.
        described = modules[-1]
        alias_of = first_name.get(described)
        first_name.setdefault(described, name)
        params, trainable, local, parameter_bytes = sizes.of(modules[0])
        shapes = _parameter_shapes(described, flat)
        records.append(
            ModuleRecord(
                name=name,
                type_name=type(described).__name__,
                extra_repr=extra_reprs.get(described, ""),
                params=params,
                trainable_params=trainable,
                local_params=local,
                parameter_bytes=parameter_bytes,
                alias_of=alias_of,
                weight_sizes=_weight_sizes(shapes),
                parameter_shapes=shapes,
            )
        )
    return tuple(records)


def _extra_repr(module: nn.Module) -> str:
    try:
        return str(module.extra_repr())
    except Exception as error:
        # A user's method may need something that the module does not have yet, and may raise anything.
        return f"extra_repr raised {words_of(error).partition(':')[0]}"


def _parameter_shapes(module: nn.Module, flat: FlatParameters) -> tuple[tuple[int, ...], ...]:
    """Shape of each parameter of *module* itself."""
    shapes: list[Sequence[int]] = [piece.shape for piece in flat.of(module)]
    for parameter in parameters_of(module).values():
        if parameter is not None and not is_lazy(parameter) and parameter not in flat:
            # ZeRO-3 empties parameters not in use.
            shapes.append(getattr(parameter, "ds_shape", None) or parameter.shape)
    return tuple(tuple(map(int, shape)) for shape in shapes)


def _weight_sizes(shapes: Iterable[tuple[int, ...]]) -> tuple[int, ...]:
    """First two dimensions of each weight among *shapes*: the numbers of inputs and outputs of its products."""
    sizes = []
    for shape in shapes:
        if len(shape) >= 2:
            sizes += [size for size in shape[:2] if size != 1]  # 1: one channel per group, no sum over channels
    return tuple(sizes)


class _SubtreeSizes:
    """Parameters of a module and everything below it, each counted once."""

    def __init__(self, flat: FlatParameters) -> None:
        self._flat = flat
        self._sizes: dict[Hashable, tuple[int, bool, int, torch.dtype]] = {}
        self._below: dict[nn.Module, frozenset[Hashable]] = {}

    def of(self, module: nn.Module) -> tuple[int, int, int, dict[str, int]]:
        """(params, trainable params, params held in this rank's memory, bytes of the params by dtype)."""
        params = trainable_params = local_params = 0
        by_dtype: dict[torch.dtype, int] = {}
        for key in self._parameters(module):
            size, trainable, local, dtype = self._sizes[key]
            params += size
            trainable_params += size if trainable else 0
            local_params += local
            by_dtype[dtype] = by_dtype.get(dtype, 0) + size * dtype.itemsize
        named = {str(dtype).removeprefix("torch."): size for dtype, size in by_dtype.items() if size}
        return params, trainable_params, local_params, dict(sorted(named.items()))

    def _parameters(self, module: nn.Module) -> frozenset[Hashable]:
        known = self._below.get(module)
        if known is not None:
            return known
        # Post-order with an explicit stack. A module that contains itself is finished at its first visit.
        pending: list[tuple[nn.Module, bool]] = [(module, False)]
        entered: set[int] = set()
        while pending:
            current, ready = pending.pop()
            if current in self._below:
                continue
            if not ready:
                if id(current) in entered:
                    continue
                entered.add(id(current))
                pending.append((current, True))
                pending.extend((child, False) for child in children_of(current).values() if child is not None)
                continue
            own: set[Hashable] = set()
            for piece in self._flat.of(current):
                own.add(piece.key)
                self._sizes[piece.key] = (piece.size, piece.trainable, piece.local, piece.dtype)
            for parameter in parameters_of(current).values():
                if parameter is not None and parameter not in self._flat:
                    own.add(id(parameter))
                    self._sizes.setdefault(id(parameter), (*parameter_sizes(parameter), parameter.dtype))
            children = [child for child in children_of(current).values() if child is not None]
            below = [self._below.get(child, frozenset()) for child in children]
            self._below[current] = frozenset(own.union(*below))
        return self._below[module]
